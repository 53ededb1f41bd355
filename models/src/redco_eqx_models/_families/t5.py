"""T5 (Raffel et al. 2020): v1.0, v1.1 and Flan, with a tied head or a separate one."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.attention import Bias
from redco_eqx_models._blocks.config import Config, Json
from redco_eqx_models._blocks.context import (
    Context,
    Hidden,
    Ids,
    LayerCache,
    LayerOutput,
)
from redco_eqx_models._blocks.decoder import make_head
from redco_eqx_models._blocks.dropout import dropout, split_key
from redco_eqx_models._blocks.encoder import encode_tokens
from redco_eqx_models._blocks.encoder_decoder import EncoderDecoder
from redco_eqx_models._blocks.layers import (
    ACTIVATIONS,
    Embedding,
    Linear,
    RMSNorm,
    make_linears,
)
from redco_eqx_models._blocks.model import Options, make_layers
from redco_eqx_models._blocks.multihead import HeadsAttention
from redco_eqx_models._blocks.positions import relative_bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class T5Config(Config):
    """T5. `feed_forward_proj` is an activation, or `gated-` and an activation;
    `gated-gelu` means `gelu_new`.

    - `tie_word_embeddings`: true if the head is the embedding table. This depends only
        on whether the files have a head, not on the entry of `config.json`.
    - `scale_decoder_outputs`: true if the input of the head is divided by
        `sqrt(d_model)`, as in v1.0. An older `config.json` means true unless its
        `tie_word_embeddings` is false.
    """

    model_type = "t5"
    architecture = "T5ForConditionalGeneration"
    aliases = {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6  # pyright: ignore[reportIncompatibleMethodOverride]
    num_decoder_layers: int | None = None
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float = 0.1
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "relu"
    tie_word_embeddings: bool = True
    scale_decoder_outputs: bool = True
    decoder_start_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0

    @property
    def is_gated(self) -> bool:
        """True if the MLP has a gate."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def activation(self) -> str:
        """The activation inside the MLP."""
        name = self.feed_forward_proj.removeprefix("gated-")
        if self.is_gated and name == "gelu":
            # transformers' `T5Config` does this for the files of v1.1.
            return "gelu_new"
        return name

    @classmethod
    def from_json(cls, raw: Mapping[str, Json], base: Any = None) -> "T5Config":
        twins = {
            name: raw[name] for name in ("dense_act_fn", "is_gated_act") if name in raw
        }
        entries = {name: x for name, x in raw.items() if name not in twins}
        if base is None:
            # `T5Config` of transformers 5 does the same. Older versions divided if the
            # entry was true, which v1.1 has as false.
            is_v1_0 = raw.get("tie_word_embeddings") is not False
            entries = {"scale_decoder_outputs": is_v1_0, **entries}
        config = super().from_json(entries, base)
        own = {"dense_act_fn": config.activation, "is_gated_act": config.is_gated}
        if own | twins != own:
            raise config.error(
                f"{twins}, but feed_forward_proj={config.feed_forward_proj!r} means "
                f"{own}."
            )
        return config


