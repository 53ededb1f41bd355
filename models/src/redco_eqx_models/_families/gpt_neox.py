"""GPT-NeoX (Black et al. 2022), and Pythia."""

import dataclasses
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.attention import split_heads
from redco_eqx_models._blocks.config import Config, Json
from redco_eqx_models._blocks.context import (
    Context,
    Hidden,
    Ids,
    LayerCache,
    LayerOutput,
)
from redco_eqx_models._blocks.decoder import DecoderLM, make_head
from redco_eqx_models._blocks.dropout import dropout, split_key
from redco_eqx_models._blocks.layers import (
    ACTIVATIONS,
    Embedding,
    LayerNorm,
    Linear,
    make_linears,
)
from redco_eqx_models._blocks.model import Options, make_layers
from redco_eqx_models._blocks.positions import Rope, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoXConfig(Config):
    """GPT-NeoX. `rope` rotates a part of each head, by default a quarter of its
    features."""

    model_type = "gpt_neox"
    architecture = "GPTNeoXForCausalLM"
    aliases = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}

    vocab_size: int = 50432
    hidden_size: int = 6144
    num_hidden_layers: int = 44
    num_attention_heads: int = 64
    intermediate_size: int = 24576
    hidden_act: str = "gelu"
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    tie_word_embeddings: bool = False
    use_parallel_residual: bool = True
    attention_bias: bool = True
    rope: Rope = dataclasses.field(
        default_factory=lambda: Rope(partial_rotary_factor=0.25)
    )

    def to_json(self) -> dict[str, Json]:
        """Return the entries of `config.json`, readable by transformers 4 and 5."""
        # transformers 5 reads these two only if `rope_parameters` lacks them.
        old = {
            "rotary_emb_base": self.rope.theta,
            "rotary_pct": self.rope.partial_rotary_factor,
        }
        return {**super().to_json(), **old}


class GPTNeoXAttention(eqx.Module):
    """Multi-head attention with rotary positions. One matrix has query, key and value,
    head by head."""

    query_key_value: Linear
    dense: Linear
    dropout: eqx.nn.Dropout
    config: GPTNeoXConfig = eqx.field(static=True)

    def __init__(self, config: GPTNeoXConfig, *, key: Key):
        size = config.hidden_size
        bias = config.attention_bias
        std = config.initializer_range
        sizes = (size, 3 * size), (size, size)
        self.query_key_value, self.dense = make_linears(
            key, *sizes, use_bias=bias, std=std
        )
        self.dropout = eqx.nn.Dropout(config.attention_dropout)
        self.config = config

    def heads(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        """Return the input of `dense`."""
        size = self.config.head_size
        # The rows of the matrix are query, key and value of head 0, then of head 1, and
        # so on, and not all queries first. A split by whole heads needs no permutation.
        (qkv,) = context.column(x, self.query_key_value, unit=3 * size)
        q, k, v = jnp.split(split_heads(qkv, 3 * size), 3, axis=-1)
        rope = self.config.rope
        q, k = (
            rotate(x, context.positions, rope.frequencies(size), rope.scale)
            for x in (q, k)
        )
        return context.attend(q, k, v, cache, dropout=self.dropout, dropout_key=key)


class GPTNeoXMLP(eqx.Module):
    """Two projections, with an activation between them."""

    dense_h_to_4h: Linear
    dense_4h_to_h: Linear


class GPTNeoXLayer(eqx.Module):
    """Attention and MLP, each with a norm before it: in parallel, or one after the
    other."""

    input_layernorm: LayerNorm
    post_attention_layernorm: LayerNorm
    attention: GPTNeoXAttention
    mlp: GPTNeoXMLP
    dropout: eqx.nn.Dropout

    def __init__(self, config: GPTNeoXConfig, *, key: Key):
        attention_key, mlp_key = jax.random.split(key)
        size = config.hidden_size
        inner = config.intermediate_size
        std = config.initializer_range
        eps = config.layer_norm_eps
        self.input_layernorm, self.post_attention_layernorm = (
            LayerNorm(size, eps=eps) for _ in range(2)
        )
        self.attention = GPTNeoXAttention(config, key=attention_key)
        self.mlp = GPTNeoXMLP(
            *make_linears(mlp_key, (size, inner), (inner, size), std=std)
        )
        self.dropout = eqx.nn.Dropout(config.hidden_dropout)

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        heads_key, *keys = split_key(key, 3)
        config = self.attention.config
        mlp = self.mlp
        heads, cache = self.attention.heads(
            self.input_layernorm(x), context, cache, heads_key
        )
        # With parallel branches, both norms read the same stream, and the two output
        # projections share one sum over `tensor`.
        closed = [(heads, self.attention.dense)]
        if not config.use_parallel_residual:
            x = context.add(x, closed, self.dropout, keys[:1], unit=config.head_size)
            closed = []
            keys = keys[1:]
        (hidden,) = context.column(
            self.post_attention_layernorm(x), mlp.dense_h_to_4h, unit=config.head_size
        )
        closed = [*closed, (ACTIVATIONS[config.hidden_act](hidden), mlp.dense_4h_to_h)]
        return context.add(x, closed, self.dropout, keys, unit=config.head_size), cache


class GPTNeoXModel(eqx.Module):
    """The model without its head."""

    embed_in: Embedding
    emb_dropout: eqx.nn.Dropout
    layers: PyTree
    final_layer_norm: LayerNorm

    def __init__(self, config: GPTNeoXConfig, *, stacked: bool, key: Key):
        token_key, layers_key = jax.random.split(key)
        size = config.hidden_size
        std = config.initializer_range
        self.embed_in = Embedding(config.vocab_size, size, std=std, key=token_key)
        self.emb_dropout = eqx.nn.Dropout(config.hidden_dropout)
        self.layers = make_layers(GPTNeoXLayer, config, stacked=stacked, key=layers_key)
        self.final_layer_norm = LayerNorm(size, eps=config.layer_norm_eps)


class GPTNeoXForCausalLM(DecoderLM):
    """GPT-NeoX with its head, which files call `embed_out`."""

    gpt_neox: GPTNeoXModel
    embed_out: Linear | None
    config: GPTNeoXConfig = eqx.field(static=True)

    stacks = ("gpt_neox.layers",)
    vocabulary = (r"\.embed_in$", r"^embed_out$")
    prefixes = ("gpt_neox.",)
    # Causal masks and frequencies, which old versions of transformers saved as buffers.
    ignored = (r"\battention\.(masked_)?bias$", r"\brotary_emb\.inv_freq$")
    tied = {"embed_out.weight": "gpt_neox.embed_in.weight"}

    def __init__(
        self,
        config: GPTNeoXConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        model_key, head_key = jax.random.split(key)
        self.gpt_neox = GPTNeoXModel(config, stacked=stacked, key=model_key)
        self.embed_out = make_head(
            config, config.hidden_size, std=config.initializer_range, key=head_key
        )

    @property
    def lm_head(self) -> Linear | None:
        return self.embed_out

    def embed(self, input_ids: Ids, context: Context, key: Key | None) -> Hidden:
        x = context.embed(self.gpt_neox.embed_in, input_ids)
        return dropout(self.gpt_neox.emb_dropout, x, key)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        return self.gpt_neox.final_layer_norm(x)
