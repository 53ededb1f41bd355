"""The best of rows that lie split: what `generate` and `beam_search` choose the next
tokens by."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx_models._generate.sampling import largest


@pytest.mark.parametrize("mesh", ["tensor8", "2x2x2"])
def test_the_order_is_numpys_on_every_mesh(mesh):
    on = mesh_of(mesh)
    for shape, k in [
        ((8, 3, 64), 5),
        ((8, 3, 64), 20),  # nearly a shard
        ((8, 1, 61), 4),  # the last dim does not divide
        ((3, 2, 64), 4),  # the batch does not
        ((8, 7, 8), 6),  # one of the last dim for a shard
    ]:
        # Many ties.
        x = np.random.default_rng(0).integers(0, 9, shape).astype(np.float32)
        x[0] = -np.inf
        x[1, ..., ::5] = np.inf
        batch = rx.batch_sharding(on).spec if shape[0] == 8 else PartitionSpec(None)
        vocabulary = "tensor" if shape[-1] % 8 == 0 else None
        placed = jax.device_put(
            x, NamedSharding(on, PartitionSpec(*batch, None, vocabulary))
        )
        values, places = jax.jit(functools.partial(largest, k=k))(placed)
        flat = x.reshape(len(x), -1)
        wanted = np.argsort(-flat, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(places, wanted, err_msg=f"{shape}, {k=}")
        np.testing.assert_array_equal(values, np.take_along_axis(flat, wanted, axis=1))


@pytest.mark.parametrize(
    ("shape", "spec", "k", "gathered"),
    [
        # Of 32 candidates on 4 shards: a value and a place.
        (
            (8, 4, 1024),
            PartitionSpec("data", None, "tensor"),
            8,
            {("f32[4,32]",), ("s32[4,32]",)},
        ),
        (
            (3, 4, 1024),
            PartitionSpec(None, None, "tensor"),
            8,
            {("f32[3,32]",), ("s32[3,32]",)},
        ),
        # More than half of them: the row itself is less.
        (
            (8, 1, 1024),
            PartitionSpec("data", None, "tensor"),
            512,
            {("f32[4,1,1024]",)},
        ),
        ((8, 4, 1021), PartitionSpec("data", None, None), 8, set()),
    ],
)
def test_only_candidates_are_gathered(shape, spec, k, gathered):
    mesh = rx.make_mesh(tensor=4)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    found = rx.communication(
        jax.jit(functools.partial(largest, k=k)).lower(x).compile(), mesh
    )
    assert {c.shapes for c in found} == gathered
    assert {(c.kind, c.axes) for c in found} <= {("all-gather", ("tensor",))}
