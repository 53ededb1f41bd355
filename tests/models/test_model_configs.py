"""`config.json` of every family: read, written, and refused where logits would be wrong."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from test_models import CONFIGS, make

from redco_eqx.models import GPT2Config, GPTJConfig, LlamaConfig
from redco_eqx.models._blocks.rope import Rope
from redco_eqx.models._families.registry import FAMILIES, read_family

LLAMA3 = {
    "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip


@pytest.mark.parametrize("name", list(CONFIGS))
def test_what_is_written_is_read_again(name):
    config, _ = read_family({**CONFIGS[name], "eos_token_id": [2, 3], "prefix": "</s>"})
    entries = json.loads(json.dumps(config.to_json()))
    assert entries["prefix"] == "</s>"
    assert entries["eos_token_id"] == [2, 3]
    assert entries["model_type"] == CONFIGS[name]["model_type"]
    assert read_family(entries)[0] == config
    hash(config)


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_an_empty_file_is_the_familys_default(model_type):
    config, _ = read_family({"model_type": model_type})
    assert config.head_size * getattr(config, "num_attention_heads", config.num_layers) > 0
    assert config == FAMILIES[model_type][0]()


def test_both_spellings_of_rope_are_one():
    old = {"rope_theta": 500, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    new = {"rope_parameters": {**LLAMA3, "rope_theta": 500}}
    rope = Rope.from_json(old)
    assert rope == Rope.from_json(new) == Rope.from_json(rope.to_json())
    assert rope.theta == 500.0
    assert rope.factor == 8.0
    assert Rope.from_json({"rope_scaling": None}) == Rope()


def test_scaled_frequencies():
    plain = Rope().frequencies(64)
    np.testing.assert_allclose(plain[[0, 16]], [1, 0.01])
    np.testing.assert_allclose(Rope(rope_type="linear", factor=4.0).frequencies(64), plain / 4)
    scaled = Rope.from_json(
        {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}
    ).frequencies(64)
    wavelength = 2 * np.pi / plain
    short, long = wavelength < 16, wavelength > 64
    assert short.any()
    assert long.any()
    assert (~short & ~long).any()
    np.testing.assert_allclose(scaled[short], plain[short])
    np.testing.assert_allclose(scaled[long], plain[long] / 8)
    between = (scaled / plain)[~short & ~long]
    assert ((between > 1 / 8) & (between < 1)).all()
    assert (np.diff(scaled) < 0).all()


def test_entries_under_their_other_names():
    config, _ = read_family({"model_type": "gpt2", "hidden_size": 64, "num_attention_heads": 8, "n_layer": 3})
    assert (config.n_embd, config.n_head, config.n_layer) == (64, 8, 3)
    assert "hidden_size" not in config.to_json()
    both, _ = read_family({"model_type": "gpt2", "hidden_size": 64, "n_embd": 96})
    assert both.n_embd == 96


def test_whole_numbers_are_floats_too():
    config, _ = read_family({"model_type": "gpt2", "resid_pdrop": 0, "initializer_range": 1})
    assert isinstance(config.resid_pdrop, float)
    assert isinstance(config.initializer_range, float)


REFUSED = {
    "rope type of transformers 4": (
        {"model_type": "llama", "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "rope type 'yarn'",
    ),
    **{
        f"rope type {kind}": (
            {"model_type": "llama", "rope_parameters": {"rope_type": kind, "factor": 2.0}},
            f"rope type '{kind}' is not supported, only default, linear, llama3",
        )
        for kind in ("dynamic", "longrope", "mrope")
    },
    "rope for each kind of layer": (
        {"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters=.* another for each kind of layer",
    ),
    "rope that is no object": ({"model_type": "llama", "rope_scaling": "linear"}, "rope_scaling='linear'"),
    "rope that is no number": (
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": "2"}},
        "factor='2', but it must be a positive number",
    ),
    "rope of base 0": ({"model_type": "mistral", "rope_theta": 0}, "rope_theta=0, but it must be a positive"),
    "rope without its numbers": (
        {"model_type": "llama", "rope_parameters": {"rope_type": "llama3", "factor": 2.0}},
        "needs low_freq_factor, high_freq_factor, original_max_position_embeddings",
    ),
    "part of a head": (
        {"model_type": "llama", "rope_parameters": {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor is not supported",
    ),
    "sliding window of Qwen": ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
    "activation": ({"model_type": "gpt2", "activation_function": "mish"}, "activation_function='mish'"),
    "scale by layer": (
        {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx=True is not supported",
    ),
    "cross-attention": ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention=True"),
    "heads of GPT-2": ({"model_type": "gpt2", "n_embd": 30, "n_head": 4}, "n_embd=30 .* n_head=4"),
    "no heads": ({"model_type": "gptj", "n_head": 0}, "n_head=0, but it must be positive"),
    "heads of no size": ({"model_type": "llama", "head_dim": 0}, "head_dim=0, but it must be positive"),
    "no number": (
        {"model_type": "llama", "rms_norm_eps": float("nan")},
        "rms_norm_eps=nan, but it must be finite",
    ),
    "end tokens in words": (
        {"model_type": "llama", "eos_token_id": ["2"]},
        r"eos_token_id=\['2'\], but it must be: int or list of int or null",
    ),
    "another family": ({"model_type": "bloom"}, "model_type='bloom' is not known, .* family="),
    "heads of OPT": (
        {"model_type": "opt", "hidden_size": 30, "num_attention_heads": 4},
        "hidden_size=30 .* num_attention_heads=4",
    ),
    "heads of LLaMA": (
        {"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4},
        "hidden_size=30 .* num_attention_heads=4",
    ),
    "key/value heads": (
        {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 3},
        "num_attention_heads=8 .* num_key_value_heads=3",
    ),
    "odd rotary": ({"model_type": "gptj", "rotary_dim": 5}, "rotary_dim=5, but it must be even"),
    "wide rotary": ({"model_type": "gptj", "rotary_dim": 512}, "at most the size of a head, 256"),
    "tied GPT-J": ({"model_type": "gptj", "tie_word_embeddings": True}, "tie_word_embeddings=True"),
    "a string": ({"model_type": "gpt2", "n_layer": "12"}, "n_layer='12', but it must be: int"),
    "null": ({"model_type": "gpt2", "n_head": None}, "n_head=None, but it must be: int"),
    "true": ({"model_type": "gpt2", "n_embd": True}, "n_embd=True, but it must be: int"),
    "a float": ({"model_type": "opt", "word_embed_proj_dim": 1.5}, "=1.5, but it must be: int or null"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_not_supported_is_refused(name):
    entries, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"^(config\.json|\w+Config): .*{message}"):
        read_family(entries)


@pytest.mark.parametrize(
    ("make_config", "message"),
    [
        (lambda: GPT2Config(n_embd=30, n_head=4), "GPT2Config: n_embd=30 is not a multiple of n_head=4"),
        (lambda: LlamaConfig(hidden_act="mish"), "LlamaConfig: hidden_act='mish' is not supported"),
        (lambda: GPTJConfig(rotary_dim=7), "GPTJConfig: rotary_dim=7"),
    ],
)
def test_a_configuration_made_by_hand_is_checked_too(make_config, message):
    with pytest.raises(ValueError, match=message):
        make_config()


def test_tokens_that_do_not_fit_are_refused():
    model, ids = make("gpt2"), jnp.zeros((2, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 5\).*\(2, 4\)"):
        model(ids, attention_mask=jnp.ones((2, 5)))
    with pytest.raises(ValueError, match="17 tokens a row, but the model has a table of 16 positions"):
        model(jnp.zeros((2, 17), jnp.int32))
