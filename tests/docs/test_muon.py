"""The recipe of the page on Muon: its updates are those of `optax.contrib.muon`, and
its bytes as expected."""

from typing import Any

import jax
import numpy as np
import optax
import optax.contrib
import pages
import pytest
import workloads

import redco_eqx as rx

NUM_LAYERS, DIM, WIDTH = 3, 64, 176
SIZES = workloads.Sizes(dim=DIM, num_layers=NUM_LAYERS, num_heads=4, vocabulary=32)


RECIPE = pages.defined("howto/muon.md", "def owned_muon", jax=jax, optax=optax, rx=rx)


def make_model(mesh, stacked, seed):
    make = workloads.make_model("LLaMA", SIZES, stacked=stacked)
    return rx.init_model(make, mesh, key=jax.random.key(seed))


def two_updates(model, mesh, stacked, optimizer):
    """Updates of two steps, with the arrays of other models as gradients; and the
    compiled update."""
    state = rx.init_state(model, optimizer, key=jax.random.key(0))
    grads = [rx.to_arrays(make_model(mesh, stacked, seed)) for seed in (1, 2)]
    update = (
        jax.jit(optimizer.update)
        .lower(grads[0], state.opt_state, state.params)
        .compile()
    )
    opt_state = state.opt_state
    found = []
    for one in grads:
        updates, opt_state = update(one, opt_state, state.params)
        found.append(jax.tree.map(np.asarray, updates))
    return found, opt_state, update


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
def test_updates_are_those_of_optax_and_each_matrix_is_sent_to_one_device_and_back(
    stacked,
):
    alone = rx.make_mesh(devices=jax.devices()[:1])
    model = make_model(alone, stacked, 0)
    dims = RECIPE["matrices"](model)
    assert len(dims) == 7 * (1 if stacked else NUM_LAYERS)

    def numbers(params):
        return {path: dims.get(path) for path in params}

    options: Any = {"weight_decay": 0.1, "adam_learning_rate": 1e-3}
    optax_muon = optax.contrib.muon(
        1e-2, muon_weight_dimension_numbers=numbers, **options
    )
    expected, like, _ = two_updates(model, alone, stacked, optax_muon)
    meshes = [
        rx.make_mesh(fsdp=fsdp, tensor=tensor)
        for fsdp, tensor in ((1, 1), (8, 1), (1, 4), (2, 2))
    ]
    for mesh in (alone, *meshes):
        model = make_model(mesh, stacked, 0)
        optimizer = RECIPE["owned_muon"](1e-2, model, dims, **options)
        found, opt_state, compiled = two_updates(model, mesh, stacked, optimizer)
        assert jax.tree.structure(opt_state) == jax.tree.structure(like)
        # Float32: the iteration of a stack rounds otherwise than that of one matrix.
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7, rtol=1e-5),
            found,
            expected,
        )
        # The padded stacks, in parts: to the owners and back within `num_parts`, then
        # to the copies.
        num_parts = mesh.shape["fsdp"] * mesh.shape["tensor"]
        # One axis: the parts move once each way.
        if num_parts in (mesh.shape["fsdp"], mesh.shape["tensor"]):
            counts = {DIM * DIM: 4 * NUM_LAYERS, DIM * WIDTH: 3 * NUM_LAYERS}
            stack = 4 * sum(
                size * -(-count // mesh.size) * mesh.size
                for size, count in counts.items()
            )
            parts = 2 * (num_parts - 1) * stack // num_parts // mesh.size
            copies = stack // num_parts - stack // mesh.size
            assert rx.communication(compiled, mesh).total.sent_bytes == parts + copies
