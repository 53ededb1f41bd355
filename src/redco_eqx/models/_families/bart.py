"""BART (Lewis et al. 2020)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.config import Config, Json
from redco_eqx.models._blocks.context import Context, Hidden, LayerCache, LayerOutput
from redco_eqx.models._blocks.encoder import encode_tokens
from redco_eqx.models._blocks.encoder_decoder import EncoderDecoder
from redco_eqx.models._blocks.layers import (
    ACTIVATIONS,
    Embedding,
    LayerNorm,
    Linear,
    TiedHead,
    add_and_norm,
    dropout,
    split_key,
)
from redco_eqx.models._blocks.model import Options, make_layers
from redco_eqx.models._blocks.multihead import MultiHeadAttention

POSITION_OFFSET = 2
"""The first token's row in the tables of positions. The rows before it are left over from fairseq."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(Config):
    """BART, base and large. Encoder and decoder have separate sizes, where most families have one."""

    model_type: ClassVar[str] = "bart"
    architecture: ClassVar[str] = "BartForConditionalGeneration"
    has_positions: ClassVar[bool] = True
    multiples: ClassVar[tuple[tuple[str, str], ...]] = (("d_model", "decoder_attention_heads"),)
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    only: ClassVar[Mapping[str, Json]] = {
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "tie_word_embeddings": True,
    }

    vocab_size: int = 50265
    max_position_embeddings: int = 1024
    encoder_layers: int = 12
    encoder_ffn_dim: int = 4096
    encoder_attention_heads: int = 16
    decoder_layers: int = 12
    decoder_ffn_dim: int = 4096
    decoder_attention_heads: int = 16
    activation_function: str = "gelu"
    d_model: int = 1024
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    init_std: float = 0.02
    scale_embedding: bool = False
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = 1
    decoder_start_token_id: int | None = 2

    @property
    def kv_heads(self) -> int:
        return self.decoder_attention_heads

    @property
    def head_size(self) -> int:
        return self.d_model // self.decoder_attention_heads


class BartLayer(eqx.Module):
    """Self-attention, cross-attention in the decoder, MLP: each added to the stream, with a norm after it."""

    self_attn: MultiHeadAttention
    self_attn_layer_norm: LayerNorm
    encoder_attn: MultiHeadAttention | None
    encoder_attn_layer_norm: LayerNorm | None
    fc1: Linear
    fc2: Linear
    final_layer_norm: LayerNorm
    dropout: eqx.nn.Dropout
    activation_dropout: eqx.nn.Dropout
    activation_function: str = eqx.field(static=True)

    def __init__(self, config: BartConfig, *, is_decoder: bool, key: Key):
        size, std = config.d_model, config.init_std
        inner = config.decoder_ffn_dim if is_decoder else config.encoder_ffn_dim
        num_heads = config.decoder_attention_heads if is_decoder else config.encoder_attention_heads
        self_key, cross_key, fc1_key, fc2_key = jax.random.split(key, 4)

        def attention(key: Key) -> MultiHeadAttention:
            return MultiHeadAttention(size, num_heads, dropout=config.attention_dropout, std=std, key=key)

        self.self_attn = attention(self_key)
        self.self_attn_layer_norm = LayerNorm(size)
        self.encoder_attn = attention(cross_key) if is_decoder else None
        self.encoder_attn_layer_norm = LayerNorm(size) if is_decoder else None
        self.fc1 = Linear(size, inner, std=std, key=fc1_key)
        self.fc2 = Linear(inner, size, std=std, key=fc2_key)
        self.final_layer_norm = LayerNorm(size)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.activation_dropout = eqx.nn.Dropout(config.activation_dropout)
        self.activation_function = config.activation_function

    def mlp(self, x: Hidden, context: Context, key: Key | None) -> Hidden:
        """Apply two projections with an activation between them."""
        (hidden,) = context.column(x, self.fc1)
        hidden = ACTIVATIONS[self.activation_function](hidden)
        return context.row(dropout(self.activation_dropout, hidden, key), self.fc2)

    def __call__(self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None) -> LayerOutput:
        self_key, cross_key, mlp_key, *keys = split_key(key, 6)
        y, cache = self.self_attn(x, context, cache, self_key)
        x = add_and_norm(x, y, self.self_attn_layer_norm, self.dropout, keys[0])
        if self.encoder_attn is not None and self.encoder_attn_layer_norm is not None:
            y = self.encoder_attn.over_memory(x, context, cross_key)
            x = add_and_norm(x, y, self.encoder_attn_layer_norm, self.dropout, keys[1])
        y = self.mlp(x, context, mlp_key)
        return add_and_norm(x, y, self.final_layer_norm, self.dropout, keys[2]), cache


