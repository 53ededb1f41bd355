"""The rows of a batch, split over the mesh: also of one that was not placed."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from redco_eqx._sharding.mesh import BATCH_AXES, axis_size
from redco_eqx._sharding.rules import ShardingWarning
from redco_eqx._tree import leaves_with_paths
from redco_eqx._types import Batch


def split_rows(batch: Batch, mesh: Mesh | AbstractMesh | None, *, dim: int = 0) -> Batch:
    """`batch` with this dim of its arrays split over `data` and `fsdp`; its other dims lie as they did.

    Otherwise each data shard would compute all of a batch that is not placed: the compiler splits only what a
    placed argument, or a constraint, says. An array whose dim does not divide is left as it is, and so is all
    outside of `jit`. Warns of a dim that has more rows than there are shards, and does not divide.
    """
    shards = 1 if mesh is None else axis_size(mesh, BATCH_AXES)
    if mesh is None or shards == 1:
        return batch
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
    leaves, odd = [], []
    for path, x in leaves_with_paths(batch):
        rows = getattr(x, "shape", ())[dim : dim + 1]
        if rows and rows[0] % shards == 0:
            x = _split_p.bind(jnp.asarray(x), mesh=mesh, dim=dim, axes=axes)
        elif rows and rows[0] > shards:  # a tail of fewer can only be computed whole
            odd.append(f"{path or 'array'} has {rows[0]} rows")
        leaves.append(x)
    if odd:
        warnings.warn(
            f"the batch's {odd[0]}, which do not divide over {shards} data shards: each of them computes all "
            "rows. Leave out or fill up some, or choose another batch size.",
            ShardingWarning,
            stacklevel=4,
        )
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)


def _split(x: Array, *, mesh: Mesh | AbstractMesh, dim: int, axes: tuple[str, ...]) -> Array:
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * x.ndim
    entries[dim] = axes
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))


def _batched(axis: Any, operands: Any, dims: Any, *, dim: int, axes: tuple[str, ...], **mesh: Any) -> Any:
    """Under `vmap`, the same dim of each; what `spmd_axis_name` says of an axis comes first."""
    (x,), (new,) = operands, dims
    taken = getattr(axis, "spmd_name", None) or ()
    axes = tuple(name for name in axes if name not in taken)
    dim = dim if new is None else dim + (new <= dim)
    return _split_p.bind(x, dim=dim, axes=axes, **mesh) if axes else x, new


# A primitive and not `with_sharding_constraint` itself, which raises an error, in place of yielding, under
# `vmap(spmd_axis_name="data")`, by which clients are laid over `data`.
_split_p = Primitive("split_rows")
_split_p.def_impl(lambda x, **_: x)
_split_p.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_split_p, lambda cotangent, *_, **options: [cotangent])
batching.fancy_primitive_batchers[_split_p] = _batched
mlir.register_lowering(_split_p, mlir.lower_fun(_split, multiple_results=False))
