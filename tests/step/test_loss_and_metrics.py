"""Means, what a loss may return, what a step reports, and parameters that a loss does not use."""

import warnings
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, compiled_step
from helpers import cross_entropy, token_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_eqx import (
    Mean,
    eval_step,
    init_state,
    train_step,
)

# Means.

NUMBERS = st.floats(-100, 100, width=32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(NUMBERS, st.integers(0, 100)), min_size=1, max_size=5))
def test_means_add_up_to_the_mean_of_all(pairs):
    total = sum((Mean(np.float32(x * n), np.float32(n)) for x, n in pairs), Mean(0.0, 0.0))
    count = sum(n for _, n in pairs)
    expected = sum(x * n for x, n in pairs) / count if count else 0.0
    # Up to 5 roundings of sums up to 5e4 in float32.
    np.testing.assert_allclose(float(total), expected, rtol=1e-5, atol=1e-6 * 5e4 / max(count, 1))


def test_a_mean_over_nothing_is_zero():
    assert float(Mean(jnp.float32(0), jnp.float32(0))) == 0
    gradient = jax.grad(lambda x: Mean(x, jnp.float32(0)).value)(1.0)
    assert gradient == 0


def test_a_mean_is_a_tree():
    doubled = jax.tree.map(lambda x: 2 * x, Mean(1.0, 2.0))
    assert doubled == Mean(2.0, 4.0)
    added = jax.jit(lambda m: m + m)(Mean(1.0, 2.0))
    assert (added.total, added.weight) == (2.0, 4.0)


def test_gradients_do_not_flow_through_the_weight():
    x = np.array([1.0, 2.0], np.float32)

    def loss_fn(model, batch, key):
        return Mean(jnp.sum(model["w"] * batch), jnp.sum(model["w"] ** 2))

    w = np.array([2.0, 1.0], np.float32)
    state = init_state({"w": jnp.asarray(w)}, optax.sgd(1.0), key=KEY)
    state, metrics = train_step(state, x, loss_fn=loss_fn, optimizer=optax.sgd(1.0))
    np.testing.assert_allclose(state.params["w"], w - x / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"].value, 4 / 5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_])
def test_metrics_come_in_float32(dtype):
    def loss_fn(model, batch, key):
        return jnp.sum(model["w"]), {"m": Mean(jnp.ones((), dtype), jnp.ones((), dtype)), "s": 3}

    state = init_state({"w": jnp.ones(2)}, optax.sgd(1.0), key=KEY)
    for metrics in (
        train_step(state, np.ones(4), loss_fn=loss_fn, optimizer=optax.sgd(1.0))[1],
        eval_step(state, np.ones(4), loss_fn=loss_fn),
    ):
        assert {x.dtype for x in jax.tree.leaves(metrics)} == {jnp.dtype("float32")}
        assert metrics["m"].value == 1
        assert metrics["s"].value == 3


# What a loss may return.


def run_loss(loss_fn: Any, model: Any = None) -> Any:
    state = init_state({"w": jnp.ones(2)} if model is None else model, optax.sgd(1.0), key=KEY)
    batch = np.ones((4, 2), np.float32)
    train_step(state, batch, loss_fn=loss_fn, optimizer=optax.sgd(1.0))


ONE = jnp.ones(())
BAD_LOSSES: dict[str, tuple[Any, str]] = {
    "a vector": (lambda m, b, k: b @ m["w"], r"the loss must be a scalar .* shape \(4,\)"),
    "a vector with Mean": (lambda m, b, k: Mean(b @ m["w"], ONE), r"its total has shape \(4,\)"),
    "a vector of weights": (lambda m, b, k: Mean(ONE, jnp.ones(4)), r"its weight has shape \(4,\)"),
    "a vector metric": (lambda m, b, k: (ONE, {"hits": b}), r"the metric 'hits' .* shape \(4, 2\)"),
    "complex": (lambda m, b, k: (ONE, {"z": ONE + 1j}), r"the metric 'z' must be a real number"),
    "three values": (lambda m, b, k: (ONE, {}, None), r"must return a loss, or .* a tuple of 3"),
    "no values": (lambda m, b, k: (), "a tuple of 0"),
    "metrics that are no dict": (lambda m, b, k: (ONE, [ONE]), "a dict of names, not list"),
    "the name loss": (lambda m, b, k: (ONE, {"loss": ONE}), "'loss' is reserved"),
    "the name grad_norm": (lambda m, b, k: (ONE, {"grad_norm": ONE}), "'grad_norm' is reserved"),
    "the name learning_rate": (lambda m, b, k: (ONE, {"learning_rate": ONE}), "'learning_rate' is reserved"),
}


@pytest.mark.parametrize("case", BAD_LOSSES)
def test_a_bad_loss_is_refused(case):
    loss_fn, message = BAD_LOSSES[case]
    with pytest.raises(ValueError, match=message):
        run_loss(loss_fn)
    state = init_state({"w": jnp.ones(2)}, key=KEY)
    with pytest.raises(ValueError, match=message):
        eval_step(state, np.ones((4, 2), np.float32), loss_fn=loss_fn)


# Metrics of a step.


def test_the_learning_rate_is_reported_where_it_can_be_seen():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    for optimizer, visible in (
        (optax.inject_hyperparams(optax.adam)(schedule), True),
        (optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(schedule)), True),
        (optax.adam(schedule), False),
    ):
        state = init_state({"w": jnp.ones(2)}, optimizer, key=KEY)
        step = compiled_step(lambda m, b, k: jnp.sum(m["w"]), optimizer)
        for i in range(3):
            state, metrics = step(state, np.ones(4))
            assert ("learning_rate" in metrics) == visible
            if visible:
                np.testing.assert_allclose(metrics["learning_rate"].value, schedule(i), rtol=1e-6)


