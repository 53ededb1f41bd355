"""The reader's own loops do what the plain ones do: scan, vmap, grad; and another
package's model."""

import argparse
import functools
from typing import Any

import digits_data
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from custom_loop import main as loops
from helpers import assert_close
from sklearn.linear_model import LogisticRegression

import redco_eqx as rx

OPTIMIZER = optax.adam(1e-3)


@pytest.fixture(scope="module")
def digits():
    train, held_out = digits_data.digits()
    return train[:320], held_out[:160]


def new_state(mesh, seed, optimizer=OPTIMIZER):
    make = functools.partial(eqx.nn.MLP, 64, 10, 16, 1, activation=jnp.tanh)
    model = rx.init_model(lambda key: make(key=key), mesh, key=jax.random.key(seed))
    return rx.init_state(model, optimizer, key=jax.random.key(seed + 100))


def test_an_epoch_by_scan_is_the_loop_over_steps(digits, double):
    data = loops.collate_fn(digits[0])
    mesh = rx.make_mesh(tensor=2)
    step = functools.partial(rx.train_step, loss_fn=loops.loss_fn, optimizer=OPTIMIZER)
    epoch = jax.jit(functools.partial(loops.train_epoch, step=step, batch_size=32))
    state, losses = epoch(new_state(mesh, 0), data)
    expected = new_state(mesh, 0)
    order = np.asarray(
        jax.random.permutation(jax.random.fold_in(expected.key, 0), 320)
    ).reshape(10, 32)
    step = jax.jit(step)
    for i, rows in enumerate(order):
        expected, metrics = step(expected, {name: x[rows] for name, x in data.items()})
        # In float32.
        np.testing.assert_allclose(losses[i], float(metrics["loss"]), rtol=1e-6)
    assert {x.dtype for x in state.params.values()} == {np.dtype("float64")}
    # Rounding at 1e-16, which Adam magnifies where it divides by the root of a tiny
    # moment.
    assert_close(state.params, expected.params, rtol=1e-9, atol=1e-12)


@eqx.filter_jit
def loss_by_hand(model, data):
    logits = jax.vmap(lambda x: model(x.ravel()))(data["x"])
    return -jnp.take_along_axis(
        jax.nn.log_softmax(logits), data["y"][:, None], axis=1
    ).mean()


def loss_after_training_by_hand(hyper, model, order, train, held_out):
    """After SGD with momentum 0.9 and weight decay, step by step."""
    rate, decay = np.exp(hyper["log_rate"]), np.exp(hyper["log_decay"])
    gradient_of = eqx.filter_jit(eqx.filter_grad(loss_by_hand))
    momentum = jax.tree.map(jnp.zeros_like, eqx.filter(model, eqx.is_array))
    for rows in order:
        gradient = gradient_of(model, {name: x[rows] for name, x in train.items()})
        params = eqx.filter(model, eqx.is_array)
        momentum = jax.tree.map(
            lambda m, g, p: 0.9 * m + g + decay * p, momentum, gradient, params
        )
        model = eqx.apply_updates(model, jax.tree.map(lambda m: -rate * m, momentum))
    return float(loss_by_hand(model, held_out))


def test_the_hypergradient_is_the_finite_difference_of_a_loop_written_by_hand(
    digits, double
):
    train, held_out = loops.collate_fn(digits[0][:96]), loops.collate_fn(digits[1][:32])
    model = eqx.nn.MLP(64, 10, 8, 1, activation=jnp.tanh, key=jax.random.key(0))
    state = rx.init_state(model, key=jax.random.key(1))
    hyper = {"log_rate": np.log(0.1), "log_decay": np.log(0.1)}
    run = jax.jit(
        jax.value_and_grad(functools.partial(loops.loss_after_training, batch_size=32))
    )
    value, gradient = run(hyper, state, train, held_out)
    order = np.asarray(
        jax.random.permutation(jax.random.fold_in(state.key, 0), 96)
    ).reshape(3, 32)
    given = {"model": model, "order": order, "train": train, "held_out": held_out}
    reference = functools.partial(loss_after_training_by_hand, **given)
    # The library's means are float32, which is all of what these tolerances allow.
    assert float(value) == pytest.approx(reference(hyper), rel=1e-6)
    for name, slope in gradient.items():
        high, low = (reference(hyper | {name: hyper[name] + e}) for e in (1e-4, -1e-4))
        assert abs(float(slope)) > 1e-4
        assert float(slope) == pytest.approx((high - low) / 2e-4, rel=1e-6)


def test_an_ensemble_learns_as_much_as_logistic_regression(digits):
    train, held_out = digits
    args = argparse.Namespace(seed=0, epochs=8, batch_size=32)
    together, alone = loops.ensemble(args, rx.make_mesh(tensor=2), train, held_out)
    own, other = (
        ([x.ravel() for x, _ in part], [y for _, y in part])
        for part in (train, held_out)
    )
    baseline = LogisticRegression(max_iter=300).fit(*own).score(*other)
    assert together >= max(baseline - 0.03, alone - 0.02)


def test_a_published_model_is_split_by_the_rules_and_has_the_same_loss(digits, double):
    from equimo.models.vit import VisionTransformer

    batch = loops.collate_fn([(x.astype(np.float64), y) for x, y in digits[0][:16]])
    loss_fn = functools.partial(loops.loss_fn, predict_fn=loops.predict_by_vit)
    optimizer = optax.sgd(0.1)
    losses = []
    for mesh in (rx.make_mesh(data=1), rx.make_mesh(tensor=4)):
        vit: Any = VisionTransformer
        make = functools.partial(vit, 8, 1, 32, 2, 4, [1], num_classes=10)
        model = rx.init_model(
            lambda key, make=make: make(key=key), mesh, key=jax.random.key(0)
        )
        attention = model.blocks[0].blocks[0].attn
        if mesh.size > 1:
            assert attention.qkv.weight.sharding.spec[0] == "tensor"
            assert attention.proj.weight.sharding.spec[1] == "tensor"
        state = rx.init_state(model, optimizer, key=jax.random.key(1))
        step = jax.jit(
            functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer)
        )
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[3:], losses[:3], rtol=1e-6)  # means are float32


def test_a_loop_ends_when_its_evaluations_grow_no_more_and_goes_on_where_it_was_stopped(
    digits, tmp_path
):
    train, held_out = digits

    def run(epochs, checkpoints=None):
        args = argparse.Namespace(
            seed=0, epochs=epochs, batch_size=32, checkpoints=checkpoints
        )
        return loops.stop_early(args, rx.make_mesh(tensor=2), train, held_out)

    scores = run(40)
    assert 4 <= len(scores) < 40
    assert max(scores[-3:]) <= max(scores[:-3])
    assert all(
        max(scores[i - 2 : i + 1]) > max(scores[: i - 2])
        for i in range(3, len(scores) - 1)
    )
    assert run(2, tmp_path) == scores[:2]
    assert run(40, tmp_path) == scores
    assert run(40, tmp_path) == scores  # it is over
