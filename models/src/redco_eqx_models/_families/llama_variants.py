"""Models that differ from LLaMA in some settings: Mistral, Qwen2, Qwen3, OLMo 2, Phi-3,
SmolLM3 and Gemma."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from redco_eqx_models._blocks.config import Json
from redco_eqx_models._blocks.context import Context
from redco_eqx_models._blocks.positions import Rope, Rotation
from redco_eqx_models._families.llama import LlamaConfig, LlamaLikeConfig

KINDS = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """Mistral (Jiang et al. 2023): each token sees `sliding_window` tokens back."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"

    intermediate_size: int = 14336
    num_key_value_heads: int | None = 8
    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Qwen2: biases only in query, key and value."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    only = {"use_sliding_window": False}
    qkv_bias = True

    vocab_size: int = 151936
    intermediate_size: int = 22016
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """Qwen3: queries and keys are normalised, head by head."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    # `attention_bias` decides again, which Qwen2 does not have.
    qkv_bias = None
    qk_norm = "head"

    head_dim: int | None = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    """OLMo 2 (OLMo team 2024): norms after attention and MLP, and over all queries and
    keys."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    qk_norm = "all"
    norms = (None, "post_attention", None, "post_feedforward")

    vocab_size: int = 50304
    rms_norm_eps: float = 1e-5
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = 50279
    pad_token_id: int | None = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """Phi-3 with 4k tokens (Abdin et al. 2024). The variants with 128k tokens are not
    supported, because they use `longrope`. Files store projections as one matrix. Here
    they are separate, so that each can be split into whole heads.
    """

    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    only = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    # One after another, in this order, along the rows of each matrix.
    joined = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    partial_rotary = True

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
    """SmolLM3 (Hugging Face 2025), 3B: every fourth layer has no position embeddings
    (Yang et al. 2025).

    - `no_rope_layers`: for each layer, 1 if it **has** rotary positions, 0 if not. By
        default, all layers have them except every `no_rope_layer_interval`-th.
    """

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    instead = {"no_rope_layers": "no_rope_layer_interval"}
    only = {"use_sliding_window": False}

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
    no_rope_layers: tuple[int, ...] | None = dataclasses.field(
        default=None, metadata={"least": 0}
    )
    no_rope_layer_interval: int = 4
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_layers("no_rope_layers", (0, 1))
        self.check_layers("layer_types", KINDS[:1])

    def rotation(self, context: Context) -> Rotation:
        turns = self.no_rope_layers
        if turns is None:
            interval = self.no_rope_layer_interval
            turns = [int((i + 1) % interval != 0) for i in range(self.num_layers)]
        frequencies, scale = super().rotation(context)
        # In a scan, the number of the layer is traced, so all layers run one program.
        # A layer without positions turns by angles of 0, with the factor 1.
        turns = jnp.asarray(turns)[context.layer]
        return frequencies * turns, scale**turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(LlamaLikeConfig):
    """Gemma 2. Scores and logits have smooth bounds, and every second layer sees all
    tokens.

    - `layer_types`: for each layer, `sliding_attention` (it has the window) or
        `full_attention`.
    """

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    only = {"tie_word_embeddings": True}
    norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    norm_offset = 1.0

    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: int = 256
    sliding_window: int = 4096
    layer_types: tuple[str, ...] | None = None
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    bos_token_id: int | None = 2
    eos_token_id: int | tuple[int, ...] | None = 1
    pad_token_id: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_layers("layer_types", KINDS)

    @property
    def hidden_act(self) -> str:
        """The activation inside the MLP. transformers ignores an entry of this name."""
        return self.hidden_activation

    @property
    def windowed(self) -> tuple[bool, ...]:
        if self.layer_types is not None:
            return tuple(kind == "sliding_attention" for kind in self.layer_types)
        # Gemma 2 has no such entry.
        every = self.entry("sliding_window_pattern", 2)
        return tuple((i + 1) % every != 0 for i in range(self.num_layers))

    @property
    def scale(self) -> float:
        # An entry of its own, which need not be the size of a head.
        return self.query_pre_attn_scalar**-0.5

    @property
    def embedding_scale(self) -> float:
        # Vaswani et al. 2017, section 3.4.
        return self.hidden_size**0.5


@dataclasses.dataclass(frozen=True)
class LayerRopes:
    """The angles of positions, in layers without the window and in layers with it."""

    entries: ClassVar[tuple[str, ...]] = (*Rope.entries, "rope_local_base_freq")

    full: Rope = dataclasses.field(default_factory=lambda: Rope(theta=1000000.0))
    near: Rope = dataclasses.field(default_factory=Rope)

    @classmethod
    def from_json(cls, raw: Mapping[str, Json], default: "LayerRopes") -> "LayerRopes":
        """Read the entries of transformers 4, or those of 5, which has one object per
        kind of layer."""
        kinds: Any = raw.get("rope_parameters") or {}
        is_object = isinstance(kinds, Mapping) and all(
            isinstance(x or {}, Mapping) for x in kinds.values()
        )
        if not is_object or set(kinds) - set(KINDS):
            raise ValueError(
                f"config.json: rope_parameters={kinds!r}, but it must have only "
                f"{', '.join(KINDS)}."
            )
        of_full: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
        of_near: dict[str, Any] = {"rope_theta": raw.get("rope_local_base_freq")}
        if "rope_parameters" in raw:
            of_full["rope_parameters"] = kinds.get(KINDS[0])
            of_near["rope_parameters"] = kinds.get(KINDS[1])
        if "rope_scaling" in raw:
            # It only concerns the layers without the window, and adds to their object,
            # as `convert_rope_params_to_dict` of transformers' Gemma 3 does.
            scaling: Any = raw["rope_scaling"] or {}
            if isinstance(scaling, Mapping):
                own = kinds.get(KINDS[0]) or {}
                scaling = {**own, **scaling}
            of_full.pop("rope_parameters", None)
            of_full["rope_scaling"] = scaling
        full = Rope.from_json(of_full, default.full)
        near = Rope.from_json(of_near, default.near)
        for rope in (full, near):
            if rope.scale != 1 or rope.partial_rotary_factor != 1:
                raise ValueError(
                    f"config.json: {rope} is not supported: it must turn whole heads, "
                    "and not scale them."
                )
        return cls(full, near)

    def to_json(self) -> dict[str, Json]:
        """Return the entries of transformers 4 and 5."""
        full = self.full.to_json()
        near = self.near.to_json()
        kinds = {KINDS[0]: full["rope_parameters"], KINDS[1]: near["rope_parameters"]}
        return {
            **full,
            "rope_local_base_freq": self.near.theta,
            "rope_parameters": kinds,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(Gemma2Config):
    """Gemma 3 without images. Queries and keys are normalised, and every
    `sliding_window_pattern`-th layer sees all tokens, with its own rotary positions.
    """

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    instead = {"layer_types": "sliding_window_pattern"}
    only = {
        "tie_word_embeddings": True,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
    }
    qk_norm = "head"

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope: LayerRopes = dataclasses.field(default_factory=LayerRopes)

    def rotation(self, context: Context) -> Rotation:
        # In a scan, the number of the layer is traced, and selects one of the two.
        full = self.rope.full.frequencies(self.head_size)
        near = self.rope.near.frequencies(self.head_size)
        has_window = jnp.asarray(self.windowed, int)[context.layer]
        return jnp.asarray([full, near])[has_window], 1.0
