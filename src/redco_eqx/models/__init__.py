"""The paper's models in Equinox, with the field paths of Hugging Face's files. Bring their own loader."""

from redco_eqx.models._decoder import Cache, DecoderLM
from redco_eqx.models._generate import generate
from redco_eqx.models._gpt2 import GPT2Config, GPT2LMHeadModel
from redco_eqx.models._gptj import GPTJConfig, GPTJForCausalLM
from redco_eqx.models._llama import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen3Config
from redco_eqx.models._load import load_pretrained
from redco_eqx.models._opt import OPTConfig, OPTForCausalLM
from redco_eqx.models._save import save_pretrained

__all__ = [
    "Cache",
    "DecoderLM",
    "GPT2Config",
    "GPT2LMHeadModel",
    "GPTJConfig",
    "GPTJForCausalLM",
    "LlamaConfig",
    "LlamaForCausalLM",
    "MistralConfig",
    "OPTConfig",
    "OPTForCausalLM",
    "Qwen2Config",
    "Qwen3Config",
    "generate",
    "load_pretrained",
    "save_pretrained",
]
