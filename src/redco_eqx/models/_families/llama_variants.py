"""Models that differ from LLaMA only in some settings: Mistral, Qwen2 and 3, SmolLM3, OLMo 2, Phi-3."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from redco_eqx.models._blocks.config import Json
from redco_eqx.models._blocks.context import Context
from redco_eqx.models._blocks.rope import Rope
from redco_eqx.models._families.llama import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Mistral (Jiang et al. 2023): each token sees `sliding_window` tokens back."""

    model_type: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


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
class Qwen3Config(Qwen2Config):
    """Qwen3: queries and keys are normalised, head by head."""

    model_type: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    qkv_bias: ClassVar[bool | None] = None
    qk_norm: ClassVar[Literal["head", "all"] | None] = "head"

    head_dim: int | None = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    """OLMo 2 (OLMo team 2024): norms after attention and MLP, and over all queries and keys."""

    model_type: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    qk_norm: ClassVar[Literal["head", "all"] | None] = "all"
    norms: ClassVar[tuple[str | None, ...]] = (
        None, "post_attention_layernorm", None, "post_feedforward_layernorm",
    )  # fmt: skip

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = 50279
    pad_token_id: int | None = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """Phi-3 with 4k tokens (Abdin et al. 2024). The variants with 128k tokens are not supported, because they
    use `longrope`. Files store projections as one matrix. Here they are separate, so that each is split by
    whole heads.
    """

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    only: ClassVar[Mapping[str, Json]] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    partial_rotary: ClassVar[bool] = True

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | tuple[int, ...] | None = 32000
    pad_token_id: int | None = 32000
    sliding_window: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """SmolLM3 (Hugging Face 2025), 3B: every fourth layer has no positions (Yang et al. 2025).

    - `no_rope_layers`: for each layer, 1 if it **has** rotary positions, 0 if not. By default, all layers have
        them except every `no_rope_layer_interval`-th.
    """

    model_type: ClassVar[str] = "smollm3"
    architecture: ClassVar[str] = "SmolLM3ForCausalLM"
    only: ClassVar[Mapping[str, Json]] = {"use_sliding_window": False}

    vocab_size: int = 128256
    hidden_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 128000
    eos_token_id: int | tuple[int, ...] | None = 128001
    pad_token_id: int | None = 128004
    rope: Rope = dataclasses.field(default_factory=lambda: Rope(theta=2000000.0))
    no_rope_layers: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"least": 0})
    no_rope_layer_interval: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_layers("no_rope_layers", (0, 1))

    def frequencies(self, context: Context) -> np.ndarray | Float[Array, " pairs"]:
        """Return radians per position; 0 in a layer without positions."""
        turns = self.no_rope_layers
        if turns is None:
            turns = [int((i + 1) % self.no_rope_layer_interval != 0) for i in range(self.num_layers)]
        return super().frequencies(context) * jnp.asarray(turns)[context.layer]
