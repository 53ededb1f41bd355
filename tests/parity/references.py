"""Tiny models of transformers as references: every architecture and variant, with weights that matter."""

import dataclasses
from typing import Any

import diffusers
import torch
import transformers

TEXT = 24  # tokens a row
VOCABULARY = 96

_GPT = {
    "vocab_size": VOCABULARY,
    "n_positions": 48,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "layer_norm_epsilon": 1e-2,  # large enough to matter
}
_OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 48,
    "word_embed_proj_dim": 32,
}
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
}
_GQA = {**_LLAMA, "num_key_value_heads": 2}
_GEMMA = {
    **_GQA,
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "sliding_window": 7,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


_RIGHT, _BOTH_SIDES = ("right",), ("left", "right")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model of transformers.

    - `family`, `config`: prefix of its classes there, and of that of its configuration, if it is another.
    - `options`: of its configuration.
    - `head`: what the name of its class ends in.
    - `reads`: its inputs: `text`, `segments` besides, `image`; and `decoder` tokens.
    - `padding`: on which sides of a text its reference is right: BART counts padding as positions, and a
        classifier reads the first token, even where that is padding.
    """

    family: str
    options: dict[str, Any]
    head: str = "ForCausalLM"
    reads: tuple[str, ...] = ("text",)
    padding: tuple[str, ...] = _BOTH_SIDES
    config: str | None = None

    def make(self) -> Any:
        """The model in float32, in evaluation mode; equal at each call."""
        config = getattr(transformers, f"{self.config or self.family}Config")(**self.options)
        model = getattr(transformers, f"{self.family}{self.head}")(config)
        if model.config.model_type == "t5" and self.options.get("tie_word_embeddings") is False:
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        randomise(model)
        return model.eval()


class Captioner(Reference):
    """A ViT that is read by a GPT-2; `options` are those of the GPT-2."""

    def make(self) -> Any:
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
            transformers.ViTConfig(**_VIT),
            transformers.GPT2Config(**self.options, bos_token_id=1, eos_token_id=2),
            decoder_start_token_id=1,
            pad_token_id=0,
        )
        model = transformers.VisionEncoderDecoderModel(config)
        randomise(model)
        return model.eval()


SCALES = {".q.": 0.4, "relative_attention_bias": 3.0, "classifier.out_proj": 20.0, "classifier.weight": 6.0}
"""Of some matrices: T5 does not scale its scores; a few labels vary less than a vocabulary."""


def randomise(model: Any) -> None:
    """Weights such that each of them changes the logits, which have a standard deviation above 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                is_scale = name.endswith("weight")
                p.copy_(1 + 0.3 * noise if is_scale else 0.15 * noise)
            elif any(part in name for part in ("embed", "wte", "wpe")):
                p.copy_(0.3 * noise)
            elif name == "shared.weight":  # T5 divides what reads it as its head
                p.copy_(1.5 * noise)
            else:
                is_conv1d = any(part in name for part in ("c_attn", "q_attn", "c_proj", "c_fc"))
                scale = next((x for part, x in SCALES.items() if part in name), 2.0)
                p.copy_(scale * noise / p.shape[0 if is_conv1d else 1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(torch.randn(buffer.shape, generator=generator))


_HIDDEN = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "layer_norm_eps": 1e-2,
}
_NEOX = {
    **_HIDDEN,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 6,  # times the heads, not the width of the stream
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "layer_norm_epsilon": 1e-2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "max_position_embeddings": 48,
}
_BERT = {**_HIDDEN, "vocab_size": VOCABULARY, "max_position_embeddings": 48}
_CLIP = {**_HIDDEN, "vocab_size": VOCABULARY, "max_position_embeddings": 48, "eos_token_id": 2}
_VIT = {**_HIDDEN, "image_size": 16, "patch_size": 4}


def _decoder(family: str, options: dict[str, Any], config: str | None = None) -> Reference:
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return Reference(family, {**options, **tokens}, head, config=config)


def _llama(options: dict[str, Any], **rope: Any) -> Reference:
    return _decoder("Llama", {**options, "rope_parameters": {"rope_theta": 10000.0, **rope}})


def _encoder_decoder(family: str, options: dict[str, Any], padding: tuple[str, ...] = _BOTH_SIDES) -> Reference:
    return Reference(family, options, "ForConditionalGeneration", ("text", "decoder"), padding)


_GELU = {"activation_function": "gelu"}
DECODERS = {
    "gpt2": _decoder("GPT2", _GPT),
    "gpt2_unscaled_untied": _decoder(
        "GPT2",
        {**_GPT, "scale_attn_weights": False, "tie_word_embeddings": False, "n_inner": 40, **_GELU},
    ),
    "gptj": _decoder("GPTJ", {**_GPT, "rotary_dim": 4}),
    "gpt_neox": _decoder("GPTNeoX", {**_NEOX, "rope_parameters": {"rope_theta": 500.0}}),
    "gpt_neox_in_turn": _decoder(
        "GPTNeoX",
        {
            **_NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "linear", "factor": 2.0},
        },
    ),
    "gemma2": _decoder("Gemma2", {**_GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": _decoder(
        "Gemma3",
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            },
        },
        "Gemma3Text",
    ),
    "mixtral": _decoder("Mixtral", {**_GQA, "num_local_experts": 4, "sliding_window": 7}),
    "qwen3_moe": _decoder(
        "Qwen3Moe",
        {**_GQA, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "head_dim": 12},
    ),
    "opt_125m": _decoder("OPT", _OPT),
    "opt_350m": Reference("OPT", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    "opt_bare": _decoder(
        "OPT",
        {
            **_OPT,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            **_GELU,
        },
    ),
    "llama": _llama(_LLAMA, rope_type="default", rope_theta=500.0),
    "llama_linear": _llama(  # with all that a LLaMA may have besides
        {**_GQA, "head_dim": 12, "attention_bias": True, "mlp_bias": True}, rope_type="linear", factor=2.0
    ),
    "llama_llama3": _llama({**_GQA, "tie_word_embeddings": True}, **_LLAMA3, rope_theta=500.0),
    "llama_yarn": _llama(_GQA, **_YARN, rope_theta=500.0),
    "llama_yarn_scaled": _llama(
        _GQA, **_YARN, rope_theta=500.0, mscale=2.0, mscale_all_dim=0.5, beta_fast=0.5, beta_slow=0.05
    ),
    "mistral": _decoder("Mistral", {**_GQA, "sliding_window": 7}),
    "qwen2": _decoder("Qwen2", {**_GQA, "tie_word_embeddings": True}),
    "qwen3": _decoder("Qwen3", {**_GQA, "head_dim": 16}),
    "olmo2": _decoder("Olmo2", _GQA),
    "phi3": _decoder("Phi3", {**_GQA, "sliding_window": 7}),
    "phi3_partial": _decoder("Phi3", {**_GQA, "rope_parameters": {"partial_rotary_factor": 0.75}}),
    "smollm3": _decoder("SmolLM3", {**_GQA, "no_rope_layer_interval": 2, "tie_word_embeddings": False}),
}

ENCODER_DECODERS = {
    "t5": _encoder_decoder("T5", _T5),
    "t5_gated_untied": _encoder_decoder(
        "T5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    ),
    "bart": _encoder_decoder("Bart", _BART, padding=_RIGHT),
    "bart_scaled": _encoder_decoder("Bart", {**_BART, "scale_embedding": True}, padding=_RIGHT),
    "vit_gpt2": Captioner("", _GPT, "", ("image", "decoder"), ()),
    "vit_gpt2_wider": Captioner("", {**_GPT, "n_embd": 48}, "", ("image", "decoder"), ()),
}
_LABELS, _BOTH = "ForSequenceClassification", ("text", "segments")
ENCODERS = {
    "bert": Reference("Bert", _BERT, "Model", _BOTH),
    "bert_masked": Reference("Bert", _BERT, "ForMaskedLM", _BOTH),
    "bert_labels": Reference("Bert", {**_BERT, "num_labels": 5}, _LABELS, _BOTH, _RIGHT),
    "roberta": Reference("Roberta", _BERT, "Model"),
    "roberta_masked": Reference("Roberta", _BERT, "ForMaskedLM"),
    "roberta_regression": Reference("Roberta", {**_BERT, "num_labels": 1}, _LABELS, padding=_RIGHT),
    "clip_text": Reference("CLIPText", _CLIP, "Model"),
    "clip_text_gelu": Reference("CLIPText", {**_CLIP, "hidden_act": "gelu", "eos_token_id": 95}, "Model"),
    "vit": Reference("ViT", _VIT, "Model", ("image",), ()),
    "vit_labels": Reference(
        "ViT", {**_VIT, "num_labels": 5, "qkv_bias": False}, "ForImageClassification", ("image",), ()
    ),
}
REFERENCES: dict[str, Reference] = {**DECODERS, **ENCODER_DECODERS, **ENCODERS}


class ImageModel(Reference):
    """A part of Stable Diffusion, by diffusers."""

    def make(self) -> Any:
        model = getattr(diffusers, self.family)(**self.options)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for key, p in sorted(model.named_parameters()):
                noise = torch.randn(p.shape, generator=generator)
                if p.ndim == 1:
                    p.copy_(1 + 0.3 * noise if "norm" in key and key.endswith("weight") else 0.15 * noise)
                else:
                    p.copy_((3.0 if "to_q" in key else 1.0) * noise / p[0].numel() ** 0.5)
        return model.eval()


_UNET: dict[str, Any] = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "norm_eps": 1e-2,  # large enough to matter
    "cross_attention_dim": 24,
    "attention_head_dim": 2,
}
_VAE: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "sample_size": 16,
}
_OTHER = {  # what neither Stable Diffusion 1 nor 2 has
    "layers_per_block": 2,
    "transformer_layers_per_block": 2,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
}
_BARE = {"use_quant_conv": False, "use_post_quant_conv": False, "mid_block_add_attention": False}
IMAGE_MODELS = {
    "sd1": ImageModel("UNet2DConditionModel", _UNET),  # one number of heads, projections that are convolutions
    "sd2": ImageModel(
        "UNet2DConditionModel", {**_UNET, "attention_head_dim": (4, 8), "use_linear_projection": True}
    ),
    "other": ImageModel("UNet2DConditionModel", {**_UNET, **_OTHER}),
    "vae": ImageModel("AutoencoderKL", _VAE),
    "vae_bare": ImageModel("AutoencoderKL", {**_VAE, **_BARE}),
}
