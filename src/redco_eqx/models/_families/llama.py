"""LLaMA (Touvron et al. 2023), and variants of it: Mistral, Qwen2, Qwen3."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, Unpack

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.attention import split_heads
from redco_eqx.models._blocks.config import Config, Json, check_activation, check_divides
from redco_eqx.models._blocks.context import Context, LayerCache
from redco_eqx.models._blocks.decoder import DecoderLM
from redco_eqx.models._blocks.layers import ACTIVATIONS, Embedding, Linear, RMSNorm
from redco_eqx.models._blocks.model import Options, make_layers
from redco_eqx.models._blocks.rope import Rope, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """LLaMA 1 to 3. Sizes are numbers of features; `rope` stands for all entries about rotary embeddings."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    only: ClassVar[Mapping[str, Json]] = {"pretraining_tp": 1}

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    rope: Rope = dataclasses.field(default_factory=Rope)

    # The differences between variants; not entries of the file.
    qkv_bias: ClassVar[bool | None] = None
    qk_norm: ClassVar[Literal["head", "all"] | None] = None
    """The features over which queries and keys are normalised: those of each head, or those of all heads."""

    def __post_init__(self) -> None:
        check_activation(self, "hidden_act")
        if self.head_dim is None:
            check_divides(self, "hidden_size", "num_attention_heads")
        if self.num_key_value_heads is not None:
            check_divides(self, "num_attention_heads", "num_key_value_heads")

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def positions(self, context: Context) -> Int[Array, "b t"]:
        """Return the positions that turn queries and keys of the current layer."""
        return context.positions

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def to_json(self) -> dict[str, Json]:
        """Return the entries of `config.json`, readable by transformers 4 and 5."""
        # Some of these families do not open in transformers with null for these entries, or have no `head_dim`.
        entries = {**super().to_json(), "num_key_value_heads": self.kv_heads}
        if self.head_dim is None:
            del entries["head_dim"]
        return entries


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Mistral (Jiang et al. 2023): each token sees `sliding_window` tokens back."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    @property
    def window(self) -> int | None:
        return self.sliding_window


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Qwen2: biases only in query, key and value."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    only: ClassVar[Mapping[str, Json]] = {"use_sliding_window": False}
    qkv_bias: ClassVar[bool | None] = True

    vocab_size: int = 151936
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Qwen3: queries and keys are normalised, head by head."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    only: ClassVar[Mapping[str, Json]] = {"use_sliding_window": False}
    qk_norm: ClassVar[Literal["head", "all"] | None] = "head"

    vocab_size: int = 151936
    intermediate_size: int = 22016
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


class LlamaAttention(eqx.Module):
    """Grouped-query attention with rotary positions."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    dropout: eqx.nn.Dropout
    config: LlamaConfig = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, *, key: Key):
        size, head_size, std = config.hidden_size, config.head_size, config.initializer_range
        heads, kv_heads = config.num_attention_heads * head_size, config.kv_heads * head_size
        bias = config.attention_bias if config.qkv_bias is None else config.qkv_bias
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.q_proj = Linear(size, heads, use_bias=bias, std=std, key=q_key)
        self.k_proj = Linear(size, kv_heads, use_bias=bias, std=std, key=k_key)
        self.v_proj = Linear(size, kv_heads, use_bias=bias, std=std, key=v_key)
        self.o_proj = Linear(heads, size, use_bias=config.attention_bias, std=std, key=o_key)
        self.q_norm = self.k_norm = None
        if config.qk_norm is not None:
            sizes = (head_size, head_size) if config.qk_norm == "head" else (heads, kv_heads)
            self.q_norm, self.k_norm = (RMSNorm(size, eps=config.rms_norm_eps) for size in sizes)
        self.dropout = eqx.nn.Dropout(config.attention_dropout)
        self.config = config

    def __call__(
        self, x: Float[Array, "b t size"], context: Context, cache: LayerCache | None, key: Key | None
    ) -> tuple[Float[Array, "b t size"], LayerCache | None]:
        size, rope = self.config.head_size, self.config.rope
        q, k, v = context.column(x, self.q_proj, self.k_proj, self.v_proj, unit=size)
        if self.config.qk_norm == "all":
            q, k = self._normalised(q, k)
        q, k, v = (split_heads(x, size) for x in (q, k, v))
        if self.config.qk_norm == "head":
            q, k = self._normalised(q, k)
        frequencies, positions = rope.frequencies(size), self.config.positions(context)
        q, k = (rotate(x, positions, frequencies) for x in (q, k))
        scale = None if rope.score_factor == 1 else rope.score_factor / size**0.5
        heads, cache = context.attend(q, k, v, cache, scale=scale, dropout=self.dropout, dropout_key=key)
        return context.row(heads, self.o_proj, unit=size), cache

    def _normalised(self, q: Array, k: Array) -> tuple[Array, Array]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


class LlamaMLP(eqx.Module):
    """A gated MLP (Shazeer 2020)."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    hidden_act: str = eqx.field(static=True)

    def __init__(self, config: LlamaConfig, *, key: Key):
        size, inner = config.hidden_size, config.intermediate_size
        bias, std = config.mlp_bias, config.initializer_range
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate_proj = Linear(size, inner, use_bias=bias, std=std, key=gate_key)
        self.up_proj = Linear(size, inner, use_bias=bias, std=std, key=up_key)
        self.down_proj = Linear(inner, size, use_bias=bias, std=std, key=down_key)
        self.hidden_act = config.hidden_act

    def __call__(self, x: Float[Array, "b t size"], context: Context) -> Float[Array, "b t size"]:
        gate, up = context.column(x, self.gate_proj, self.up_proj)
        return context.row(ACTIVATIONS[self.hidden_act](gate) * up, self.down_proj)


