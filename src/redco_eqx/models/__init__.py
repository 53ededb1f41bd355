"""The paper's models in Equinox, with the field paths of Hugging Face's files, and functions to load them.

To load, save and run: `load_pretrained`, `save_pretrained`, `generate`, `beam_search`. Each family has a
configuration and a model. For images from texts: `load_stable_diffusion`, `save_stable_diffusion`,
`sample_images`, `noise_losses`, and schedulers. The rest are building blocks for your own model: a `Config`,
and a `DecoderLM`, an `EncoderDecoder`, or a `Model` (if it writes no text), whose layers take a `Context`.
"""

from redco_eqx.models._blocks.attention import split_heads
from redco_eqx.models._blocks.config import Config, Labels
from redco_eqx.models._blocks.context import Cache, Context, Memory
from redco_eqx.models._blocks.decoder import DecoderLM, pad_vocabulary
from redco_eqx.models._blocks.dropout import add_and_norm
from redco_eqx.models._blocks.encoder import encode_tokens
from redco_eqx.models._blocks.encoder_decoder import EncoderDecoder, shift_right
from redco_eqx.models._blocks.layers import Embedding, LayerNorm, Linear, RMSNorm, TiedHead
from redco_eqx.models._blocks.lora import LoRA, add_lora, lora_spec, merge_lora
from redco_eqx.models._blocks.model import Model, Options, make_layers, run_layers
from redco_eqx.models._blocks.multihead import MultiHeadAttention
from redco_eqx.models._blocks.positions import Rope, relative_bias, rotate
from redco_eqx.models._diffusion.scheduler import Scheduler, denoise
from redco_eqx.models._diffusion.schedulers import DDIMScheduler, DDPMScheduler, PNDMScheduler
from redco_eqx.models._families.autoencoder_kl import AutoencoderKL, AutoencoderKLConfig
from redco_eqx.models._families.bart import BartConfig, BartForConditionalGeneration, OPTConfig, OPTForCausalLM
from redco_eqx.models._families.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)
from redco_eqx.models._families.clip import CLIPTextConfig, CLIPTextModel
from redco_eqx.models._families.gpt2 import Conv1D, GPT2Config, GPT2LMHeadModel, GPTJConfig, GPTJForCausalLM
from redco_eqx.models._families.gpt_neox import GPTNeoXConfig, GPTNeoXForCausalLM
from redco_eqx.models._families.llama import LlamaConfig, LlamaForCausalLM
from redco_eqx.models._families.llama_variants import (
    Gemma2Config,
    Gemma3TextConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from redco_eqx.models._families.mixtral import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig
from redco_eqx.models._families.t5 import T5Config, T5ForConditionalGeneration
from redco_eqx.models._families.unet_2d_condition import UNet2DConditionConfig, UNet2DConditionModel
from redco_eqx.models._families.vision_encoder_decoder import (
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
)
from redco_eqx.models._families.vit import ViTConfig, ViTForImageClassification, ViTModel
from redco_eqx.models._files.images import ImageProcessor, load_image_processor
from redco_eqx.models._files.load import load_pretrained
from redco_eqx.models._files.lora import load_lora, save_lora
from redco_eqx.models._files.pipeline import load_stable_diffusion, save_stable_diffusion
from redco_eqx.models._files.save import save_pretrained
from redco_eqx.models._generate.beam_search import Hypotheses, beam_search
from redco_eqx.models._generate.generate import generate
from redco_eqx.models._text_to_image.stable_diffusion import (
    StableDiffusion,
    noise_losses,
    parts_spec,
    sample_images,
    to_uint8,
)

__all__ = [
    "AutoencoderKL",
    "AutoencoderKLConfig",
    "BartConfig",
    "BartForConditionalGeneration",
    "BertConfig",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertModel",
    "CLIPTextConfig",
    "CLIPTextModel",
    "Cache",
    "Config",
    "Context",
    "Conv1D",
    "DDIMScheduler",
    "DDPMScheduler",
    "DecoderLM",
    "Embedding",
    "EncoderDecoder",
    "GPT2Config",
    "GPT2LMHeadModel",
    "GPTJConfig",
    "GPTJForCausalLM",
    "GPTNeoXConfig",
    "GPTNeoXForCausalLM",
    "Gemma2Config",
    "Gemma3TextConfig",
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
    "MixtralConfig",
    "MixtralForCausalLM",
    "Model",
    "MultiHeadAttention",
    "OPTConfig",
    "OPTForCausalLM",
    "Olmo2Config",
    "Options",
    "PNDMScheduler",
    "Phi3Config",
    "Qwen2Config",
    "Qwen3Config",
    "Qwen3MoeConfig",
    "RMSNorm",
    "RobertaConfig",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "Rope",
    "Scheduler",
    "SmolLM3Config",
    "StableDiffusion",
    "T5Config",
    "T5ForConditionalGeneration",
    "TiedHead",
    "UNet2DConditionConfig",
    "UNet2DConditionModel",
    "ViTConfig",
    "ViTForImageClassification",
    "ViTModel",
    "VisionEncoderDecoderConfig",
    "VisionEncoderDecoderModel",
    "add_and_norm",
    "add_lora",
    "beam_search",
    "denoise",
    "encode_tokens",
    "generate",
    "load_image_processor",
    "load_lora",
    "load_pretrained",
    "load_stable_diffusion",
    "lora_spec",
    "make_layers",
    "merge_lora",
    "noise_losses",
    "pad_vocabulary",
    "parts_spec",
    "relative_bias",
    "rotate",
    "run_layers",
    "sample_images",
    "save_lora",
    "save_pretrained",
    "save_stable_diffusion",
    "shift_right",
    "split_heads",
    "to_uint8",
]
