"""The mesh that traced arrays lie on, found from the arrays themselves."""

import jax
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import PyTree

from redco_eqx._sharding.mesh import AXES, BATCH_AXES, axis_size


def traced_mesh(*trees: PyTree) -> AbstractMesh | None:
    """The mesh of the first array that has one, if its axes are all Auto; otherwise `None`.

    Under a trace an array no longer knows its spec, but it knows its mesh, if it came in committed to one (or
    as a `ShapeDtypeStruct` with a sharding). `None` is an array on one device, or one inside a `shard_map`.
    """
    for x in jax.tree.leaves(trees):
        if isinstance(x, jax.Array):
            mesh: AbstractMesh = jax.typeof(x).sharding.mesh
            if not mesh.empty:
                known = any(axis in mesh.shape for axis in AXES)
                return mesh if known and set(mesh.axis_types) == {AxisType.Auto} else None
    return None


def tensor_size(mesh: AbstractMesh | None) -> int:
    """Number of shards over `tensor`; 1 without a mesh."""
    return 1 if mesh is None else axis_size(mesh, "tensor")


def batch_axes(mesh: AbstractMesh, num_rows: int) -> tuple[str, ...] | None:
    """The axes that split a batch of this many rows: all of them, or none where they do not divide it."""
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    return axes if axes and num_rows % axis_size(mesh, axes) == 0 else None
