"""`fit` says which index is outside, and under `jax_debug_nans` where what is not finite comes from."""

import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
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


class Lookup(eqx.Module):
    table: jax.Array

    def __init__(self, key: Any):
        self.table = jax.random.normal(key, (16, 8))


def by_layers(model: Any, batch: Any, key: Any) -> Any:
    hidden = rx.layers.embed(model.table, batch["ids"])
    return rx.layers.cross_entropy(hidden, model.table, batch["labels"], num_chunks=2)


def by_optax(model: Any, batch: Any, key: Any) -> Any:
    hidden = jax.checkpoint(lambda table, ids: jnp.take(table, ids, axis=0))(model.table, batch["ids"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ model.table.T, batch["labels"]).mean()


@pytest.mark.parametrize("mesh", ["one", "mixed"])
@pytest.mark.parametrize(
    ("loss", "name", "value"),
    [(by_layers, "ids", 99), (by_layers, "labels", -7), (by_optax, "ids", -17), (by_optax, "labels", 16)],
)
def test_an_index_outside_is_named(mesh: str, loss: Any, name: str, value: int) -> None:
    """However late the metrics are read, and in a stream too."""
    rng = np.random.default_rng(0)
    examples = [{x: rng.integers(0, 16, 4).astype(np.int32) for x in ("ids", "labels")} for _ in range(80)]
    examples[18][name][2] = value  # row 2 of step 2

    def make(key: Any) -> Any:
        return Lookup(key)

    state = rx.init_state(
        rx.init_model(make, rx.make_mesh(**MESHES[mesh]), key=jax.random.key(0)), SGD, key=jax.random.key(1)
    )
    arguments: Any = {"loss_fn": loss, "num_steps": 10, "batch_size": 8, "donate": False}
    # The first line that is not JAX's or this library's: else optax's, or of what checks annotations here.
    line = r"test_where_not_finite.py:\d+ \(" if loss is by_optax and name == "ids" else ""
    expected = (
        rf"at step 2 .*: the batch's {name} has {value} in row 2, an index outside a dim of 16 at .*{line}"
    )
    for given in (rx.Data(examples, shuffle=False), rx.Stream(iter(examples))):
        with pytest.raises(rx.errors.NonFiniteError, match=expected) as caught:
            fit(state, given, **arguments)
        assert int(caught.value.state.step) == caught.value.step == 2
