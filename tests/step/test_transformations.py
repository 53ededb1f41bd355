"""Steps under plain `jit`, `scan`, `vmap`, `grad` and `eval_shape`, with no filter of Equinox."""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, by_hand, by_path, ratio
from helpers import mlp_batch, squared_error

from redco_eqx import (
    Mean,
    batch_sharding,
    eval_step,
    init_state,
    make_mesh,
    train_step,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(tensor=2, fsdp=2)


class Odd(eqx.Module):
    """Holds a lambda, a partial and tied weights."""

    shared: Any
    activation: Callable[[Any], Any]
    gate: Callable[[Any], Any]
    count: Any

    def __init__(self, kind: str, seed: int):
        keys = jax.random.split(jax.random.key(seed))
        embedding = eqx.nn.Embedding(5, 4, key=keys[0])
        head = eqx.nn.Linear(4, 5, key=keys[1])
        if kind == "shared":
            pair = (embedding, head)
            self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)
        else:
            self.shared = Call((embedding, head))
        self.activation = lambda x: x + x**2
        self.gate = functools.partial(jax.nn.leaky_relu, negative_slope=0.3)
        self.count = jnp.arange(2)

    def __call__(self, token: Any) -> Any:
        embedding, head = self.shared()
        return head(self.gate(self.activation(embedding(token))))


class Call(eqx.Module):
    pair: Any

    def __call__(self) -> Any:
        return self.pair


def odd_loss(model: Any, batch: Any, key: Any) -> tuple[Mean, dict[str, Any]]:
    logits = jax.vmap(model)(batch["tokens"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    noise = jax.random.normal(key)
    return Mean(jnp.sum(loss) + 0.1 * noise, len(loss)), {"noise": noise}


def odd_batch(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 5, 8).astype(np.int32) for name in ("tokens", "labels")}


ADAM = optax.adam(0.1)
ODD_STEP = partial(train_step, loss_fn=odd_loss, optimizer=ADAM)
ODD_BATCHES = [odd_batch(seed) for seed in range(3)]


def odd_state(seed: int = 0, kind: str = "plain") -> Any:
    return init_state(Odd(kind, seed), ADAM, key=jax.random.key(seed))


@pytest.fixture(scope="module")
def looped():
    """Three steps of the compiled step, from seed 0, with the metrics of each."""
    step, state, metrics = jax.jit(ODD_STEP), odd_state(), []
    for batch in ODD_BATCHES:
        state, report = step(state, batch)
        metrics.append(report)
    return state, metrics


def test_jit_with_donation(looped):
    step, states = jax.jit(ODD_STEP, donate_argnums=0), [odd_state()]
    for batch in ODD_BATCHES:
        states.append(step(states[-1], batch)[0])
    *previous, state = states
    assert all(x.is_deleted() for x in jax.tree.leaves([s.params for s in previous]))
    helpers.assert_close(state, looped[0], rtol=1e-6)


def test_scan_equals_a_loop(looped):
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *ODD_BATCHES)
    state, metrics = jax.lax.scan(ODD_STEP, odd_state(), stacked)
    helpers.assert_close(state, looped[0], rtol=1e-4, atol=1e-5)
    helpers.assert_close(metrics, jax.tree.map(lambda *xs: jnp.stack(xs), *looped[1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "shared"])
def test_vmap_over_an_ensemble_equals_each_alone(kind):
    """States that are built apart, each with its own lambda and partial, and stacked."""
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(odd_state(seed, kind) for seed in range(3)))
    batches = jax.tree.map(lambda *xs: np.stack(xs), *ODD_BATCHES)
    together = jax.jit(jax.vmap(ODD_STEP))
    alone = jax.jit(ODD_STEP)
    ensemble, metrics = together(*together(stacked, batches)[:1], batches)
    for seed in range(3):
        state, _ = alone(odd_state(seed, kind), ODD_BATCHES[seed])
        state, report = alone(state, ODD_BATCHES[seed])
        helpers.assert_close(jax.tree.map(lambda x, seed=seed: x[seed], ensemble), state, rtol=1e-4, atol=1e-5)
        helpers.assert_close(jax.tree.map(lambda x, seed=seed: x[seed], metrics), report, rtol=1e-4, atol=1e-5)


def test_vmap_with_shardings_equals_each_alone(mesh):
    """An ensemble on the mesh, each member split."""
    optimizer = optax.sgd(0.1)
    models = [helpers.place(helpers.make_mlp(seed=seed), mesh) for seed in range(2)]
    shardings = models[0][1]
    states = [init_state(model, optimizer, key=KEY) for model, _ in models]
    step = partial(train_step, loss_fn=squared_error, optimizer=optimizer, shardings=shardings)
    batch = jax.device_put(mlp_batch(0), batch_sharding(mesh))
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    ensemble, _ = jax.jit(jax.vmap(step, in_axes=(0, None)))(stacked, batch)
    alone = jax.jit(step)
    for i, state in enumerate(states):
        helpers.assert_close(
            jax.tree.map(lambda x, i=i: x[i], ensemble.params),
            alone(state, batch)[0].params,
            rtol=1e-4,
            atol=1e-5,
        )
    assert not ensemble.params["layers.0.weight"].is_fully_replicated


