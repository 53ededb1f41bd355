"""Gemma 2 and the text half of Gemma 3 (Gemma team 2024, 2025): a LLaMA with windows in most of its layers."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from redco_eqx.models._blocks.config import Json
from redco_eqx.models._blocks.context import Context
from redco_eqx.models._blocks.rope import Rope
from redco_eqx.models._families.llama import LlamaLikeConfig

KINDS = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma2Config(LlamaLikeConfig):
    """Gemma 2. Scores and logits have smooth bounds, and every second layer sees all tokens.

    - `layer_types`: for each layer, `sliding_attention` (it has the window) or `full_attention`.
    """

    model_type: ClassVar[str] = "gemma2"
    architecture: ClassVar[str] = "Gemma2ForCausalLM"
    aliases: ClassVar[Mapping[str, str]] = {"hidden_act": "hidden_activation"}
    only: ClassVar[Mapping[str, Json]] = {"tie_word_embeddings": True}
    norms: ClassVar[tuple[str | None, ...]] = (
        "input_layernorm", "post_attention_layernorm",
        "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip
    norm_offset: ClassVar[float] = 1.0

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
    def windowed(self) -> tuple[bool, ...]:
        if self.layer_types is not None:
            return tuple(kind == "sliding_attention" for kind in self.layer_types)
        every = self.entry("sliding_window_pattern") or 2
        return tuple((i + 1) % every != 0 for i in range(self.num_layers))

    @property
    def scale(self) -> float:
        return self.query_pre_attn_scalar**-0.5

    @property
    def embedding_scale(self) -> float:
        return self.hidden_size**0.5


@dataclasses.dataclass(frozen=True)
class LayerRopes:
    """The angles of positions, in layers without the window and in layers with it."""

    entries: ClassVar[tuple[str, ...]] = (*Rope.entries, "rope_local_base_freq")

    full: Rope = dataclasses.field(default_factory=lambda: Rope(theta=1000000.0))
    near: Rope = dataclasses.field(default_factory=Rope)

    @classmethod
    def from_json(cls, raw: Mapping[str, Json], default: "LayerRopes") -> "LayerRopes":
        """Read the entries of transformers 4, or those of 5, which has one object per kind of layer."""
        kinds = raw.get("rope_parameters") or {}
        if not isinstance(kinds, Mapping) or set(kinds) - set(KINDS):
            raise ValueError(
                f"config.json: rope_parameters={kinds!r}, but it must have only {', '.join(KINDS)}."
            )
        full, near = (
            Rope.from_json(
                {"rope_theta": raw.get(theta), "rope_scaling": scaling, "rope_parameters": kinds.get(kind)},
                rope,
            )
            for theta, scaling, kind, rope in (
                ("rope_theta", raw.get("rope_scaling"), KINDS[0], default.full),
                ("rope_local_base_freq", None, KINDS[1], default.near),
            )
        )
        for rope in (full, near):
            if rope.score_factor != 1 or rope.partial_rotary_factor != 1:
                raise ValueError(
                    f"config.json: {rope} is not supported: it must turn whole heads, and scale no scores."
                )
        return cls(full, near)

    def to_json(self) -> dict[str, Json]:
        """Return the entries of transformers 4 and 5."""
        full, near = self.full.to_json(), self.near.to_json()
        kinds = {KINDS[0]: full["rope_parameters"], KINDS[1]: near["rope_parameters"]}
        return {**full, "rope_local_base_freq": self.near.theta, "rope_parameters": kinds}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3TextConfig(Gemma2Config):
    """Gemma 3 without images. Queries and keys are normalised, and every `sliding_window_pattern`-th layer sees
    all tokens, with its own rotary positions.
    """

    model_type: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    only: ClassVar[Mapping[str, Json]] = {"tie_word_embeddings": True, "use_bidirectional_attention": False}
    qk_norm: ClassVar[Literal["head", "all"] | None] = "head"

    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    rope: LayerRopes = dataclasses.field(default_factory=LayerRopes)

    def frequencies(self, context: Context) -> Float[Array, " pairs"]:
        both = jnp.asarray([rope.frequencies(self.head_size) for rope in (self.rope.full, self.rope.near)])
        return both[jnp.asarray(self.windowed, int)[context.layer]]
