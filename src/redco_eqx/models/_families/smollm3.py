"""SmolLM3 (Hugging Face 2025): a LLaMA whose every fourth layer has no positions (Yang et al. 2025)."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Int

from redco_eqx.models._blocks.config import Json
from redco_eqx.models._blocks.context import Context
from redco_eqx.models._blocks.rope import Rope
from redco_eqx.models._families.llama import LlamaConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Config(LlamaConfig):
    """SmolLM3, 3B.

    - `no_rope_layers`: for each layer 1 if it **has** rotary positions, 0 if not. By default all layers have
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
        given = self.no_rope_layers
        if given is not None and (len(given) != self.num_layers or set(given) - {0, 1}):
            raise ValueError(
                f"SmolLM3Config: no_rope_layers={list(given)}, but it must be 0 or 1 for each of the "
                f"{self.num_layers} layers."
            )

    def positions(self, context: Context) -> Int[Array, "b t"]:
        """Return the positions that turn queries and keys of the current layer: 0 if it has no positions."""
        turns = self.no_rope_layers
        if turns is None:
            turns = [int((i + 1) % self.no_rope_layer_interval != 0) for i in range(self.num_layers)]
        return context.positions * jnp.asarray(turns, jnp.int32)[context.layer]
