"""`activation_axes`: one's own kernel runs on the rows and heads of each device."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_long, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx.layers import activation_axes

SHAPE = (8, 5, 4, 3)  # rows, length, heads, size


def kernel(q: Any, k: Any, v: Any) -> Any:
    """Attention of the rows and heads that it gets, and of no others."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), v)


def attention(q: Any, k: Any, v: Any, seen: list[Any]) -> Any:
    axes = activation_axes(q, k, v, num_rows=q.shape[0], num_heads=k.shape[2])
    seen.append(axes)
    if axes is None:
        return kernel(q, k, v)
    spec = PartitionSpec(axes.rows, None, axes.heads)
    split = jax.shard_map(
        kernel, mesh=axes.mesh, in_specs=(spec, spec, spec), out_specs=spec
    )
    return split(q, k, v)


@pytest.mark.parametrize(
    "name", ["one", "2x2x2", "data2xtensor4", *in_long("data8", "fsdp8")]
)
def test_a_kernel_on_each_device_gives_what_it_gives_on_the_whole(name: str) -> None:
    mesh = mesh_of(name)
    whole = [
        np.asarray(jax.random.normal(key, SHAPE))
        for key in jax.random.split(jax.random.key(0), 3)
    ]
    seen: list[Any] = []
    placed = jax.device_put(whole, rx.batch_sharding(mesh))
    found = jax.jit(lambda q, k, v: attention(q, k, v, seen))(*placed)
    np.testing.assert_allclose(found, kernel(*whole), rtol=1e-5, atol=1e-6)
    (axes,) = seen
    assert axes.num_row_shards == mesh.shape["data"] * mesh.shape["fsdp"]
    assert axes.num_head_shards == mesh.shape["tensor"]


def test_what_does_not_divide_is_not_split() -> None:
    mesh = mesh_of("2x2x2")
    x = jax.device_put(jnp.ones((8, 4)), rx.batch_sharding(mesh))
    seen = []
    jax.jit(lambda x: seen.append(activation_axes(x, num_rows=6, num_heads=3)))(x)
    assert (seen[0].rows, seen[0].heads) == (None, None)
    assert (seen[0].num_row_shards, seen[0].num_head_shards) == (1, 1)
    assert seen[0].mesh == mesh.abstract_mesh


def test_the_first_array_that_is_on_a_mesh_decides_also_in_a_layer() -> None:
    mesh = mesh_of("2x2x2")
    layer = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    placed = eqx.filter_shard(layer, NamedSharding(mesh, PartitionSpec()))
    seen = []
    run = eqx.filter_jit(
        lambda *trees: seen.append(activation_axes(*trees, num_rows=8))
    )
    run(jnp.ones(3), layer)
    run(jnp.ones(3), placed)
    assert seen[0] is None
    assert seen[1].rows == ("data", "fsdp")
    assert seen[1].heads is None  # one head


def test_inside_a_shard_map_there_is_nothing_to_split() -> None:
    mesh = mesh_of("2x2x2")
    seen = []

    def body(x: Any) -> Any:
        seen.append(activation_axes(x, num_rows=x.shape[0]))
        return x

    spec = PartitionSpec(("data", "fsdp"))
    jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(
        jnp.ones((8, 2))
    )
    assert seen == [None]
