"""A warning names the line of the user, from whatever depth it comes."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import EXAMPLES, SGD, fit
from helpers import KEY, mesh_of

import redco_eqx as rx

ODD: Any = {"w": jnp.ones((1031, 1033))}  # no axis divides it


def of_rules() -> None:
    rx.shard_rules(ODD, mesh_of("2x2x2"))


def of_a_step_under_jit() -> None:
    params: Any = {"w": jnp.ones(3), "unused": jnp.ones(3)}
    state = rx.init_state(params, SGD, key=KEY)
    step = partial(
        rx.train_step,
        loss_fn=lambda model, batch, key: jnp.mean(batch * model["w"]),
        optimizer=SGD,
    )
    jax.jit(step)(state, np.ones((8, 3), np.float32))


def of_fit() -> None:
    shapes = iter(range(1, 99))

    def collate_fn(rows: Any) -> Any:
        return {"x": np.ones((4, next(shapes)), np.float32)}

    fit(
        rx.init_state({"w": jnp.ones(1)}, optax.sgd(0.1), key=KEY),
        rx.Data(EXAMPLES, prefetch=0),
        collate_fn=collate_fn,
        loss_fn=lambda model, batch, key: jnp.mean(model["w"] * batch["x"]),
        optimizer=optax.sgd(0.1),
        num_steps=2,
    )


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (of_rules, "MiB are replicated"),
        (of_a_step_under_jit, "the gradient of 1 trainable arrays is always zero"),
    ],
)
def test_a_warning_names_the_line_of_the_user(
    function: Callable[[], None], message: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    (found,) = [w for w in caught if message in str(w.message)]
    code = function.__code__
    assert found.filename == __file__
    last = max(line for _, _, line in code.co_lines() if line is not None)
    assert code.co_firstlineno < found.lineno <= last


def test_a_warning_of_fit_names_the_line_that_called_it() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        of_fit()
    (found,) = [w for w in caught if "Each new shape compiles" in str(w.message)]
    assert found.filename.endswith("fit_helpers.py")  # whose `fit` calls the library's
