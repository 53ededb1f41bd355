"""Models with state: running statistics equal a loop by hand."""

from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, by_path, compiled_step
from jax.sharding import NamedSharding
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


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Any):
        self.linear = eqx.nn.Linear(3, 2, key=key)
        self.norm = eqx.nn.BatchNorm(2, "batch", mode="ema", momentum=0.9)

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(self.linear(x), state)


def normed_loss(pair: Any, batch: Any, key: Any) -> Any:
    model, model_state = pair
    out, model_state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        batch, model_state
    )
    return jnp.mean(jnp.sin(3 * out)), {"out": jnp.mean(out)}, model_state


def normed_data() -> list[Any]:
    rng = np.random.default_rng(0)
    return [(1 + i + rng.normal(size=(16, 3))).astype(np.float32) for i in range(3)]


@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("name", ["one", "data8"])
def test_running_statistics_equal_a_loop_by_hand(name, num_microbatches):
    mesh = helpers.mesh_of(name)
    model, model_state = eqx.nn.make_with_state(Normed)(KEY)
    placed, shardings = helpers.place(model, mesh)
    placed_state = jax.device_put(jax.tree.map(jnp.copy, model_state), NamedSharding(mesh, P()))
    state = init_state((placed, placed_state), optax.sgd(0.1), key=jax.random.key(1))
    step = jax.jit(
        partial(
            train_step,
            loss_fn=normed_loss,
            optimizer=optax.sgd(0.1),
            num_microbatches=num_microbatches,
            shardings=shardings,
        ),
        donate_argnums=0,
    )
    data = normed_data()
    metrics: Any = None
    with helpers.count_compilations() as compiled:
        for x in data:
            state, metrics = step(state, jax.device_put(x, batch_sharding(mesh)))
    # One for the step; placing NumPy arrays compiles nothing.
    assert len(compiled) == 1

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, model_state, part):
        value, _, model_state = normed_loss((eqx.combine(params, static), model_state), part, None)
        return value, model_state

    gradient_of = jax.jit(jax.grad(loss, has_aux=True))
    for x in data:
        grads = []
        for i in range(num_microbatches):
            gradient, model_state = gradient_of(params, model_state, x[i::num_microbatches])
            grads.append(gradient)
        mean = jax.tree.map(lambda *gs: sum(gs) / len(gs), *grads)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean)
    # Float32, three steps, through a division by a standard deviation.
    helpers.assert_close(state.params, by_path(params), rtol=1e-4, atol=1e-5)
    expected = model_state.get(static.norm.ema_state_index)
    for i, x in enumerate(expected):
        np.testing.assert_allclose(state.model_state[f"norm.ema_state_index.{i}"], x, rtol=1e-4, atol=1e-5)
    assert not state.model_state["norm.ema_first_time_index"]
    assert sorted(metrics) == ["grad_norm", "loss", "out"]


def test_evaluation_uses_the_running_statistics_and_keeps_them():
    state = init_state(eqx.nn.make_with_state(Normed)(KEY), optax.sgd(0.1), key=KEY)
    data, step = normed_data(), compiled_step(normed_loss, optax.sgd(0.1))
    for x in data:
        state, _ = step(state, x)
    mean, variance = (np.asarray(state.model_state[f"norm.ema_state_index.{i}"]) for i in range(2))
    model, _ = state.model
    hidden = np.asarray(data[0] @ model.linear.weight.T + model.linear.bias)
    expected = (hidden - mean) / np.sqrt(variance + model.norm.eps) * model.norm.weight + model.norm.bias
    metrics = jax.jit(partial(eval_step, loss_fn=normed_loss))(state, data[0])
    np.testing.assert_allclose(metrics["out"].value, expected.mean(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(metrics["loss"].value, np.sin(3 * expected).mean(), rtol=1e-4, atol=1e-5)

    def predict_fn(pair, batch, key):
        model, model_state = pair
        return jax.vmap(lambda x: model(x, model_state)[0], axis_name="batch")(batch)

    outputs = jax.jit(partial(predict_step, predict_fn=predict_fn))(state, data[0])
    np.testing.assert_allclose(outputs, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda out: out[0], r"must return \(loss, metrics, new_state\)"),
        (lambda out: out[:2], r"must return \(loss, metrics, new_state\), but returned a tuple of 2"),
    ],
)
def test_a_model_with_state_must_return_the_new_one(output, message):
    state = init_state(eqx.nn.make_with_state(Normed)(KEY), optax.sgd(0.1), key=KEY)
    with pytest.raises(ValueError, match=message):
        train_step(
            state,
            normed_data()[0],
            loss_fn=lambda m, b, k: output(normed_loss(m, b, k)),
            optimizer=optax.sgd(0.1),
        )


class Wide(Normed):
    """Large enough that `tensor` and `fsdp` split it."""

    def __init__(self, key: Any):
        self.linear = eqx.nn.Linear(64, 128, key=key)
        self.norm = eqx.nn.BatchNorm(128, "batch", mode="ema", momentum=0.9)


def wide_data() -> Any:
    return np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)


def predict_wide(pair: Any, batch: Any, key: Any) -> Any:
    model, model_state = pair
    return jax.vmap(lambda x: model(x, model_state)[0], axis_name="batch")(batch)


def test_the_layout_of_the_pair_serves_the_steps():
    """`shard_rules` and `init_model` lay out `(model, state)` like the model alone."""
    mesh = helpers.mesh_of("2x2x2")
    make = eqx.nn.make_with_state(Wide)
    pair: Any = init_model(make, mesh, key=KEY)
    shardings = shard_rules(pair, mesh)
    assert shardings[0].linear.weight.spec == shard_rules(pair[0], mesh).linear.weight.spec != P()
    assert pair[0].linear.weight.sharding.spec == shardings[0].linear.weight.spec
    assert "0.linear.weight" in explain(pair, mesh).decisions
    state, data = init_state(pair, optax.sgd(0.1), key=KEY), wide_data()
    found = []
    for layout in (shardings, shardings[0]):
        common: Any = {"loss_fn": normed_loss, "shardings": layout}
        new, metrics = jax.jit(partial(train_step, optimizer=optax.sgd(0.1), **common))(state, data)
        evaluated = jax.jit(partial(eval_step, **common))(new, data)
        predicted = jax.jit(partial(predict_step, predict_fn=predict_wide, shardings=layout))(new, data)
        assert new.params["linear.weight"].sharding == state.params["linear.weight"].sharding
        found.append((new, metrics, evaluated, predicted))
    helpers.assert_identical(*found)
