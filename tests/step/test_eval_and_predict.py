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

from redco_eqx import (
    batch_sharding,
    cast,
    eval_step,
    init_state,
    jit_step,
    make_mesh,
    predict_step,
    train_step,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(tensor=2, fsdp=2)


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
    return batch * jax.random.uniform(key)


ZERO_RATE = optax.sgd(0.0)
ONES = np.ones(64, np.float32)


NOISY_STEP = compiled_step(noisy_loss, ZERO_RATE)
NOISY_EVAL = jax.jit(partial(eval_step, loss_fn=noisy_loss))
NOISY_PREDICT = jax.jit(partial(predict_step, predict_fn=noisy_predict))


def noises(key: Any) -> dict[str, list[float]]:
    """Return the draws of each of the three steps, at four steps of a run that changes no parameter."""
    state = init_state(Noisy(), ZERO_RATE, key=key)
    drawn: dict[str, list[float]] = {"train": [], "eval": [], "predict": []}
    for _ in range(4):
        drawn["eval"].append(float(NOISY_EVAL(state, ONES)["noise"].value))
        drawn["predict"].append(float(NOISY_PREDICT(state, ONES)[0]))
        state, metrics = NOISY_STEP(state, ONES)
        drawn["train"].append(float(metrics["noise"].value))
    return drawn


def test_streams_of_randomness_are_apart_and_reproducible():
    drawn, again, other = noises(KEY), noises(jax.random.key(0)), noises(jax.random.key(1))
    numbers = [x for stream in drawn.values() for x in stream]
    assert len(set(numbers)) == 12
    assert drawn == again
    assert not set(numbers) & {x for stream in other.values() for x in stream}


def test_batches_that_see_the_same_state_are_told_apart_by_their_index():
    """The steps of a rollout, say, of one compiled program."""
    state = init_state(Noisy(), ZERO_RATE, key=KEY)
    evaluated = jit_step(partial(eval_step, loss_fn=noisy_loss), donate=False)
    predicted = jit_step(partial(predict_step, predict_fn=noisy_predict), donate=False)

    def draw(state: Any, **index: Any) -> tuple[float, float]:
        return float(evaluated(state, ONES, **index)["noise"]), float(predicted(state, ONES, **index)[0])

    plain, *drawn = [draw(state), *(draw(state, index=i) for i in (0, 1, np.int32(2), jnp.int32(1)))]
    assert plain == (float(NOISY_EVAL(state, ONES)["noise"]), float(NOISY_PREDICT(state, ONES)[0]))
    assert drawn[3] == drawn[1]
    later = draw(NOISY_STEP(state, ONES)[0], index=1)
    assert len({*plain, *drawn[0], *drawn[1], *drawn[2], *later}) == 10


def test_the_key_of_a_state_is_never_consumed():
    state = init_state(Noisy(), ZERO_RATE, key=KEY)
    new, _ = NOISY_STEP(state, ONES)
    helpers.assert_identical(new.key, state.key)
    assert new.step == state.step + 1


def test_dropout_is_on_in_training_only():
    state = init_state(Noisy(), ZERO_RATE, key=KEY)
    assert NOISY_STEP(state, ONES)[1]["loss"].value != 1
    assert NOISY_EVAL(state, ONES)["loss"].value == 1
    outputs = predict_step(state, ONES, predict_fn=lambda m, b, k: m.dropout(m.w * b, key=k))
    np.testing.assert_array_equal(outputs, ONES)
    # The state itself stays in training mode.
    assert state.model.dropout.inference is False


# Evaluation and prediction.


def test_evaluation_weighs_a_scalar_by_its_examples(mesh):
    state = init_state({"w": jnp.ones(3)}, key=KEY)
    x = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)

    def loss_fn(model, batch, key):
        return jnp.mean(batch @ model["w"]), {"first": jnp.mean(batch[:, 0])}

    parts = [eval_step(state, part, loss_fn=loss_fn) for part in (x[:4], x[4:])]
    assert [part["loss"].weight for part in parts] == [4, 2]
    for name, expected in (("loss", x.sum(axis=1).mean()), ("first", x[:, 0].mean())):
        np.testing.assert_allclose((parts[0][name] + parts[1][name]).value, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["one", "2x2x2"])
def test_evaluation_and_prediction_on_a_mesh(name):
    mesh = helpers.mesh_of(name)
    model = helpers.make_mlp()
    placed, shardings = helpers.place(model, mesh)
    state = init_state(placed, key=KEY)
    host_batch = mlp_batch(0)
    batch = jax.device_put(host_batch, batch_sharding(mesh))
    metrics = jax.jit(partial(eval_step, loss_fn=squared_error, shardings=shardings))(state, batch)
    assert sorted(metrics) == ["absolute", "loss"]
    for key, metric in (("loss", None), ("absolute", "absolute")):
        expected = ratio(squared_error, metric)(model, host_batch)
        np.testing.assert_allclose(metrics[key].value, expected, rtol=1e-5)

    def predict_fn(model, batch, key):
        return {"out": jax.vmap(model)(batch["x"]), "index": jnp.argmax(batch["x"], axis=1)}

    outputs = jax.jit(partial(predict_step, predict_fn=predict_fn, shardings=shardings))(state, batch)
    np.testing.assert_allclose(
        outputs["out"], jax.vmap(model)(jnp.asarray(host_batch["x"])), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_array_equal(outputs["index"], host_batch["x"].argmax(axis=1))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda b: {"rows": b, "sum": jnp.sum(b)}, r"output sum has shape \(\)"),
        (lambda b: {"nested": [b, b[:2]]}, r"output nested\.1 has shape \(2, 3\).*the batch's, 4"),
        (lambda b: b.T, r"output array has shape \(3, 4\)"),
        (lambda b: {}, "returned no array"),
        (lambda b: None, "returned no array"),
    ],
)
def test_predictions_without_one_row_per_example_are_refused(output, message):
    state = init_state({"w": jnp.ones(3)}, key=KEY)
    with pytest.raises(ValueError, match=message):
        predict_step(state, np.ones((4, 3)), predict_fn=lambda model, batch, key: output(jnp.asarray(batch)))


def test_bfloat16_compute_over_float32_masters():
    def loss_fn(model, batch, key):
        model, batch = cast((model, batch), jnp.bfloat16)
        out = jax.vmap(model)(batch["x"])
        assert out.dtype == jnp.bfloat16
        return jnp.mean((out - batch["y"]).astype(jnp.float32) ** 2)

    state = init_state(helpers.make_mlp(), optax.sgd(0.1), key=KEY)
    new, metrics = jax.jit(partial(train_step, loss_fn=loss_fn, optimizer=optax.sgd(0.1)))(state, mlp_batch(0))
    assert {x.dtype for x in new.params.values()} == {jnp.dtype("float32")}
    x, y = (jnp.asarray(mlp_batch(0)[name]) for name in ("x", "y"))
    exact = jnp.mean((jax.vmap(helpers.make_mlp())(x) - y) ** 2)
    # bfloat16 has 8 bits.
    np.testing.assert_allclose(metrics["loss"].value, exact, rtol=2e-2)
    assert metrics["loss"].value != exact
