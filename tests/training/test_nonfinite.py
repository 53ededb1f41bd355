"""Steps that are not finite end the run with the last good state, or are left out; and it is said where."""

import functools
import itertools
import math
import traceback
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    EXAMPLES,
    MESHES,
    SGD,
    Rows,
    assert_same,
    collate,
    errors_of,
    fit,
    hand_loop,
    linear_state,
    loss_fn,
    make_examples,
    mlp_state,
    spoiled,
    state_after,
)

import redco_eqx as rx


def infinite_gradient(model: Any, batch: Any, key: Any) -> Any:
    """The value of the loss is always finite, but at a flag of 0 the gradient is infinite."""
    zero = jnp.sum(model.bias) - jax.lax.stop_gradient(jnp.sum(model.bias))
    return jnp.mean(errors_of(model, batch)) + jnp.mean(jnp.sqrt(batch["flag"] + zero))


NONFINITE = {"nan loss": (loss_fn, np.nan), "inf loss": (loss_fn, np.inf), "gradient": (infinite_gradient, 0)}


@pytest.mark.parametrize(
    ("kind", "log_every"),
    [("nan loss", 1), ("inf loss", 100), ("gradient", 100)],
)
def test_a_nonfinite_step_ends_the_run_with_the_state_before_it(kind: str, log_every: int) -> None:
    loss, value = NONFINITE[kind]
    examples, step = spoiled(value)
    assert step > 0
    rows = Rows()
    with pytest.raises(rx.errors.NonFiniteError, match=f"not finite at step {step} ") as caught:
        fit(linear_state(), examples, num_epochs=2, loss_fn=loss, log_every=log_every, loggers=[rows])
    assert caught.value.step == step
    assert_same(caught.value.state, state_after(step, examples=examples, loss_fn=loss))
    assert all(math.isfinite(x) for _, row in rows.rows for x in row.values())
    assert [at for at, _ in rows.rows] == (list(range(1, step + 1)) if log_every == 1 else [])


def test_a_nonfinite_step_is_found_before_an_evaluation() -> None:
    examples, step = spoiled(np.nan)
    rows = Rows()
    with pytest.raises(rx.errors.NonFiniteError):
        fit(
            linear_state(),
            examples,
            num_epochs=2,
            log_every=100,
            loggers=[rows],
            evaluation=rx.Evaluation(EXAMPLES[:4], every_steps=step + 1),
        )
    assert rows.rows == []


@pytest.mark.parametrize("kind", ["nan loss", "gradient"])
def test_skipping_leaves_out_exactly_the_step(kind: str) -> None:
    loss, value = NONFINITE[kind]
    optimizer = optax.adam(1e-2)
    examples, step = spoiled(value)
    hand: Any = {"loss_fn": loss, "optimizer": optimizer}
    steps = list(itertools.islice(hand_loop(linear_state(optimizer), examples, skip=step, **hand), 5))
    guarded = rx.jit_step(rx.skip_nonfinite(functools.partial(rx.train_step, **hand)))
    state = linear_state(optimizer)
    for i, (_, metrics, batch) in enumerate(steps):
        state, reported = guarded(state, batch)
        assert float(reported["skipped"]) == (i == step)
        if i != step:
            assert float(reported["loss"]) == float(metrics["loss"])
    # Parameters, moments and counts are kept at that step, only its number counts; and training goes on.
    assert_same(state, steps[-1][0])
    assert int(state.step) == 5


def test_a_guarded_step_is_a_step() -> None:
    """It takes the same steps where all is finite, also under a scan."""
    state = linear_state()
    step = functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=SGD)
    batches = [collate(EXAMPLES[i : i + 4]) for i in range(0, 20, 4)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    expected, _ = jax.jit(lambda state, xs: jax.lax.scan(step, state, xs))(state, stacked)
    found, metrics = jax.jit(lambda state, xs: jax.lax.scan(rx.skip_nonfinite(step), state, xs))(state, stacked)
    assert_same(found, expected)
    np.testing.assert_array_equal(metrics["skipped"].total, np.zeros(5))


# Where: the index that is outside, and under `jax_debug_nans` the line

WIDE = make_examples(16, dim=8)


def poisoned(value: float, at: int) -> list[Any]:
    """The examples, of which one has another flag."""
    examples = [dict(example) for example in WIDE]
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


def test_a_nan_raises_from_its_line_with_the_last_good_state() -> None:
    state = mlp_state(SGD, rx.make_mesh(tensor=2, fsdp=2))
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
        fit(state, WIDE, loss_fn=overflowing, num_steps=2)
    assert "inf" in str(caught.value) or "layers.0.bias" in str(caught.value)


def test_a_finite_run_is_as_without() -> None:
    state = mlp_state(SGD, rx.make_mesh(data=1))
    with jax.debug_nans(True):
        found = fit(state, WIDE, num_steps=3, donate=False)
    assert_same(found, fit(state, WIDE, num_steps=3))


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


@pytest.mark.parametrize(
    ("mesh", "loss", "name", "value"),
    [
        ("mixed", by_layers, "ids", 99),
        ("mixed", by_layers, "labels", -7),
        ("one", by_optax, "ids", -17),
        ("one", by_optax, "labels", 16),
    ],
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
    line = r"test_nonfinite.py:\d+ \(" if loss is by_optax and name == "ids" else ""
    expected = (
        rf"at step 2 .*: the batch's {name} has {value} in row 2, an index outside a dim of 16 at .*{line}"
    )
    for given in (rx.Data(examples, shuffle=False), rx.Stream(iter(examples))):
        with pytest.raises(rx.errors.NonFiniteError, match=expected) as caught:
            fit(state, given, **arguments)
        assert int(caught.value.state.step) == caught.value.step == 2
