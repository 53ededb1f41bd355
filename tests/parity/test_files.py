"""Transformers opens the files that we save: nothing missing, nothing unexpected, bit-equal."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
import transformers
from comparison import TOLERANCE, logits, texts, torch_logits
from references import REFERENCES

from redco_eqx.models import load_pretrained, save_pretrained

NAMES = list(REFERENCES)


def opened(path):
    """The model that transformers makes of a directory, which must hold exactly its arrays."""
    opening: Any = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    model, info = opening
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not info[kind], (kind, info[kind])
    return model.eval()


def assert_bit_equal(model, other):
    ours, theirs = model.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for key, x in ours.items():
        assert x.dtype == theirs[key].dtype, key
        assert torch.equal(x, theirs[key]), key


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_loaded_and_saved_is_bit_equal(name, stacked, directory, reference, tmp_path):
    save_pretrained(load_pretrained(directory(name), stacked=stacked), tmp_path)
    there = opened(tmp_path)
    assert_bit_equal(there, reference(name))
    assert type(there) is type(reference(name))
    ids, _ = texts()
    expected = torch_logits(reference(name), ids, counts_positions=True)
    np.testing.assert_array_equal(torch_logits(there, ids, counts_positions=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gpt2", "llama_gqa"])
def test_half_precision_is_kept(name, dtype, tmp_path):
    there = REFERENCES[name].make().to(dtype)
    there.save_pretrained(tmp_path / "there")
    save_pretrained(load_pretrained(tmp_path / "there"), tmp_path / "here")
    assert_bit_equal(opened(tmp_path / "here"), there)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_model_opens_there(name, stacked, directory, tmp_path):
    loaded = load_pretrained(directory(name))
    model = type(loaded)(loaded.config, stacked=stacked, key=jax.random.key(0))
    save_pretrained(model, tmp_path)
    ids, _ = texts()
    expected = torch_logits(opened(tmp_path), ids, counts_positions=True)
    assert np.abs(logits(model, ids) - expected).max() <= TOLERANCE * expected.std()
