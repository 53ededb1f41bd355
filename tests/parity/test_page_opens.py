"""Transformers opens the model that the page on pretrained models saves, and both compute the same logits."""

import jax.numpy as jnp
import numpy as np
import pages
import torch
import transformers


def test_transformers_opens_what_the_page_saves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in pages.blocks_of(pages.PAGES / "pretrained.md", "python"):
        exec(compile(block.code, "pretrained.md", "exec"), namespace)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained("finetuned", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = namespace["text"][None, :16].astype(np.int64)
    with torch.no_grad():
        expected = theirs(torch.asarray(ids)).logits.numpy()
    found = np.asarray(namespace["state"].model(jnp.asarray(ids, np.int32)))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
