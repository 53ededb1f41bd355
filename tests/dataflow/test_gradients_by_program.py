"""Loss and gradients through `train_step`, in the layout of the program, are those of one device."""

from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import numpy as np
import optax
import pytest
from cases import loss_of
from sharding.zoo import BY_NAME
from solves_and_groups import ENTRIES

import redco_eqx as rx

ALL = {**BY_NAME, **ENTRIES}

# What the program splits otherwise than the path rules, or what only it splits: fused weights across borders,
# a stream, experts with their router, members of an ensemble, a table of relative positions; linear solves, and
# products by groups of rows.
CASES = [
    ("fused_qkv", "data2xtensor4"),
    ("gate_narrow", "tensor8"),
    ("moe", "2x2x2"),
    ("ensemble", "data2xtensor4"),
    ("t5", "2x2x2"),
    ("stacked_llama_gqa_refused", "data2xtensor4"),
    ("groupnorm_between", "tensor8"),
    ("ridge_of_heads", "tensor8"),
    ("solve_of_rows", "data2xtensor4"),
    ("experts_of_rows", "data2xtensor4"),
    ("experts_by_example", "2x2x2"),
]


def on_one_device(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """Model and batch, loss and gradients in float64, by plain JAX."""
    entry = ALL[name]
    with jax.enable_x64(True):
        model = entry.make(jax.random.key(0))
        batch = jax.tree.map(
            lambda x: x.astype(np.float64) if np.issubdtype(x.dtype, np.floating) else x, entry.inputs(8)
        )
        loss, gradients = eqx.filter_jit(eqx.filter_value_and_grad(entry.loss))(model, batch)
        return model, batch, {"loss": loss, **rx.to_arrays(gradients)}


@pytest.mark.parametrize(("name", "mesh_name"), CASES)
def test_gradients_do_not_depend_on_the_mesh(name, mesh_name):
    model, batch, expected = on_one_device(name)
    loss_fn, optimizer = loss_of(ALL[name]), optax.trace(0.0)  # a trace of decay 0 is the gradient itself
    with jax.enable_x64(True):
        mesh = helpers.mesh_of(mesh_name)
        shardings = rx.shard_rules(model, mesh, loss_fn=loss_fn, batch=batch)
        placed = jax.tree.map(lambda x, s: x if s is None else jax.device_put(x, s), model, shardings)
        state = rx.init_state(placed, optimizer, key=jax.random.key(1))
        assert any(not x.is_fully_replicated for x in state.params.values())
        step = partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer, shardings=shardings)
        new, metrics = jax.jit(step)(state, jax.device_put(batch, rx.batch_sharding(mesh)))
        found = jax.device_get({"loss": metrics["loss"].value, **new.opt_state.trace})
    largest = max(1.0, *(float(np.abs(x).max()) for x in expected.values()))
    for path, x in found.items():
        # Sums of some thousand terms in another order: rounding of float64.
        np.testing.assert_allclose(x, expected[path], rtol=0, atol=1e-12 * largest, err_msg=path)