class BartStack(eqx.Module):
    """The encoder or the decoder."""

    embed_positions: Embedding
    layers: PyTree
    layernorm_embedding: LayerNorm
    dropout: eqx.nn.Dropout
    scale: float = eqx.field(static=True)

    def __init__(self, config: BartConfig, *, is_decoder: bool, stacked: bool, key: Key):
        position_key, layers_key = jax.random.split(key)
        num_positions = config.max_position_embeddings + POSITION_OFFSET
        self.embed_positions = Embedding(num_positions, config.d_model, std=config.init_std, key=position_key)
        self.layers = make_layers(
            lambda config, *, key: BartLayer(config, is_decoder=is_decoder, key=key),
            config, stacked=stacked, key=layers_key,
            num_layers=config.decoder_layers if is_decoder else config.encoder_layers,
        )  # fmt: skip
        self.layernorm_embedding = LayerNorm(config.d_model)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.scale = config.d_model**0.5 if config.scale_embedding else 1.0

    def embed(
        self, table: Embedding, input_ids: Int[Array, "b t"], context: Context, key: Key | None
    ) -> Hidden:
        """Return the input of the first layer."""
        x = context.embed(table, input_ids) * self.scale
        x = x + self.embed_positions(context.positions + POSITION_OFFSET)
        return dropout(self.dropout, self.layernorm_embedding(x), key)


class BartModel(eqx.Module):
    """The model without its head, which is the table that encoder and decoder share."""

    shared: Embedding
    encoder: BartStack
    decoder: BartStack

    def __init__(self, config: BartConfig, *, stacked: bool, key: Key):
        table_key, encoder_key, decoder_key = jax.random.split(key, 3)
        self.shared = Embedding(config.vocab_size, config.d_model, std=config.init_std, key=table_key)
        self.encoder = BartStack(config, is_decoder=False, stacked=stacked, key=encoder_key)
        self.decoder = BartStack(config, is_decoder=True, stacked=stacked, key=decoder_key)


class BartForConditionalGeneration(EncoderDecoder):
    """BART with its head. `final_logits_bias` is added to the logits and is not trained."""

    model: BartModel
    final_logits_bias: Float[Array | np.ndarray, "1 vocab"]
    lm_head: None
    config: BartConfig = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("model.encoder.layers", "model.decoder.layers")
    prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    ignored: ClassVar[tuple[str, ...]] = (r"\b(encoder|decoder)\.version$",)
    tied: ClassVar[Mapping[str, str]] = {
        "lm_head.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    }
    buffers: ClassVar[tuple[str, ...]] = ("final_logits_bias",)

    def __init__(self, config: BartConfig, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        self.model = BartModel(config, stacked=stacked, key=key)
        self.final_logits_bias = np.zeros((1, config.vocab_size), np.float32)
        self.lm_head = None

    @property
    def head(self) -> TiedHead:
        """The layer that computes the logits."""
        table, bias = self.model.shared.weight, jax.lax.stop_gradient(self.final_logits_bias)
        return TiedHead(table, jnp.asarray(bias, table.dtype)[0])

    def encoder_states(
        self, inputs: Int[Array, "b s"], *, attention_mask: Array | None = None, key: Key | None = None
    ) -> Float[Array, "b s size"]:
        encoder = self.model.encoder
        return encode_tokens(
            self, inputs, functools.partial(encoder.embed, self.model.shared, inputs), encoder.layers,
            attention_mask=attention_mask, max_positions=self.config.max_positions, key=key,
        )  # fmt: skip

    def cross_projections(self, layer: PyTree) -> tuple[Linear, Linear]:
        return layer.encoder_attn.k_proj, layer.encoder_attn.v_proj

    def embed(self, input_ids: Int[Array, "b t"], context: Context, key: Key | None) -> Hidden:
        return self.model.decoder.embed(self.model.shared, input_ids, context, key)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        return x
