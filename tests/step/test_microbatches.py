"""Accumulated equals whole: values, keys, precision and cost of microbatches."""

import functools
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, compiled_step
from einops import rearrange
from helpers import mlp_batch, squared_error

from redco_eqx import (
    Mean,
    batch_sharding,
    init_state,
    make_mesh,
    train_step,
)


def linear_loss(model: Any, batch: Any, key: Any) -> tuple[Mean, dict[str, Mean]]:
    """Linear in `w`, so that every sum can be written down."""
    weight = batch["weight"]
    total = jnp.sum(weight * (batch["x"] @ model["w"]))
    return Mean(total, jnp.sum(weight)), {"x": Mean(jnp.sum(batch["x"][:, 0]), weight.shape[0])}


WEIGHTS = {
    "unequal": np.array([1, 5, 0, 2, 7, 1, 1, 3.0]),
    "every second is zero": np.array([0, 2, 0, 1, 0, 3, 0, 1.0]),
    "every fourth is zero": np.array([0, 2, 3, 1, 0, 1, 2, 1.0]),
    "the first half is zero": np.array([0, 0, 0, 0, 1, 2, 3, 4.0]),
    "all but one are zero": np.array([0, 0, 0, 0, 0, 3, 0, 0.0]),
    "all are zero": np.zeros(8),
}


@functools.cache
def linear_step(num_microbatches: int) -> Any:
    return compiled_step(linear_loss, optax.sgd(1.0), num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_accumulated_equals_whole(weights, num_microbatches):
    weight = WEIGHTS[weights].astype(np.float32)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    w = np.array([1.0, -2.0, 0.5], np.float32)
    scale = 1 / weight.sum() if weight.sum() else 0.0
    state = init_state({"w": jnp.asarray(w)}, optax.sgd(1.0), key=KEY)
    state, metrics = linear_step(num_microbatches)(state, {"x": x, "weight": weight})
    gradient = scale * (weight @ x)
    # One sum of 8 products in float32.
    np.testing.assert_allclose(state.params["w"], w - gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["loss"].value, gradient @ w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"].value, np.linalg.norm(gradient), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["x"].value, x[:, 0].mean(), rtol=1e-5, atol=1e-6)
    assert metrics["loss"].weight == weight.sum()
    assert metrics["x"].weight == 8


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_a_batch_without_weight_changes_nothing(num_microbatches):
    model = helpers.make_mlp()
    state = init_state(model, optax.sgd(1.0), key=KEY)
    batch = {**mlp_batch(0), "weight": np.zeros(16, np.float32)}
    step = compiled_step(squared_error, optax.sgd(1.0), num_microbatches=num_microbatches)
    new, metrics = step(state, batch)
    helpers.assert_identical(new.params, state.params)
    for name in ("loss", "grad_norm", "absolute"):
        assert metrics[name].value == 0, name


def test_a_bare_scalar_counts_once_per_microbatch():
    """The mean of the maxima, not the maximum: what a loss that is no mean can be over parts."""
    x = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], np.float32)

    def loss_fn(model, batch, key):
        return model["w"] * jnp.max(batch["x"]), {"sum": jnp.sum(batch["x"])}

    for num_microbatches in (1, 2, 4):
        state = init_state({"w": jnp.array(2.0)}, optax.sgd(1.0), key=KEY)
        step = compiled_step(loss_fn, optax.sgd(1.0), num_microbatches=num_microbatches)
        state, metrics = step(state, {"x": x})
        parts = x.reshape(-1, num_microbatches)  # example i in microbatch i % number
        expected = parts.max(axis=0).mean()
        np.testing.assert_allclose(metrics["loss"].value, 2 * expected, rtol=1e-6)
        np.testing.assert_allclose(state.params["w"], 2 - expected, rtol=1e-6)
        np.testing.assert_allclose(metrics["sum"].value, x.sum() / num_microbatches, rtol=1e-6)
        assert metrics["loss"].weight == num_microbatches


