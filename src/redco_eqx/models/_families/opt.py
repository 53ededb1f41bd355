"""OPT (Zhang et al. 2022)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Unpack

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.config import Config
from redco_eqx.models._blocks.context import Context, Hidden, LayerCache, LayerOutput
from redco_eqx.models._blocks.decoder import DecoderLM, make_head
from redco_eqx.models._blocks.layers import ACTIVATIONS, Embedding, LayerNorm, Linear, dropout, split_key
from redco_eqx.models._blocks.model import Options, make_layers
from redco_eqx.models._blocks.multihead import MultiHeadAttention

POSITION_OFFSET = 2
"""The first token's row in the table of positions; fairseq left the rows before it over."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(Config):
    """OPT, 125M to 175B.

    Norms come before attention and MLP, and after the last layer. Only the 350M model differs
    (`do_layer_norm_before` is false): its norms come after attention and MLP, with none after the last layer,
    and its embeddings are narrower (`word_embed_proj_dim`).
    """

    model_type: ClassVar[str] = "opt"
    architecture: ClassVar[str] = "OPTForCausalLM"
    has_positions: ClassVar[bool] = True
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


class OPTDecoderLayer(eqx.Module):
    """Attention, then MLP, each added to the stream, with a norm before it (or, in the 350M, after)."""

    self_attn: MultiHeadAttention
    self_attn_layer_norm: LayerNorm
    fc1: Linear
    fc2: Linear
    final_layer_norm: LayerNorm
    dropout: eqx.nn.Dropout
    config: OPTConfig = eqx.field(static=True)

    def __init__(self, config: OPTConfig, *, key: Key):
        size, inner, bias, std = config.hidden_size, config.ffn_dim, config.enable_bias, config.init_std
        attention_key, fc1_key, fc2_key = jax.random.split(key, 3)
        self.self_attn = MultiHeadAttention(
            size, config.num_attention_heads,
            use_bias=bias, dropout=config.attention_dropout, std=std, key=attention_key,
        )  # fmt: skip
        self.self_attn_layer_norm = LayerNorm(size, affine=config.layer_norm_elementwise_affine)
        self.fc1 = Linear(size, inner, use_bias=bias, std=std, key=fc1_key)
        self.fc2 = Linear(inner, size, use_bias=bias, std=std, key=fc2_key)
        self.final_layer_norm = LayerNorm(size, affine=config.layer_norm_elementwise_affine)
        self.dropout = eqx.nn.Dropout(config.dropout)
        self.config = config

    def mlp(self, x: Hidden, context: Context) -> Hidden:
        """Apply two projections with an activation between them."""
        (hidden,) = context.column(x, self.fc1)
        return context.row(ACTIVATIONS[self.config.activation_function](hidden), self.fc2)

    def __call__(self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None) -> LayerOutput:
        attention_key, attended_key, mlp_key = split_key(key, 3)
        before = self.config.do_layer_norm_before
        y = self.self_attn_layer_norm(x) if before else x
        y, cache = self.self_attn(y, context, cache, attention_key)
        x = x + dropout(self.dropout, y, attended_key)
        x = x if before else self.self_attn_layer_norm(x)
        y = self.final_layer_norm(x) if before else x
        x = x + dropout(self.dropout, self.mlp(y, context), mlp_key)
        return x if before else self.final_layer_norm(x), cache


class OPTDecoder(eqx.Module):
    """The model without its head."""

    embed_tokens: Embedding
    embed_positions: Embedding
    project_in: Linear | None
    project_out: Linear | None
    layers: PyTree
    final_layer_norm: LayerNorm | None

    def __init__(self, config: OPTConfig, *, stacked: bool, key: Key):
        size, narrow, std = config.hidden_size, config.embedding_size, config.init_std
        token_key, position_key, in_key, out_key, layers_key = jax.random.split(key, 5)
        num_positions = config.max_position_embeddings + POSITION_OFFSET
        self.embed_tokens = Embedding(config.vocab_size, narrow, std=std, key=token_key)
        self.embed_positions = Embedding(num_positions, size, std=std, key=position_key)
        self.project_in = self.project_out = None
        if narrow != size:
            self.project_in = Linear(narrow, size, use_bias=False, std=std, key=in_key)
            self.project_out = Linear(size, narrow, use_bias=False, std=std, key=out_key)
        self.layers = make_layers(OPTDecoderLayer, config, stacked=stacked, key=layers_key)
        self.final_layer_norm = None
        if config.do_layer_norm_before and not config._remove_final_layer_norm:
            self.final_layer_norm = LayerNorm(size, affine=config.layer_norm_elementwise_affine)


class OPTModel(eqx.Module):
    """The decoder, under its name in files."""

    decoder: OPTDecoder


class OPTForCausalLM(DecoderLM):
    """OPT with its head, which is the embedding table unless the configuration unties them."""

    model: OPTModel
    lm_head: Linear | None
    config: OPTConfig = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("model.decoder.layers",)
    vocabulary: ClassVar[tuple[str, ...]] = (r"\.embed_tokens$", r"^lm_head$")
    prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    ignored: ClassVar[tuple[str, ...]] = (r"\bdecoder\.version$",)
    tied: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.decoder.embed_tokens.weight"}

    def __init__(self, config: OPTConfig, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        model_key, head_key = jax.random.split(key)
        self.model = OPTModel(OPTDecoder(config, stacked=stacked, key=model_key))
        self.lm_head = make_head(config, config.embedding_size, std=config.init_std, key=head_key)

    def embed(self, input_ids: Int[Array, "b t"], context: Context, key: Key | None) -> Hidden:
        decoder = self.model.decoder
        x = context.embed(decoder.embed_tokens, input_ids)
        x = x if decoder.project_in is None else decoder.project_in(x)
        return x + decoder.embed_positions(context.positions + POSITION_OFFSET)

    def finish(self, x: Hidden, key: Key | None) -> Float[Array, "b t _"]:
        decoder = self.model.decoder
        x = x if decoder.final_layer_norm is None else decoder.final_layer_norm(x)
        return x if decoder.project_out is None else decoder.project_out(x)
