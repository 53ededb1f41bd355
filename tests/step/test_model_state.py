"""Models with state: running statistics equal a loop by hand, and evaluation uses them."""

from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, Normed, by_path, compiled_step
from jax.sharding import PartitionSpec as P

from redco_eqx import (
    batch_sharding,
    eval_step,
    explain,
    init_model,
    init_state,
    predict_step,
    shard_rules,
    train_step,
)

SGD = optax.sgd(0.1)


def loss_fn(pair: Any, batch: Any, key: Any) -> Any:
    model, model_state = pair
    out, model_state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        batch, model_state
    )
    return jnp.mean(jnp.sin(3 * out)), {"out": jnp.mean(out)}, model_state


def predict_fn(pair: Any, batch: Any, key: Any) -> Any:
    model, model_state = pair
    return jax.vmap(lambda x: model(x, model_state)[0], axis_name="batch")(batch)


DATA = [(1 + i + np.random.default_rng(i).normal(size=(16, 64))).astype(np.float32) for i in range(3)]
MAKE = eqx.nn.make_with_state(Normed)


@pytest.mark.parametrize(("name", "num_microbatches"), [("data8", 1), ("2x2x2", 2)])
def test_running_statistics_equal_a_loop_by_hand(name, num_microbatches):
    mesh = helpers.mesh_of(name)
    pair: Any = init_model(MAKE, mesh, key=KEY)
    shardings = shard_rules(pair, mesh)
    state = init_state(pair, SGD, key=jax.random.key(1))
    model, model_state = MAKE(KEY)
    step = compiled_step(loss_fn, SGD, num_microbatches=num_microbatches, shardings=shardings)
    metrics: Any = None
    with helpers.count_compilations() as compiled:
        for x in DATA:
            state, metrics = step(state, jax.device_put(x, batch_sharding(mesh)))
    assert len(compiled) == 1
    assert sorted(metrics) == ["grad_norm", "loss", "out"]

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, model_state, part):
        value, _, model_state = loss_fn((eqx.combine(params, static), model_state), part, None)
        return value, model_state

    gradient_of = jax.jit(jax.grad(loss, has_aux=True))
    for x in DATA:
        grads = []
        for i in range(num_microbatches):
            gradient, model_state = gradient_of(params, model_state, x[i::num_microbatches])
            grads.append(gradient)
        mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
    # Float32, three steps, through a division by a standard deviation.
    helpers.assert_close(state.params, by_path(params), rtol=1e-4, atol=1e-5)
    mean, variance = (np.asarray(state.model_state[f"norm.ema_state_index.{i}"]) for i in range(2))
    for found, x in zip((mean, variance), model_state.get(static.norm.ema_state_index), strict=True):
        np.testing.assert_allclose(found, x, rtol=1e-4, atol=1e-5)
    assert not state.model_state["norm.ema_first_time_index"]

    model = jax.device_get(state.model[0])
    hidden = DATA[0] @ model.linear.weight.T + model.linear.bias
    expected = (hidden - mean) / np.sqrt(variance + model.norm.eps) * model.norm.weight + model.norm.bias
    metrics = jax.jit(partial(eval_step, loss_fn=loss_fn, shardings=shardings))(state, DATA[0])
    np.testing.assert_allclose(metrics["out"].value, expected.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"].value, np.sin(3 * expected).mean(), rtol=1e-4, atol=1e-5)
    outputs = jax.jit(partial(predict_step, predict_fn=predict_fn, shardings=shardings))(state, DATA[0])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


def test_the_layout_of_the_pair_is_that_of_the_model():
    mesh = helpers.mesh_of("2x2x2")
    pair: Any = init_model(MAKE, mesh, key=KEY)
    of_pair, of_model = shard_rules(pair, mesh), shard_rules(pair[0], mesh)
    assert of_pair[0].linear.weight.spec == of_model.linear.weight.spec != P()
    assert pair[0].linear.weight.sharding.spec == of_model.linear.weight.spec
    assert "0.linear.weight" in explain(pair, mesh).decisions
    state = init_state(pair, SGD, key=KEY)
    for step in (
        partial(train_step, loss_fn=loss_fn, optimizer=SGD),
        partial(eval_step, loss_fn=loss_fn),
        partial(predict_step, predict_fn=predict_fn),
    ):
        programs = [jax.jit(partial(step, shardings=x)).lower(state, DATA[0]) for x in (of_pair, of_model)]
        assert programs[0].as_text() == programs[1].as_text()


def test_a_model_with_state_must_return_the_new_one():
    state = init_state(MAKE(KEY), SGD, key=KEY)
    cases: list[tuple[Any, str]] = [
        (lambda m, b, k: loss_fn(m, b, k)[0], "but returned a"),
        (lambda m, b, k: loss_fn(m, b, k)[:2], "but returned a tuple of 2"),
    ]
    for without, message in cases:
        with pytest.raises(ValueError, match=rf"must return \(loss, metrics, new_state\), {message}"):
            train_step(state, DATA[0], loss_fn=without, optimizer=SGD)