def test_gradients_of_bfloat16_parameters_accumulate_in_float32():
    # 512 gradients of 1 each: a bfloat16 sum would stop at 256.
    def loss_fn(model, batch, key):
        return jnp.sum(model["w"].astype(jnp.float32) * batch)

    state = init_state({"w": jnp.zeros((), jnp.bfloat16)}, optax.sgd(1.0), key=KEY)
    state, metrics = train_step(
        state, np.ones(512, np.float32), loss_fn=loss_fn, optimizer=optax.sgd(1.0), num_microbatches=512
    )
    assert metrics["grad_norm"].value == 1
    w: Any = state.params["w"]
    assert w.dtype == jnp.bfloat16
    assert w == -1


def test_each_microbatch_has_a_key_of_its_own():
    def loss_fn(model, batch, key):
        u = jax.random.uniform(key)
        return model["w"] * u, {"square": u**2}

    state = init_state({"w": jnp.array(0.0)}, optax.sgd(1.0), key=KEY)
    step = compiled_step(loss_fn, optax.sgd(1.0), num_microbatches=8)
    new, metrics = step(state, np.ones(8))
    mean, square = float(metrics["grad_norm"].value), float(metrics["square"].value)
    assert square - mean**2 > 0.01  # a spread: uniform numbers have 1/12
    np.testing.assert_allclose(new.params["w"], -mean, rtol=1e-6)
    # And another step draws others.
    _, later = step(new, np.ones(8))
    assert later["grad_norm"].value != mean


def row_major(batch: Any, number: int) -> Any:
    return jax.tree.map(lambda x: rearrange(x, "(k b) ... -> k b ...", k=number), batch)


def test_microbatches_cost_no_more_arithmetic():
    """On data=8, each device works on a part of each microbatch."""
    mesh = make_mesh()
    model, shardings = helpers.place(helpers.make_mlp(), mesh)
    batch = jax.device_put(mlp_batch(0, size=1024), batch_sharding(mesh))

    def flops(f, state):
        cost: Any = jax.jit(f).lower(state, batch).compile().cost_analysis()
        return cost["flops"]

    def of(num_microbatches):
        state = init_state(model, optax.sgd(1.0), key=KEY)
        step = partial(
            train_step,
            loss_fn=squared_error,
            optimizer=optax.sgd(1.0),
            shardings=shardings,
            num_microbatches=num_microbatches,
        )
        return flops(step, state)

    def neighbours(state, batch):
        # The wrong way: each microbatch lies on two of the eight devices.
        def body(total, part):
            params = jax.grad(lambda p: squared_error(state.build(p, {}), part, None)[0].value)(state.params)
            return jax.tree.map(jnp.add, total, params), None

        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, state.params), row_major(batch, 4))[0]

    whole, accumulated = of(1), of(4)
    # The cost of a loop is that of one round. What each round adds to the accumulator, and the update of the
    # parameters, count 4 times here: about 4 operations per parameter against 6 for each of 128 examples.
    assert accumulated * 4 == pytest.approx(whole, rel=0.08)
    state = init_state(model, optax.sgd(1.0), key=KEY)
    assert flops(neighbours, state) * 4 > 1.5 * whole


@pytest.mark.parametrize("number", [0, -1, 3, 16])
def test_a_number_of_microbatches_that_does_not_divide_is_refused(number):
    state = init_state({"w": jnp.ones(3)}, optax.sgd(1.0), key=KEY)
    batch = {"x": np.ones((8, 3), np.float32), "weight": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match=f"num_microbatches={number}"):
        train_step(state, batch, loss_fn=linear_loss, optimizer=optax.sgd(1.0), num_microbatches=number)


def test_microbatches_must_divide_over_the_devices():
    mesh = make_mesh()
    model, shardings = helpers.place({"w": jnp.ones(3)}, mesh)
    state = init_state(model, optax.sgd(1.0), key=KEY)
    batch = {"x": np.ones((8, 3), np.float32), "weight": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match="weight has 8 rows, which do not divide into 2 microbatches on 8"):
        train_step(
            state,
            batch,
            loss_fn=linear_loss,
            optimizer=optax.sgd(1.0),
            num_microbatches=2,
            shardings=shardings,
        )
