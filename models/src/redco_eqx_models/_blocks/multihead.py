"""Multi-head attention with separate projections for query, key and value, as in
files."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from redco_eqx.types import Key
from redco_eqx_models._blocks.attention import split_heads
from redco_eqx_models._blocks.context import Context, Hidden, LayerCache, LayerOutput
from redco_eqx_models._blocks.layers import Linear, make_linears
from redco_eqx_models._blocks.lora import LoRA


class HeadsAttention(eqx.Module):
    """Attention over the tokens themselves (`__call__`), or over the encoder's
    (`over_memory`)."""

    dropout: eqx.nn.Dropout
    num_heads: int = eqx.field(static=True)

    names: ClassVar[tuple[str, ...]]
    """The fields of the projections for query, key, value and output. A module beside
    it may have the last."""
    scale: ClassVar[float | None] = None
    """The factor on the scores; one over the root of the head size by default."""

    @property
    def projections(self) -> list[Linear | LoRA]:
        """The projections for query, key, value and output."""
        return [getattr(self, name) for name in self.names]

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.projections[0].out_features // self.num_heads

    def heads(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> tuple[Float[Array, "b t width"], LayerCache | None]:
        """Return the outputs of the heads side by side, which the output projection
        reads."""
        qkv = context.column(x, *self.projections[:3], unit=self.head_size)
        q, k, v = (split_heads(y, self.head_size) for y in qkv)
        return context.attend(
            q, k, v, cache, scale=self.scale, dropout=self.dropout, dropout_key=key
        )

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        heads, cache = self.heads(x, context, cache, key)
        return context.row(heads, self.projections[3], unit=self.head_size), cache

    def over_memory(self, x: Hidden, context: Context, key: Key | None) -> Hidden:
        """Compute cross-attention. The encoder's keys and values are in the context."""
        query, *_, output = self.projections
        (q,) = context.column(x, query, unit=self.head_size)
        q = split_heads(q, self.head_size)
        heads = context.cross_attend(
            q, scale=self.scale, dropout=self.dropout, dropout_key=key
        )
        return context.row(heads, output, unit=self.head_size)


class MultiHeadAttention(HeadsAttention):
    """Attention as in OPT and BART."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    out_proj: Linear

    names = ("q_proj", "k_proj", "v_proj", "out_proj")

    def __init__(
        self,
        size: int,
        num_heads: int,
        *,
        use_bias: bool = True,
        dropout: float,
        std: float,
        key: Key,
    ):
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = make_linears(
            key, *[(size, size)] * 4, use_bias=use_bias, std=std
        )
        self.dropout = eqx.nn.Dropout(dropout)
        self.num_heads = num_heads


class Dense(eqx.Module):
    """A Linear layer, under the name that it has in model files."""

    dense: Linear


def pool_first(pooler: Dense | None, hidden: Hidden) -> Float[Array, "b size"]:
    """Return a vector for the whole input, which the pooler makes of its first
    token."""
    if pooler is None:
        raise ValueError(
            "pool: this model has no pooler, because its head does not use one."
        )
    return jnp.tanh(pooler.dense(hidden[:, 0]))
