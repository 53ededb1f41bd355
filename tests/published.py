"""The paper's models at full size: their configurations and what they hold."""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """`keys` are patterns of the arrays in its file: `{i}` numbers the layers. Buffers are not counted."""

    config: dict[str, Any]
    num_layers: int
    num_parameters: int
    keys: tuple[str, ...]


def _expand(prefix: str, names: str, suffixes: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}.{suffix}" for name in names.split() for suffix in suffixes.split())


LLAMA_KEYS = (
    *_expand("model.", "embed_tokens norm", "weight"),
    *_expand("model.layers.{i}.", "input_layernorm post_attention_layernorm", "weight"),
    *_expand("model.layers.{i}.self_attn.", "q_proj k_proj v_proj o_proj", "weight"),
    *_expand("model.layers.{i}.mlp.", "gate_proj up_proj down_proj", "weight"),
    "lm_head.weight",
)
GPTJ_KEYS = (
    "transformer.wte.weight",
    *_expand("transformer.", "ln_f h.{i}.ln_1 h.{i}.mlp.fc_in h.{i}.mlp.fc_out", "weight bias"),
    *_expand("transformer.h.{i}.attn.", "q_proj k_proj v_proj out_proj", "weight"),
    *_expand("", "lm_head", "weight bias"),
)
GPT2_KEYS = (
    *_expand("transformer.", "wte wpe", "weight"),
    *_expand("transformer.", "ln_f h.{i}.ln_1 h.{i}.ln_2", "weight bias"),
    *_expand("transformer.h.{i}.", "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj", "weight bias"),
)
OPT_KEYS = (
    *_expand("model.decoder.", "embed_tokens embed_positions", "weight"),
    *_expand("model.decoder.", "final_layer_norm", "weight bias"),
    *_expand("model.decoder.layers.{i}.self_attn.", "q_proj k_proj v_proj out_proj", "weight bias"),
    *_expand("model.decoder.layers.{i}.", "self_attn_layer_norm final_layer_norm fc1 fc2", "weight bias"),
)
_T5_ATTENTION = _expand("", "q k v o", "weight")


def _t5_keys(mlp: str, *further: str) -> tuple[str, ...]:
    keys = ["shared.weight", *further]
    for stack, parts in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
        layer = f"{stack}.block.{{i}}.layer"
        keys.append(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight")
        keys += [f"{layer}.{n}.{part}.{x}" for n, part in enumerate(parts) for x in _T5_ATTENTION]
        keys += [f"{layer}.{n}.layer_norm.weight" for n in range(len(parts) + 1)]
        keys += _expand(f"{layer}.{len(parts)}.DenseReluDense.", mlp, "weight")
        keys.append(f"{stack}.final_layer_norm.weight")
    return tuple(keys)


_BART_LAYER = "fc1 fc2 final_layer_norm self_attn_layer_norm " + " ".join(
    f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")
)
BART_KEYS = (
    "final_logits_bias",
    *_expand("model.", "shared encoder.embed_positions decoder.embed_positions", "weight"),
    *_expand("model.", "encoder.layernorm_embedding decoder.layernorm_embedding", "weight bias"),
    *_expand("model.encoder.layers.{i}.", _BART_LAYER, "weight bias"),
    *_expand("model.decoder.layers.{i}.", _BART_LAYER, "weight bias"),
    *_expand(
        "model.decoder.layers.{i}.encoder_attn", "_layer_norm .q_proj .k_proj .v_proj .out_proj", "weight bias"
    ),
)
_EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")
ROBERTA_KEYS = (
    *_expand("embeddings.", " ".join(_EMBEDDINGS), "weight"),
    *_expand("", "embeddings.LayerNorm pooler.dense", "weight bias"),
    *_expand(
        "encoder.layer.{i}.attention.",
        "self.query self.key self.value output.dense output.LayerNorm",
        "weight bias",
    ),
    *_expand("encoder.layer.{i}.", "intermediate.dense output.dense output.LayerNorm", "weight bias"),
)
VIT_KEYS = (
    *("vit.embeddings.cls_token", "vit.embeddings.position_embeddings"),
    *_expand("", "vit.embeddings.patch_embeddings.projection vit.layernorm classifier", "weight bias"),
    *_expand(
        "vit.encoder.layer.{i}.attention.",
        "attention.query attention.key attention.value output.dense",
        "weight bias",
    ),
    *_expand(
        "vit.encoder.layer.{i}.",
        "intermediate.dense output.dense layernorm_before layernorm_after",
        "weight bias",
    ),
)
CLIP_TEXT_KEYS = (
    *_expand("text_model.embeddings.", "token_embedding position_embedding", "weight"),
    "text_model.final_layer_norm.weight",
    "text_model.final_layer_norm.bias",
    *_expand(
        "text_model.encoder.layers.{i}.",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj layer_norm1 layer_norm2 "
        "mlp.fc1 mlp.fc2",
        "weight bias",
    ),
)
_T5_11B = {"model_type": "t5", "d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128}
_FLAN_XL = {
    "model_type": "t5", "d_model": 2048, "d_ff": 5120, "num_layers": 24, "num_heads": 32,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_ROBERTA_LARGE = {
    **_LARGE, "model_type": "roberta", "architectures": ["RobertaModel"], "max_position_embeddings": 514,
    "type_vocab_size": 1,
}  # fmt: skip
_VIT_LARGE = {
    **_LARGE, "model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000,
}  # fmt: skip


def _opt(size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": size,
        "word_embed_proj_dim": size,
        "ffn_dim": 4 * size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }


_SD1_TEXT = {
    "model_type": "clip_text_model", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
}  # fmt: skip
_SD2_TEXT = {
    "model_type": "clip_text_model", "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 23, "hidden_act": "gelu",
}  # fmt: skip

GPT2_LARGE = {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20}

PUBLISHED = {
    "LLaMA-7B": Published({"model_type": "llama"}, 32, 6_738_415_616, LLAMA_KEYS),
    "GPT-J-6B": Published({"model_type": "gptj"}, 28, 6_050_882_784, GPTJ_KEYS),
    "GPT2-Large": Published(GPT2_LARGE, 36, 774_030_080, GPT2_KEYS),
    "OPT-2.7B": Published(_opt(2560, 32, 32), 32, 2_651_596_800, OPT_KEYS),
    "OPT-13B": Published(_opt(5120, 40, 40), 40, 12_853_473_280, OPT_KEYS),
    "T5-XXL": Published(_T5_11B, 24, 11_307_321_344, _t5_keys("wi wo")),
    "Flan-T5-XL": Published(_FLAN_XL, 24, 2_849_757_184, _t5_keys("wi_0 wi_1 wo", "lm_head.weight")),
    "BART-Large": Published({"model_type": "bart"}, 12, 406_291_456, BART_KEYS),
    "RoBERTa-Large": Published(_ROBERTA_LARGE, 24, 355_359_744, ROBERTA_KEYS),
    "ViT-Large": Published(_VIT_LARGE, 24, 304_326_632, VIT_KEYS),
    "Stable Diffusion 1.5, text": Published(_SD1_TEXT, 12, 123_060_480, CLIP_TEXT_KEYS),
    "Stable Diffusion 2.1, text": Published(_SD2_TEXT, 23, 340_387_840, CLIP_TEXT_KEYS),
    "OPT-66B": Published(_opt(9216, 64, 72), 64, 65_719_701_504, OPT_KEYS),
}
