"""Three steps of one state: their streams of randomness, evaluation, prediction, and
models with a state."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import Normed, assert_identical, compilations
from helpers import KEY, assert_close, by_path, compiled_step, mesh_of

import redco_eqx as rx

# Randomness and inference mode.


class Noisy(eqx.Module):
    w: Any
    dropout: eqx.nn.Dropout


def noisy_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(model.w * model.dropout(batch, key=key)), {
        "noise": jax.random.uniform(key)
    }


def noisy_predict(model: Any, batch: Any, key: Any) -> Any:
    return {
        "noise": batch * jax.random.uniform(key),
        "kept": model.dropout(model.w * batch, key=key),
    }


NOISY = Noisy(jnp.ones(()), eqx.nn.Dropout(0.5))
ZERO_RATE = optax.sgd(0.0)
ONES = np.ones(64, np.float32)
TRAIN = compiled_step(noisy_loss, ZERO_RATE)
EVALUATE = rx.jit_step(partial(rx.eval_step, loss_fn=noisy_loss), donate=False)
PREDICT = rx.jit_step(partial(rx.predict_step, predict_fn=noisy_predict), donate=False)


def draw(state: Any, **index: Any) -> list[float]:
    """Return the draws of evaluation and prediction; dropout is off in both."""
    metrics = EVALUATE(state, ONES, **index)
    outputs = PREDICT(state, ONES, **index)
    assert metrics["loss"].value == 1
    np.testing.assert_array_equal(outputs["kept"], ONES)
    return [float(metrics["noise"].value), float(outputs["noise"][0])]


def noises(key: Any) -> list[float]:
    """Return the draws of each of the three steps, at four steps of a run that changes
    no parameter."""
    state = begin = rx.init_state(NOISY, ZERO_RATE, key=key)
    drawn: list[float] = []
    losses: set[float] = set()
    for i in range(4):
        drawn += draw(state)
        state, metrics = TRAIN(state, ONES)
        drawn.append(float(metrics["noise"].value))
        losses.add(float(metrics["loss"].value))
        assert state.step == i + 1
        assert state.model.dropout.inference is False
    assert len(losses) > 1  # dropout is on
    assert_identical(state.key, begin.key)  # never consumed
    return drawn


def test_streams_of_randomness_are_apart_and_reproducible():
    drawn, other = noises(KEY), noises(jax.random.key(1))
    assert drawn == noises(jax.random.key(0))
    assert len({*drawn, *other}) == 24
    # Members of an ensemble draw each from their own key.
    states = jax.vmap(lambda key: rx.init_state(NOISY, ZERO_RATE, key=key))(
        jnp.stack([KEY, jax.random.key(1)])
    )
    assert jax.vmap(TRAIN, (0, None))(states, ONES)[1]["noise"].value.tolist() == [
        drawn[2],
        other[2],
    ]


def test_batches_that_see_the_same_state_are_told_apart_by_their_index():
    """The steps of a rollout, say, of one compiled program."""
    state = rx.init_state(NOISY, ZERO_RATE, key=KEY)
    plain, zero, one = draw(state), draw(state, index=0), draw(state, index=1)
    assert draw(state, index=jnp.int32(1)) == one
    assert len({*plain, *zero, *one, *draw(TRAIN(state, ONES)[0], index=1)}) == 8


# Evaluation and prediction.


WITHOUT_ROWS: dict[str, tuple[Any, str]] = {
    "sum": (
        lambda m, b, k: {"rows": b, "sum": jnp.sum(b)},
        r"output sum has shape \(\)",
    ),
    "fewer_rows": (
        lambda m, b, k: {"nested": [b, b[:2]]},
        r"output nested\.1 has shape \(2, 3\).*the batch's, 4",
    ),
    "transposed": (lambda m, b, k: b.T, r"output array has shape \(3, 4\)"),
    "empty": (lambda m, b, k: {}, "returned no array"),
    "none": (lambda m, b, k: None, "returned no array"),
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_predictions_without_one_row_per_example_are_refused(name: str):
    predict_fn, message = WITHOUT_ROWS[name]
    state = rx.init_state({"w": jnp.ones(3)}, key=KEY)
    step = partial(rx.predict_step, predict_fn=predict_fn)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, state, np.ones((4, 3), np.float32))


# Models with state: running statistics equal a loop by hand, and evaluation uses them.

SLOW = optax.sgd(0.1)


def loss_fn(pair: Any, batch: Any, key: Any) -> Any:
    model, model_state = pair
    apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    out, model_state = apply(batch, model_state)
    return jnp.mean(jnp.sin(3 * out)), {"out": jnp.mean(out)}, model_state


def predict_fn(pair: Any, batch: Any, key: Any) -> Any:
    model, model_state = pair
    return jax.vmap(lambda x: model(x, model_state)[0], axis_name="batch")(batch)


DATA = [
    (1 + i + np.random.default_rng(i).normal(size=(16, 64))).astype(np.float32)
    for i in range(3)
]
MAKE = eqx.nn.make_with_state(Normed)


@pytest.mark.parametrize(("name", "num_microbatches"), [("data8", 1), ("2x2x2", 2)])
def test_running_statistics_equal_a_loop_by_hand(name, num_microbatches):
    mesh = mesh_of(name)
    pair: Any = rx.init_model(MAKE, mesh, key=KEY)
    shardings = rx.shard_rules(pair, mesh)
    state = rx.init_state(pair, SLOW, key=jax.random.key(1))
    model, model_state = MAKE(KEY)
    step = compiled_step(
        loss_fn, SLOW, num_microbatches=num_microbatches, shardings=shardings
    )
    metrics: Any = None
    with compilations() as compiled:
        for x in DATA:
            state, metrics = step(state, jax.device_put(x, rx.batch_sharding(mesh)))
    assert (len(compiled), sorted(metrics)) == (1, ["grad_norm", "loss", "out"])

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, model_state, part):
        value, _, model_state = loss_fn(
            (eqx.combine(params, static), model_state), part, None
        )
        return value, model_state

    gradient_of = jax.jit(jax.grad(loss, has_aux=True))
    for x in DATA:
        grads = []
        for i in range(num_microbatches):
            gradient, model_state = gradient_of(
                params, model_state, x[i::num_microbatches]
            )
            grads.append(gradient)
        mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
    # Float32, three steps, through a division by a standard deviation.
    assert_close(state.params, by_path(params), rtol=1e-4, atol=1e-5)
    mean, variance = (
        np.asarray(state.model_state[f"norm.ema_state_index.{i}"]) for i in range(2)
    )
    for found, x in zip(
        (mean, variance), model_state.get(static.norm.ema_state_index), strict=True
    ):
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-5)
    assert not state.model_state["norm.ema_first_time_index"]

    model = jax.device_get(state.model[0])
    hidden = DATA[0] @ model.linear.weight.T + model.linear.bias
    expected = (hidden - mean) / np.sqrt(
        variance + model.norm.eps
    ) * model.norm.weight + model.norm.bias
    metrics = jax.jit(partial(rx.eval_step, loss_fn=loss_fn, shardings=shardings))(
        state, DATA[0]
    )
    np.testing.assert_allclose(
        metrics["out"].value, expected.mean(), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        metrics["loss"].value, np.sin(3 * expected).mean(), rtol=1e-4, atol=1e-5
    )
    outputs = jax.jit(
        partial(rx.predict_step, predict_fn=predict_fn, shardings=shardings)
    )(state, DATA[0])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_the_layout_of_the_pair_is_that_of_the_model():
    mesh = mesh_of("2x2x2")
    pair: Any = rx.init_model(MAKE, mesh, key=KEY)
    of_pair, of_model = rx.shard_rules(pair, mesh), rx.shard_rules(pair[0], mesh)
    assert of_pair[0].linear.weight.spec == of_model.linear.weight.spec != jax.P()
    assert pair[0].linear.weight.sharding.spec == of_model.linear.weight.spec
    assert "0.linear.weight" in rx.explain(pair, mesh).decisions
    state = rx.init_state(pair, SLOW, key=KEY)
    train = partial(rx.train_step, loss_fn=loss_fn, optimizer=SLOW)
    evaluate = partial(rx.eval_step, loss_fn=loss_fn)
    predict = partial(rx.predict_step, predict_fn=predict_fn)
    for step in (train, evaluate, predict):
        programs = [
            jax.jit(partial(step, shardings=x)).lower(state, DATA[0])
            for x in (of_pair, of_model)
        ]
        assert programs[0].as_text() == programs[1].as_text()


def test_a_model_with_state_must_return_the_new_one():
    state = rx.init_state(MAKE(KEY), SLOW, key=KEY)
    for kept, message in (
        (0, "but returned a"),
        (slice(2), "but returned a tuple of 2"),
    ):
        with pytest.raises(
            ValueError, match=rf"must return \(loss, metrics, new_state\), {message}"
        ):
            rx.train_step(
                state,
                DATA[0],
                loss_fn=lambda *a, kept=kept: loss_fn(*a)[kept],
                optimizer=SLOW,
            )
