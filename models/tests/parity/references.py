"""Tiny models of transformers as references: every architecture and variant, with
weights that matter."""

import copy
import dataclasses
from typing import Any

import diffusers
import tiny_models
import torch
import transformers

TEXT = 24  # tokens a row
VOCABULARY = 96

# Entries of `tiny_models` that differ here: longer texts, more layers, widths that are
# no multiples.
LARGER = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("n_positions", "max_position_embeddings"), 48),
    "image_size": 16,
    **dict.fromkeys(
        ("n_layer", "num_hidden_layers", "num_layers", "encoder_layers"), 3
    ),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "decoder_attention_heads": 8,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "d_ff"), 48),
    "decoder_ffn_dim": 40,
    "d_kv": 6,  # times the heads, not the width of the stream
    "relative_attention_max_distance": 12,
    "num_experts": 6,
}
EPSILONS = ("layer_norm_epsilon", "layer_norm_eps", "rms_norm_eps")
"""Of norms: 0.01, which is large enough to matter."""


def larger(raw: dict[str, Any]) -> dict[str, Any]:
    """The same configuration, with heads of the usual size."""
    entries = {k: x for k, x in raw.items() if k != "head_dim"}
    return {
        k: larger(x) if isinstance(x, dict) else LARGER.get(k, x)
        for k, x in entries.items()
    }


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_SCALED = {"mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 0.5, "beta_slow": 0.05}
_SWAPPED = {"beta_fast": 0.05, "beta_slow": 0.5, "partial_rotary_factor": 0.75}


_RIGHT, _BOTH_SIDES = ("right",), ("left", "right")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A model of transformers.

    - `options`: the entries of its configuration.
    - `kind`: the name of a class of models.
    - `reads`: its inputs: `text`, `segments` besides, `image`; and `decoder` tokens.
    - `padding`: on which sides of a text its reference is right: BART counts padding as
        positions, and a classifier reads the first token, even where that is padding.
    """

    options: dict[str, Any]
    kind: str = "AutoModelForCausalLM"
    reads: tuple[str, ...] = ("text",)
    padding: tuple[str, ...] = _BOTH_SIDES

    def make(self) -> Any:
        """The model in float32, in evaluation mode; equal at each call."""
        options = copy.deepcopy(self.options)  # transformers 5.17 alters them
        config = transformers.AutoConfig.for_model(**options)
        for part in (
            config,
            *(getattr(config, name, None) for name in ("encoder", "decoder")),
        ):
            for name in EPSILONS:
                if hasattr(part, name):
                    setattr(part, name, 1e-2)
        kind = getattr(transformers, self.kind)
        model = (
            kind.from_config(config) if self.kind.startswith("Auto") else kind(config)
        )
        if (
            config.model_type == "t5"
            and self.options.get("tie_word_embeddings") is False
        ):
            model.lm_head.weight = torch.nn.Parameter(
                torch.empty_like(model.lm_head.weight)
            )
        randomise(model)
        return model.eval()


SCALES = {
    ".q.": 0.4,
    "relative_attention_bias": 3.0,
    "classifier.out_proj": 20.0,
    "classifier.weight": 6.0,
}
"""Of some matrices: T5 does not scale its scores; a few labels vary less than a
vocabulary."""


def randomise(model: Any) -> None:
    """Weights such that each of them changes the logits, which have a standard
    deviation above 1."""
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
                is_conv1d = any(
                    part in name for part in ("c_attn", "q_attn", "c_proj", "c_fc")
                )
                scale = next((x for part, x in SCALES.items() if part in name), 2.0)
                p.copy_(scale * noise / p.shape[0 if is_conv1d else 1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer.copy_(torch.randn(buffer.shape, generator=generator))


def _of(name: str, *arguments: Any, **changes: Any) -> Reference:
    """A model of `tiny_models`, enlarged and changed."""
    return Reference({**larger(tiny_models.CONFIGS[name]), **changes}, *arguments)


def _decoder(name: str, **changes: Any) -> Reference:
    return _of(
        name, **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **changes}
    )


def _llama(changes: dict[str, Any], **rope: Any) -> Reference:
    return _decoder("llama", **changes, rope_parameters={"rope_theta": 10000.0, **rope})


_OPT = {"word_embed_proj_dim": 32}
_PLAIN = {"enable_bias": False, "layer_norm_elementwise_affine": False}
_GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 7}
DECODERS = {
    "gpt2": _decoder("gpt2"),
    "gpt2_unscaled_untied": _decoder(
        "gpt2",
        scale_attn_weights=False,
        tie_word_embeddings=False,
        n_inner=40,
        activation_function="gelu",
    ),
    "gptj": _decoder("gptj"),
    "gpt_neox": _decoder(
        "gpt_neox", rope_parameters={**_YARN, **_SWAPPED, "rope_theta": 500.0}
    ),
    "gpt_neox_in_turn": _decoder(
        "gpt_neox",
        use_parallel_residual=False,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={
            "partial_rotary_factor": 0.5,
            "rope_type": "linear",
            "factor": 2.0,
        },
    ),
    "gemma2": _decoder(
        "gemma2", **_GEMMA, attn_logit_softcapping=3.0, final_logit_softcapping=5.0
    ),
    "gemma3": _decoder(
        "gemma3",
        **_GEMMA,
        final_logit_softcapping=None,
        sliding_window_pattern=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "linear",
                "factor": 2.0,
                "rope_theta": 500.0,
            },
        },
    ),
    "mixtral": _decoder("mixtral", sliding_window=7),
    "qwen3_moe": _decoder("qwen3_moe", head_dim=12),
    "opt_125m": _decoder("opt_125m", **_OPT),
    "opt_350m": _of("opt_350m"),
    "opt_bare": _decoder(
        "opt_125m",
        **_OPT,
        **_PLAIN,
        tie_word_embeddings=False,
        activation_function="gelu",
    ),
    "llama": _llama({"num_key_value_heads": 4}, rope_type="default", rope_theta=500.0),
    "llama_linear": _llama(  # with all that a LLaMA may have besides
        {"head_dim": 12, "attention_bias": True, "mlp_bias": True},
        rope_type="linear",
        factor=2.0,
    ),
    "llama_llama3": _llama(
        {"tie_word_embeddings": True}, **tiny_models.LLAMA3, rope_theta=500.0
    ),
    "llama_yarn": _llama({}, **_YARN, rope_theta=500.0),
    "llama_yarn_scaled": _llama({}, **_YARN, **_SCALED, rope_theta=500.0),
    "mistral": _decoder("mistral", sliding_window=7),
    "qwen2": _decoder("qwen2"),
    "qwen3": _decoder("qwen3", head_dim=16),
    "olmo2": _decoder("olmo2"),
    "phi3": _decoder("phi3", attention_bias=False, sliding_window=7),
    "phi3_partial": _decoder(
        "phi3", attention_bias=False, rope_parameters={"partial_rotary_factor": 0.75}
    ),
    "smollm3": _decoder("smollm3", rope_parameters={**_YARN, "rope_theta": 500.0}),
}

_TO_TEXT = "AutoModelForSeq2SeqLM", ("text", "decoder")
_TO_CAPTION = "VisionEncoderDecoderModel", ("image", "decoder"), ()
_T5 = {
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_CAPTIONER = {"decoder_start_token_id": 1, "pad_token_id": 0}
_READER = {**larger(tiny_models.CONFIGS["gpt2"]), "bos_token_id": 1, "eos_token_id": 2}
_READER |= {"is_decoder": True, "add_cross_attention": True}
ENCODER_DECODERS = {
    "t5": _of("t5", *_TO_TEXT, **_T5),
    "t5_gated_untied": _of(
        "t5",
        *_TO_TEXT,
        **_T5,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "bart": _of("bart", *_TO_TEXT, _RIGHT),
    "bart_scaled": _of("bart", *_TO_TEXT, _RIGHT, scale_embedding=True),
    "vit_gpt2": _of("vit_gpt2", *_TO_CAPTION, **_CAPTIONER, decoder=_READER),
    "vit_gpt2_wider": _of(
        "vit_gpt2", *_TO_CAPTION, **_CAPTIONER, decoder={**_READER, "n_embd": 48}
    ),
}
_MASKED, _LABELS = "AutoModelForMaskedLM", "AutoModelForSequenceClassification"
_BOTH, _IMAGE = ("text", "segments"), (("image",), ())
ENCODERS = {
    "bert": _of("bert", "AutoModel", _BOTH),
    "bert_masked": _of("bert", _MASKED, _BOTH),
    "bert_labels": _of("bert", _LABELS, _BOTH, _RIGHT, num_labels=5),
    "roberta": _of("bert", "AutoModel", model_type="roberta"),
    "roberta_masked": _of("bert", _MASKED, model_type="roberta"),
    "roberta_regression": _of(
        "bert", _LABELS, ("text",), _RIGHT, model_type="roberta", num_labels=1
    ),
    "clip_text": _of("clip", "CLIPTextModel", eos_token_id=2),
    "clip_text_gelu": _of("clip", "CLIPTextModel", hidden_act="gelu", eos_token_id=95),
    "vit": _of("vit_labels", "AutoModel", *_IMAGE),
    "vit_labels": _of(
        "vit_labels",
        "AutoModelForImageClassification",
        *_IMAGE,
        num_labels=5,
        qkv_bias=False,
    ),
}
REFERENCES: dict[str, Reference] = {**DECODERS, **ENCODER_DECODERS, **ENCODERS}


class ImageModel(Reference):
    """A part of Stable Diffusion, by diffusers."""

    def make(self) -> Any:
        model = getattr(diffusers, self.kind)(**self.options)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for key, p in sorted(model.named_parameters()):
                noise = torch.randn(p.shape, generator=generator)
                if p.ndim == 1:
                    p.copy_(
                        1 + 0.3 * noise
                        if "norm" in key and key.endswith("weight")
                        else 0.15 * noise
                    )
                else:
                    p.copy_(
                        (3.0 if "to_q" in key else 1.0) * noise / p[0].numel() ** 0.5
                    )
        return model.eval()


def _image(name: str, **changes: Any) -> ImageModel:
    raw = {
        k: tuple(x) if isinstance(x, list) else x
        for k, x in tiny_models.IMAGES[name].items()
    }
    kind = raw.pop("_class_name")
    return ImageModel({**raw, "norm_num_groups": 4, **changes}, kind)


_UNET = {"sample_size": 8, "norm_eps": 1e-2}
# What neither Stable Diffusion 1 nor 2 has.
_OTHER = {
    "layers_per_block": 2,
    "transformer_layers_per_block": 2,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
}
_BARE = {
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
}
IMAGE_MODELS = {
    # One number of heads, projections that are convolutions.
    "sd1": _image("unet", **_UNET, attention_head_dim=2),
    "sd2": _image("unet_linear", **_UNET, attention_head_dim=(4, 8)),
    "other": _image("unet", **{**_UNET, **_OTHER}, attention_head_dim=2),
    "vae": _image("vae", sample_size=16),
    "vae_bare": _image("vae", sample_size=16, **_BARE),
}
