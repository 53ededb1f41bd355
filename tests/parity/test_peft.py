"""Branches that were trained here open in peft, and those of peft open here, with the same logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparison import TOLERANCE, distance, logits, texts, torch_logits
from references import REFERENCES

from redco_eqx.models import add_lora, load_lora, load_pretrained, merge_lora, save_lora

peft = pytest.importorskip("peft", reason="comes with the session parity, not with transformers")

TARGETS = ("q_proj", "v_proj", "o_proj", "down_proj")


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_peft_opens_what_was_saved_here(stacked, directory, tmp_path):
    model = load_pretrained(directory("llama_gqa"), stacked=stacked)
    adapted = add_lora(model, targets=TARGETS, rank=4, scale=0.5, key=jax.random.key(0))
    noisy = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.asarray(np.random.default_rng(len(str(path))).normal(size=x.shape), x.dtype)
        if getattr(path[-1], "name", "") == "lora_b" else x,
        adapted,
    )  # fmt: skip
    save_lora(noisy, tmp_path)
    there = peft.PeftModel.from_pretrained(REFERENCES["llama_gqa"].make(), tmp_path).eval()
    ids, _ = texts()
    expected = torch_logits(there, ids, counts_positions=True)
    assert distance(logits(model, ids), expected) > 0.1, "the branches must matter"
    assert distance(logits(noisy, ids), expected) <= TOLERANCE
    assert distance(logits(merge_lora(noisy), ids), expected) <= TOLERANCE


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_what_peft_saved_opens_here(stacked, rslora, directory, tmp_path):
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=list(TARGETS), init_lora_weights=False, use_rslora=rslora
    )
    torch.manual_seed(0)
    there = peft.get_peft_model(REFERENCES["llama_gqa"].make(), config).eval()
    there.save_pretrained(tmp_path)
    model = load_lora(load_pretrained(directory("llama_gqa"), stacked=stacked), tmp_path)
    ids, _ = texts()
    assert distance(logits(model, ids), torch_logits(there, ids, counts_positions=True)) <= TOLERANCE
