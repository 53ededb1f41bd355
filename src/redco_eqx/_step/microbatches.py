"""A batch in parts."""

from typing import Any

import jax
from einops import rearrange
from jax.sharding import AbstractMesh, Mesh

from redco_eqx._sharding.mesh import num_batch_shards
from redco_eqx._step.rows import split_rows
from redco_eqx._tree import leaves_with_paths
from redco_eqx._types import Batch


def microbatches(batch: Batch, number: int, mesh: Mesh | AbstractMesh | None, *, must_divide: bool) -> Batch:
    """`(number, size / number, ...)`: example i goes to microbatch i % number.

    Taking neighbours instead would put each microbatch on a part of the devices only.
    Raises `ValueError` if the batch does not divide; over the data shards of `mesh`, too, if it `must_divide`.
    """
    shards = num_batch_shards(mesh) if must_divide and mesh is not None else 1

    def one(path: str, x: Any) -> Any:
        if number < 1 or x.shape[0] % (number * shards) != 0:
            raise ValueError(
                f"num_microbatches={number}: the batch's {path or 'array'} has {x.shape[0]} rows, which do not "
                f"divide into {number} microbatches on {shards} data shards."
            )
        return rearrange(x, "(b k) ... -> k b ...", k=number)

    leaves = [one(path, x) for path, x in leaves_with_paths(batch)]
    return split_rows(jax.tree.unflatten(jax.tree.structure(batch), leaves), mesh, dim=1)
