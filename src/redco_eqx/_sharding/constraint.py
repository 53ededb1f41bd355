"""A sharding constraint that `vmap(spmd_axis_name=...)` may override."""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from redco_eqx._sharding.mesh import axes_in


def sharding_constraint(x: Array, sharding: NamedSharding) -> Array:
    """Constrain the layout of an array, as `jax.lax.with_sharding_constraint` does.

    Under `vmap`, leave out the axes that its `spmd_axis_name` names. JAX's own
    constraint raises an error there, because one axis cannot split two dims of an
    array. But a step under `vmap(spmd_axis_name="data")`, which lays out its clients
    over `data`, must give this axis to them.
    """
    return _constraint_p.bind(x, mesh=sharding.mesh, spec=sharding.spec)


def _lower(x: Array, *, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def _batch(
    axis: Any,
    operands: Any,
    dims: Any,
    *,
    mesh: Mesh | AbstractMesh,
    spec: PartitionSpec,
) -> Any:
    """Constrain an array that has a new dim under `vmap`."""
    (x,) = operands
    (new_dim,) = dims
    taken = getattr(axis, "spmd_name", None) or ()
    num_dims = x.ndim if new_dim is None else x.ndim - 1
    entries: list[Any] = [*spec, *[None] * (num_dims - len(spec))]
    for dim, entry in enumerate(entries):
        if entry is PartitionSpec.UNCONSTRAINED:
            continue
        left = tuple(name for name in axes_in(entry) if name not in taken)
        if len(left) < len(axes_in(entry)):
            entries[dim] = left or PartitionSpec.UNCONSTRAINED
    if new_dim is not None:
        entries.insert(new_dim, taken or PartitionSpec.UNCONSTRAINED)
    return _constraint_p.bind(x, mesh=mesh, spec=PartitionSpec(*entries)), new_dim


_constraint_p = Primitive("sharding_constraint_under_vmap")
_constraint_p.def_impl(lambda x, **_: x)
_constraint_p.def_abstract_eval(lambda x, **_: x)
# It is linear, and its own transpose: a cotangent has the layout of its value.
ad.deflinear2(_constraint_p, lambda cotangent, *_, **options: [cotangent])
batching.fancy_primitive_batchers[_constraint_p] = _batch
mlir.register_lowering(_constraint_p, mlir.lower_fun(_lower, multiple_results=False))
