"""The classes for a `model_type`, or for the `_class_name` of a part of a pipeline."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from redco_eqx_models._blocks.config import BaseConfig, Json
from redco_eqx_models._blocks.model import Model
from redco_eqx_models._families import (
    autoencoder_kl,
    bart,
    bert,
    clip,
    gpt2,
    gpt_neox,
    llama,
    llama_variants,
    mixtral,
    t5,
    unet_2d_condition,
    vision_encoder_decoder,
    vit,
)

Family: TypeAlias = tuple[type[BaseConfig], type[Model]]
"""The class of a configuration, and that of the model."""

FAMILIES: dict[str, tuple[Any, Any]] = {
    config.model_type: (config, model)
    for config, model in (
        (bart.BartConfig, bart.BartForConditionalGeneration),
        (bert.BertConfig, bert.BertModel),
        (clip.CLIPTextConfig, clip.CLIPTextModel),
        (llama_variants.Gemma2Config, llama.LlamaForCausalLM),
        (llama_variants.Gemma3TextConfig, llama.LlamaForCausalLM),
        (gpt2.GPT2Config, gpt2.GPT2LMHeadModel),
        (gpt2.GPTJConfig, gpt2.GPTJForCausalLM),
        (gpt_neox.GPTNeoXConfig, gpt_neox.GPTNeoXForCausalLM),
        (llama.LlamaConfig, llama.LlamaForCausalLM),
        (llama_variants.MistralConfig, llama.LlamaForCausalLM),
        (mixtral.MixtralConfig, mixtral.MixtralForCausalLM),
        (llama_variants.Olmo2Config, llama.LlamaForCausalLM),
        (bart.OPTConfig, bart.OPTForCausalLM),
        (llama_variants.Phi3Config, llama.LlamaForCausalLM),
        (llama_variants.Qwen2Config, llama.LlamaForCausalLM),
        (llama_variants.Qwen3Config, llama.LlamaForCausalLM),
        (mixtral.Qwen3MoeConfig, mixtral.MixtralForCausalLM),
        (bert.RobertaConfig, bert.BertModel),
        (t5.T5Config, t5.T5ForConditionalGeneration),
        (vit.ViTConfig, vit.ViTModel),
        (
            vision_encoder_decoder.VisionEncoderDecoderConfig,
            vision_encoder_decoder.VisionEncoderDecoderModel,
        ),
        (llama_variants.SmolLM3Config, llama.LlamaForCausalLM),
    )
}
"""Families by `model_type`."""

INSIDE = {"clip": ("text_config", clip.CLIPTextConfig.model_type)}
"""For the `model_type` of a larger model: the entry that describes the supported half,
and the half's `model_type`.
"""

PARTS: dict[str, tuple[Any, Any]] = {
    "AutoencoderKL": (autoencoder_kl.AutoencoderKLConfig, autoencoder_kl.AutoencoderKL),
    "UNet2DConditionModel": (
        unet_2d_condition.UNet2DConditionConfig,
        unet_2d_condition.UNet2DConditionModel,
    ),
}
"""Families by `_class_name`, in a pipeline of diffusers."""

HEADS: dict[str | None, Any] = {
    model.architecture: model
    for model in (
        bert.BertForMaskedLM,
        bert.BertForSequenceClassification,
        bert.RobertaForMaskedLM,
        bert.RobertaForSequenceClassification,
        vit.ViTForImageClassification,
    )
}
"""Models by the name in `architectures`, for a `model_type` that has several."""


LACKING: dict[str, str] = {
    "gemma3": "a vision tower; its text half is the family gemma3_text",
    "qwen2_moe": "an expert that all tokens go to, which the blocks do not have",
}
"""The reason why a well-known family is not supported, by `model_type`: a need that the
blocks do not meet."""


def read_family(
    raw: Mapping[str, Json],
    family: Family | None = None,
    entries: Mapping[str, Json] | None = None,
) -> tuple[Any, Any]:
    """Read the configuration from a parsed `config.json`, and return it with the class
    of the model.

    `family` is a pair of classes to use instead of this library's; `entries` replace
    those of the file. Raises `ValueError` for an unknown `model_type`, or an entry that
    is not supported.
    """
    entries = entries or {}
    old = raw.get("rope_parameters")
    if "rope_scaling" in entries and isinstance(old, Mapping):
        # It replaces `rope_parameters`, but does not contain these two.
        for name in ("rope_theta", "partial_rotary_factor"):
            if name in old:
                raw = {**raw, name: old[name]}
    raw = {**raw, **entries}
    whole = raw.get("model_type")
    if family is None and isinstance(whole, str) and whole in INSIDE:
        name, kind = INSIDE[whole]
        half = raw.get(name)
        # Old files of CLIP have both. In transformers, this one replaces the other.
        if raw.get(f"{name}_dict") is not None:
            half = raw[f"{name}_dict"]
        if not isinstance(half, Mapping):
            raise ValueError(f"config.json: {name}={half!r}, but it must be an object.")
        raw = {**half, **entries, "model_type": kind}
    entry = "model_type"
    families = FAMILIES
    if "_class_name" in raw and "model_type" not in raw:
        entry = "_class_name"
        families = PARTS
    if family is not None:
        entry = family[0].type_entry
        families = {family[0].model_type: family}
    model_type = raw.get(entry)
    if not isinstance(model_type, str) or model_type not in families:
        needs = LACKING.get(str(model_type))
        why = f"is not known, only {', '.join(families)}"
        if needs:
            why = f"is not supported: it needs {needs}"
        raise ValueError(
            f"config.json: {entry}={model_type!r} {why}. Pass family=(its Config, its "
            "Model) to load_pretrained for one of your own."
        )
    if raw.get("quantization_config") is not None:
        raise ValueError(
            "config.json: quantization_config is not supported. Use a checkpoint that "
            "is not quantized."
        )
    config_class, model_class = families[model_type]
    if family is None:
        # transformers writes the class of the model that it saved.
        named = raw.get("architectures")
        name = named[0] if isinstance(named, list) and named else None
        if isinstance(name, str):
            model_class = HEADS.get(name, model_class)
    entries = {config_class.aliases.get(name, name): x for name, x in entries.items()}
    config = config_class.from_json({**raw, **entries})
    if entries:
        # A second time, because only a change of a configuration checks that each of
        # its entries is one that the family reads.
        config = config_class.from_json(entries, config)
    return config, model_class
