"""Directories unlike those that today's transformers writes by default, held against it all the same."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from comparison import TOLERANCE, distance, logits, texts, torch_logits
from references import REFERENCES, VOCABULARY
from safetensors.numpy import load_file, save_file

from redco_eqx import to_arrays
from redco_eqx.models import (
    GPT2Config,
    GPTJConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
    VisionEncoderDecoderConfig,
    load_pretrained,
    save_pretrained,
)
from redco_eqx.models._families.registry import FAMILIES

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_an_entry_that_is_left_out_means_the_same(model_type):
    ours = FAMILIES[model_type][0]()
    if isinstance(ours, VisionEncoderDecoderConfig):
        pytest.skip("transformers has no default encoder and decoder; those that are here are tested apart")
    theirs = transformers.AutoConfig.for_model(model_type)
    for field in dataclasses.fields(ours):
        value = getattr(ours, field.name)
        # What is null follows from other entries, which `test_configurations_made_here_open_there` holds.
        if value is not None and hasattr(theirs, field.name):
            assert value == getattr(theirs, field.name), field.name
    if hasattr(ours, "rope"):
        expected = {"rope_type": ours.rope.rope_type, "rope_theta": ours.rope.theta}
        assert {"partial_rotary_factor": 1.0, **theirs.rope_parameters} == {
            "partial_rotary_factor": 1.0,
            **expected,
        }


_GPT: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
_OTHERS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
_LLAMA: dict[str, Any] = {**_OTHERS, "intermediate_size": 48}
MADE_HERE = {
    "gpt2": lambda: GPT2Config(**_GPT),
    "gptj": lambda: GPTJConfig(**_GPT, rotary_dim=8),
    "opt": lambda: OPTConfig(**_OTHERS, ffn_dim=48),
    "llama": lambda: LlamaConfig(**_LLAMA),
    "mistral": lambda: MistralConfig(**_LLAMA, num_key_value_heads=None, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**_LLAMA),
    "qwen3": lambda: Qwen3Config(**_LLAMA, head_dim=8),
    "olmo2": lambda: Olmo2Config(**_LLAMA),
    "phi3": lambda: Phi3Config(**_LLAMA, pad_token_id=0),
    "smollm3": lambda: SmolLM3Config(**_LLAMA, num_key_value_heads=None, pad_token_id=0),
}


@pytest.mark.parametrize("model_type", list(MADE_HERE))
def test_configurations_made_here_open_there(model_type, tmp_path):
    # With as much left to defaults as there is, null included.
    config = MADE_HERE[model_type]()
    save_pretrained(FAMILIES[model_type][1](config, key=jax.random.key(0)), tmp_path)
    model: Any = load_pretrained(tmp_path)
    there: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids, _ = texts()
    expected = torch_logits(there.eval(), ids, counts_positions=True)
    assert np.abs(logits(model, ids) - expected).max() <= TOLERANCE * expected.std()


@pytest.mark.parametrize("name", ["gpt2", "opt_125m", "opt_350m", "llama_tied", "qwen2"])
def test_files_of_the_bare_model_are_read(name, reference, tmp_path):
    reference(name).base_model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    model = load_pretrained(tmp_path)
    assert not stored.keys() & to_arrays(model).keys()
    ids, _ = texts()
    expected = torch_logits(reference(name), ids, counts_positions=True)
    assert distance(logits(model, ids), expected) <= TOLERANCE


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_files_that_transformers_splits_are_read(name, stacked, reference, tmp_path):
    reference(name).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids, _ = texts()
    expected = torch_logits(reference(name), ids, counts_positions=True)
    assert distance(logits(load_pretrained(tmp_path, stacked=stacked), ids), expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "opt_350m", "llama_tied"])
def test_a_tied_head_without_its_table_is_the_table(name, directory, reference, tmp_path):
    # As `safetensors.torch.save_model` writes it, which keeps the first of two names.
    (tmp_path / "config.json").write_bytes((directory(name) / "config.json").read_bytes())
    arrays = load_file(directory(name) / WEIGHTS)
    (table,) = (key for key in arrays if key.endswith(("wte.weight", "embed_tokens.weight")))
    arrays["lm_head.weight"] = arrays.pop(table)
    save_file(arrays, tmp_path / WEIGHTS, metadata={"format": "pt"})
    ids, _ = texts()
    expected = torch_logits(reference(name), ids, counts_positions=True)
    assert distance(logits(load_pretrained(tmp_path), ids), expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "gptj", "opt_125m", "llama_llama3", "mistral"])
def test_half_precision_is_no_worse_than_there(name, dtype, reference, tmp_path):
    # Both are compared with float32 arithmetic on the same rounded weights.
    there = REFERENCES[name].make().to(dtype)
    there.save_pretrained(tmp_path)
    ids, mask = texts("left")
    counts = REFERENCES[name].counts_positions
    halves = torch_logits(there, ids, mask, counts_positions=counts)
    expected = torch_logits(there.float(), ids, mask, counts_positions=counts)
    found = logits(load_pretrained(tmp_path), ids, mask)
    assert found.dtype == jnp.dtype(str(dtype).removeprefix("torch."))
    real = np.asarray(mask) == 1
    ours, theirs = (np.sqrt(np.mean((x.astype(np.float32) - expected)[real] ** 2)) for x in (found, halves))
    assert 0 < ours <= 1.5 * theirs
