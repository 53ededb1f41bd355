"""Published models by the entries of their `config.json`, written by hand. No file is
read, no weight made.

`LIST` has the models of autoparallel's `examples/run_hf_eval.sh`, in its order, and the
two that the script names as failing and leaves out. `FAMILIES` has five more. Entries
on which no layout depends are left out.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import applicability
import equinox as eqx
import experts
import jax
import jax.numpy as jnp
from foreign_models import BUILDERS

import redco_eqx as rx
from redco_eqx_models._families.registry import read_family

ROWS, LENGTH = 16, 128


@dataclasses.dataclass(frozen=True)
class Text(applicability.Model):
    """A published model of texts, with the loss of its kind."""

    @property
    def is_masked(self) -> bool:
        """True if it predicts tokens in their places, from all others."""
        return self.kind.__name__.endswith("MaskedLM")

    def make(self, key: Any, **options: Any) -> Any:
        # With the stream between layers whole, as predictions have it. One that is
        # split sends the same, and the output of the last layer once more.
        return super().make(key, **{"sequence_parallel": False, **options})

    def batch(self, size: int, length: int) -> Any:
        tokens = jax.ShapeDtypeStruct((size, length), jnp.int32)
        return (
            {"tokens": tokens, "labels": tokens}
            if self.is_masked
            else super().batch(size, length)
        )

    def loss(self, model: Any, batch: Any, key: Any) -> Any:
        if self.is_masked:
            hidden = model.hidden_states(batch["tokens"])
            return rx.layers.cross_entropy(hidden, model.head, batch["labels"])
        if hasattr(model, "hidden_states_and_balance"):
            return experts.loss_fn(model, batch, key)
        return super().loss(model, batch, key)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A model, abstract, with its loss and batch."""

    make: Callable[[Any], Any]
    loss: Callable[..., Any]
    batch: Any

    @property
    def num_parameters(self) -> int:
        model = eqx.filter_eval_shape(self.make, jax.random.key(0))
        return sum(
            x.size
            for x in rx.to_arrays(model).values()
            if jnp.issubdtype(x.dtype, jnp.floating)
        )


def _gpt2(dim: int, layers: int, heads: int, positions: int = 1024) -> dict[str, Any]:
    sizes = {
        "n_embd": dim,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
    }
    return {"model_type": "gpt2", "vocab_size": 50257, **sizes}


