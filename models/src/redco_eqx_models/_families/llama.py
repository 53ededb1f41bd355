"""LLaMA (Touvron et al. 2023), and the layers of all models that are built like it."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, Unpack

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
from redco_eqx_models._blocks.layers import (
    ACTIVATIONS,
    Embedding,
    Linear,
    RMSNorm,
    make_linears,
    maybe,
)
from redco_eqx_models._blocks.model import Options, make_layers
from redco_eqx_models._blocks.positions import Rope, Rotation, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaLikeConfig(Config):
    """Models built like LLaMA. Sizes are numbers of features; `rope` stands for all
    entries about rotary embeddings.
    """

    multiples = (("num_attention_heads", "num_key_value_heads"),)

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    rope: Any = dataclasses.field(default_factory=Rope)

    # The differences between families; not entries of the file.
    qkv_bias: ClassVar[bool | None] = None
    qk_norm: ClassVar[Literal["head", "all"] | None] = None
    """The features over which queries and keys are normalised: those of each head, or
    those of all heads."""
    norms: ClassVar[tuple[str | None, ...]] = ("input", None, "post_attention", None)
    """The norms before and after attention, then before and after the MLP, without
    `_layernorm`."""
    norm_offset: ClassVar[float] = 0.0
    """Added to the weights of norms."""
    mlp_name: ClassVar[str] = "mlp"
    """The name of the MLP in files."""
    partial_rotary: ClassVar[bool] = False
    """True if only a part of each head may turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            isinstance(self.rope, Rope)
            and self.rope.partial_rotary_factor != 1
            and not self.partial_rotary
        ):
            raise self.error("partial_rotary_factor is not supported, only 1.0.")

    def check_layers(self, entry: str, kinds: Sequence[str | int]) -> None:
        """Raise `ValueError` if an entry exists but does not have one of the kinds for
        each layer."""
        given = getattr(self, entry)
        if given is not None and (
            len(given) != self.num_layers or set(given) - set(kinds)
        ):
            expected = (
                f"{' or '.join(map(str, kinds))} for each of the {self.num_layers} "
                "layers"
            )
            raise self.error(f"{entry}={list(given)}, but it must be {expected}.")

    @property
    def scale(self) -> float:
        """The factor on the scores of attention."""
        return self.head_size**-0.5

    @property
    def embedding_scale(self) -> float:
        """The scale factor for token embeddings."""
        return 1.0

    def rotation(self, context: Context) -> Rotation:
        """Return the last arguments of `rotate`, in the current layer."""
        return self.rope.frequencies(self.head_size), self.rope.scale

    def to_json(self) -> dict[str, Json]:
        """Return the entries of `config.json`, readable by transformers 4 and 5."""
        # Some of these families do not open in transformers with null for these
        # entries, or have no `head_dim`.
        entries = {**super().to_json(), "num_key_value_heads": self.kv_heads}
        if self.head_dim is None:
            del entries["head_dim"]
        return entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(LlamaLikeConfig):
    """LLaMA 1 to 3."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    only = {"pretraining_tp": 1}

    hidden_act: str = "silu"
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    rope: Rope = dataclasses.field(default_factory=Rope)


class LlamaAttention(eqx.Module):
    """Grouped-query attention with rotary positions."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    dropout: eqx.nn.Dropout
    config: LlamaLikeConfig = eqx.field(static=True)

    def __init__(self, config: LlamaLikeConfig, *, key: Key):
        size = config.hidden_size
        head_size = config.head_size
        std = config.initializer_range
        heads = config.num_attention_heads * head_size
        kv_heads = config.kv_heads * head_size
        # Qwen2 has biases in these three, and none in the output projection.
        bias = config.attention_bias if config.qkv_bias is None else config.qkv_bias
        qkv_key, o_key = jax.random.split(key)
        self.q_proj, self.k_proj, self.v_proj = make_linears(
            qkv_key, (size, heads), *[(size, kv_heads)] * 2, use_bias=bias, std=std
        )
        self.o_proj = Linear(
            heads, size, use_bias=config.attention_bias, std=std, key=o_key
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm == "head":
            self.q_norm = make_norm(config, head_size)
            self.k_norm = make_norm(config, head_size)
        elif config.qk_norm == "all":
            self.q_norm = make_norm(config, heads)
            self.k_norm = make_norm(config, kv_heads)
        self.dropout = eqx.nn.Dropout(config.attention_dropout)
        self.config = config

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        config = self.config
        size = self.config.head_size
        q, k, v = context.column(x, self.q_proj, self.k_proj, self.v_proj, unit=size)
        if config.qk_norm == "all":
            q = maybe(self.q_norm, q)
            k = maybe(self.k_norm, k)
        q, k, v = (split_heads(x, size) for x in (q, k, v))
        if config.qk_norm == "head":
            q = maybe(self.q_norm, q)
            k = maybe(self.k_norm, k)
        # After the norms, because these do not see positions. The cache has keys that
        # are already turned.
        q, k = (rotate(x, context.positions, *config.rotation(context)) for x in (q, k))
        cap = config.entry("attn_logit_softcapping", None)
        heads, cache = context.attend(
            q,
            k,
            v,
            cache,
            scale=config.scale,
            cap=cap,
            dropout=self.dropout,
            dropout_key=key,
        )
        return context.row(heads, self.o_proj, unit=size), cache


class LlamaMLP(eqx.Module):
    """A gated MLP (Shazeer 2020)."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    hidden_act: str = eqx.field(static=True)

    def __init__(self, config: LlamaLikeConfig, *, key: Key):
        size = config.hidden_size
        inner = config.intermediate_size
        bias = config.mlp_bias
        std = config.initializer_range
        self.gate_proj, self.up_proj, self.down_proj = make_linears(
            key, *[(size, inner)] * 2, (inner, size), use_bias=bias, std=std
        )
        self.hidden_act = config.entry("hidden_act")

    def __call__(self, x: Hidden, context: Context) -> Hidden:
        gate, up = context.column(x, self.gate_proj, self.up_proj)
        return context.row(ACTIVATIONS[self.hidden_act](gate) * up, self.down_proj)


class LlamaDecoderLayer(eqx.Module):
    """Attention, then MLP, each with the norms of the family around it, and added to
    the stream.

    The MLP has its name in files, `mlp` or `block_sparse_moe`. A mixture of experts
    also returns numbers that are added up over the layers.
    """

    self_attn: LlamaAttention
    mlp: PyTree
    block_sparse_moe: PyTree
    input_layernorm: RMSNorm | None
    post_attention_layernorm: RMSNorm | None
    pre_feedforward_layernorm: RMSNorm | None
    post_feedforward_layernorm: RMSNorm | None

    def __init__(
        self, config: LlamaLikeConfig, *, make_mlp: Callable[..., eqx.Module], key: Key
    ):
        attention_key, mlp_key = jax.random.split(key)
        self.self_attn = LlamaAttention(config, key=attention_key)
        self.mlp = self.block_sparse_moe = None
        setattr(self, config.mlp_name, make_mlp(config, key=mlp_key))
        # `post_attention_layernorm` comes before the MLP in LLaMA, and directly after
        # attention, before the sum, in OLMo 2 and Gemma. `config.norms` has the order.
        for place in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            norm = None
            if place in config.norms:
                norm = make_norm(config, config.hidden_size)
            setattr(self, f"{place}_layernorm", norm)

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> tuple[Any, ...]:
        norms = self.self_attn.config.norms
        before, after, before_mlp, after_mlp = (
            getattr(self, f"{place}_layernorm", None) for place in norms
        )
        attended, cache = self.self_attn(maybe(before, x), context, cache, key)
        x = x + maybe(after, attended)
        mlp = self.mlp or self.block_sparse_moe
        y = mlp(maybe(before_mlp, x), context)
        sums = []
        if isinstance(y, tuple):
            y, *sums = y
        return x + maybe(after_mlp, y), cache, *sums


def make_norm(config: LlamaLikeConfig, size: int) -> RMSNorm:
    """Return a new norm over `size` features."""
    return RMSNorm(size, eps=config.rms_norm_eps, offset=config.norm_offset)


class LlamaModel(eqx.Module):
    """The model without its head."""

    embed_tokens: Embedding
    layers: PyTree
    norm: RMSNorm

    def __init__(
        self,
        config: LlamaLikeConfig,
        *,
        stacked: bool,
        make_mlp: Callable[..., eqx.Module],
        key: Key,
    ):
        embed_key, layers_key = jax.random.split(key)
        size = config.hidden_size
        std = config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, size, std=std, key=embed_key)
        make_layer = functools.partial(LlamaDecoderLayer, make_mlp=make_mlp)
        self.layers = make_layers(make_layer, config, stacked=stacked, key=layers_key)
        self.norm = make_norm(config, size)


class LlamaForCausalLM(DecoderLM):
    """A LLaMA, or a model built like it, by its configuration."""

    model: LlamaModel
    lm_head: Linear | None
    config: LlamaLikeConfig = eqx.field(static=True)

    stacks = ("model.layers",)
    vocabulary = (r"\.embed_tokens$", r"^lm_head$")
    prefixes = ("model.",)
    # Frequencies, which old versions of transformers saved as a buffer.
    ignored = (r"\brotary_emb\.inv_freq$",)
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    mlp: ClassVar[type[eqx.Module]] = LlamaMLP

    def __init__(
        self,
        config: LlamaLikeConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        model_key, head_key = jax.random.split(key)
        self.model = LlamaModel(
            config, stacked=stacked, make_mlp=self.mlp, key=model_key
        )
        self.lm_head = make_head(
            config, config.hidden_size, std=config.initializer_range, key=head_key
        )

    def embed(self, input_ids: Ids, context: Context, key: Key | None) -> Hidden:
        x = context.embed(self.model.embed_tokens, input_ids)
        scale = self.config.embedding_scale
        if scale == 1:
            return x
        # transformers' Gemma also rounds the factor to the dtype of the table first: in
        # bfloat16, the root of 3072 is 55.5.
        return x * jnp.asarray(scale, x.dtype)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        return self.model.norm(x)
