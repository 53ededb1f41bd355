"""Multi-head attention with separate projections for query, key, value and output, as in files."""

import equinox as eqx
import jax

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.attention import split_heads
from redco_eqx.models._blocks.context import Context, Hidden, LayerCache, LayerOutput
from redco_eqx.models._blocks.layers import Linear


class MultiHeadAttention(eqx.Module):
    """Attention as in OPT and BART: over the tokens themselves (`__call__`), or over the encoder's
    (`over_memory`).
    """

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)

    def __init__(
        self, size: int, num_heads: int, *, use_bias: bool = True, dropout: float, std: float, key: Key
    ):
        q_key, k_key, v_key, out_key = jax.random.split(key, 4)
        self.q_proj = Linear(size, size, use_bias=use_bias, std=std, key=q_key)
        self.k_proj = Linear(size, size, use_bias=use_bias, std=std, key=k_key)
        self.v_proj = Linear(size, size, use_bias=use_bias, std=std, key=v_key)
        self.out_proj = Linear(size, size, use_bias=use_bias, std=std, key=out_key)
        self.dropout = eqx.nn.Dropout(dropout)
        self.num_heads = num_heads

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.q_proj.out_features // self.num_heads

    def __call__(self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None) -> LayerOutput:
        size = self.head_size
        qkv = context.column(x, self.q_proj, self.k_proj, self.v_proj, unit=size)
        q, k, v = (split_heads(y, size) for y in qkv)
        heads, cache = context.attend(q, k, v, cache, dropout=self.dropout, dropout_key=key)
        return context.row(heads, self.out_proj, unit=size), cache

    def over_memory(self, x: Hidden, context: Context, key: Key | None) -> Hidden:
        """Compute cross-attention. The encoder's keys and values are in the context."""
        size = self.head_size
        (q,) = context.column(x, self.q_proj, unit=size)
        heads = context.cross_attend(split_heads(q, size), dropout=self.dropout, dropout_key=key)
        return context.row(heads, self.out_proj, unit=size)


class SelfAttention(eqx.Module):
    """Self-attention as in BERT and ViT: a module beside it has the output projection."""

    query: Linear
    key: Linear
    value: Linear
    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)

    def __init__(
        self, size: int, num_heads: int, *, use_bias: bool = True, dropout: float, std: float, key: Key
    ):
        keys = jax.random.split(key, 3)
        self.query, self.key, self.value = (
            Linear(size, size, use_bias=use_bias, std=std, key=key) for key in keys
        )
        self.dropout = eqx.nn.Dropout(dropout)
        self.num_heads = num_heads

    def __call__(self, x: Hidden, context: Context, key: Key | None) -> Hidden:
        """Return the outputs of the heads side by side, which the output projection reads."""
        size = self.query.out_features // self.num_heads
        qkv = context.column(x, self.query, self.key, self.value, unit=size)
        q, k, v = (split_heads(y, size) for y in qkv)
        return context.attend(q, k, v, None, dropout=self.dropout, dropout_key=key)[0]


class Dense(eqx.Module):
    """A Linear under its name in files."""

    dense: Linear

    def __init__(self, in_features: int, out_features: int, *, std: float, key: Key):
        self.dense = Linear(in_features, out_features, std=std, key=key)
