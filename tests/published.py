"""The paper's models at full size: their configurations and what they hold."""

from typing import Any, NamedTuple


class Published(NamedTuple):
    """`keys` are patterns of the arrays in its file: `{i}` numbers the layers."""

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


def _opt(size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "hidden_size": size,
        "word_embed_proj_dim": size,
        "ffn_dim": 4 * size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }


GPT2_LARGE = {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20}

PUBLISHED = {
    "LLaMA-7B": Published({"model_type": "llama"}, 32, 6_738_415_616, LLAMA_KEYS),
    "GPT-J-6B": Published({"model_type": "gptj"}, 28, 6_050_882_784, GPTJ_KEYS),
    "GPT2-Large": Published(GPT2_LARGE, 36, 774_030_080, GPT2_KEYS),
    "OPT-2.7B": Published(_opt(2560, 32, 32), 32, 2_651_596_800, OPT_KEYS),
    "OPT-13B": Published(_opt(5120, 40, 40), 40, 12_853_473_280, OPT_KEYS),
    "OPT-66B": Published(_opt(9216, 64, 72), 64, 65_719_701_504, OPT_KEYS),
}
