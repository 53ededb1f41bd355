"""Evaluation and prediction, and the randomness and mode of all three steps."""

from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, compiled_step, ratio
from helpers import mlp_batch, squared_error

from redco_eqx import batch_sharding, eval_step, init_state, jit_step, predict_step

# Randomness and inference mode.


class Noisy(eqx.Module):
    w: Any
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.w = jnp.ones(())
        self.dropout = eqx.nn.Dropout(0.5)


def noisy_loss(model: Any, batch: Any, key: Any) -> Any:
    kept = jnp.mean(model.w * model.dropout(batch, key=key))
    return kept, {"noise": jax.random.uniform(key)}


def noisy_predict(model: Any, batch: Any, key: Any) -> Any:
    return {"noise": batch * jax.random.uniform(key), "kept": model.dropout(model.w * batch, key=key)}


ZERO_RATE = optax.sgd(0.0)
ONES = np.ones(64, np.float32)
TRAIN = compiled_step(noisy_loss, ZERO_RATE)
EVALUATE = jit_step(partial(eval_step, loss_fn=noisy_loss), donate=False)
PREDICT = jit_step(partial(predict_step, predict_fn=noisy_predict), donate=False)


def draw(state: Any, **index: Any) -> list[float]:
    """Return the draws of evaluation and prediction; dropout is off in both."""
    metrics, outputs = EVALUATE(state, ONES, **index), PREDICT(state, ONES, **index)
    assert metrics["loss"].value == 1
    np.testing.assert_array_equal(outputs["kept"], ONES)
    return [float(metrics["noise"].value), float(outputs["noise"][0])]


def noises(key: Any) -> list[float]:
    """Return the draws of each of the three steps, at four steps of a run that changes no parameter."""
    state = begin = init_state(Noisy(), ZERO_RATE, key=key)
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
    helpers.assert_identical(state.key, begin.key)  # never consumed
    return drawn


def test_streams_of_randomness_are_apart_and_reproducible():
    drawn, other = noises(KEY), noises(jax.random.key(1))
    assert drawn == noises(jax.random.key(0))
    assert len({*drawn, *other}) == 24


def test_batches_that_see_the_same_state_are_told_apart_by_their_index():
    """The steps of a rollout, say, of one compiled program."""
    state = init_state(Noisy(), ZERO_RATE, key=KEY)
    plain, zero, one = draw(state), draw(state, index=0), draw(state, index=1)
    assert draw(state, index=jnp.int32(1)) == one
    later = draw(TRAIN(state, ONES)[0], index=1)
    assert len({*plain, *zero, *one, *later}) == 8


# Evaluation and prediction.


def test_evaluation_weighs_a_scalar_by_its_examples():
    state = init_state({"w": jnp.ones(3)}, key=KEY)
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)

    def loss_fn(model, batch, key):
        return jnp.mean(batch @ model["w"]), {"first": jnp.mean(batch[:, 0])}

    step = jax.jit(partial(eval_step, loss_fn=loss_fn))
    parts = [step(state, part) for part in (x[:4], x[4:])]
    assert [part["loss"].weight for part in parts] == [4, 2]
    for name, expected in (("loss", x.sum(axis=1).mean()), ("first", x[:, 0].mean())):
        np.testing.assert_allclose((parts[0][name] + parts[1][name]).value, expected, rtol=1e-5)


def test_evaluation_and_prediction_on_a_mesh():
    mesh = helpers.mesh_of("2x2x2")
    model, host_batch = helpers.make_mlp(), mlp_batch(0)
    placed, shardings = helpers.place(model, mesh)
    state = init_state(placed, key=KEY)
    batch = jax.device_put(host_batch, batch_sharding(mesh))

    def predict_fn(model, batch, key):
        return {"out": jax.vmap(model)(batch["x"]), "index": jnp.argmax(batch["x"], axis=1)}

    @eqx.filter_jit
    def on_one_device(model, batch):
        values = [ratio(squared_error, name)(model, batch) for name in (None, "absolute")]
        return *values, jax.vmap(model)(batch["x"])

    loss, absolute, out = on_one_device(model, host_batch)
    metrics = jax.jit(partial(eval_step, loss_fn=squared_error, shardings=shardings))(state, batch)
    assert sorted(metrics) == ["absolute", "loss"]
    np.testing.assert_allclose(metrics["loss"].value, loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["absolute"].value, absolute, rtol=1e-5)
    outputs = jax.jit(partial(predict_step, predict_fn=predict_fn, shardings=shardings))(state, batch)
    np.testing.assert_allclose(outputs["out"], out, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(outputs["index"], host_batch["x"].argmax(axis=1))


def test_predictions_without_one_row_per_example_are_refused():
    state = init_state({"w": jnp.ones(3)}, key=KEY)
    cases: list[tuple[Any, str]] = [
        (lambda m, b, k: {"rows": b, "sum": jnp.sum(b)}, r"output sum has shape \(\)"),
        (lambda m, b, k: {"nested": [b, b[:2]]}, r"output nested\.1 has shape \(2, 3\).*the batch's, 4"),
        (lambda m, b, k: b.T, r"output array has shape \(3, 4\)"),
        (lambda m, b, k: {}, "returned no array"),
        (lambda m, b, k: None, "returned no array"),
    ]
    for predict_fn, message in cases:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(partial(predict_step, predict_fn=predict_fn), state, np.ones((4, 3), np.float32))
