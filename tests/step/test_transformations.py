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
from by_hand import KEY
from helpers import mlp_batch, squared_error

from redco_eqx import Mean, batch_sharding, eval_step, init_state, make_mesh, train_step


class Odd(eqx.Module):
    """Holds a lambda, a partial and tied weights."""

    shared: Any
    activation: Callable[[Any], Any]
    gate: Callable[[Any], Any]
    count: Any

    def __init__(self, seed: int):
        keys = jax.random.split(jax.random.key(seed))
        pair = (eqx.nn.Embedding(5, 4, key=keys[0]), eqx.nn.Linear(4, 5, key=keys[1]))
        self.shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)
        self.activation = lambda x: x + x**2
        self.gate = functools.partial(jax.nn.leaky_relu, negative_slope=0.3)
        self.count = jnp.arange(2)

    def __call__(self, token: Any) -> Any:
        embedding, head = self.shared()
        return head(self.gate(self.activation(embedding(token))))


def odd_loss(model: Any, batch: Any, key: Any) -> tuple[Mean, dict[str, Any]]:
    logits = jax.vmap(model)(batch["tokens"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    noise = jax.random.normal(key)
    return Mean(jnp.sum(loss) + 0.1 * noise, len(loss)), {"noise": noise}


ADAM = optax.adam(0.1)
STEP = partial(train_step, loss_fn=odd_loss, optimizer=ADAM)
BATCHES = [
    {name: np.random.default_rng([i, seed]).integers(0, 5, 8) for i, name in enumerate(("tokens", "labels"))}
    for seed in range(3)
]
STACKED = jax.tree.map(lambda *xs: np.stack(xs), *BATCHES)


def odd_state(seed: int = 0) -> Any:
    return init_state(Odd(seed), ADAM, key=jax.random.key(seed))


def test_scan_equals_a_loop_that_donates():
    step, states, reports = jax.jit(STEP, donate_argnums=0), [odd_state()], []
    for batch in BATCHES:
        state, metrics = step(states[-1], batch)
        states.append(state)
        reports.append(metrics)
    *previous, state = states
    assert all(x.is_deleted() for x in jax.tree.leaves([s.params for s in previous]))
    scanned, metrics = jax.lax.scan(STEP, odd_state(), STACKED)
    helpers.assert_close(scanned, state, rtol=1e-4, atol=1e-5)
    helpers.assert_close(metrics, jax.tree.map(lambda *xs: np.stack(xs), *reports), rtol=1e-4, atol=1e-5)


def test_vmap_over_an_ensemble_equals_each_alone():
    """States that are built apart, each with its own lambda and partial, and stacked."""
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *(odd_state(seed) for seed in range(3)))
    together, alone = jax.jit(jax.vmap(STEP)), jax.jit(STEP)
    ensemble, metrics = together(*together(stacked, STACKED)[:1], STACKED)
    for seed in range(3):
        expected = alone(alone(odd_state(seed), BATCHES[seed])[0], BATCHES[seed])
        found = jax.tree.map(lambda x, seed=seed: x[seed], (ensemble, metrics))
        helpers.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def quadratic_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(jnp.tanh(batch @ model["w"]) ** 2) + 0.1 * jnp.sum(model["w"] ** 4)


def assert_slope(f: Callable[[Any], Any], x: float, slope: Any, *, step: float, rtol: float) -> None:
    """Compares with central differences in float64, which have an error of step^2."""
    assert abs(slope) > 1e-3
    np.testing.assert_allclose(slope, float(f(x + step) - f(x - step)) / (2 * step), rtol=rtol)


@pytest.mark.parametrize(("how", "num_microbatches"), [("closed over", 1), ("in the optimizer state", 2)])
def test_gradient_through_steps_by_the_learning_rate(how, num_microbatches):
    with jax.enable_x64(True):
        batch = np.random.default_rng(0).normal(size=(4, 3))
        w = {"w": jnp.array([0.3, -0.7, 1.1])}
        # eps_root: without it the derivative of a square root at 0 is infinite.
        make = partial(optax.adam, eps_root=1e-8)

        def after(rate):
            optimizer = make(rate) if how == "closed over" else optax.inject_hyperparams(make)(0.1)
            state = init_state(w, optimizer, key=KEY)
            if how != "closed over":
                hyperparams = {**state.opt_state.hyperparams, "learning_rate": jnp.asarray(rate)}
                state = dataclasses.replace(state, opt_state=state.opt_state._replace(hyperparams=hyperparams))
            for _ in range(2):
                state, _ = train_step(
                    state,
                    batch,
                    loss_fn=quadratic_loss,
                    optimizer=optimizer,
                    num_microbatches=num_microbatches,
                )
            return eval_step(state, batch, loss_fn=quadratic_loss)["loss"].value

        slope = jax.jit(jax.grad(after))(0.05)
        assert_slope(jax.jit(after), 0.05, slope, step=1e-5, rtol=1e-6)


def test_gradient_through_steps_by_the_parameters():
    mesh = make_mesh(tensor=2, fsdp=2)
    with jax.enable_x64(True):
        optimizer = optax.sgd(0.5, momentum=0.9)
        model, shardings = helpers.place(helpers.make_mlp(jnp.float64), mesh)
        state = init_state(model, optimizer, key=KEY)
        data = [jax.device_put(mlp_batch(seed, dtype=np.float64), batch_sharding(mesh)) for seed in range(2)]
        rng = np.random.default_rng(0)
        direction = {path: rng.normal(size=x.shape) for path, x in state.params.items()}

        def along(distance):
            params = {path: x + distance * direction[path] for path, x in state.params.items()}
            now = dataclasses.replace(state, params=params)
            common: Any = {"loss_fn": squared_error, "shardings": shardings}
            now, _ = train_step(now, data[0], optimizer=optimizer, **common)
            return eval_step(now, data[1], **common)["loss"].value

        slope = jax.jit(jax.grad(along))(0.0)
        assert_slope(jax.jit(along), 0.0, slope, step=1e-6, rtol=1e-5)
