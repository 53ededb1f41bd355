"""A batch in parts."""

from typing import Any

import jax
from einops import rearrange
from jax.sharding import NamedSharding, PartitionSpec

from redco_eqx._sharding.mesh import batch_sharding, num_batch_shards
from redco_eqx._step.layout import Layout
from redco_eqx._tree import leaves_with_paths
from redco_eqx._types import Batch


def microbatches(batch: Batch, number: int, layout: Layout | None) -> Batch:
    """`(number, size / number, ...)`: example i goes to microbatch i % number.

    Taking neighbours instead would put each microbatch on a part of the devices only.
    Raises `ValueError` if the batch does not divide.
    """
    mesh = None if layout is None else next(iter(layout.values())).mesh
    shards = 1 if mesh is None else num_batch_shards(mesh)

    def one(path: str, x: Any) -> Any:
        if number < 1 or x.shape[0] % (number * shards) != 0:
            raise ValueError(
                f"num_microbatches={number}: the batch's {path or 'array'} has {x.shape[0]} rows, which do not "
                f"divide into {number} microbatches on {shards} data shards."
            )
        x = rearrange(x, "(b k) ... -> k b ...", k=number)
        if mesh is None:
            return x
        spec = PartitionSpec(None, *batch_sharding(mesh).spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    leaves = [one(path, x) for path, x in leaves_with_paths(batch)]
    return jax.tree.unflatten(jax.tree.structure(batch), leaves)
