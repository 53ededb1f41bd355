"""GPT-2 (Radford et al. 2019)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redco_eqx._parallel import Remat, column, row
from redco_eqx._types import Key
from redco_eqx._vocabulary import embed
from redco_eqx.models._attention import Implementation, merge_heads, split_heads
from redco_eqx.models._config import Config, check_activation, check_divides, read_config, refuse
from redco_eqx.models._decoder import Context, DecoderLM, attend_in, make_layers
from redco_eqx.models._layers import ACTIVATIONS, Embedding, LayerNorm, Linear, dropout, split


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPT2Config(Config):
    """GPT-2, small to XL. `n_embd` features, of which `n_inner` (4 times as many) inside the MLP."""

    model_type: ClassVar[str] = "gpt2"
    architecture: ClassVar[str] = "GPT2LMHeadModel"
    aliases: ClassVar[Mapping[str, str]] = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
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
    bos_token_id: int | None = 50256
    eos_token_id: int | tuple[int, ...] | None = 50256
    tie_word_embeddings: bool = True

    @property
    def num_layers(self) -> int:
        return self.n_layer

    @property
    def kv_heads(self) -> int:
        return self.n_head

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @property
    def max_positions(self) -> int:
        return self.n_positions

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "GPT2Config":
        """The configuration in a parsed `config.json`."""
        refuse(raw, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
        config = read_config(cls, raw)
        check_activation(config.activation_function, "activation_function")
        check_divides(config, "n_embd", "n_head")
        return config


class Conv1D(eqx.Module):
    """A Linear whose weight is stored `(in, out)`.

    Where `out_features` is `(parts, size)`, several projections share the matrix but are kept apart, so that
    each can be split over the `tensor` axis by itself; in a file the two dims are one.
    """

    weight: Any
    bias: Any
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

    def __call__(
        self, x: Float[Array, "b t size"], context: Context, cache: Any, key: Key | None
    ) -> tuple[Float[Array, "b t size"], Any]:
        attn_key, resid_key = split(key, 2)
        unit, sequence_parallel = self.config.head_size, context.sequence_parallel
        (qkv,) = column(x, self.c_attn, unit=unit, sequence_parallel=sequence_parallel)
        q, k, v = (split_heads(qkv[:, :, i], self.config.n_head) for i in range(3))
        scale = None if self.config.scale_attn_weights else 1.0
        output, cache = attend_in(
            context, q, k, v, cache, scale=scale, dropout=self.attn_dropout, dropout_key=attn_key
        )
        output = row(merge_heads(output), self.c_proj, unit=unit, sequence_parallel=sequence_parallel)
        return dropout(self.resid_dropout, output, resid_key), cache


class GPT2MLP(eqx.Module):
    """Two projections with an activation between."""

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

    def __call__(
        self, x: Float[Array, "b t size"], context: Context, key: Key | None
    ) -> Float[Array, "b t size"]:
        (hidden,) = column(x, self.c_fc, sequence_parallel=context.sequence_parallel)
        hidden = ACTIVATIONS[self.activation_function](hidden)
        output = row(hidden, self.c_proj, sequence_parallel=context.sequence_parallel)
        return dropout(self.dropout, output, key)


class GPT2Block(eqx.Module):
    """Attention, then MLP, each normalised before and added to the stream."""

    ln_1: LayerNorm
    attn: GPT2Attention
    ln_2: LayerNorm
    mlp: GPT2MLP

    def __init__(self, config: GPT2Config, *, key: Key):
        attn_key, mlp_key = jax.random.split(key)
        self.ln_1 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.attn = GPT2Attention(config, key=attn_key)
        self.ln_2 = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.mlp = GPT2MLP(config, key=mlp_key)

    def __call__(
        self, x: Float[Array, "b t size"], context: Context, cache: Any, key: Key | None
    ) -> tuple[Float[Array, "b t size"], Any]:
        attn_key, mlp_key = split(key, 2)
        attended, cache = self.attn(self.ln_1(x), context, cache, attn_key)
        x = x + attended
        return x + self.mlp(self.ln_2(x), context, mlp_key), cache


class GPT2Model(eqx.Module):
    """Everything but the head."""

    wte: Embedding
    wpe: Embedding
    drop: eqx.nn.Dropout
    h: Any
    ln_f: LayerNorm

    def __init__(self, config: GPT2Config, *, stacked: bool, key: Key):
        token_key, position_key, layers_key = jax.random.split(key, 3)
        std = config.initializer_range
        self.wte = Embedding(config.vocab_size, config.n_embd, std=std, key=token_key)
        self.wpe = Embedding(config.n_positions, config.n_embd, std=std, key=position_key)
        self.drop = eqx.nn.Dropout(config.embd_pdrop)
        self.h = make_layers(
            lambda key: GPT2Block(config, key=key), config.n_layer, stacked=stacked, key=layers_key
        )
        self.ln_f = LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)


class GPT2LMHeadModel(DecoderLM):
    """GPT-2 with its head, which is the embedding table unless the configuration unties them."""

    transformer: GPT2Model
    lm_head: Linear | None
    config: GPT2Config = eqx.field(static=True)
    remat: Remat = eqx.field(static=True)
    attention: Implementation | None = eqx.field(static=True)
    sequence_parallel: bool = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("transformer.h",)
    fused: ClassVar[tuple[str, ...]] = (r"\.c_attn\.(weight|bias)$",)
    prefixes: ClassVar[tuple[str, ...]] = ("transformer.",)
    ignored: ClassVar[tuple[str, ...]] = (r"\battn\.(masked_)?bias$",)
    tied: ClassVar[Mapping[str, str]] = {"lm_head.weight": "transformer.wte.weight"}

    def __init__(
        self,
        config: GPT2Config,
        *,
        stacked: bool = False,
        remat: Remat = "none",
        attention: Implementation | None = None,
        sequence_parallel: bool = False,
        key: Key,
    ):
        model_key, head_key = jax.random.split(key)
        self.transformer = GPT2Model(config, stacked=stacked, key=model_key)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.n_embd,
                config.vocab_size,
                use_bias=False,
                std=config.initializer_range,
                key=head_key,
            )
        self.config, self.remat, self.attention = config, remat, attention
        self.sequence_parallel = sequence_parallel

    @property
    def layers(self) -> Any:
        return self.transformer.h

    def embed(
        self, input_ids: Int[Array, "b t"], context: Context, key: Key | None
    ) -> Float[Array, "b t size"]:
        x = embed(
            self.transformer.wte.weight, input_ids, sequence_parallel=context.sequence_parallel
        ) + self.transformer.wpe(context.positions)
        return dropout(self.transformer.drop, x, key)

    def finish(self, x: Float[Array, "b t size"]) -> Float[Array, "b t size"]:
        return self.transformer.ln_f(x)

    @property
    def head(self) -> Any:
        return self.transformer.wte.weight if self.lm_head is None else self.lm_head