class T5Attention(HeadsAttention):
    """Multi-head attention with unscaled scores. The context has the bias of relative
    positions."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear

    names = ("q", "k", "v", "o")
    # The initial queries are smaller instead, by the root of the head size.
    scale = 1.0

    def __init__(self, config: T5Config, *, key: Key):
        size = config.d_model
        inner = config.num_heads * config.d_kv
        factor = config.initializer_factor
        q_key, kv_key, o_key = jax.random.split(key, 3)
        q_std = factor * (size * config.d_kv) ** -0.5
        self.q = Linear(size, inner, use_bias=False, std=q_std, key=q_key)
        self.k, self.v = make_linears(
            kv_key, *[(size, inner)] * 2, use_bias=False, std=factor * size**-0.5
        )
        self.o = Linear(
            inner, size, use_bias=False, std=factor * inner**-0.5, key=o_key
        )
        self.dropout = eqx.nn.Dropout(config.dropout_rate)
        self.num_heads = config.num_heads


class T5MLP(eqx.Module):
    """Two projections with an activation between them, or three with one as a gate
    (Shazeer 2020)."""

    wi: Linear | None
    wi_0: Linear | None
    wi_1: Linear | None
    wo: Linear
    dropout: eqx.nn.Dropout
    activation: str = eqx.field(static=True)

    def __init__(self, config: T5Config, *, key: Key):
        size = config.d_model
        inner = config.d_ff
        factor = config.initializer_factor
        in_key, out_key = jax.random.split(key)
        sizes = [(size, inner)] * (1 + config.is_gated)
        first, *second = make_linears(
            in_key, *sizes, use_bias=False, std=factor * size**-0.5
        )
        self.wi = self.wi_0 = self.wi_1 = None
        if second:
            self.wi_0 = first
            self.wi_1 = second[0]
        else:
            self.wi = first
        self.wo = Linear(
            inner, size, use_bias=False, std=factor * inner**-0.5, key=out_key
        )
        self.dropout = eqx.nn.Dropout(config.dropout_rate)
        self.activation = config.activation

    def __call__(self, x: Hidden, context: Context, key: Key | None) -> Hidden:
        layers = [
            layer for layer in (self.wi, self.wi_0, self.wi_1) if layer is not None
        ]
        hidden, *gated = context.column(x, *layers)
        hidden = ACTIVATIONS[self.activation](hidden)
        for other in gated:
            hidden = hidden * other
        return context.row(dropout(self.dropout, hidden, key), self.wo)


class T5Part(eqx.Module):
    """Self-attention, cross-attention or an MLP, with a norm before it."""

    SelfAttention: T5Attention | None
    EncDecAttention: T5Attention | None
    DenseReluDense: T5MLP | None
    layer_norm: RMSNorm

    def __init__(self, config: T5Config, kind: str, *, key: Key):
        self.SelfAttention = self.EncDecAttention = self.DenseReluDense = None
        if kind == "self":
            self.SelfAttention = T5Attention(config, key=key)
        elif kind == "cross":
            self.EncDecAttention = T5Attention(config, key=key)
        else:
            self.DenseReluDense = T5MLP(config, key=key)
        self.layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon)


class T5Block(eqx.Module):
    """Self-attention, cross-attention in the decoder, then MLP, each added to the
    stream."""

    layer: list[T5Part]
    dropout: eqx.nn.Dropout

    def __init__(self, config: T5Config, *, is_decoder: bool, key: Key):
        kinds = ("self", "cross", "mlp") if is_decoder else ("self", "mlp")
        keys = jax.random.split(key, len(kinds))
        self.layer = [T5Part(config, kind, key=key) for kind, key in zip(kinds, keys)]
        self.dropout = eqx.nn.Dropout(config.dropout_rate)

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        for part in self.layer:
            inner_key, outer_key, key = split_key(key, 3)
            y = part.layer_norm(x)
            if part.SelfAttention is not None:
                y, cache = part.SelfAttention(y, context, cache, inner_key)
            if part.EncDecAttention is not None:
                y = part.EncDecAttention.over_memory(y, context, inner_key)
            if part.DenseReluDense is not None:
                y = part.DenseReluDense(y, context, inner_key)
            x = _finite(x + dropout(self.dropout, y, outer_key))
        return x, cache


def _finite(x: Array) -> Array:
    """Clip the stream to the range of float16, which the published weights overflow."""
    if x.dtype != jnp.float16:
        return x
    # The largest number of float16 less 1000, to which transformers clips as soon as a
    # number is infinite.
    return jnp.clip(x, -64504, 64504)


class T5Stack(eqx.Module):
    """The layers of the encoder or of the decoder.

    - `relative_attention_bias`: the table that all layers share. In files the first
        layer has it.
    """

    block: PyTree
    relative_attention_bias: Embedding
    final_layer_norm: RMSNorm
    dropout: eqx.nn.Dropout
    max_distance: int = eqx.field(static=True)
    bidirectional: bool = eqx.field(static=True)

    def __init__(self, config: T5Config, *, is_decoder: bool, stacked: bool, key: Key):
        layers_key, table_key = jax.random.split(key)
        num_layers = config.num_layers
        if is_decoder and config.num_decoder_layers:
            num_layers = config.num_decoder_layers
        make_block = functools.partial(T5Block, is_decoder=is_decoder)
        self.block = make_layers(
            make_block, config, stacked=stacked, key=layers_key, num_layers=num_layers
        )
        num_buckets = config.relative_attention_num_buckets
        std = config.initializer_factor * config.d_model**-0.5
        self.relative_attention_bias = Embedding(
            num_buckets, config.num_heads, std=std, key=table_key
        )
        self.final_layer_norm = RMSNorm(config.d_model, eps=config.layer_norm_epsilon)
        self.dropout = eqx.nn.Dropout(config.dropout_rate)
        self.max_distance = config.relative_attention_max_distance
        self.bidirectional = not is_decoder

    def bias(
        self, query: Int[Array, "r t"], key: Int[Array, "r s"], batch_size: int
    ) -> Bias:
        """Return the bias of relative positions, by the table that all layers share."""
        return relative_bias(
            self.relative_attention_bias,
            query,
            key,
            bidirectional=self.bidirectional,
            max_distance=self.max_distance,
            batch_size=batch_size,
        )

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        """Apply the norm and dropout after the last layer."""
        return dropout(self.dropout, self.final_layer_norm(x), key)


class T5ForConditionalGeneration(EncoderDecoder):
    """T5 with its head, which is the embedding table in v1.0."""

    shared: Embedding
    encoder: T5Stack
    decoder: T5Stack
    lm_head: Linear | None
    config: T5Config = eqx.field(static=True)

    stacks = ("encoder.block", "decoder.block")
    in_first_layer = {
        f"{stack}.relative_attention_bias": (
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        )
        for stack in ("encoder", "decoder")
    }
    # In files converted from the first implementation. transformers ignores it too.
    ignored = (
        r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",
    )
    tied = {
        "lm_head.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }
    tied_by_file = True

    def __init__(
        self,
        config: T5Config,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        table_key, encoder_key, decoder_key, head_key = jax.random.split(key, 4)
        size = config.d_model
        std = config.initializer_factor
        self.shared = Embedding(config.vocab_size, size, std=std, key=table_key)
        self.encoder = T5Stack(
            config, is_decoder=False, stacked=stacked, key=encoder_key
        )
        self.decoder = T5Stack(
            config, is_decoder=True, stacked=stacked, key=decoder_key
        )
        self.lm_head = make_head(config, size, std=std, key=head_key)

    def encoder_states(
        self,
        inputs: Int[Array, "b s"],
        *,
        attention_mask: Array | None = None,
        key: Key | None = None,
    ) -> Float[Array, "b s size"]:
        body_key, finish_key = split_key(key, 2)

        def embed(context: Context, key: Key | None) -> Array:
            x = context.embed(self.shared, inputs)
            return dropout(self.encoder.dropout, x, key)

        # Only differences of positions count, so padding on the left changes nothing,
        # and all rows share one bias.
        positions = jnp.arange(inputs.shape[1])[None]
        bias = self.encoder.bias(positions, positions, len(inputs))
        layers = self.encoder.block
        x = encode_tokens(
            self,
            inputs,
            embed,
            layers,
            attention_mask=attention_mask,
            bias=bias,
            key=body_key,
        )
        return self.encoder.finish(x, finish_key)

    def cross_projections(self, layer: PyTree) -> tuple[Linear, Linear]:
        attention = layer.layer[1].EncDecAttention
        return attention.k, attention.v

    def bias(
        self, query: Int[Array, "r t"], key: Int[Array, "r s"], batch_size: int
    ) -> Bias:
        return self.decoder.bias(query, key, batch_size)

    def embed(self, input_ids: Ids, context: Context, key: Key | None) -> Hidden:
        return dropout(self.decoder.dropout, context.embed(self.shared, input_ids), key)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        x = self.decoder.finish(x, key)
        if self.config.scale_decoder_outputs:
            # The table has entries of about 1, as an embedding needs. As a head, it
            # would make logits that are too large.
            x = x * self.config.d_model**-0.5
        return x
