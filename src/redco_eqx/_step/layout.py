"""The layout of a step on the mesh: that of its arrays, and that of its batch."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from redco_eqx._base.pairs import is_pair
from redco_eqx._base.protocols import Batch
from redco_eqx._base.tree import describe, first_few, leaves_with_paths, to_paths
from redco_eqx._base.warn import warn
from redco_eqx._sharding.constraint import sharding_constraint
from redco_eqx._sharding.mesh import (
    ShardingWarning,
    batch_axes,
    misfit,
    num_batch_shards,
    traced_mesh,
)
from redco_eqx._step.state import TrainState

# The layout that a step follows.


Layout: TypeAlias = dict[str, NamedSharding]
"""The sharding of each array of the model, by path."""


def shardings_by_path(shardings: PyTree, state: TrainState) -> Layout:
    """The shardings in a tree, by path. For a pair `(model, state)`, those of the
    model.

    Raises `ValueError`, naming the array, if a parameter has no sharding, if an array
    does not divide as its sharding says, if the model has no such array, or if the mesh
    is not that of the state.
    """
    if is_pair(shardings):
        shardings, _ = shardings
    found = to_paths(shardings, lambda x: isinstance(x, NamedSharding))
    missing = [path for path in state.params if path not in found]
    if missing:
        raise ValueError(
            f"shardings has no NamedSharding for {first_few(missing)}. Pass "
            "shard_rules(model, mesh) of the same model."
        )
    arrays = {**state.params, **state.frozen}
    unknown = [path for path in found if path not in arrays]
    if unknown:
        raise ValueError(
            f"shardings has {first_few(unknown)}, but the state has no such array. "
            "Pass shard_rules(model, mesh) of the same model."
        )
    mesh = mesh_in(found)
    for path, sharding in found.items():
        if mesh is not None and sharding.mesh != mesh:
            raise ValueError(
                f"shardings: {path} is on {_described(sharding.mesh)}, but others are "
                f"on {_described(mesh)}. Pass shard_rules(model, mesh) of one mesh."
            )
        problem = misfit(arrays[path].shape, sharding.spec, sharding.mesh)
        if problem:
            raise ValueError(
                f"shardings: {sharding.spec} does not fit {path}, "
                f"{describe(arrays[path])}: {problem} Pass shard_rules(model, mesh) of "
                "the same model."
            )
    check_on_mesh(mesh, state)  # last: those of another model are the likelier mistake
    return found


def mesh_in(shardings: PyTree) -> Mesh | AbstractMesh | None:
    """The mesh of the first sharding in a tree, if there is one."""
    found = (x.mesh for x in jax.tree.leaves(shardings) if isinstance(x, NamedSharding))
    return next(found, None)


def check_on_mesh(mesh: Mesh | AbstractMesh | None, state: TrainState) -> None:
    """Raise `ValueError` if the state lies on other devices than those of `mesh`, the
    mesh of `shardings`.

    A traced state knows only the number of its devices. One that is on no mesh fits
    any.
    """
    if isinstance(state.step, Tracer):
        own = traced_mesh(state.params, state.step)
    else:
        own = mesh_in(getattr(state.step, "sharding", None))
    if mesh is None or own is None or own.empty:
        return
    if isinstance(mesh, Mesh) and isinstance(own, Mesh):
        is_same = list(mesh.devices.flat) == list(own.devices.flat)
    else:
        is_same = mesh.size == own.size
    if not is_same:
        raise ValueError(
            f"shardings is on {_described(mesh)}, but the state lies on "
            f"{_described(own)}. Pass state.shardings, or place the model by these "
            "shardings before init_state: eqx.filter_shard(model, shardings)."
        )


def _described(mesh: Mesh | AbstractMesh) -> str:
    text = "a mesh of " + " x ".join(
        f"{axis}={size}" for axis, size in mesh.shape.items()
    )
    if isinstance(mesh, Mesh):
        text += (
            " (devices "
            f"{first_few([str(device.id) for device in mesh.devices.flat], most=8)})"
        )
    return text


def mesh_of(layout: Layout | None, arrays: PyTree) -> Mesh | AbstractMesh | None:
    """Return the mesh of the layout; without a layout, that of `arrays`; if they have
    none, `None`."""
    return next(iter(layout.values())).mesh if layout else traced_mesh(arrays)


def constrain(params: dict[str, Array], layout: Layout | None) -> dict[str, Array]:
    """Lay out arrays by path. Without a layout, they stay as they are."""
    if layout is None:
        return params
    return jax.lax.with_sharding_constraint(
        params, {path: layout[path] for path in params}
    )


# Split the rows of a batch over the mesh, even if the batch was not placed.


def split_rows(
    batch: Batch, mesh: Mesh | AbstractMesh | None, *, dim: int = 0
) -> Batch:
    """Split this dim of the arrays in `batch` over `data` and `fsdp`. The other dims
    stay as they are.

    Otherwise, each data shard would compute all of a batch that is not placed, because
    the compiler splits an array only if a placed argument or a constraint says so. An
    array whose dim does not divide evenly stays as it is, and so does every array
    outside `jit`. Warns if a dim has more rows than there are shards, but does not
    divide evenly.
    """
    shards = 1 if mesh is None else num_batch_shards(mesh)
    if mesh is None or shards == 1:
        return batch
    leaves = []
    odd = []
    for path, x in leaves_with_paths(batch):
        rows = getattr(x, "shape", ())[dim : dim + 1]
        if rows and rows[0] % shards == 0:
            x = jnp.asarray(x)
            entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
            entries[dim] = batch_axes(mesh, rows[0])
            x = sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))
        elif rows and rows[0] > shards:
            # A tail with fewer rows can only be computed whole.
            odd.append(f"{path or 'array'} has {rows[0]} rows")
        leaves.append(x)
    if odd:
        warn(
            f"the batch's {odd[0]}, which do not divide evenly over {shards} data "
            "shards: each computes all rows. Drop or pad some rows, or use another "
            "batch size.",
            ShardingWarning,
        )
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


# Microbatches.


def microbatches(
    batch: Batch, number: int, mesh: Mesh | AbstractMesh | None, *, must_divide: bool
) -> Batch:
    """Cut a batch into `(number, size / number, ...)`. Example i goes to microbatch i %
    number.

    If neighbours were in one microbatch, each microbatch would lie on only some of the
    devices. Raises `ValueError` if the batch does not divide evenly. With
    `must_divide`, the microbatches must also divide over the data shards of `mesh`.
    """
    shards = num_batch_shards(mesh) if must_divide and mesh is not None else 1
    sizes = {
        path or "array": x.shape[0] if x.shape else None
        for path, x in leaves_with_paths(batch)
    }
    if len(set(sizes.values())) > 1:
        listed = first_few(
            [
                f"{path} has {'none' if size is None else size}"
                for path, size in sizes.items()
            ]
        )
        raise ValueError(
            f"num_microbatches={number}: the leading dims of the batch's arrays "
            f"differ: {listed}. All must be the number of examples, because each array "
            "is cut into microbatches."
        )
    for path, size in sizes.items():
        if number < 1 or size is None or size % (number * shards) != 0:
            raise ValueError(
                f"num_microbatches={number}: the batch's {path} has {size or 'no'} "
                f"rows, which do not divide into {number} microbatches on {shards} "
                "data shards."
            )
    parts = jax.tree.map(
        lambda x: rearrange(x, "(b k) ... -> k b ...", k=number), batch
    )
    return split_rows(parts, mesh, dim=1)
