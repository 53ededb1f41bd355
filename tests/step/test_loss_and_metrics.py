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

from redco_eqx import Mean, eval_step, init_state, train_step

SGD = optax.sgd(1.0)
NUMBERS = st.floats(-100, 100, width=32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(NUMBERS, st.integers(0, 100)), min_size=1, max_size=5))
def test_means_add_up_to_the_mean_of_all(pairs):
    total = sum((Mean(np.float32(x * n), np.float32(n)) for x, n in pairs), Mean(0.0, 0.0))
    count = sum(n for _, n in pairs)
    expected = sum(x * n for x, n in pairs) / count if count else 0.0
    # Up to 5 roundings of sums up to 5e4 in float32.
    np.testing.assert_allclose(float(total), expected, rtol=1e-5, atol=1e-6 * 5e4 / max(count, 1))


def test_a_mean_is_a_tree_and_over_nothing_zero():
    assert jax.tree.map(lambda x: 2 * x, Mean(1.0, 2.0)) == Mean(2.0, 4.0)
    added = jax.jit(lambda m: m + m)(Mean(1.0, 2.0))
    assert (added.total, added.weight) == (2.0, 4.0)
    assert float(Mean(jnp.float32(0), jnp.float32(0))) == 0
    assert jax.jit(jax.grad(lambda x: Mean(x, jnp.float32(0)).value))(1.0) == 0


def test_gradients_do_not_flow_through_the_weight():
    x = np.array([1.0, 2.0], np.float32)

    def loss_fn(model, batch, key):
        return Mean(jnp.sum(model["w"] * batch), jnp.sum(model["w"] ** 2))

    w = np.array([2.0, 1.0], np.float32)
    state = init_state({"w": jnp.asarray(w)}, SGD, key=KEY)
    state, metrics = compiled_step(loss_fn, SGD)(state, x)
    np.testing.assert_allclose(state.params["w"], w - x / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"].value, 4 / 5, rtol=1e-6)


def test_metrics_come_in_float32():
    dtypes = (jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_)

    def loss_fn(model, batch, key):
        metrics = {str(dtype): Mean(jnp.ones((), dtype), jnp.ones((), dtype)) for dtype in dtypes}
        return jnp.sum(model["w"]), {**metrics, "three": 3}

    state = init_state({"w": jnp.ones(2)}, SGD, key=KEY)
    trained = compiled_step(loss_fn, SGD)(state, np.ones(4))[1]
    for metrics in (trained, jax.jit(partial(eval_step, loss_fn=loss_fn))(state, np.ones(4))):
        assert {x.dtype for x in jax.tree.leaves(metrics)} == {jnp.dtype("float32")}
        assert [metrics[str(dtype)].value for dtype in dtypes] == [1] * 4
        assert metrics["three"].value == 3


ONE = jnp.ones(())
# What a loss returns from (model, batch, key), and the message.
BAD_LOSSES: list[tuple[Any, str]] = [
    (lambda m, b, k: b @ m["w"], r"the loss must be a scalar .* shape \(4,\)"),
    (lambda m, b, k: Mean(b @ m["w"], ONE), r"its total has shape \(4,\)"),
    (lambda m, b, k: Mean(ONE, jnp.ones(4)), r"its weight has shape \(4,\)"),
    (lambda m, b, k: (ONE, {"hits": b}), r"the metric 'hits' .* shape \(4, 2\)"),
    (lambda m, b, k: (ONE, {"z": ONE + 1j}), r"the metric 'z' must be a real number"),
    (lambda m, b, k: (ONE, {}, None), r"must return a loss, or .* a tuple of 3"),
    (lambda m, b, k: (), "a tuple of 0"),
    (lambda m, b, k: (ONE, [ONE]), "a dict of names, not list"),
    (lambda m, b, k: (ONE, {"loss": ONE}), "'loss' is reserved"),
    (lambda m, b, k: (ONE, {"grad_norm": ONE}), "'grad_norm' is reserved"),
    (lambda m, b, k: (ONE, {"learning_rate": ONE}), "'learning_rate' is reserved"),
]


def test_a_bad_loss_is_refused():
    state = init_state({"w": jnp.ones(2)}, SGD, key=KEY)
    for loss_fn, message in BAD_LOSSES:
        for step in (partial(train_step, optimizer=SGD), eval_step):
            with pytest.raises(ValueError, match=message):
                jax.eval_shape(partial(step, loss_fn=loss_fn), state, np.ones((4, 2), np.float32))


def test_the_learning_rate_is_reported_where_it_can_be_seen():
    schedule = optax.linear_schedule(1.0, 0.0, 4)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.sum(model["w"])

    optimizer = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(schedule))
    state = init_state({"w": jnp.ones(2)}, optimizer, key=KEY)
    step = compiled_step(loss_fn, optimizer)
    for i in range(3):
        state, metrics = step(state, np.ones(4))
        np.testing.assert_allclose(metrics["learning_rate"].value, schedule(i), rtol=1e-6)
    hidden = optax.adam(schedule)
    state = init_state({"w": jnp.ones(2)}, hidden, key=KEY)
    assert sorted(jax.eval_shape(compiled_step(loss_fn, hidden), state, np.ones(4))[1]) == ["grad_norm", "loss"]


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

    state = init_state(model, SGD, key=KEY)
    step = partial(train_step, loss_fn=loss_fn, optimizer=SGD)
    message = "does not depend on 3 trainable arrays.*: only_shape, stopped, unused"
    with pytest.warns(UserWarning, match=message):
        jax.eval_shape(step, state, np.ones((4, 2), np.float32))


def test_every_parameter_of_a_transformer_is_used():
    state = init_state(helpers.make_transformer(), SGD, key=KEY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(partial(train_step, loss_fn=cross_entropy, optimizer=SGD), state, token_batch(0))
