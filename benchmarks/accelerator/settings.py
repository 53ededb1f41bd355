"""What is measured on an accelerator: models, and a setting for each row of the
table."""

import dataclasses
from typing import Any, Literal, TypeAlias

import redco_eqx_models as models

Part: TypeAlias = Literal[
    "llama", "paper", "fit", "generation", "loading", "saving", "tests"
]
Precision: TypeAlias = Literal["highest", "float32", "mixed", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row.

    - `library`: whose program it is.
    - `model`: a name in `MODELS`, or in `SMALL`.
    - `precision`: `float32`, whose products are in TF32 on a GPU that has it, but for
        `highest`; `mixed`, products in bfloat16 over float32 parameters and moments;
        `bfloat16`, all three of them.
    - `remat`: what the backward pass computes again, as for `scan_layers`; torch has
        `none` and `full`.
    - `attention`: `auto`, what the library chooses by itself; or an implementation by
        its name there.
    - `chunks`: in how many parts the cross-entropy takes the length.
    - `batch`, `length`: rows, and tokens in each that are trained on (generated, for
        `generation`).
    - `limit`: seconds that its process may take.
    """

    part: Part
    library: Literal["redco_eqx", "plain JAX", "torch", "torch.compile", "transformers"]
    model: str
    precision: Precision = "bfloat16"
    remat: Literal["none", "row_out", "full"] = "full"
    attention: Literal["auto", "xla", "cudnn", "eager", "sdpa", "flash_attention_2"] = (
        "auto"
    )
    chunks: int = 1
    batch: int = 4
    length: int = 4096
    limit: int = 150


def _opt(
    size: int, num_layers: int, num_heads: int, **options: Any
) -> models.OPTConfig:
    return models.OPTConfig(
        hidden_size=size,
        ffn_dim=4 * size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        dropout=0.0,
        **options,
    )


MODELS: dict[str, Any] = {
    "LLaMA-7B": models.LlamaConfig(max_position_embeddings=4096),
    "LLaMA-1B": models.LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        max_position_embeddings=4096,
    ),
    "OPT-2.7B": _opt(2560, 32, 32, word_embed_proj_dim=2560),
    "GPT-J-6B": models.GPTJConfig(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
}
_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
SMALL: dict[str, Any] = {
    "LLaMA-7B": models.LlamaConfig(**_TINY, intermediate_size=176),
    "LLaMA-1B": models.LlamaConfig(**_TINY, intermediate_size=176),
    "OPT-2.7B": _opt(
        64, 2, 4, vocab_size=256, max_position_embeddings=128, word_embed_proj_dim=64
    ),
    "GPT-J-6B": models.GPTJConfig(
        vocab_size=256,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=128,
        rotary_dim=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
FAMILIES: dict[str, Any] = {
    "llama": models.LlamaForCausalLM,
    "opt": models.OPTForCausalLM,
    "gptj": models.GPTJForCausalLM,
}

TORCH: tuple[dict[str, Any], ...] = (
    {"library": "torch", "attention": "eager"},
    {"library": "torch", "attention": "sdpa"},
    {"library": "torch", "attention": "flash_attention_2"},
    {"library": "torch.compile", "attention": "sdpa", "limit": 240},
)


def _llama() -> list[Setting]:
    ours: list[dict[str, Any]] = [
        {},
        {"remat": "row_out"},
        {"remat": "none", "batch": 2},
        {"batch": 8},
        {"attention": "xla"},
        {"chunks": 8},
        {"precision": "mixed", "batch": 1, "chunks": 8},
    ]
    rows = [Setting("llama", "redco_eqx", "LLaMA-7B", **options) for options in ours]
    rows.append(Setting("llama", "plain JAX", "LLaMA-7B"))
    return rows + [Setting("llama", model="LLaMA-7B", **options) for options in TORCH]


def _paper() -> list[Setting]:
    rows = []
    for model in ("OPT-2.7B", "GPT-J-6B"):
        for precision in ("float32", "mixed"):
            common: dict[str, Any] = {
                "precision": precision,
                "batch": 8,
                "length": 1024,
            }
            rows.append(Setting("paper", "redco_eqx", model, **common))
            # Flash attention has no float32.
            others = [
                x
                for x in TORCH
                if precision == "mixed" or x["attention"] != "flash_attention_2"
            ]
            rows += [
                Setting("paper", model=model, **common, **options) for options in others
            ]
    return rows


SETTINGS: list[Setting] = [
    *_llama(),
    *_paper(),
    Setting("fit", "redco_eqx", "LLaMA-1B", length=2048, remat="none"),
    Setting("generation", "redco_eqx", "LLaMA-1B", batch=8, length=128),
    Setting(
        "generation", "transformers", "LLaMA-1B", batch=8, length=128, attention="sdpa"
    ),
    Setting("loading", "redco_eqx", "LLaMA-7B", limit=300),
    Setting("loading", "transformers", "LLaMA-7B", limit=300),
    Setting("saving", "redco_eqx", "LLaMA-1B", batch=4, length=2048, limit=300),
    Setting("tests", "redco_eqx", "tests", precision="highest", limit=580),
    Setting("tests", "redco_eqx", "parity", precision="highest", limit=580),
    Setting("tests", "redco_eqx", "parity", precision="float32", limit=580),
]


def small(setting: Setting) -> Setting:
    """The same at a size that a CPU runs in seconds."""
    batch = min(setting.batch, 2)
    return dataclasses.replace(
        setting, batch=batch, length=min(setting.length, 64), limit=120
    )


def flops_per_token(num_parameters: int, config: Any, length: int) -> float:
    """6N + 12 L d s (PaLM, Chowdhery et al. 2022, appendix B): a product's two
    operations for each pair of numbers, forward and twice backward; all pairs of
    tokens, although half of them are masked, and nothing for what is computed again."""
    return (
        6 * num_parameters
        + 12 * config.num_layers * config.entry("hidden_size") * length
    )
