"""The layout of activations: how the rows of a batch and the heads of a layer lie on
the mesh."""

import dataclasses
import math

from jax.sharding import AbstractMesh
from jaxtyping import PyTree

from redco_eqx._sharding.mesh import batch_axes, tensor_size, traced_mesh


@dataclasses.dataclass(frozen=True)
class ActivationAxes:
    """The mesh axes that split activations.

    - `mesh`: the mesh of the arrays, for `jax.shard_map` and `NamedSharding`.
    - `rows`: the axes that split the rows of the batch; `None` if they do not divide
        the number of rows.
    - `heads`: `"tensor"`, or `None` if the mesh has no such axis, or it does not divide
        the number of heads.
    """

    mesh: AbstractMesh
    rows: tuple[str, ...] | None
    heads: str | None

    @property
    def num_row_shards(self) -> int:
        """The number of parts into which the rows are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.rows or ())

    @property
    def num_head_shards(self) -> int:
        """The number of parts into which the heads are split."""
        return 1 if self.heads is None else self.mesh.shape[self.heads]


def activation_axes(
    *arrays: PyTree, num_rows: int, num_heads: int = 1
) -> ActivationAxes | None:
    """Return how rows and heads lie on the mesh of these arrays, in the layout of
    [`column`][] and [`scan_layers`][]: rows over `data` and `fsdp`, heads over
    `tensor`.

    Use it to run a kernel of your own on the part of each device. The compiler cannot
    look into such a kernel, so it would gather the arrays first:

    ```python
    def attention(q, k, v):                        # (batch, length, heads, size)
        num_rows, _, num_heads, _ = k.shape
        axes = rx.layers.activation_axes(
            q, k, v, num_rows=num_rows, num_heads=num_heads
        )
        if axes is None:
            return kernel(q, k, v)
        spec = PartitionSpec(axes.rows, None, axes.heads)
        specs = (spec, spec, spec)
        split = jax.shard_map(kernel, mesh=axes.mesh, in_specs=specs, out_specs=spec)
        return split(q, k, v)
    ```

    **Arguments:**

    - `arrays`: arrays or PyTrees of arrays. The first one that is on a mesh decides.
    - `num_rows`: the size of the dimension of the batch.
    - `num_heads`: the size of the dimension that `tensor` splits: heads, features or
        entries of a vocabulary.

    **Returns:**

    The axes, or `None` if the arrays are on no mesh that the blocks of
    `redco_eqx.layers` split over: on one device without a mesh, inside a `shard_map`,
    or with axes that are not of `AxisType.Auto`.
    """
    mesh = traced_mesh(arrays)
    if mesh is None:
        return None
    has_heads = "tensor" in mesh.shape and num_heads % tensor_size(mesh) == 0
    return ActivationAxes(
        mesh, batch_axes(mesh, num_rows), "tensor" if has_heads else None
    )
