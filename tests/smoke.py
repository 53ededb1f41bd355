"""The package trains a model on eight devices, and includes its types: for
`nox -s build`.

python tests/smoke.py PLACE     # the package must lie below PLACE
"""

import importlib.resources
import sys

import equinox as eqx
import jax
import numpy as np
import optax

import redco_eqx as rx

jax.config.update("jax_num_cpu_devices", 8)


def loss_fn(model, batch, key):
    return ((jax.vmap(model)(batch) - batch) ** 2).mean()


def main(place: str) -> None:
    assert place in str(rx.__file__), rx.__file__
    assert importlib.resources.files(rx).joinpath("py.typed").is_file()
    assert all(getattr(rx, name) is not None for name in rx.__all__)
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    model = rx.init_model(
        lambda key: eqx.nn.MLP(8, 8, 32, depth=1, key=key), mesh, key=jax.random.key(0)
    )
    optimizer = optax.adam(1e-2)
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    examples = np.random.default_rng(0).normal(size=(256, 8)).astype(np.float32)
    functions = {"collate_fn": np.stack, "loss_fn": loss_fn, "batch_size": 32}
    before = rx.evaluate(state, examples, **functions)["loss"]
    state, _ = rx.fit(state, examples, **functions, optimizer=optimizer, num_epochs=4)
    assert rx.evaluate(state, examples, **functions)["loss"] < before / 2


if __name__ == "__main__":
    main(sys.argv[1])
