"""The paper's models in Equinox, with the field paths of Hugging Face's files. Bring their own loader."""

from redco_eqx.models._decoder import Cache, DecoderLM
from redco_eqx.models._generate import generate
from redco_eqx.models._llama import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

__all__ = [
    "Cache",
    "DecoderLM",
    "LlamaConfig",
    "LlamaForCausalLM",
    "MistralConfig",
    "Qwen2Config",
    "Qwen3Config",
    "generate",
]
