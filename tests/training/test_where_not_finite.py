"""Under `jax_debug_nans` `fit` says where a number that is not finite comes from."""

import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import MESHES, SGD, assert_same, errors_of, fit, make_examples, mlp_state

import redco_eqx as rx

EXAMPLES = make_examples(16, dim=8)


def poisoned(value: float, at: int) -> list[Any]:
    """The examples, of which one has another flag."""
    examples = [dict(example) for example in EXAMPLES]
    examples[at]["flag"] = np.float32(value)
    return examples


def risky_part(flag: Any) -> Any:
    return jnp.log(flag)


def poisoned_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(errors_of(model, batch) + risky_part(batch["flag"]))


def overflowing(model: Any, batch: Any, key: Any) -> Any:
    """A finite loss whose gradient is not."""
    small = jnp.sum(model.layers[0].bias * 0.0)
    return jnp.mean(errors_of(model, batch)) + jnp.sqrt(jnp.maximum(small, 0.0)) * jnp.min(batch["flag"])


@pytest.mark.parametrize("mesh", ["one", "mixed"])
def test_a_nan_raises_from_its_line_with_the_last_good_state(mesh: str) -> None:
    state = mlp_state(SGD, rx.make_mesh(**MESHES[mesh]))
    arguments: Any = {"loss_fn": poisoned_loss, "num_epochs": 1, "donate": False}
    with pytest.raises(rx.errors.NonFiniteError, match=r"jax_debug_nans") as plain:
        fit(state, poisoned(-1.0, 3), **arguments)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.* encountered in log") as caught:
        fit(state, poisoned(-1.0, 3), **arguments)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "risky_part" in frames
    assert_same(caught.value.state, plain.value.state)  # pyright: ignore[reportAttributeAccessIssue]


def test_without_a_place_the_first_parameter_is_named() -> None:
    state = mlp_state(SGD, rx.make_mesh(data=1))
    with jax.debug_infs(True), pytest.raises((FloatingPointError, rx.errors.NonFiniteError)) as caught:
        fit(state, EXAMPLES, loss_fn=overflowing, num_steps=2)
    assert "inf" in str(caught.value) or "layers.0.bias" in str(caught.value)


def test_a_finite_run_is_as_without() -> None:
    state = mlp_state(SGD, rx.make_mesh(data=1))
    with jax.debug_nans(True):
        found = fit(state, EXAMPLES, num_steps=3, donate=False)
    assert_same(found, fit(state, EXAMPLES, num_steps=3))
