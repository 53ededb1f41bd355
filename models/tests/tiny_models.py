"""Small models of every family, with random numbers for their arrays, and inputs for
them."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from helpers import filled

import redco_eqx_models as models
from redco_eqx import from_arrays, to_arrays
from redco_eqx.layers import cross_entropy
from redco_eqx_models._families.registry import read_family
from redco_eqx_models._files.names import entries_of

VOCABULARY, LENGTH, SIDE = 64, 8, 8

# The scaling of LLaMA 3.1, by a shorter text.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}
_HIDDEN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_HIDDEN, "vocab_size": VOCABULARY}
_OPT = {"model_type": "opt", **_TEXT, "ffn_dim": 64, "max_position_embeddings": 16}
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
_LLAMA = {"model_type": "llama", **_TEXT, **_HEADS, "intermediate_size": 48}
_WINDOW = {**_LLAMA, "sliding_window": 3}
_BERT = {
    "model_type": "bert",
    **_TEXT,
    "intermediate_size": 64,
    "max_position_embeddings": 20,
}
_ROBERTA = {**_BERT, "model_type": "roberta"}
_VIT = {
    "model_type": "vit",
    **_HIDDEN,
    "intermediate_size": 64,
    "image_size": SIDE,
    "patch_size": 4,
}
_T5 = {
    "model_type": "t5",
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
}


def _like(base: dict[str, Any], model_type: str, **changes: Any) -> dict[str, Any]:
    return {**base, "model_type": model_type, **changes}


DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": _like(_GPT, "gpt2"),
    "gptj": _like(_GPT, "gptj", rotary_dim=4),
    "gpt_neox": _like(_TEXT, "gpt_neox", intermediate_size=64),
    "opt_125m": _OPT,
    "opt_350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "llama": _LLAMA,
    "mistral": _like(_WINDOW, "mistral"),
    "qwen2": _like(_LLAMA, "qwen2", tie_word_embeddings=True),
    "qwen3": _like(_LLAMA, "qwen3"),
    "olmo2": _like(_LLAMA, "olmo2"),
    "gemma2": _like(_WINDOW, "gemma2"),
    "gemma3": _like(
        _WINDOW, "gemma3_text", sliding_window_pattern=2, final_logit_softcapping=2.0
    ),
    "mixtral": _like(_WINDOW, "mixtral", num_local_experts=4),
    "qwen3_moe": _like(
        _LLAMA,
        "qwen3_moe",
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=3,
    ),
    "phi3": _like(_LLAMA, "phi3", attention_bias=True),
    "smollm3": _like(
        _LLAMA, "smollm3", no_rope_layer_interval=2, tie_word_embeddings=False
    ),
}
ENCODERS: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "t5_gated": _like(
        _T5,
        "t5",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        scale_decoder_outputs=False,
    ),
    "bart": {
        "model_type": "bart",
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "max_position_embeddings": 16,
    },
    "bert": _BERT,
    "bert_masked": {**_BERT, "architectures": ["BertForMaskedLM"]},
    "bert_labels": {
        **_BERT,
        "architectures": ["BertForSequenceClassification"],
        "num_labels": 4,
    },
    "roberta_masked": {**_ROBERTA, "architectures": ["RobertaForMaskedLM"]},
    "roberta_labels": {
        **_ROBERTA,
        "architectures": ["RobertaForSequenceClassification"],
        "num_labels": 1,
    },
    "clip": _like(_BERT, "clip_text_model"),
    "vit_labels": {
        **_VIT,
        "architectures": ["ViTForImageClassification"],
        "num_labels": 4,
    },
    "vit_gpt2": {
        "model_type": "vision-encoder-decoder",
        "encoder": _VIT,
        "decoder": DECODERS["gpt2"],
    },
}
_STAGES = {"block_out_channels": [16, 32], "layers_per_block": 1, "norm_num_groups": 8}
IMAGES: dict[str, dict[str, Any]] = {
    "unet": {
        "_class_name": "UNet2DConditionModel",
        **_STAGES,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "cross_attention_dim": 24,
        "attention_head_dim": 4,
        "transformer_layers_per_block": 1,
    },
    "vae": {
        "_class_name": "AutoencoderKL",
        **_STAGES,
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    },
}
IMAGES["unet_linear"] = {**IMAGES["unet"], "use_linear_projection": True}
CONFIGS = {**DECODERS, **ENCODERS, **IMAGES}


def shapes(raw: dict[str, Any], **options: Any) -> Any:
    """The abstract model of a configuration."""
    config, kind = read_family(raw)
    return eqx.filter_eval_shape(
        lambda key: kind(config, key=key, **options), jax.random.key(0)
    )


def abstract(name: str, *, stacked: bool = False, **changes: Any) -> Any:
    return shapes({**CONFIGS[name], **changes}, stacked=stacked)


def make(
    name: str, *, stacked: bool = False, dtype: Any = jnp.float32, **changes: Any
) -> Any:
    """A model in which all arrays count, also biases, and in which images keep their
    size."""
    model = filled(abstract(name, stacked=stacked, **changes), dtype, 0)
    return jax.tree.map(
        lambda x: x / x[0, ..., 0].size ** 0.5 if jnp.ndim(x) == 4 else x, model
    )


def telling(
    name: str, *, stacked: bool = True, dtype: Any = jnp.float32, **changes: Any
) -> Any:
    """A model whose matrices are large, so that what it says depends on every token
    before."""

    def scaled(path: Any, x: Any) -> Any:
        where = jax.tree_util.keystr(path)
        if not eqx.is_array(x):
            return x
        if where.endswith("bias"):
            return 0.2 * x
        return 1 + x if "norm" in where or ".ln_" in where else 2 * x

    return jax.tree_util.tree_map_with_path(
        scaled, make(name, stacked=stacked, dtype=dtype, **changes)
    )


def restack(model: Any, *, stacked: bool = True, **options: Any) -> Any:
    """The same arrays (layers in a list) in a model of other options."""
    make = functools.partial(type(model), model.config, stacked=stacked, **options)
    arrays = to_arrays(model)
    shape = eqx.filter_eval_shape(lambda key: make(key=key), jax.random.key(0))
    pieces = {
        key: arrays[e.path][index] for e in entries_of(model) for index, key in e.places
    }
    found = {
        e.path: np.stack([pieces[k] for k in e.keys]).reshape(e.shape)
        for e in entries_of(shape)
    }
    return from_arrays(shape, jax.tree.map(jnp.asarray, found))


def changed(model: Any, cls: Any = None, **fields: Any) -> Any:
    """A copy with other fields, of another class if one is given."""
    new = object.__new__(cls or type(model))
    for field in dataclasses.fields(model):
        object.__setattr__(
            new, field.name, fields.get(field.name, getattr(model, field.name))
        )
    return new


def inputs(name: str, num_rows: int = 2) -> tuple[jax.Array, ...]:
    """The arguments of a model: what it reads, and, of an encoder-decoder, the text to
    write."""
    generator = np.random.default_rng(0)
    text, written = jnp.asarray(
        generator.integers(2, VOCABULARY, (2, num_rows, LENGTH)), jnp.int32
    )
    if name == "vae":
        return (
            jnp.asarray(
                generator.uniform(-1, 1, (num_rows, 3, SIDE, SIDE)), jnp.float32
            ),
        )
    sizes = ((num_rows, channels, SIDE, SIDE) for channels in (3, 4))
    image, latent = (
        jnp.asarray(generator.normal(size=size), jnp.float32) for size in sizes
    )
    if name in IMAGES:
        times = jnp.asarray(generator.integers(0, 1000, num_rows), jnp.int32)
        return (
            latent,
            times,
            jnp.asarray(generator.normal(size=(num_rows, 7, 24)), jnp.float32),
        )
    read = image if name.startswith("vit") else text
    return (read, written) if name.startswith(("t5", "bart", "vit_gpt2")) else (read,)


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    """The cross-entropy of a text; squares for other models: of an autoencoder with the
    error of its images."""
    if isinstance(model, models.AutoencoderKL):
        mean, log_variance = model.encode(*batch)
        kl = jnp.mean(jnp.square(mean) + jnp.exp(log_variance) - log_variance)
        images = model.decode(mean + 0.5 * jnp.exp(log_variance / 2))
        return jnp.mean(jnp.square(images - batch[0])) + 0.01 * kl
    if isinstance(model, models.EncoderDecoder):
        hidden = model.hidden_states(*batch, key=key)
        text = batch[1]
        return cross_entropy(
            hidden, model.head, text, sequence_parallel=model.sequence_parallel
        ).value
    if isinstance(model, models.MixtralForCausalLM):
        hidden, balance = model.hidden_states_and_balance(*batch, key=key)
        one = cross_entropy(
            hidden, model.head, *batch, sequence_parallel=model.sequence_parallel
        )
        return one.value + 0.1 * balance
    if isinstance(model, models.DecoderLM):
        hidden, _ = model.hidden_states(batch[0][:, :-1], key=key)
        return cross_entropy(hidden, model.head, batch[0][:, 1:]).value
    return jnp.mean(jnp.square(model(*batch, key=key)))
