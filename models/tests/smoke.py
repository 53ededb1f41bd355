"""The package saves a tiny model, and loads equal arrays: for `nox -s build`.

python models/tests/smoke.py PLACE     # the package must lie below PLACE
"""

import importlib.resources
import pathlib
import sys
import tempfile

import jax
import numpy as np

import redco_eqx as rx
import redco_eqx_models as models

jax.config.update("jax_num_cpu_devices", 8)
CONFIG = models.LlamaConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
)


def make_model(key):
    return models.LlamaForCausalLM(CONFIG, key=key, stacked=True)


def main(place: str) -> None:
    for package in (rx, models):
        assert place in str(package.__file__), package.__file__
        assert importlib.resources.files(package).joinpath("py.typed").is_file()
        assert all(getattr(package, name) is not None for name in package.__all__)
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    model = rx.init_model(make_model, mesh, key=jax.random.key(0))
    with tempfile.TemporaryDirectory() as base:
        directory = pathlib.Path(base) / "model"
        models.save_pretrained(model, directory)
        assert (directory / "model.safetensors").is_file()
        loaded = models.load_pretrained(directory, mesh, stacked=True)
        expected, found = rx.to_arrays(model), rx.to_arrays(loaded)
    assert len(expected) > 5
    assert {path: x.dtype for path, x in found.items()} == {
        path: x.dtype for path, x in expected.items()
    }
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)
    tokens = models.generate(loaded, np.ones((8, 4), np.int32), max_new_tokens=2)
    assert tokens.shape == (8, 2)


if __name__ == "__main__":
    main(sys.argv[1])