def test_the_optimizer_is_given_the_loss():
    def update(updates: Any, state: Any, params: Any = None, *, value: Any, **extra: Any) -> Any:
        return jax.tree.map(lambda g: jnp.full_like(g, value), updates), state

    given: Any = update
    optimizer = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), given)
    state = init_state({"w": jnp.ones(2)}, optimizer, key=KEY)
    for num_microbatches in (1, 2):
        new, metrics = train_step(
            state,
            np.arange(4.0, dtype=np.float32),
            loss_fn=lambda m, b, k: jnp.sum(m["w"]) * jnp.mean(b),
            optimizer=optimizer,
            num_microbatches=num_microbatches,
        )
        assert metrics["loss"].value == 3
        np.testing.assert_allclose(new.params["w"], 1 + 3, rtol=1e-6)


# What the loss does not use.


def test_parameters_that_the_loss_cannot_depend_on_are_named():
    model = {
        "used": jnp.ones(2),
        "unused": jnp.ones(2),
        "stopped": jnp.ones(()),
        "times_zero": jnp.ones(()),
        "in_a_jit": jnp.ones(2),
        "only_shape": jnp.ones(3),
    }

    @jax.jit
    def inner(model, x):
        return jnp.sum(x * model["in_a_jit"]) + model["only_shape"].size

    def loss_fn(model, batch, key):
        zero = batch[0, 0] - batch[0, 0]
        return (
            jnp.mean(batch @ model["used"])
            + jax.lax.stop_gradient(model["stopped"])
            + zero * model["times_zero"]
            + inner(model, batch[0])
        )

    state = init_state(model, optax.sgd(0.1), key=KEY)
    with pytest.warns(
        UserWarning, match="does not depend on 3 trainable arrays.*: only_shape, stopped, unused"
    ):
        train_step(state, np.ones((4, 2), np.float32), loss_fn=loss_fn, optimizer=optax.sgd(0.1))


def test_every_parameter_of_a_transformer_is_used():
    state = init_state(helpers.make_transformer(), optax.sgd(0.1), key=KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = partial(train_step, loss_fn=cross_entropy, optimizer=optax.sgd(0.1))
        jax.eval_shape(step, state, token_batch(0))
