"""The paper's models in Equinox, with the field paths of Hugging Face's files. Bring their own loader.

To load, save and run: `load_pretrained`, `save_pretrained`, `generate`, `beam_search`. A family: its
configuration and its model. The rest is what families are made of, for a model of your own: a `Config`, and a
`DecoderLM`, an `EncoderDecoder` or, where nothing is written, a `Model`, whose layers are given a `Context`.
"""

from redco_eqx.models._blocks.attention import split_heads
from redco_eqx.models._blocks.config import Config, Labels
from redco_eqx.models._blocks.context import Cache, Context, Memory
from redco_eqx.models._blocks.decoder import DecoderLM
from redco_eqx.models._blocks.encoder import encode_tokens
from redco_eqx.models._blocks.encoder_decoder import EncoderDecoder, shift_right
from redco_eqx.models._blocks.layers import Embedding, LayerNorm, Linear, RMSNorm, TiedHead, add_and_norm
from redco_eqx.models._blocks.lora import LoRA, add_lora, lora_spec, merge_lora
from redco_eqx.models._blocks.model import Model, Options, make_layers, run_layers
from redco_eqx.models._blocks.multihead import MultiHeadAttention
from redco_eqx.models._blocks.relative_bias import relative_bias
from redco_eqx.models._blocks.rope import Rope, rotate
from redco_eqx.models._blocks.vocabulary import pad_vocabulary
from redco_eqx.models._families.bart import BartConfig, BartForConditionalGeneration
from redco_eqx.models._families.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
)
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
from redco_eqx.models._families.roberta import (
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)
from redco_eqx.models._families.smollm3 import SmolLM3Config
from redco_eqx.models._families.t5 import T5Config, T5ForConditionalGeneration
from redco_eqx.models._families.vision_encoder_decoder import (
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)
from redco_eqx.models._families.vit import ViTConfig, ViTForImageClassification, ViTModel
from redco_eqx.models._files.images import ImageProcessor, load_image_processor
from redco_eqx.models._files.load import load_pretrained
from redco_eqx.models._files.lora import load_lora, save_lora
from redco_eqx.models._files.save import save_pretrained
from redco_eqx.models._generate.beam_search import beam_search
from redco_eqx.models._generate.beams import Hypotheses
from redco_eqx.models._generate.generate import generate

__all__ = [
    "BartConfig",
    "BartForConditionalGeneration",
    "BertConfig",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertModel",
    "Cache",
    "Config",
    "Context",
    "Conv1D",
    "DecoderLM",
    "Embedding",
    "EncoderDecoder",
    "GPT2Config",
    "GPT2LMHeadModel",
    "GPTJConfig",
    "GPTJForCausalLM",
    "Hypotheses",
    "ImageProcessor",
    "Labels",
    "LayerNorm",
    "Linear",
    "LlamaConfig",
    "LlamaForCausalLM",
    "LoRA",
    "Memory",
    "MistralConfig",
    "Model",
    "MultiHeadAttention",
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
    "RobertaConfig",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "Rope",
    "SmolLM3Config",
    "T5Config",
    "T5ForConditionalGeneration",
    "TiedHead",
    "ViTConfig",
    "ViTForImageClassification",
    "ViTModel",
    "VisionEncoderDecoderConfig",
    "VisionEncoderDecoderModel",
    "add_and_norm",
    "add_lora",
    "beam_search",
    "encode_tokens",
    "generate",
    "load_image_processor",
    "load_lora",
    "load_pretrained",
    "lora_spec",
    "make_layers",
    "merge_lora",
    "pad_vocabulary",
    "relative_bias",
    "rotate",
    "run_layers",
    "save_lora",
    "save_pretrained",
    "shift_right",
    "split_heads",
]
