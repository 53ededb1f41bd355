"""GPT-2 (Radford et al. 2019)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.attention import split_heads
from redco_eqx.models._blocks.config import Config, Json
from redco_eqx.models._blocks.context import Context, Hidden, LayerCache, LayerOutput
from redco_eqx.models._blocks.decoder import DecoderLM, make_head
from redco_eqx.models._blocks.layers import ACTIVATIONS, Embedding, LayerNorm, Linear, dropout, split_key
from redco_eqx.models._blocks.model import Options, make_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(Config):
    """GPT-2, small to XL. It has `n_embd` features, and `n_inner` (4 times as many) inside the MLP.

    - `add_cross_attention`: whether it is the decoder of a `VisionEncoderDecoderModel`.
    """

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    has_positions: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    only: ClassVar[Mapping[str, Json]] = {
        "add_cross_attention": False,
        "scale_attn_by_inverse_layer_idx": False,
    }

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    add_cross_attention: bool = False
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    tie_word_embeddings: bool = True


class Conv1D(eqx.Module):
    """A Linear whose weight is stored `(in, out)`.

    If `out_features` is `(parts, size)`, several projections share the matrix but stay separate, so that each
    can be split over the `tensor` axis by itself; in a file the two dims are one.
    """

    weight: Float[Array, "in *out"]
    bias: Float[Array, "*out"]
    in_features: int = eqx.field(static=True)
    out_features: int | tuple[int, int] = eqx.field(static=True)

    def __init__(self, in_features: int, out_features: int | tuple[int, int], *, std: float, key: Key):
        out = out_features if isinstance(out_features, tuple) else (out_features,)
        self.weight = std * jax.random.normal(key, (in_features, *out))
        self.bias = jnp.zeros(out)
        self.in_features = in_features
        self.out_features = out_features

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch_and_out"]:
        return jnp.tensordot(x, self.weight, axes=1) + self.bias


class GPT2Attention(eqx.Module):
    """Multi-head attention; query, key and value come from one matrix."""

    c_attn: Conv1D
    c_proj: Conv1D
    attn_dropout: eqx.nn.Dropout
    resid_dropout: eqx.nn.Dropout
    config: GPT2Config = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: Key):
        size, std = config.n_embd, config.initializer_range
        attn_key, proj_key = jax.random.split(key)
        self.c_attn = Conv1D(size, (3, size), std=std, key=attn_key)
        self.c_proj = Conv1D(size, size, std=std / (2 * config.n_layer) ** 0.5, key=proj_key)
        self.attn_dropout = eqx.nn.Dropout(config.attn_pdrop)
        self.resid_dropout = eqx.nn.Dropout(config.resid_pdrop)
        self.config = config

    def __call__(self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None) -> LayerOutput:
        attn_key, resid_key = split_key(key, 2)
        size = self.config.head_size
        (qkv,) = context.column(x, self.c_attn, unit=size)
        q, k, v = (split_heads(qkv[:, :, i], size) for i in range(3))
        scale = None if self.config.scale_attn_weights else 1.0
        heads, cache = context.attend(
            q, k, v, cache, scale=scale, dropout=self.attn_dropout, dropout_key=attn_key
        )
        return dropout(self.resid_dropout, context.row(heads, self.c_proj, unit=size), resid_key), cache


class GPT2CrossAttention(eqx.Module):
    """Multi-head attention over an encoder's output; key and value come from one matrix."""

    q_attn: Conv1D
    c_attn: Conv1D
    c_proj: Conv1D
    attn_dropout: eqx.nn.Dropout
    resid_dropout: eqx.nn.Dropout
    config: GPT2Config = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: Key):
        size, std = config.n_embd, config.initializer_range
        query_key, attn_key, proj_key = jax.random.split(key, 3)
        self.q_attn = Conv1D(size, size, std=std, key=query_key)
        self.c_attn = Conv1D(size, (2, size), std=std, key=attn_key)
        self.c_proj = Conv1D(size, size, std=std / (2 * config.n_layer) ** 0.5, key=proj_key)
        self.attn_dropout = eqx.nn.Dropout(config.attn_pdrop)
        self.resid_dropout = eqx.nn.Dropout(config.resid_pdrop)
        self.config = config

    def __call__(self, x: Hidden, context: Context, key: Key | None) -> Hidden:
        attn_key, resid_key = split_key(key, 2)
        size = self.config.head_size
        (q,) = context.column(x, self.q_attn, unit=size)
        heads = context.cross_attend(
            split_heads(q, size),
            scale=None if self.config.scale_attn_weights else 1.0,
            dropout=self.attn_dropout, dropout_key=attn_key,
        )  # fmt: skip
        return dropout(self.resid_dropout, context.row(heads, self.c_proj, unit=size), resid_key)


