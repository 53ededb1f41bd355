"""The paper's models in Equinox, with the field paths of Hugging Face's files. Bring their own loader.

To load, save and run: `load_pretrained`, `save_pretrained`, `generate`. A family: its configuration and its
model. The rest is what families are made of, for a model of your own: a `Config`, a `DecoderLM` (or, where the
text is not read from left to right, a `Model`), whose layers are given a `Context`.
"""

from redco_eqx.models._attention import split_heads
from redco_eqx.models._config import Config
from redco_eqx.models._context import Cache, Context
from redco_eqx.models._decoder import DecoderLM
from redco_eqx.models._generate import generate
from redco_eqx.models._gpt2 import Conv1D, GPT2Config, GPT2LMHeadModel
from redco_eqx.models._gptj import GPTJConfig, GPTJForCausalLM
from redco_eqx.models._layers import Embedding, LayerNorm, Linear, RMSNorm
from redco_eqx.models._llama import LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen3Config
from redco_eqx.models._load import load_pretrained
from redco_eqx.models._model import Model, Options, make_layers, run_layers
from redco_eqx.models._opt import OPTConfig, OPTForCausalLM
from redco_eqx.models._rope import Rope, rotate
from redco_eqx.models._save import save_pretrained

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
    "MistralConfig",
    "Model",
    "OPTConfig",
    "OPTForCausalLM",
    "Options",
    "Qwen2Config",
    "Qwen3Config",
    "RMSNorm",
    "Rope",
    "generate",
    "load_pretrained",
    "make_layers",
    "rotate",
    "run_layers",
    "save_pretrained",
    "split_heads",
]