def _by_hidden(kind: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """`sizes`: of a stream, inside an MLP, of layers, heads and words."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "vocab_size")
    return {"model_type": kind, **dict(zip(names, sizes, strict=True)), **more}


def _t5(dim: int, inner: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {
        "d_model": dim,
        "d_kv": 64,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
    }
    return {"model_type": "t5", "vocab_size": 32128, **sizes}


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
QWEN = {"max_position_embeddings": 32768, "rope_theta": 1e6}
FALCON = {"num_key_value_heads": 4, "head_dim": 256, **UNTIED}

LIST: dict[str, dict[str, Any]] = {
    "openai-community/gpt2-medium": _gpt2(1024, 24, 16),
    "openai-community/gpt2-xl": _gpt2(1600, 48, 25),
    "EleutherAI/gpt-neo-2.7B": {"model_type": "gpt_neo"},
    "EleutherAI/gpt-j-6b": {
        "model_type": "gptj",
        "vocab_size": 50400,
        "n_embd": 4096,
        "n_layer": 28,
        "n_head": 16,
        "rotary_dim": 64,
    },
    "EleutherAI/pythia-160m": _by_hidden("gpt_neox", (768, 3072, 12, 12, 50304)),
    "EleutherAI/pythia-6.9b": _by_hidden("gpt_neox", (4096, 16384, 32, 32, 50432)),
    "bigscience/bloom-560m": {"model_type": "bloom"},
    "bigscience/bloom-7b1": {"model_type": "bloom"},
    "cerebras/Cerebras-GPT-1.3B": _gpt2(2048, 24, 16, 2048),
    "Qwen/Qwen2-1.5B": _by_hidden(
        "qwen2", (1536, 8960, 28, 12, 151936), num_key_value_heads=2, **TIED, **QWEN
    ),
    "Qwen/Qwen2.5-3B": _by_hidden(
        "qwen2", (2048, 11008, 36, 16, 151936), num_key_value_heads=2, **TIED, **QWEN
    ),
    "Qwen/Qwen2.5-7B": _by_hidden(
        "qwen2", (3584, 18944, 28, 28, 152064), num_key_value_heads=4, **UNTIED, **QWEN
    ),
    "microsoft/phi-1": {"model_type": "phi"},
    "microsoft/phi-2": {"model_type": "phi"},
    "HuggingFaceTB/SmolLM2-135M": _by_hidden(
        "llama", (576, 1536, 30, 9, 49152), num_key_value_heads=3, **TIED
    ),
    "HuggingFaceTB/SmolLM2-1.7B": _by_hidden(
        "llama", (2048, 8192, 24, 32, 49152), num_key_value_heads=32, **TIED
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _by_hidden(
        "llama", (2048, 5632, 22, 32, 32000), num_key_value_heads=4, **UNTIED
    ),
    "stabilityai/stablelm-2-1_6b": {"model_type": "stablelm"},
    "tiiuae/Falcon3-3B-Base": _by_hidden(
        "llama", (3072, 9216, 22, 12, 131072), **FALCON
    ),
    "tiiuae/Falcon3-7B-Base": _by_hidden(
        "llama", (3072, 23040, 28, 12, 131072), **FALCON
    ),
    "mistralai/Mistral-7B-v0.1": _by_hidden(
        "mistral",
        (4096, 14336, 32, 32, 32000),
        num_key_value_heads=8,
        sliding_window=4096,
    ),
    "google-t5/t5-small": _t5(512, 2048, 6, 8),
    "google-t5/t5-base": _t5(768, 3072, 12, 12),
    "google-bert/bert-base-uncased": _by_hidden(
        "bert", (768, 3072, 12, 12, 30522), architectures=["BertForMaskedLM"]
    ),
    "FacebookAI/roberta-base": _by_hidden(
        "roberta",
        (768, 3072, 12, 12, 50265),
        architectures=["RobertaForMaskedLM"],
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    "distilbert/distilbert-base-uncased": {"model_type": "distilbert"},
    "tiiuae/falcon-7b": {"model_type": "falcon"},
    "RWKV/rwkv-4-169m-pile": {"model_type": "rwkv"},
    "facebook/opt-350m": {
        "model_type": "opt",
        "hidden_size": 1024,
        "word_embed_proj_dim": 512,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 50272,
        "do_layer_norm_before": False,
    },
    "facebook/bart-base": {
        "model_type": "bart",
        "d_model": 768,
        "encoder_layers": 6,
        "decoder_layers": 6,
        "vocab_size": 50265,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
        "max_position_embeddings": 1024,
    },
}

FAMILIES: dict[str, dict[str, Any]] = {
    "google/gemma-2-2b": _by_hidden(
        "gemma2",
        (2304, 9216, 26, 8, 256000),
        num_key_value_heads=4,
        head_dim=256,
        sliding_window=4096,
    ),
    "google/gemma-3-1b-pt": _by_hidden(
        "gemma3_text",
        (1152, 6912, 26, 4, 262144),
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        sliding_window_pattern=6,
    ),
    "mistralai/Mixtral-8x7B-v0.1": _by_hidden(
        "mixtral", (4096, 14336, 32, 32, 32000), num_key_value_heads=8
    ),
    "Qwen/Qwen3-30B-A3B": _by_hidden(
        "qwen3_moe",
        (2048, 6144, 48, 32, 151936),
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    "EleutherAI/gpt-neox-20b": _by_hidden("gpt_neox", (6144, 24576, 44, 64, 50432)),
}

GROUPS: dict[str, tuple[str, ...]] = {
    "autoparallel's list": tuple(LIST),
    "RedCoast's models": tuple(applicability.MODELS),
    "five more families": tuple(FAMILIES),
    "packages of Equinox models": tuple(BUILDERS),
}


def open_model(name: str, rows: int = ROWS, length: int = LENGTH) -> Opened:
    """Opens a model by its name. Raises `ValueError` with the reason if the library
    does not know its kind, and `ImportError` if its package is not installed."""
    if name in BUILDERS:
        model = BUILDERS[name](True)
        return Opened(model.make, model.loss, model.batch)
    if name in applicability.MODELS:
        known = applicability.MODELS[name]
        text = Text(known.kind, known.config)
    else:
        config, kind = read_family((LIST | FAMILIES)[name])
        text = Text(kind, config)
    return Opened(text.make, text.loss, text.batch(rows, length))
