"""What the page on pretrained models saves, transformers opens, and both write the same."""

import pathlib
import re

import jax.numpy as jnp
import numpy as np
import torch
import transformers

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "pages" / "pretrained.md").read_text()


def test_transformers_opens_what_the_page_saves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for program in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(program, "pretrained.md", "exec"), namespace)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained("finetuned", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = namespace["text"][None, :16].astype(np.int64)
    with torch.no_grad():
        expected = theirs(torch.asarray(ids)).logits.numpy()
    found = np.asarray(namespace["state"].model(jnp.asarray(ids, np.int32)))
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
