"""Phi-3 of 4k tokens (Abdin et al. 2024): a LLaMA whose files store query, key and value as one."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Unpack

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.config import Json
from redco_eqx.models._blocks.model import Options
from redco_eqx.models._families.llama import LlamaConfig, LlamaForCausalLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phi3Config(LlamaConfig):
    """Phi-3 and models of the same build; not those of 128k tokens, whose `longrope` is not supported."""

    model_type: ClassVar[str] = "phi3"
    architecture: ClassVar[str] = "Phi3ForCausalLM"
    only: ClassVar[Mapping[str, Json]] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}

    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    eos_token_id: int | tuple[int, ...] | None = 32000
    pad_token_id: int | None = 32000
    sliding_window: int | None = None

    @property
    def window(self) -> int | None:
        return self.sliding_window


class Phi3ForCausalLM(LlamaForCausalLM):
    """A Phi-3. Its projections are separate, so that each is split by whole heads."""

    joined: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: Phi3Config, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, stacked=stacked, key=key, **options)
