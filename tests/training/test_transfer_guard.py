"""Under `jax.transfer_guard("disallow")`, what the library moves is moved explicitly.

On the CPU, JAX guards only transfers to the device; with `TESTS_ON=device`, those from
it too.
"""

import pathlib
from typing import Any

import equinox as eqx
import fit_helpers as tiny
import jax
import numpy as np
import optax
import pytest
from fit_helpers import EXAMPLES, collate, fit, linear_state, loss_fn

import redco_eqx as rx

MODELS = iter([eqx.nn.Linear(2, 2, key=jax.random.key(i)) for i in range(2)])
KEY = jax.random.key(1)


@pytest.fixture(params=["this thread", "all threads"])
def guarded(request: Any) -> Any:
    """A guard as a context, which other threads do not see, or as a setting of the
    program."""
    if request.param == "this thread":
        with jax.transfer_guard("disallow"):
            yield
        return
    names = ("jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host")
    for name in names:
        jax.config.update(name, "disallow")
    yield
    for name in names:
        jax.config.update(name, None)


STATES = iter([linear_state(optax.adamw(0.1)) for _ in range(8)])
"""Made before the guards: their programs have constants of the user's own."""


@pytest.mark.parametrize("prefetch", [0, 2])
def test_fit(prefetch: int, guarded: None, tmp_path: pathlib.Path) -> None:
    options: Any = {
        "optimizer": optax.adamw(0.1),
        "prefetch": prefetch,
        "checkpoints": rx.Checkpoints(tmp_path, every_steps=2),
        "evaluation": rx.Evaluation(
            EXAMPLES, predict_fn=tiny.predict_fn, every_steps=2
        ),
        "hook": lambda run, row, state: None,
        "log_every": 1,
    }
    fit(next(STATES), num_steps=3, **options)
    fit(next(STATES), num_steps=5, **options)  # and on from a checkpoint


def test_init_state_own_loop_evaluate_predict_save(
    guarded: None, tmp_path: pathlib.Path
) -> None:
    optimizer = optax.sgd(0.1)
    state = rx.init_state(next(MODELS), optimizer, key=KEY)
    data = rx.Data(EXAMPLES, prefetch=0)
    common: Any = {"collate_fn": collate, "batch_size": 4}
    rx.evaluate(state, data, loss_fn=loss_fn, **common)
    rx.predict(state, data, predict_fn=tiny.predict_fn, **common)

    def train_step(state: Any, batch: Any) -> Any:
        return rx.train_step(state, batch, loss_fn=loss_fn, optimizer=optimizer)

    step = rx.jit_step(train_step)
    for batch in rx.batches(data, mesh=rx.make_mesh(data=1), key=KEY, **common):
        state, _ = step(state, batch)
    rx.save(tmp_path, state)
    restored = rx.restore(tmp_path, state)
    with jax.transfer_guard("allow"):  # the comparison is the test's own
        np.testing.assert_array_equal(restored.params["weight"], state.params["weight"])