class LlamaDecoderLayer(eqx.Module):
    """Attention, then MLP, each normalised before and added to the stream."""

    self_attn: LlamaAttention
    mlp: LlamaMLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, config: LlamaConfig, *, key: Key):
        attention_key, mlp_key = jax.random.split(key)
        self.self_attn = LlamaAttention(config, key=attention_key)
        self.mlp = LlamaMLP(config, key=mlp_key)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "b t size"], context: Context, cache: LayerCache | None, key: Key | None
    ) -> tuple[Float[Array, "b t size"], LayerCache | None]:
        attended, cache = self.self_attn(self.input_layernorm(x), context, cache, key)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x), context), cache


class LlamaModel(eqx.Module):
    """Everything but the head."""

    embed_tokens: Embedding
    layers: PyTree
    norm: RMSNorm

    def __init__(
        self,
        config: LlamaConfig,
        *,
        stacked: bool,
        make_layer: Callable[..., eqx.Module] = LlamaDecoderLayer,
        key: Key,
    ):
        embed_key, layers_key = jax.random.split(key)
        size, std = config.hidden_size, config.initializer_range
        self.embed_tokens = Embedding(config.vocab_size, size, std=std, key=embed_key)
        self.layers = make_layers(make_layer, config, stacked=stacked, key=layers_key)
        self.norm = RMSNorm(size, eps=config.rms_norm_eps)


class LlamaForCausalLM(DecoderLM):
    """A LLaMA, Mistral, Qwen2 or Qwen3, by its configuration."""

    model: LlamaModel
    lm_head: Linear | None
    config: LlamaConfig = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("model.layers",)
    vocabulary: ClassVar[tuple[str, ...]] = (r"\.embed_tokens$", r"^lm_head$")
    prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    ignored: ClassVar[tuple[str, ...]] = (r"\brotary_emb\.inv_freq$",)
    tied: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}
    layer: ClassVar[type[eqx.Module]] = LlamaDecoderLayer

    def __init__(self, config: LlamaConfig, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        model_key, head_key = jax.random.split(key)
        self.model = LlamaModel(config, stacked=stacked, make_layer=self.layer, key=model_key)
        self.lm_head = None
        if not config.tie_word_embeddings:
            size, std = config.hidden_size, config.initializer_range
            self.lm_head = Linear(size, config.vocab_size, use_bias=False, std=std, key=head_key)

    def embed(
        self, input_ids: Int[Array, "b t"], context: Context, key: Key | None
    ) -> Float[Array, "b t size"]:
        return context.embed(self.model.embed_tokens, input_ids)

    def finish(self, x: Float[Array, "b t size"], key: Key | None) -> Float[Array, "b t size"]:
        return self.model.norm(x)
