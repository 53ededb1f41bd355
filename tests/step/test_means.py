"""Means over examples: losses, the metrics that steps report, and microbatches
(accumulated equals whole)."""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import (
    KEY,
    compiled_step,
    cross_entropy,
    mlp_batch,
    squared_error,
    token_batch,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import redco_eqx as rx
from redco_eqx._base.protocols import RESERVED_METRICS

SGD = optax.sgd(1.0)


def stepped(loss_fn: Any, w: Any, batch: Any, **options: Any) -> Any:
    """The new `w`, and the metrics, of one step."""
    state = rx.init_state({"w": jnp.asarray(w)}, SGD, key=KEY)
    state, metrics = compiled_step(loss_fn, SGD, **options)(state, batch)
    return state.params["w"], metrics


NUMBERS = st.floats(-100, 100, width=32)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(NUMBERS, st.integers(0, 100)), min_size=1, max_size=5))
def test_means_add_up_to_the_mean_of_all(pairs):
    total = sum(
        (rx.Mean(np.float32(x * n), np.float32(n)) for x, n in pairs), rx.Mean(0.0, 0.0)
    )
    count = sum(n for _, n in pairs)
    expected = sum(x * n for x, n in pairs) / count if count else 0.0
    # Up to 5 roundings of sums up to 5e4 in float32.
    np.testing.assert_allclose(
        float(total), expected, rtol=1e-5, atol=1e-6 * 5e4 / max(count, 1)
    )


def test_a_mean_is_a_tree_and_over_nothing_zero():
    assert jax.tree.map(lambda x: 2 * x, rx.Mean(1.0, 2.0)) == rx.Mean(2.0, 4.0)
    added = jax.jit(lambda m: m + m)(rx.Mean(1.0, 2.0))
    assert (added.total, added.weight) == (2.0, 4.0)
    assert float(rx.Mean(jnp.float32(0), jnp.float32(0))) == 0
    assert jax.jit(jax.grad(lambda x: rx.Mean(x, jnp.float32(0)).value))(1.0) == 0


def test_gradients_do_not_flow_through_the_weight():
    x = np.array([1.0, 2.0], np.float32)

    def loss_fn(model, batch, key):
        return rx.Mean(jnp.sum(model["w"] * batch), jnp.sum(model["w"] ** 2))

    w = np.array([2.0, 1.0], np.float32)
    new, metrics = stepped(loss_fn, w, x)
    np.testing.assert_allclose(new, w - x / 5, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"].value, 4 / 5, rtol=1e-6)


def test_metrics_come_in_float32():
    dtypes = (jnp.bfloat16, jnp.float16, jnp.int32, jnp.bool_)

    def loss_fn(model, batch, key):
        metrics = {
            str(dtype): rx.Mean(jnp.ones((), dtype), jnp.ones((), dtype))
            for dtype in dtypes
        }
        # Four of each do not fit into its dtype.
        limits = {"half": jnp.float16(6e4), "byte": jnp.uint8(200)}
        return jnp.sum(model["w"]), {**metrics, "three": 3, **limits}

    state = rx.init_state({"w": jnp.ones(2)}, SGD, key=KEY)
    evaluated = jax.jit(partial(rx.eval_step, loss_fn=loss_fn))(state, np.ones(4))
    for metrics in (stepped(loss_fn, jnp.ones(2), np.ones(4))[1], evaluated):
        assert {x.dtype for x in jax.tree.leaves(metrics)} == {jnp.dtype("float32")}
        assert [metrics[str(dtype)].value for dtype in dtypes] == [1] * 4
        assert [metrics[name].value for name in ("three", "half", "byte")] == [
            3,
            np.float16(6e4),
            200,
        ]


ONE = jnp.ones(())
# What a loss returns from (model, batch, key), and the message.
BAD_LOSSES = [
    pytest.param(
        lambda m, b, k: b @ m["w"],
        r"the loss must be a scalar .* shape \(4,\)",
        id="rows",
    ),
    pytest.param(
        lambda m, b, k: rx.Mean(b @ m["w"], ONE),
        r"its total has shape \(4,\)",
        id="total_of_rows",
    ),
    pytest.param(
        lambda m, b, k: rx.Mean(ONE, jnp.ones(4)),
        r"its weight has shape \(4,\)",
        id="weight_of_rows",
    ),
    pytest.param(
        lambda m, b, k: (ONE, {"hits": b}),
        r"the metric 'hits' .* shape \(4, 2\)",
        id="metric_of_rows",
    ),
    pytest.param(
        lambda m, b, k: (ONE, {"z": ONE + 1j}),
        r"the metric 'z' must be a real number",
        id="complex_metric",
    ),
    pytest.param(lambda m, b, k: (), "a tuple of 0", id="empty_tuple"),
    pytest.param(
        lambda m, b, k: (ONE, [ONE]),
        "a dict of names, not list",
        id="metrics_in_a_list",
    ),
    *(
        pytest.param(
            lambda m, b, k, x=x: (ONE, {x: ONE}),
            f"'{x}' is reserved",
            id=f"metric_named_{x}",
        )
        for x in RESERVED_METRICS
    ),
]


@pytest.mark.parametrize(
    "step",
    [partial(rx.train_step, optimizer=SGD), rx.eval_step],
    ids=["train_step", "eval_step"],
)
@pytest.mark.parametrize(("loss_fn", "message"), BAD_LOSSES)
def test_a_bad_loss_is_refused(loss_fn, message, step):
    state = rx.init_state({"w": jnp.ones(2)}, SGD, key=KEY)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            partial(step, loss_fn=loss_fn), state, np.ones((4, 2), np.float32)
        )