def test_scan_with_shardings_keeps_the_layout(mesh):
    optimizer = optax.sgd(0.1)
    model, shardings = helpers.place(helpers.make_mlp(), mesh)
    state = init_state(model, optimizer, key=KEY)
    step = partial(train_step, loss_fn=squared_error, optimizer=optimizer, shardings=shardings)
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *(mlp_batch(seed) for seed in range(3)))
    final, _ = jax.jit(lambda s, xs: jax.lax.scan(step, s, xs))(state, stacked)
    helpers.assert_same_layout(final.params, state.params)
    expected, _, _ = by_hand(
        helpers.make_mlp(), optimizer, ratio(squared_error), [mlp_batch(seed) for seed in range(3)]
    )
    helpers.assert_close(final.params, by_path(expected), rtol=1e-4, atol=1e-5)


def test_the_state_comes_out_as_it_went_in():
    """A fixed point of shape, dtype and weak type: what scan needs, and a step that compiles once."""
    state = odd_state()
    new, metrics = jax.eval_shape(ODD_STEP, state, ODD_BATCHES[0])
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, jax.typeof(y).weak_type)
    assert sorted(metrics) == ["grad_norm", "loss", "noise"]
    for x in jax.tree.leaves(metrics):
        assert (x.shape, x.dtype) == ((), jnp.float32)


def quadratic_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(jnp.tanh(batch @ model["w"]) ** 2) + 0.1 * jnp.sum(model["w"] ** 4)


def central(f: Callable[[Any], Any], x: float, step: float = 1e-5) -> float:
    return float(f(x + step) - f(x - step)) / (2 * step)


@pytest.mark.parametrize("how", ["closed over", "in the optimizer state"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_gradient_through_steps_by_the_learning_rate(how, num_microbatches):
    with jax.enable_x64(True):
        batch = np.random.default_rng(0).normal(size=(4, 3))
        w = {"w": jnp.array([0.3, -0.7, 1.1])}

        def after(rate):
            # eps_root: without it the derivative of a square root at 0 is infinite.
            make = partial(optax.adam, eps_root=1e-8)
            if how == "closed over":
                optimizer = make(rate)
                state = init_state(w, optimizer, key=KEY)
            else:
                optimizer = optax.inject_hyperparams(make)(0.1)
                state = init_state(w, optimizer, key=KEY)
                hyperparams = {**state.opt_state.hyperparams, "learning_rate": jnp.asarray(rate)}
                state = dataclasses.replace(state, opt_state=state.opt_state._replace(hyperparams=hyperparams))
            for _ in range(3):
                state, _ = train_step(
                    state,
                    batch,
                    loss_fn=quadratic_loss,
                    optimizer=optimizer,
                    num_microbatches=num_microbatches,
                )
            return eval_step(state, batch, loss_fn=quadratic_loss)["loss"].value

        compiled = jax.jit(after)
        gradient = jax.jit(jax.grad(after))(0.05)
        assert abs(gradient) > 1e-3
        # Central differences in float64: an error of step^2.
        np.testing.assert_allclose(gradient, central(compiled, 0.05), rtol=1e-6)


def test_gradient_through_steps_by_the_parameters(mesh):
    with jax.enable_x64(True):
        optimizer = optax.sgd(0.5, momentum=0.9)
        model, shardings = helpers.place(helpers.make_mlp(jnp.float64), mesh)
        state = init_state(model, optimizer, key=KEY)
        data = [jax.device_put(mlp_batch(seed, dtype=np.float64), batch_sharding(mesh)) for seed in range(2)]

        def after(params):
            now = dataclasses.replace(state, params=params)
            step = partial(train_step, loss_fn=squared_error, optimizer=optimizer, shardings=shardings)
            now, _ = step(now, data[0])
            return step(now, data[1])[1]["loss"].value

        keys = jax.random.split(KEY, len(state.params))
        direction = {
            path: jax.random.normal(k, x.shape, x.dtype) for k, (path, x) in zip(keys, state.params.items())
        }

        @jax.jit
        def along(distance):
            return after({path: x + distance * direction[path] for path, x in state.params.items()})

        gradient = jax.jit(jax.grad(after))(state.params)
        slope = sum(jnp.vdot(gradient[path], direction[path]) for path in direction)
        assert abs(slope) > 1e-3
        np.testing.assert_allclose(slope, central(along, 0.0, 1e-6), rtol=1e-5)


# Compiles once.


def test_a_weakly_typed_parameter_compiles_one_step():
    state = init_state({"temperature": jnp.asarray(0.5)}, ADAM, key=jax.random.key(1))
    step = jax.jit(
        partial(train_step, loss_fn=lambda m, b, k: (m["temperature"] * jnp.mean(b) - 1) ** 2, optimizer=ADAM),
        donate_argnums=0,
    )
    with helpers.count_compilations() as compiled:
        for _ in range(3):
            state, _ = step(state, np.ones(4, np.float32))
    assert len(compiled) == 1
