"""Accumulated equals whole: values, keys, precision and cost of microbatches."""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, compiled_step
from helpers import mlp_batch, squared_error

from redco_eqx import Mean, batch_sharding, init_state, make_mesh, train_step

SGD = optax.sgd(1.0)


def linear_loss(model: Any, batch: Any, key: Any) -> tuple[Mean, dict[str, Mean]]:
    """Linear in `w`, so that every sum can be written down."""
    weight = batch["weight"]
    total = jnp.sum(weight * (batch["x"] @ model["w"]))
    return Mean(total, jnp.sum(weight)), {"x": Mean(jnp.sum(batch["x"][:, 0]), weight.shape[0])}


WEIGHTS = {
    "unequal": [1, 5, 0, 2, 7, 1, 1, 3],
    "every second is zero": [0, 2, 0, 1, 0, 3, 0, 1],
    "the first half is zero": [0, 0, 0, 0, 1, 2, 3, 4],
    "all but one are zero": [0, 0, 0, 0, 0, 3, 0, 0],
    "all are zero": [0, 0, 0, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_accumulated_equals_whole(num_microbatches):
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    w = np.array([1.0, -2.0, 0.5], np.float32)
    state = init_state({"w": jnp.asarray(w)}, SGD, key=KEY)
    step = compiled_step(linear_loss, SGD, num_microbatches=num_microbatches)
    for name, weights in WEIGHTS.items():
        weight = np.array(weights, np.float32)
        new, metrics = step(state, {"x": x, "weight": weight})
        gradient = (weight @ x) / max(weight.sum(), 1)
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=name)  # a sum of 8 products
        close(new.params["w"], w - gradient)
        close(metrics["loss"].value, gradient @ w)
        close(metrics["grad_norm"].value, np.linalg.norm(gradient))
        close(metrics["x"].value, x[:, 0].mean())
        assert metrics["loss"].weight == weight.sum()
        assert metrics["x"].weight == 8
        assert weight.any() or np.array_equal(new.params["w"], w)


def test_a_bare_scalar_counts_once_per_microbatch():
    """The mean of the maxima, not the maximum: what a loss that is no mean can be over parts."""
    x = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], np.float32)

    def loss_fn(model, batch, key):
        return model["w"] * jnp.max(batch["x"]), {"sum": jnp.sum(batch["x"])}

    state = init_state({"w": jnp.array(2.0)}, SGD, key=KEY)
    state, metrics = compiled_step(loss_fn, SGD, num_microbatches=4)(state, {"x": x})
    expected = x.reshape(-1, 4).max(axis=0).mean()  # example i is in microbatch i % number
    np.testing.assert_allclose(metrics["loss"].value, 2 * expected, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], 2 - expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["sum"].value, x.sum() / 4, rtol=1e-6)
    assert metrics["loss"].weight == 4


def test_gradients_of_bfloat16_parameters_accumulate_in_float32():
    # 512 gradients of 1 each: a bfloat16 sum would stop at 256.
    def loss_fn(model, batch, key):
        return jnp.sum(model["w"].astype(jnp.float32) * batch)

    state = init_state({"w": jnp.zeros((), jnp.bfloat16)}, SGD, key=KEY)
    state, metrics = compiled_step(loss_fn, SGD, num_microbatches=512)(state, np.ones(512, np.float32))
    assert metrics["grad_norm"].value == 1
    w: Any = state.params["w"]
    assert w.dtype == jnp.bfloat16
    assert w == -1


def test_each_microbatch_has_a_key_of_its_own():
    def loss_fn(model, batch, key):
        u = jax.random.uniform(key)
        return model["w"] * u, {"square": u**2}

    state = init_state({"w": jnp.array(0.0)}, SGD, key=KEY)
    step = compiled_step(loss_fn, SGD, num_microbatches=8)
    new, metrics = step(state, np.ones(8))
    mean, square = float(metrics["grad_norm"].value), float(metrics["square"].value)
    assert square - mean**2 > 0.01  # a spread: uniform numbers have 1/12
    np.testing.assert_allclose(new.params["w"], -mean, rtol=1e-6)
    # And another step draws others.
    _, later = step(new, np.ones(8))
    assert later["grad_norm"].value != mean


def test_microbatches_cost_no_more_arithmetic():
    """On data=8, each device works on a part of each microbatch."""
    mesh = make_mesh()
    model, shardings = helpers.place(helpers.make_mlp(), mesh)
    state = init_state(model, SGD, key=KEY)
    batch = jax.device_put(mlp_batch(0, size=1024), batch_sharding(mesh))

    def flops(num_microbatches):
        step = compiled_step(squared_error, SGD, shardings=shardings, num_microbatches=num_microbatches)
        cost: Any = step.lower(state, batch).compile().cost_analysis()
        return cost["flops"]

    # The cost of a loop is that of one round. What each round adds to the accumulator, and the update of the
    # parameters, count 4 times here: about 4 operations per parameter against 6 for each of 128 examples.
    assert flops(4) * 4 == pytest.approx(flops(1), rel=0.08)


def test_a_number_of_microbatches_that_does_not_divide_is_refused():
    mesh = make_mesh()
    model, shardings = helpers.place({"w": jnp.ones(3)}, mesh)
    state = init_state(model, SGD, key=KEY)
    batch = {"x": np.ones((8, 3), np.float32), "weight": np.ones(8, np.float32)}
    on_eight = "weight has 8 rows, which do not divide into 2 microbatches on 8"
    for number, layout, message in (
        *((number, None, f"num_microbatches={number}") for number in (0, -1, 3, 16)),
        (2, shardings, on_eight),
    ):
        with pytest.raises(ValueError, match=message):
            train_step(
                state,
                batch,
                loss_fn=linear_loss,
                optimizer=SGD,
                num_microbatches=number,
                shardings=layout,
            )