def test_the_learning_rate_is_reported_where_it_can_be_seen():
    schedule = optax.linear_schedule(1.0, 0.0, 4)
    seen = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(schedule))
    for optimizer, names in ((seen, {"learning_rate"}), (optax.adam(schedule), set())):
        # A parameter of this name has moments of this name.
        state = rx.init_state(
            {"w": jnp.ones(2), "learning_rate": jnp.ones(())}, optimizer, key=KEY
        )
        step = compiled_step(
            lambda model, batch, key: sum(map(jnp.sum, model.values())), optimizer
        )
        assert jax.eval_shape(step, state, np.ones(4))[1].keys() == {
            "grad_norm",
            "loss",
            *names,
        }
        for i in range(3 if names else 0):
            state, metrics = step(state, np.ones(4))
            np.testing.assert_allclose(
                metrics["learning_rate"].value, schedule(i), rtol=1e-6
            )


def test_parameters_that_the_loss_cannot_depend_on_are_named():
    names = ("used", "unused", "stopped", "times_zero", "in_a_jit", "only_shape")

    @jax.jit
    def inner(model, x):
        return jnp.sum(x) * model["in_a_jit"] + model["only_shape"].size

    def loss_fn(model, batch, key):
        zero = batch[0, 0] - batch[0, 0]
        used = jnp.mean(batch * model["used"]) + zero * model["times_zero"]
        return used + jax.lax.stop_gradient(model["stopped"]) + inner(model, batch[0])

    state = rx.init_state(
        {name: jnp.asarray(float(i)) for i, name in enumerate(names)}, SGD, key=KEY
    )
    message = (
        "gradient of 3 trainable arrays is always zero, because the loss does not use "
        "their values, or only behind stop_gradient: only_shape, stopped, unused"
    )
    with pytest.warns(UserWarning, match=message):
        jax.eval_shape(compiled_step(loss_fn, SGD), state, np.ones((4, 2), np.float32))


@pytest.mark.filterwarnings("error")
def test_every_parameter_of_a_transformer_is_used():
    state = rx.init_state(helpers.make_transformer(), SGD, key=KEY)
    jax.eval_shape(compiled_step(cross_entropy, SGD), state, token_batch(0))


# Microbatches


def linear_loss(model: Any, batch: Any, key: Any) -> tuple[rx.Mean, dict[str, rx.Mean]]:
    """Linear in `w`, so that every sum can be written down."""
    weight = batch["weight"]
    total = jnp.sum(weight * (batch["x"] @ model["w"]))
    return rx.Mean(total, jnp.sum(weight)), {
        "x": rx.Mean(jnp.sum(batch["x"][:, 0]), weight.shape[0])
    }


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
    state = rx.init_state({"w": jnp.asarray(w)}, SGD, key=KEY)
    step = compiled_step(linear_loss, SGD, num_microbatches=num_microbatches)
    for name, weights in WEIGHTS.items():
        weight = np.array(weights, np.float32)
        new, metrics = step(state, {"x": x, "weight": weight})
        gradient = (weight @ x) / max(weight.sum(), 1)
        # A sum of 8 products.
        close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=name)
        close(new.params["w"], w - gradient)
        close(metrics["loss"].value, gradient @ w)
        close(metrics["grad_norm"].value, np.linalg.norm(gradient))
        close(metrics["x"].value, x[:, 0].mean())
        assert (metrics["loss"].weight, metrics["x"].weight) == (weight.sum(), 8)
        assert weight.any() or np.array_equal(new.params["w"], w)


