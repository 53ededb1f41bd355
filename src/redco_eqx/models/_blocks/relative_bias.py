"""Relative positions as a bias of the scores, by buckets of distances (Raffel et al. 2020, T5, section 2.1)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from redco_eqx._parallel.linear import batch_axes, traced_mesh
from redco_eqx._sharding.mesh import axis_size
from redco_eqx.models._blocks.layers import Embedding


def distance_buckets(num_buckets: int, max_distance: int) -> np.ndarray:
    """Return the bucket of each distance from 0 to `max_distance`. The latter is always in the last bucket.

    Half of the buckets have one distance each; the other half grow logarithmically.
    """
    num_exact = num_buckets // 2
    distance = np.arange(max_distance + 1)
    # In float32, because the models were trained with the rounding of float32 at the borders between buckets.
    ratio = np.maximum(distance, 1).astype(np.float32) / np.float32(num_exact)
    growth = np.log(ratio) / np.float32(np.log(max_distance / num_exact)) * np.float32(num_buckets - num_exact)
    beyond = np.minimum(num_exact + growth.astype(np.int32), num_buckets - 1)
    return np.where(distance < num_exact, distance, beyond).astype(np.int32)


def relative_bias(
    table: Embedding,
    query: Int[Array, "r t"],
    key: Int[Array, "r s"],
    *,
    bidirectional: bool,
    max_distance: int,
    batch_size: int = 1,
) -> Float[Array, "n heads t s"]:
    """Return the bias on the scores of each head, from the distance between the two tokens.

    Compute it once, and pass it to all layers as `Context.bias`.

    If all rows share their positions, the bias on a mesh has a row per part of the batch. So each device
    adds its gradients, which have the size of the scores, over the layers, and computes the gradient of the
    table. Only the table's gradient is reduced.

    **Arguments:**

    - `table`: a row per bucket, a column per head.
    - `query`, `key`: positions of the tokens, in one row if all rows share them. Padding may be counted or not,
        because only differences matter.
    - `bidirectional`: true if the second half of the buckets is for the tokens after a token (an encoder).
        Otherwise, all tokens after it have the bucket of distance 0.
    - `max_distance`: all distances beyond it share the last bucket.
    - `batch_size`: the number of rows of the batch. From positions in one row, the bias has one row for each
        part of the batch on the mesh, or a single row if the batch does not divide evenly.
    """
    ahead = key[:, None] - query[:, :, None]
    num_buckets = table.num_embeddings // 2 if bidirectional else table.num_embeddings
    distance = jnp.abs(ahead) if bidirectional else jnp.maximum(-ahead, 0)
    buckets = jnp.asarray(distance_buckets(num_buckets, max_distance))[jnp.minimum(distance, max_distance)]
    if bidirectional:
        buckets = buckets + jnp.where(ahead > 0, num_buckets, 0)
    if len(buckets) > 1:
        return jnp.moveaxis(table(buckets), -1, 1)
    weights = jnp.take(_for_each_part(table.weight, batch_size), buckets[0], axis=1)
    return jnp.moveaxis(weights, -1, 1)


def _for_each_part(weight: Float[Array, "buckets heads"], batch_size: int) -> Float[Array, "n buckets heads"]:
    mesh = traced_mesh(weight)
    axes = None if mesh is None else batch_axes(mesh, batch_size)
    if mesh is None or not axes:
        return weight[None]
    parts = jnp.broadcast_to(weight, (axis_size(mesh, axes), *weight.shape))
    spec = PartitionSpec(axes, *[PartitionSpec.UNCONSTRAINED] * 2)
    return jax.lax.with_sharding_constraint(parts, NamedSharding(mesh, spec))
