"""What the README's example saves, transformers opens, and both write the same."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import transformers

import redco_eqx as rx

README = (pathlib.Path(__file__).parents[2] / "README.md").read_text()


def test_transformers_opens_what_the_readme_saves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = (b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "save_pretrained" in b)
    text = np.random.default_rng(0).integers(32, 127, 8192).astype(np.uint8)
    namespace = {
        "rx": rx, "jax": jax, "np": np, "text": text, "mesh": rx.make_mesh(tensor=4),
        "optimizer": optax.adamw(1e-3),
    }  # fmt: skip
    exec(compile(program, "README.md", "exec"), namespace)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained("finetuned", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = text[None, :16].astype(np.int64)
    with torch.no_grad():
        expected = theirs(torch.asarray(ids)).logits.numpy()
    found = np.asarray(namespace["state"].model(jnp.asarray(ids, np.int32)))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
