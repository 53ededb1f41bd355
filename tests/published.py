"""The paper's models at full size: their configurations, layers and numbers of parameters."""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """Buffers are not among the parameters."""

    config: dict[str, Any]
    num_layers: int
    num_parameters: int


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
    "LLaMA-7B": Published({"model_type": "llama"}, 32, 6_738_415_616),
    "GPT-J-6B": Published({"model_type": "gptj"}, 28, 6_050_882_784),
    "GPT2-Large": Published(GPT2_LARGE, 36, 774_030_080),
    "OPT-2.7B": Published(_opt(2560, 32, 32), 32, 2_651_596_800),
    "OPT-13B": Published(_opt(5120, 40, 40), 40, 12_853_473_280),
    "T5-XXL": Published(_T5_11B, 24, 11_307_321_344),
    "Flan-T5-XL": Published(_FLAN_XL, 24, 2_849_757_184),
    "BART-Large": Published({"model_type": "bart"}, 12, 406_291_456),
    "RoBERTa-Large": Published(_ROBERTA_LARGE, 24, 355_359_744),
    "ViT-Large": Published(_VIT_LARGE, 24, 304_326_632),
    "Stable Diffusion 1.5, text": Published(_SD1_TEXT, 12, 123_060_480),
    "Stable Diffusion 2.1, text": Published(_SD2_TEXT, 23, 340_387_840),
    "OPT-66B": Published(_opt(9216, 64, 72), 64, 65_719_701_504),
}
