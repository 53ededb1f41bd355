"""The paper's models in Equinox, with the field paths of Hugging Face's files, and
functions to load them.

To load, save and run: `load_pretrained`, `save_pretrained`, `generate`, `beam_search`.
Each family has a configuration and a model. For images from texts:
`load_stable_diffusion`, `save_stable_diffusion`, `sample_images`, `noise_losses`, and
schedulers. The rest are building blocks for your own model: a `Config`, and a
`DecoderLM`, an `EncoderDecoder`, or a `Model` (if it writes no text), whose layers take
a `Context`.
"""

from redco_eqx_models._blocks.attention import split_heads as split_heads
from redco_eqx_models._blocks.config import Config as Config
from redco_eqx_models._blocks.config import Labels as Labels
from redco_eqx_models._blocks.context import Cache as Cache
from redco_eqx_models._blocks.context import Context as Context
from redco_eqx_models._blocks.context import Memory as Memory
from redco_eqx_models._blocks.decoder import DecoderLM as DecoderLM
from redco_eqx_models._blocks.decoder import pad_vocabulary as pad_vocabulary
from redco_eqx_models._blocks.dropout import add_and_norm as add_and_norm
from redco_eqx_models._blocks.encoder import encode_tokens as encode_tokens
from redco_eqx_models._blocks.encoder_decoder import EncoderDecoder as EncoderDecoder
from redco_eqx_models._blocks.encoder_decoder import shift_right as shift_right
from redco_eqx_models._blocks.layers import Embedding as Embedding
from redco_eqx_models._blocks.layers import LayerNorm as LayerNorm
from redco_eqx_models._blocks.layers import Linear as Linear
from redco_eqx_models._blocks.layers import RMSNorm as RMSNorm
from redco_eqx_models._blocks.layers import TiedHead as TiedHead
from redco_eqx_models._blocks.lora import LoRA as LoRA
from redco_eqx_models._blocks.lora import add_lora as add_lora
from redco_eqx_models._blocks.lora import lora_spec as lora_spec
from redco_eqx_models._blocks.lora import merge_lora as merge_lora
from redco_eqx_models._blocks.model import Model as Model
from redco_eqx_models._blocks.model import Options as Options
from redco_eqx_models._blocks.model import make_layers as make_layers
from redco_eqx_models._blocks.model import run_layers as run_layers
from redco_eqx_models._blocks.multihead import MultiHeadAttention as MultiHeadAttention
from redco_eqx_models._blocks.positions import Rope as Rope
from redco_eqx_models._blocks.positions import relative_bias as relative_bias
from redco_eqx_models._blocks.positions import rotate as rotate
from redco_eqx_models._diffusion.scheduler import Scheduler as Scheduler
from redco_eqx_models._diffusion.scheduler import denoise as denoise
from redco_eqx_models._diffusion.schedulers import DDIMScheduler as DDIMScheduler
from redco_eqx_models._diffusion.schedulers import DDPMScheduler as DDPMScheduler
from redco_eqx_models._diffusion.schedulers import PNDMScheduler as PNDMScheduler
from redco_eqx_models._families.autoencoder_kl import AutoencoderKL as AutoencoderKL
from redco_eqx_models._families.autoencoder_kl import (
    AutoencoderKLConfig as AutoencoderKLConfig,
)
from redco_eqx_models._families.bart import BartConfig as BartConfig
from redco_eqx_models._families.bart import (
    BartForConditionalGeneration as BartForConditionalGeneration,
)
from redco_eqx_models._families.bart import OPTConfig as OPTConfig
from redco_eqx_models._families.bart import OPTForCausalLM as OPTForCausalLM
from redco_eqx_models._families.bert import BertConfig as BertConfig
from redco_eqx_models._families.bert import BertForMaskedLM as BertForMaskedLM
from redco_eqx_models._families.bert import (
    BertForSequenceClassification as BertForSequenceClassification,
)
from redco_eqx_models._families.bert import BertModel as BertModel
from redco_eqx_models._families.bert import RobertaConfig as RobertaConfig
from redco_eqx_models._families.bert import RobertaForMaskedLM as RobertaForMaskedLM
from redco_eqx_models._families.bert import (
    RobertaForSequenceClassification as RobertaForSequenceClassification,
)
from redco_eqx_models._families.clip import CLIPTextConfig as CLIPTextConfig
from redco_eqx_models._families.clip import CLIPTextModel as CLIPTextModel
from redco_eqx_models._families.gpt2 import Conv1D as Conv1D
from redco_eqx_models._families.gpt2 import GPT2Config as GPT2Config
from redco_eqx_models._families.gpt2 import GPT2LMHeadModel as GPT2LMHeadModel
from redco_eqx_models._families.gpt2 import GPTJConfig as GPTJConfig
from redco_eqx_models._families.gpt2 import GPTJForCausalLM as GPTJForCausalLM
from redco_eqx_models._families.gpt_neox import GPTNeoXConfig as GPTNeoXConfig
from redco_eqx_models._families.gpt_neox import GPTNeoXForCausalLM as GPTNeoXForCausalLM
from redco_eqx_models._families.llama import LlamaConfig as LlamaConfig
from redco_eqx_models._families.llama import LlamaForCausalLM as LlamaForCausalLM
from redco_eqx_models._families.llama_variants import Gemma2Config as Gemma2Config
from redco_eqx_models._families.llama_variants import (
    Gemma3TextConfig as Gemma3TextConfig,
)
from redco_eqx_models._families.llama_variants import MistralConfig as MistralConfig
from redco_eqx_models._families.llama_variants import Olmo2Config as Olmo2Config
from redco_eqx_models._families.llama_variants import Phi3Config as Phi3Config
from redco_eqx_models._families.llama_variants import Qwen2Config as Qwen2Config
from redco_eqx_models._families.llama_variants import Qwen3Config as Qwen3Config
from redco_eqx_models._families.llama_variants import SmolLM3Config as SmolLM3Config
from redco_eqx_models._families.mixtral import MixtralConfig as MixtralConfig
from redco_eqx_models._families.mixtral import MixtralForCausalLM as MixtralForCausalLM
from redco_eqx_models._families.mixtral import Qwen3MoeConfig as Qwen3MoeConfig
from redco_eqx_models._families.t5 import T5Config as T5Config
from redco_eqx_models._families.t5 import (
    T5ForConditionalGeneration as T5ForConditionalGeneration,
)
from redco_eqx_models._families.unet_2d_condition import (
    UNet2DConditionConfig as UNet2DConditionConfig,
)
from redco_eqx_models._families.unet_2d_condition import (
    UNet2DConditionModel as UNet2DConditionModel,
)
from redco_eqx_models._families.vision_encoder_decoder import (
    VisionEncoderDecoderConfig as VisionEncoderDecoderConfig,
)
from redco_eqx_models._families.vision_encoder_decoder import (
    VisionEncoderDecoderModel as VisionEncoderDecoderModel,
)
from redco_eqx_models._families.vit import ViTConfig as ViTConfig
from redco_eqx_models._families.vit import (
    ViTForImageClassification as ViTForImageClassification,
)
from redco_eqx_models._families.vit import ViTModel as ViTModel
from redco_eqx_models._files.images import ImageProcessor as ImageProcessor
from redco_eqx_models._files.images import load_image_processor as load_image_processor
from redco_eqx_models._files.load import load_pretrained as load_pretrained
from redco_eqx_models._files.lora import load_lora as load_lora
from redco_eqx_models._files.lora import save_lora as save_lora
from redco_eqx_models._files.pipeline import (
    load_stable_diffusion as load_stable_diffusion,
)
from redco_eqx_models._files.pipeline import (
    save_stable_diffusion as save_stable_diffusion,
)
from redco_eqx_models._files.save import save_pretrained as save_pretrained
from redco_eqx_models._generate.beam_search import Hypotheses as Hypotheses
from redco_eqx_models._generate.beam_search import beam_search as beam_search
from redco_eqx_models._generate.generate import generate as generate
from redco_eqx_models._text_to_image.stable_diffusion import (
    StableDiffusion as StableDiffusion,
)
from redco_eqx_models._text_to_image.stable_diffusion import (
    noise_losses as noise_losses,
)
from redco_eqx_models._text_to_image.stable_diffusion import parts_spec as parts_spec
from redco_eqx_models._text_to_image.stable_diffusion import (
    sample_images as sample_images,
)
from redco_eqx_models._text_to_image.stable_diffusion import to_uint8 as to_uint8

# The imports above are the only list of the public names.
_NAMES = [
    name for name, x in globals().items() if callable(x) and not name.startswith("_")
]

__all__ = sorted(_NAMES, key=lambda name: (name[0].islower(), name))  # pyright: ignore[reportUnsupportedDunderAll]