class GPT2MLP(eqx.Module):
    """Two projections with an activation between them."""

    c_fc: Conv1D
    c_proj: Conv1D
    dropout: eqx.nn.Dropout
    activation_function: str = eqx.field(static=True)

    def __init__(self, config: GPT2Config, *, key: Key):
        size, inner, std = config.n_embd, config.n_inner or 4 * config.n_embd, config.initializer_range
        fc_key, proj_key = jax.random.split(key)
        self.c_fc = Conv1D(size, inner, std=std, key=fc_key)
        self.c_proj = Conv1D(inner, size, std=std / (2 * config.n_layer) ** 0.5, key=proj_key)
        self.dropout = eqx.nn.Dropout(config.resid_pdrop)
        self.activation_function = config.activation_function

    def __call__(self, x: Hidden, context: Context, key: Key | None) -> Hidden:
        (hidden,) = context.column(x, self.c_fc)
        hidden = ACTIVATIONS[self.activation_function](hidden)
        return dropout(self.dropout, context.row(hidden, self.c_proj), key)


class GPT2Block(eqx.Module):
    """Attention, cross-attention if there is an encoder, and MLP, each with a norm before it, added to the
    stream.
    """

    ln_1: LayerNorm
    attn: GPT2Attention
    ln_cross_attn: LayerNorm | None
    crossattention: GPT2CrossAttention | None
    ln_2: LayerNorm
    mlp: GPT2MLP

    def __init__(self, config: GPT2Config, *, key: Key):
        attn_key, mlp_key, cross_key = jax.random.split(key, 3)
        self.ln_1 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, key=attn_key)
        self.ln_cross_attn = self.crossattention = None
        if config.add_cross_attention:
            self.ln_cross_attn = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
            self.crossattention = GPT2CrossAttention(config, key=cross_key)
        self.ln_2 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config, key=mlp_key)

    def __call__(self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None) -> LayerOutput:
        attn_key, mlp_key, cross_key = split_key(key, 3)
        attended, cache = self.attn(self.ln_1(x), context, cache, attn_key)
        x = x + attended
        if self.crossattention is not None and self.ln_cross_attn is not None:
            x = x + self.crossattention(self.ln_cross_attn(x), context, cross_key)
        return x + self.mlp(self.ln_2(x), context, mlp_key), cache


class GPT2Model(eqx.Module):
    """The model without its head."""

    wte: Embedding
    wpe: Embedding
    drop: eqx.nn.Dropout
    h: PyTree
    ln_f: LayerNorm

    def __init__(self, config: GPT2Config, *, stacked: bool, key: Key):
        token_key, position_key, layers_key = jax.random.split(key, 3)
        std = config.initializer_range
        self.wte = Embedding(config.vocab_size, config.n_embd, std=std, key=token_key)
        self.wpe = Embedding(config.n_positions, config.n_embd, std=std, key=position_key)
        self.drop = eqx.nn.Dropout(config.embd_pdrop)
        self.h = make_layers(GPT2Block, config, stacked=stacked, key=layers_key)
        self.ln_f = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


class GPT2LMHeadModel(DecoderLM):
    """GPT-2 with its head, which is the embedding table unless the configuration unties them."""

    transformer: GPT2Model
    lm_head: Linear | None
    config: GPT2Config = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("transformer.h",)
    vocabulary: ClassVar[tuple[str, ...]] = (r"\.wte$", r"^lm_head$")
    fused: ClassVar[tuple[str, ...]] = (r"\.c_attn\.(weight|bias)$",)
    prefixes: ClassVar[tuple[str, ...]] = ("transformer.",)
    ignored: ClassVar[tuple[str, ...]] = (r"\battn\.(masked_)?bias$",)
    tied: ClassVar[Mapping[str, str]] = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(self, config: GPT2Config, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        model_key, head_key = jax.random.split(key)
        self.transformer = GPT2Model(config, stacked=stacked, key=model_key)
        self.lm_head = make_head(config, config.n_embd, std=config.initializer_range, key=head_key)

    def embed(self, input_ids: Int[Array, "b t"], context: Context, key: Key | None) -> Hidden:
        body = self.transformer
        x = context.embed(body.wte, input_ids) + body.wpe(context.positions)
        return dropout(body.drop, x, key)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        return self.transformer.ln_f(x)