def test_a_bare_scalar_counts_once_per_microbatch():
    """The mean of the maxima, not the maximum: what a loss that is no mean can be over
    parts."""
    x = np.array([3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], np.float32)

    def loss_fn(model, batch, key):
        return model["w"] * jnp.max(batch["x"]), {"sum": jnp.sum(batch["x"])}

    new, metrics = stepped(loss_fn, 2.0, {"x": x}, num_microbatches=4)
    # Example i is in microbatch i % number.
    expected = x.reshape(-1, 4).max(axis=0).mean()
    np.testing.assert_allclose(metrics["loss"].value, 2 * expected, rtol=1e-6)
    np.testing.assert_allclose(new, 2 - expected, rtol=1e-6)
    np.testing.assert_allclose(metrics["sum"].value, x.sum() / 4, rtol=1e-6)
    assert metrics["loss"].weight == 4


def test_gradients_of_bfloat16_parameters_accumulate_in_float32():
    # 512 gradients of 1 each: a bfloat16 sum would stop at 256.
    def loss_fn(model, batch, key):
        return jnp.sum(model["w"].astype(jnp.float32) * batch)

    w, metrics = stepped(
        loss_fn,
        jnp.zeros((), jnp.bfloat16),
        np.ones(512, np.float32),
        num_microbatches=512,
    )
    assert metrics["grad_norm"].value == 1
    assert (w, w.dtype) == (-1, jnp.bfloat16)


def test_each_microbatch_has_a_key_of_its_own():
    def loss_fn(model, batch, key):
        u = jax.random.uniform(key)
        return model["w"] * u, {"square": u**2}

    state = rx.init_state({"w": jnp.array(0.0)}, SGD, key=KEY)
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
    mesh = rx.make_mesh()
    model, shardings = helpers.place(helpers.make_mlp(), mesh)
    state = rx.init_state(model, SGD, key=KEY)
    batch = jax.device_put(mlp_batch(0, size=1024), rx.batch_sharding(mesh))

    def flops(num_microbatches):
        step = compiled_step(
            squared_error, SGD, shardings=shardings, num_microbatches=num_microbatches
        )
        cost: Any = step.lower(state, batch).compile().cost_analysis()
        return cost["flops"]

    # The cost of a loop is that of one round. What each round adds to the accumulator,
    # and the update of the parameters, count 4 times here: about 4 operations per
    # parameter against 6 for each of 128 examples.
    assert flops(4) * 4 == pytest.approx(flops(1), rel=0.08)


# The number of microbatches, whether the layout is given, more of the batch, and the
# message.
INDIVISIBLE = [
    *(
        pytest.param(
            number, False, {}, f"num_microbatches={number}", id=f"into {number}"
        )
        for number in (0, -1, 3, 16)
    ),
    pytest.param(
        2,
        True,
        {},
        "weight has 8 rows, which do not divide into 2 microbatches on 8",
        id="on 8 devices",
    ),
    pytest.param(
        2,
        False,
        {"shared": np.ones(4, np.float32)},
        "arrays differ: shared has 4, weight has 8, x has 8",
        id="fewer rows",
    ),
    pytest.param(
        2,
        False,
        {"shared": np.float32(1)},
        "arrays differ: shared has none, weight has 8, x has 8",
        id="an array without rows",
    ),
    pytest.param(
        2,
        False,
        dict.fromkeys(("x", "weight"), np.float32(1)),
        "weight has no rows, which do not divide into 2",
        id="no rows",
    ),
]


@pytest.mark.parametrize(("number", "is_laid_out", "more", "message"), INDIVISIBLE)
def test_a_number_of_microbatches_that_does_not_divide_is_refused(
    number, is_laid_out, more, message
):
    model, shardings = helpers.place({"w": jnp.ones(3)}, rx.make_mesh())
    state = rx.init_state(model, SGD, key=KEY)
    batch = {"x": np.ones((8, 3), np.float32), "weight": np.ones(8, np.float32)}
    with pytest.raises(ValueError, match=message):
        rx.train_step(
            state,
            {**batch, **more},
            loss_fn=linear_loss,
            optimizer=SGD,
            num_microbatches=number,
            shardings=shardings if is_laid_out else None,
        )
