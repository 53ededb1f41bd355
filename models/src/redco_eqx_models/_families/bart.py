"""BART (Lewis et al. 2020) and OPT (Zhang et al. 2022), which come from fairseq and
share their layers."""

import dataclasses
import functools
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.config import Config
from redco_eqx_models._blocks.context import (
    Context,
    Hidden,
    Ids,
    LayerCache,
    LayerOutput,
)
from redco_eqx_models._blocks.decoder import DecoderLM, make_head
from redco_eqx_models._blocks.dropout import dropout, split_key
from redco_eqx_models._blocks.encoder import encode_tokens
from redco_eqx_models._blocks.encoder_decoder import EncoderDecoder
from redco_eqx_models._blocks.layers import (
    Embedding,
    LayerNorm,
    Linear,
    TiedHead,
    make_linears,
    maybe,
)
from redco_eqx_models._blocks.model import Options, make_layers
from redco_eqx_models._blocks.multihead import MultiHeadAttention

# fairseq counts positions from its padding token, 1, so the first token has row 2.
POSITION_OFFSET = 2
"""The first token's row in the tables of positions. The rows before it are left over
from fairseq."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BartConfig(Config):
    """BART, base and large. Encoder and decoder have separate sizes, where most
    families have one."""

    model_type = "bart"
    architecture = "BartForConditionalGeneration"
    has_positions = True
    multiples = (("d_model", "decoder_attention_heads"),)
    aliases = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }
    only = {
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
    """Self-attention, cross-attention in the decoder, and MLP, each added to the
    stream. Norms come after them or, with `before`, before them. OPT has the same
    layer, with more choices in its configuration.
    """

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
    before: bool = eqx.field(static=True)

    def __init__(
        self, config: Any, num_heads: int, inner: int, *, cross: bool = False, key: Key
    ):
        size = config.entry("hidden_size")
        std = config.init_std
        rate = config.attention_dropout
        use_bias = config.entry("enable_bias", True)
        affine = config.entry("layer_norm_elementwise_affine", True)
        self_key, cross_key, mlp_key = jax.random.split(key, 3)

        def attention(key: Key) -> MultiHeadAttention:
            return MultiHeadAttention(
                size, num_heads, use_bias=use_bias, dropout=rate, std=std, key=key
            )

        self.self_attn = attention(self_key)
        self.self_attn_layer_norm = LayerNorm(size, affine=affine)
        self.encoder_attn = self.encoder_attn_layer_norm = None
        if cross:
            self.encoder_attn = attention(cross_key)
            self.encoder_attn_layer_norm = LayerNorm(size, affine=affine)
        self.fc1, self.fc2 = make_linears(
            mlp_key, (size, inner), (inner, size), use_bias=use_bias, std=std
        )
        self.final_layer_norm = LayerNorm(size, affine=affine)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.activation_dropout = eqx.nn.Dropout(
            config.entry("activation_dropout", 0.0)
        )
        self.activation_function = config.activation_function
        self.before = config.entry("do_layer_norm_before", False)

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        self_key, cross_key, mlp_key, *keys = split_key(key, 6)
        y = self._open(x, self.self_attn_layer_norm)
        y, cache = self.self_attn(y, context, cache, self_key)
        x = self._close(x, y, self.self_attn_layer_norm, keys[0])
        norm = self.encoder_attn_layer_norm
        if self.encoder_attn is not None and norm is not None:
            y = self._open(x, norm)
            y = self.encoder_attn.over_memory(y, context, cross_key)
            x = self._close(x, y, norm, keys[1])
        y = self._open(x, self.final_layer_norm)
        activation = self.activation_function
        y = context.mlp(
            y, self.fc1, activation, self.fc2, self.activation_dropout, mlp_key
        )
        return self._close(x, y, self.final_layer_norm, keys[2]), cache

    def _open(self, x: Hidden, norm: LayerNorm) -> Hidden:
        """Return the input of a branch."""
        if self.before:
            return norm(x)
        return x

    def _close(self, x: Hidden, y: Hidden, norm: LayerNorm, key: Key | None) -> Hidden:
        """Return the stream with the output of a branch added."""
        x = x + dropout(self.dropout, y, key)
        if self.before:
            return x
        return norm(x)


class BartStack(eqx.Module):
    """The encoder or the decoder."""

    embed_positions: Embedding
    layers: PyTree
    layernorm_embedding: LayerNorm
    dropout: eqx.nn.Dropout
    scale: float = eqx.field(static=True)

    def __init__(
        self, config: BartConfig, *, is_decoder: bool, stacked: bool, key: Key
    ):
        position_key, layers_key = jax.random.split(key)
        num_positions = config.max_position_embeddings + POSITION_OFFSET
        self.embed_positions = Embedding(
            num_positions, config.d_model, std=config.init_std, key=position_key
        )
        stack = "decoder" if is_decoder else "encoder"
        names = (f"{stack}_layers", f"{stack}_attention_heads", f"{stack}_ffn_dim")
        num_layers, num_heads, inner = (getattr(config, name) for name in names)
        make_layer = functools.partial(
            BartLayer, num_heads=num_heads, inner=inner, cross=is_decoder
        )
        self.layers = make_layers(
            make_layer, config, stacked=stacked, key=layers_key, num_layers=num_layers
        )
        self.layernorm_embedding = LayerNorm(config.d_model)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.scale = config.d_model**0.5 if config.scale_embedding else 1.0

    def embed(
        self, table: Embedding, input_ids: Ids, context: Context, key: Key | None
    ) -> Hidden:
        """Return the input of the first layer."""
        x = context.embed(table, input_ids) * self.scale
        # transformers' BART counts padding too, and differs with padding on the left.
        x = x + self.embed_positions(context.positions + POSITION_OFFSET)
        return dropout(self.dropout, self.layernorm_embedding(x), key)


class BartModel(eqx.Module):
    """The model without its head, which is the table that encoder and decoder share."""

    shared: Embedding
    encoder: BartStack
    decoder: BartStack

    def __init__(self, config: BartConfig, *, stacked: bool, key: Key):
        table_key, encoder_key, decoder_key = jax.random.split(key, 3)
        self.shared = Embedding(
            config.vocab_size, config.d_model, std=config.init_std, key=table_key
        )
        self.encoder = BartStack(
            config, is_decoder=False, stacked=stacked, key=encoder_key
        )
        self.decoder = BartStack(
            config, is_decoder=True, stacked=stacked, key=decoder_key
        )


class BartForConditionalGeneration(EncoderDecoder):
    """BART with its head. `final_logits_bias` is added to the logits and is not
    trained."""

    model: BartModel
    final_logits_bias: Float[Array | np.ndarray, "1 vocab"]
    lm_head: None
    config: BartConfig = eqx.field(static=True)

    stacks = ("model.encoder.layers", "model.decoder.layers")
    prefixes = ("model.",)
    ignored = (r"\b(encoder|decoder)\.version$",)
    tied = {
        "lm_head.weight": "model.shared.weight",
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
    }
    buffers = ("final_logits_bias",)

    def __init__(
        self,
        config: BartConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        self.model = BartModel(config, stacked=stacked, key=key)
        # A buffer in transformers, so it is in files, but is not trained.
        self.final_logits_bias = np.zeros((1, config.vocab_size), np.float32)
        self.lm_head = None

    @property
    def head(self) -> TiedHead:
        """The layer that computes the logits."""
        table = self.model.shared.weight
        # Inside a traced function, a buffer may be a traced array with a gradient.
        bias = jax.lax.stop_gradient(self.final_logits_bias)
        return TiedHead(table, jnp.asarray(bias, table.dtype)[0])

    def encoder_states(
        self,
        inputs: Int[Array, "b s"],
        *,
        attention_mask: Array | None = None,
        key: Key | None = None,
    ) -> Float[Array, "b s size"]:
        encoder = self.model.encoder
        embed = functools.partial(encoder.embed, self.model.shared, inputs)
        return encode_tokens(
            self, inputs, embed, encoder.layers, attention_mask=attention_mask, key=key
        )

    def cross_projections(self, layer: PyTree) -> tuple[Linear, Linear]:
        return layer.encoder_attn.k_proj, layer.encoder_attn.v_proj

    def embed(self, input_ids: Ids, context: Context, key: Key | None) -> Hidden:
        return self.model.decoder.embed(self.model.shared, input_ids, context, key)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        # The last layer ends with a norm.
        return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(Config):
    """OPT, 125M to 175B.

    Norms come before attention and MLP, and after the last layer. Only the 350M model
    differs (`do_layer_norm_before` is false): its norms come after attention and MLP,
    with none after the last layer, and its embeddings are narrower
    (`word_embed_proj_dim`).
    """

    model_type = "opt"
    architecture = "OPTForCausalLM"
    has_positions = True
    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    do_layer_norm_before: bool = True
    _remove_final_layer_norm: bool = False
    word_embed_proj_dim: int | None = None
    dropout: float = 0.1
    attention_dropout: float = 0.0
    num_attention_heads: int = 12
    activation_function: str = "relu"
    init_std: float = 0.02
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = 1
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True

    @property
    def embedding_size(self) -> int:
        """Features of a row of the embedding table."""
        return self.word_embed_proj_dim or self.hidden_size


class OPTDecoder(eqx.Module):
    """The model without its head."""

    embed_tokens: Embedding
    embed_positions: Embedding
    project_in: Linear | None
    project_out: Linear | None
    layers: PyTree
    final_layer_norm: LayerNorm | None

    def __init__(self, config: OPTConfig, *, stacked: bool, key: Key):
        size = config.hidden_size
        narrow = config.embedding_size
        std = config.init_std
        token_key, position_key, project_key, layers_key = jax.random.split(key, 4)
        num_positions = config.max_position_embeddings + POSITION_OFFSET
        self.embed_tokens = Embedding(config.vocab_size, narrow, std=std, key=token_key)
        self.embed_positions = Embedding(num_positions, size, std=std, key=position_key)
        self.project_in = self.project_out = None
        if narrow != size:
            self.project_in, self.project_out = make_linears(
                project_key, (narrow, size), (size, narrow), use_bias=False, std=std
            )
        make_layer = functools.partial(
            BartLayer, num_heads=config.num_attention_heads, inner=config.ffn_dim
        )
        self.layers = make_layers(make_layer, config, stacked=stacked, key=layers_key)
        self.final_layer_norm = None
        # The second entry is for models that were fine-tuned with transformers before
        # 4.20.1, which left this norm out.
        if config.do_layer_norm_before and not config._remove_final_layer_norm:
            self.final_layer_norm = LayerNorm(
                size, affine=config.layer_norm_elementwise_affine
            )


class OPTModel(eqx.Module):
    """The decoder, under the name that it has in model files."""

    decoder: OPTDecoder


class OPTForCausalLM(DecoderLM):
    """OPT with its head, which is the embedding table unless the configuration unties
    them."""

    model: OPTModel
    lm_head: Linear | None
    config: OPTConfig = eqx.field(static=True)

    stacks = ("model.decoder.layers",)
    vocabulary = (r"\.embed_tokens$", r"^lm_head$")
    prefixes = ("model.",)
    ignored = (r"\bdecoder\.version$",)
    tied = {"lm_head.weight": "model.decoder.embed_tokens.weight"}

    def __init__(
        self,
        config: OPTConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        model_key, head_key = jax.random.split(key)
        self.model = OPTModel(OPTDecoder(config, stacked=stacked, key=model_key))
        self.lm_head = make_head(
            config, config.embedding_size, std=config.init_std, key=head_key
        )

    def embed(self, input_ids: Ids, context: Context, key: Key | None) -> Hidden:
        decoder = self.model.decoder
        x = context.embed(decoder.embed_tokens, input_ids)
        return maybe(decoder.project_in, x) + decoder.embed_positions(
            context.positions + POSITION_OFFSET
        )

    def finish(self, x: Hidden, key: Key | None) -> Float[Array, "b t _"]:
        decoder = self.model.decoder
        return maybe(decoder.project_out, maybe(decoder.final_layer_norm, x))
