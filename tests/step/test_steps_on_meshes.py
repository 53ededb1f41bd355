"""`train_step` on every mesh equals a loop written by hand on one device."""

import functools
from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY, by_hand, by_path, compiled_step, ratio
from helpers import cross_entropy, mlp_batch, squared_error, token_batch

from redco_eqx import (
    batch_sharding,
    eval_step,
    init_state,
    make_mesh,
    predict_step,
    shard_rules,
    train_step,
)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(tensor=2, fsdp=2)


SUBJECTS: dict[str, Any] = {
    "mlp": (helpers.make_mlp, mlp_batch, squared_error, "absolute"),
    "transformer": (helpers.make_transformer, token_batch, cross_entropy, "hits"),
}


@functools.cache
def reference(subject: str) -> Any:
    """Three steps of gradient descent with step size 1, in float64 on one device."""
    make, make_batch, loss_fn, metric = SUBJECTS[subject]
    with jax.enable_x64(True):
        model = make(jnp.float64)
        data = [make_batch(seed, dtype=np.float64) for seed in range(3)]
        final, losses, gradients = by_hand(model, optax.sgd(1.0), ratio(loss_fn), data)
        first = eqx.filter_jit(ratio(loss_fn, metric))(model, data[0])
        return model, data, loss_fn, metric, final, losses, gradients, first


# Tolerances. In float64 only the order of summation differs between meshes: 1e-10 is rounding, three steps on.
# In float32 the same operations in another program agree to 1e-4: XLA fuses and orders them otherwise.


@pytest.mark.parametrize(
    ("subject", "name", "num_microbatches"),
    [
        *(("transformer", name, 1) for name in helpers.MESHES),
        ("mlp", "data8", 2),
        ("mlp", "2x2x2", 4),
    ],
)
def test_steps_do_not_depend_on_the_mesh(subject, name, num_microbatches):
    model, data, loss_fn, metric, final, losses, gradients, first = reference(subject)
    with jax.enable_x64(True):
        mesh = helpers.mesh_of(name)
        placed, shardings = helpers.place(model, mesh)
        state = init_state(placed, optax.sgd(1.0), key=KEY)
        split = [path for path, x in state.params.items() if not x.is_fully_replicated]
        assert bool(split) == (name not in ("one", "data8"))
        before = state
        step = compiled_step(loss_fn, optax.sgd(1.0), shardings=shardings, num_microbatches=num_microbatches)
        reports = []
        with helpers.count_compilations() as compiled:
            for batch in data:
                state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
                reports.append(metrics)
        assert len(compiled) == 1
        for metrics, loss, gradient in zip(reports, losses, gradients, strict=True):
            np.testing.assert_allclose(metrics["loss"].value, loss, rtol=1e-10, atol=1e-12)
            norm = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(gradient)))
            np.testing.assert_allclose(metrics["grad_norm"].value, norm, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(reports[0][metric].value, first, rtol=1e-10, atol=1e-12)
        helpers.assert_close(state.params, by_path(final), rtol=1e-10, atol=1e-12)
        assert state.step == 3
        helpers.assert_same_layout(state, before)


def test_without_shardings_the_values_are_the_same(mesh):
    model = helpers.make_mlp()
    data = [mlp_batch(seed) for seed in range(2)]
    state = init_state(helpers.place(model, mesh)[0], optax.sgd(1.0), key=KEY)
    step = compiled_step(squared_error, optax.sgd(1.0))
    for batch in data:
        state, _ = step(state, jax.device_put(batch, batch_sharding(mesh)))
    final, _, _ = by_hand(model, optax.sgd(1.0), ratio(squared_error), data)
    helpers.assert_close(state.params, by_path(final), rtol=1e-4, atol=1e-5)


def test_shardings_of_another_model_are_refused(mesh):
    model, _ = helpers.place(helpers.make_mlp(), mesh)
    other = shard_rules({"mlp": model}, mesh)
    state = init_state(model, optax.sgd(1.0), key=KEY)
    for step in (
        partial(train_step, optimizer=optax.sgd(1.0), loss_fn=squared_error),
        partial(eval_step, loss_fn=squared_error),
        partial(predict_step, predict_fn=lambda model, batch, key: batch),
    ):
        with pytest.raises(ValueError, match=r"shardings has no NamedSharding for layers\.0\.weight"):
            step(state, mlp_batch(0), shardings=other)
