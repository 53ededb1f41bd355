"""LLaMA (Touvron et al. 2023), and what is a LLaMA with a difference: Mistral, Qwen2, Qwen3."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from redco_eqx._parallel import Remat, column, row
from redco_eqx._types import Key
from redco_eqx._vocabulary import embed
from redco_eqx.models._attention import Implementation, merge_heads, split_heads
from redco_eqx.models._config import Config, check_activation, check_divides, read_config, refuse
from redco_eqx.models._decoder import Context, DecoderLM, attend_in, make_layers
from redco_eqx.models._layers import ACTIVATIONS, Embedding, Linear, RMSNorm
from redco_eqx.models._rope import Rope, rotate


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig(Config):
    """LLaMA 1 to 3. Sizes are numbers of features; `rope` stands for all entries about rotary embeddings."""

    model_type: ClassVar[str] = "llama"
    architecture: ClassVar[str] = "LlamaForCausalLM"

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

    # What the variants change; not entries of the file.
    qkv_bias: ClassVar[bool | None] = None
    qk_norm: ClassVar[bool] = False

    @property
    def num_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        """The configuration in a parsed `config.json`, of transformers 4 or 5."""
        refuse(raw, pretraining_tp=1)
        others = {name: x for name, x in raw.items() if name not in Rope.entries}
        config = read_config(cls, others, rope=Rope.from_json(raw))
        check_activation(config.hidden_act, "hidden_act")
        if config.head_dim is None:
            check_divides(config, "hidden_size", "num_attention_heads")
        if config.num_key_value_heads is not None:
            check_divides(config, "num_attention_heads", "num_key_value_heads")
        return config

    def to_json(self) -> dict[str, Any]:
        """The entries of `config.json`, readable by transformers 4 and 5."""
        entries = super().to_json()
        del entries["rope"]
        if self.head_dim is None:
            del entries["head_dim"]  # an entry that Qwen2 does not have must not be there as null
        return {**entries, **self.rope.to_json()}


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
    """Qwen2: biases in query, key and value alone."""

    model_type: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    qkv_bias: ClassVar[bool | None] = True

    vocab_size: int = 151936
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        refuse(raw, use_sliding_window=False)
        return super().from_json(raw)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(LlamaConfig):
    """Qwen3: queries and keys are normalised, head by head."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    qk_norm: ClassVar[bool] = True

    vocab_size: int = 151936
    intermediate_size: int = 22016
    head_dim: int | None = 128
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "LlamaConfig":
        refuse(raw, use_sliding_window=False)
        return super().from_json(raw)


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
        self.q_norm = RMSNorm(head_size, eps=config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_size, eps=config.rms_norm_eps) if config.qk_norm else None
        self.dropout = eqx.nn.Dropout(config.attention_dropout)
        self.config = config

    def __call__(
        self, x: Float[Array, "b t size"], context: Context, cache: Any, key: Key | None
    ) -> tuple[Float[Array, "b t size"], Any]:
        config = self.config
        q, k, v = column(
            x,
            *(self.q_proj, self.k_proj, self.v_proj),
            unit=config.head_size,
            sequence_parallel=context.sequence_parallel,
        )
        q = split_heads(q, config.num_attention_heads)
        k, v = split_heads(k, config.kv_heads), split_heads(v, config.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        frequencies = config.rope.frequencies(config.head_size)
        q, k = (rotate(x, context.positions, frequencies) for x in (q, k))
        output, cache = attend_in(context, q, k, v, cache, dropout=self.dropout, dropout_key=key)
        output = row(
            merge_heads(output),
            self.o_proj,
            unit=config.head_size,
            sequence_parallel=context.sequence_parallel,
        )
        return output, cache


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
        gate, up = column(x, self.gate_proj, self.up_proj, sequence_parallel=context.sequence_parallel)
        hidden = ACTIVATIONS[self.hidden_act](gate) * up
        return row(hidden, self.down_proj, sequence_parallel=context.sequence_parallel)


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
        self, x: Float[Array, "b t size"], context: Context, cache: Any, key: Key | None
    ) -> tuple[Float[Array, "b t size"], Any]:
        attended, cache = self.self_attn(self.input_layernorm(x), context, cache, key)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x), context), cache


class LlamaModel(eqx.Module):
    """Everything but the head."""

    embed_tokens: Embedding
    layers: Any
    norm: RMSNorm

    def __init__(self, config: LlamaConfig, *, stacked: bool, key: Key):
        embed_key, layers_key = jax.random.split(key)
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, std=config.initializer_range, key=embed_key
        )
        self.layers = make_layers(
            lambda key: LlamaDecoderLayer(config, key=key),
            config.num_hidden_layers,
            stacked=stacked,
            key=layers_key,
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class LlamaForCausalLM(DecoderLM):
    """A LLaMA, Mistral, Qwen2 or Qwen3, by its configuration."""

    model: LlamaModel
    lm_head: Linear | None
    config: LlamaConfig = eqx.field(static=True)
    remat: Remat = eqx.field(static=True)
    attention: Implementation | None = eqx.field(static=True)
    sequence_parallel: bool = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("model.layers",)
    prefixes: ClassVar[tuple[str, ...]] = ("model.",)
    ignored: ClassVar[tuple[str, ...]] = (r"\brotary_emb\.inv_freq$",)
    tied: ClassVar[Mapping[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(
        self,
        config: LlamaConfig,
        *,
        stacked: bool = False,
        remat: Remat = "none",
        attention: Implementation | None = None,
        sequence_parallel: bool = False,
        key: Key,
    ):
        model_key, head_key = jax.random.split(key)
        self.model = LlamaModel(config, stacked=stacked, key=model_key)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                std=config.initializer_range,
                key=head_key,
            )
        self.config, self.remat, self.attention = config, remat, attention
        self.sequence_parallel = sequence_parallel

    @property
    def layers(self) -> Any:
        return self.model.layers

    def embed(
        self, input_ids: Int[Array, "b t"], context: Context, key: Key | None
    ) -> Float[Array, "b t size"]:
        return embed(self.model.embed_tokens.weight, input_ids, sequence_parallel=context.sequence_parallel)

    def finish(self, x: Float[Array, "b t size"]) -> Float[Array, "b t size"]:
        return self.model.norm(x)

    @property
    def head(self) -> Any:
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head
