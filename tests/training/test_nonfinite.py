"""Steps that are not finite end the run with the last good state, or are left out."""

import functools
import itertools
import math
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    EXAMPLES,
    Rows,
    assert_same,
    errors_of,
    fit,
    hand_loop,
    linear_state,
    loss_fn,
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
    [("nan loss", 1), ("nan loss", 100), ("inf loss", 100), ("gradient", 1), ("gradient", 100)],
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


def test_the_error_goes_whole_from_one_process_to_another() -> None:
    examples, step = spoiled(np.nan)
    with pytest.raises(rx.errors.NonFiniteError) as caught:
        fit(linear_state(), examples, num_epochs=2)
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.step == step
    assert_same(copy.state, caught.value.state)


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
