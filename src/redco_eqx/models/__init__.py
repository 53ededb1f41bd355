"""The paper's models in Equinox, with the field paths of Hugging Face's files. Bring their own loader.

To load, save and run: `load_pretrained`, `save_pretrained`, `generate`. A family: its configuration and its
model. The rest is what families are made of, for a model of your own: a `Config`, a `DecoderLM` (or, where the
text is not read from left to right, a `Model`), whose layers are given a `Context`.
"""

from redco_eqx.models._blocks.attention import split_heads
from redco_eqx.models._blocks.config import Config
from redco_eqx.models._blocks.context import Cache, Context
from redco_eqx.models._blocks.decoder import DecoderLM
from redco_eqx.models._blocks.layers import Embedding, LayerNorm, Linear, RMSNorm
from redco_eqx.models._blocks.lora import LoRA, add_lora, lora_spec, merge_lora
from redco_eqx.models._blocks.model import Model, Options, make_layers, run_layers
from redco_eqx.models._blocks.rope import Rope, rotate
from redco_eqx.models._families.gpt2 import Conv1D, GPT2Config, GPT2LMHeadModel
from redco_eqx.models._families.gptj import GPTJConfig, GPTJForCausalLM
from redco_eqx.models._families.llama import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from redco_eqx.models._families.olmo2 import Olmo2Config, Olmo2ForCausalLM
from redco_eqx.models._families.opt import OPTConfig, OPTForCausalLM
from redco_eqx.models._families.phi3 import Phi3Config, Phi3ForCausalLM
from redco_eqx.models._families.smollm3 import SmolLM3Config
from redco_eqx.models._files.load import load_pretrained
from redco_eqx.models._files.lora import load_lora, save_lora
from redco_eqx.models._files.save import save_pretrained
from redco_eqx.models._generate.loop import generate

__all__ = [
    "Cache",
    "Config",
    "Context",
    "Conv1D",
    "DecoderLM",
    "Embedding",
    "GPT2Config",
    "GPT2LMHeadModel",
    "GPTJConfig",
    "GPTJForCausalLM",
    "LayerNorm",
    "Linear",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LoRA",
    "MistralConfig",
    "Model",
    "OPTConfig",
    "OPTForCausalLM",
    "Olmo2Config",
    "Olmo2ForCausalLM",
    "Options",
    "Phi3Config",
    "Phi3ForCausalLM",
    "Qwen2Config",
    "Qwen3Config",
    "RMSNorm",
    "Rope",
    "SmolLM3Config",
    "add_lora",
    "generate",
    "load_lora",
    "load_pretrained",
    "lora_spec",
    "make_layers",
    "merge_lora",
    "rotate",
    "run_layers",
    "save_lora",
    "save_pretrained",
    "split_heads",
]
