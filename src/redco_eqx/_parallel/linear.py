"""The two halves of a Megatron-split pair of layers: column and row, with their
communication.

They change the communication, never the result: for any layout of the arrays, the
result is the same as if the layers were applied one by one. On one device, and on a
mesh with a `tensor` axis of size 1, the layers are applied one by one.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Inexact, PyTree

from redco_eqx._base.tree import from_arrays, is_array, to_arrays
from redco_eqx._sharding.mesh import (
    batch_axes,
    mapped_axes,
    tensor_size,
    traced_mesh,
)

# Sums over devices inside a `shard_map` and their transposes, in a form that every
# compiler accepts.


Axes = str | Sequence[str]


def psum(x: Array, axes: Axes) -> Array:
    """`jax.lax.psum`; on CPU a bfloat16 sum is taken in float32. Without axes, it
    returns `x`."""
    return _in_float32_on_cpu(jax.lax.psum, x, axes)


def vary(x: Array, axes: Axes) -> Array:
    """Mark `x` as different on each device along `axes`, so that its gradient is a
    single `psum` over them."""
    return _in_float32_on_cpu(functools.partial(jax.lax.pcast, to="varying"), x, axes)


def _in_float32_on_cpu(
    function: Callable[[Array, Axes], Array], x: Array, axes: Axes
) -> Array:
    # In a shard_map that leaves axes to the compiler, the CPU compiler aborts the
    # process on a bfloat16 sum ("Invalid binary instruction opcode copy"): jaxlib
    # 0.10.2 and 0.12.0, no upstream issue known. The platform is known only when the
    # program is lowered.
    if x.dtype != jnp.bfloat16 or not axes:
        return function(x, axes)
    return jax.lax.platform_dependent(
        x,
        cpu=lambda x: function(x.astype(jnp.float32), axes).astype(x.dtype),
        default=lambda x: function(x, axes),
    )


# The arrays of one Linear-like layer, cut over the `tensor` axis for use inside a
# `shard_map`.


Layer: TypeAlias = Callable[[Array], Array]
"""A layer, called on an array. `eqx.nn.Linear` is applied to the last dim."""


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """A layer in parts: a tree of arrays that a `shard_map` cuts by `specs`, and a tree
    of everything else.

    - `bias`: the bias that a row split adds after the sum over shards. The layer then
        has zeros in its place.
    """

    arrays: PyTree[Array]
    static: PyTree
    specs: PyTree[PartitionSpec]
    bias: Array | None = None

    def apply(self, arrays: PyTree[Array], x: Array) -> Array:
        """Apply the layer with these arrays, which may be shards of its own."""
        return apply(eqx.combine(arrays, self.static), x)


def marked(x: Array) -> Array:
    """Mark `x` in a traced program by a copy, which compiles to nothing, in the current
    scope."""
    return jnp.copy(x) if isinstance(x, Tracer) else x


def split_layer(
    layer: Layer, split: Literal["column", "row"], num_shards: int, unit: int
) -> SplitLayer | None:
    """Cut a layer over its outputs (column) or inputs (row). Return `None` if it cannot
    be cut.

    It can be cut if `shard_rules` would see exactly one matrix in it (with its bias and
    LoRA branch), and the features on that side divide evenly into units and shards.
    """
    from redco_eqx._sharding.matrices import root_node  # only if a layer is split

    matrix = root_node(layer).matrix
    if matrix is None:
        return None
    dims = {node.path: dim for node, dim in matrix.cut(split).items()}
    features = matrix.in_size
    if split == "column":
        # Each of several fused matrices is split.
        features = matrix.out_size // matrix.parts
    # A convolution has more dims.
    is_linear = len(matrix.weight.shape) == (3 if matrix.parts > 1 else 2)
    if not is_linear or features % (num_shards * unit):
        return None
    own = to_arrays(layer)
    bias = None
    if own.keys() != dims.keys():
        return None
    if split == "row" and matrix.bias is not None:
        bias = own[matrix.bias.path]
        layer = from_arrays(layer, {**own, matrix.bias.path: jnp.zeros_like(bias)})
    arrays, static = eqx.partition(layer, is_array)
    cut = []
    for path in own:
        dim = dims[path]
        if dim is None:
            cut.append(PartitionSpec())
        else:
            cut.append(PartitionSpec(*[None] * dim, "tensor"))
    specs = jax.tree.unflatten(jax.tree.structure(arrays), cut)
    return SplitLayer(arrays, static, specs, bias)


def apply(layer: Layer | Array, x: Array) -> Array:
    """Apply a layer to the last dim of `x`. An embedding table is applied as a head.

    `eqx.nn.Linear` itself accepts only vectors.
    """
    if not callable(layer):
        return jnp.einsum("...i,oi->...o", x, layer)
    if isinstance(layer, eqx.nn.Linear):
        for _ in range(x.ndim - 1):
            layer = jax.vmap(layer)
    return layer(x)


# The scopes tell an analysis of the program which results are added before they are
# summed over the shards.
@jax.named_scope("redco_eqx.column")
def column(
    x: Inexact[Array, "*batch in"],
    *layers: Layer,
    unit: int = 1,
    sequence_parallel: bool = False,
) -> tuple[Inexact[Array, "..."], ...]:
    """Apply sibling projections of one input, split by their outputs: query, key and
    value, or gate and up.

    The forward pass communicates nothing. The backward pass adds up the gradients of
    `x` over the siblings first, and then over the shards, in **one** all-reduce of the
    size of `x`, with every compiler. Separate layers would need one all-reduce per
    sibling if the compiler does not merge them (as on CPU).

    ```python
    attention = eqx.nn.MultiheadAttention(8, 64, key=key)
    projections = attention.query_proj, attention.key_proj, attention.value_proj
    q, k, v = rx.layers.column(x, *projections, unit=8)
    ```

    **Arguments:**

    - `x`: the input of all layers.
    - `layers`: Linear-like modules: `eqx.nn.Linear` (applied to the last dim), a module
        that you wrote with a `weight` or `kernel`, or either with a LoRA branch. A
        layer is split if its outputs divide evenly. Anything else, such as a function,
        is applied as it is.
    - `unit`: the number of neighbouring outputs that belong together, such as the size
        of a head. A layer is split only if its number of units divides evenly, as in
        `shard_rules`.
    - `sequence_parallel`: pass true if `x` is split over `tensor` along dim 1 of
        `(batch, length, features)`. `x` is gathered here, and its gradient is reduced
        and scattered, each with the size of the whole `x`.

    **Returns:**

    One output for each layer, with its last dim split over `tensor`.

    **Raises:**

    `ValueError` if the length does not divide evenly under `sequence_parallel`.
    """
    mesh = traced_mesh(layers, x)
    if mesh is None or tensor_size(mesh) == 1:
        if len(layers) > 1:
            # The mark shows analyses without a mesh that the gradients of siblings are
            # added up here.
            x = marked(x)
        return tuple(apply(layer, x) for layer in layers)
    if sequence_parallel:
        check_sequence("column", x, mesh)
    splits = [split_layer(layer, "column", tensor_size(mesh), unit) for layer in layers]
    found = [split for split in splits if split is not None]
    of_split: Iterator[Array] = iter(())
    if found:
        of_split = iter(_column(x, found, mesh, sequence_parallel))
    outputs = []
    for layer, split in zip(layers, splits):
        if split is None:
            outputs.append(apply(layer, x))
        else:
            outputs.append(next(of_split))
    return tuple(outputs)


def _manual_axes(mesh: AbstractMesh, sequence_parallel: bool) -> set[str]:
    """The axes that a `shard_map` does not leave to the compiler."""
    # Beside automatic axes, gathers and scatters over a manual axis become other
    # operations.
    if sequence_parallel:
        return set(mesh.axis_names)
    # A `vmap(spmd_axis_name=)` splits a dim over its axis in the specs, which may name
    # only manual axes.
    return {"tensor", *mapped_axes()}


def _split_last(ndim: int, rows: tuple[str, ...] | None) -> PartitionSpec:
    """The spec of an array whose last dim is split over `tensor`, and whose first one,
    if it is another, over the axes `rows`."""
    entries = [rows, *[None] * ndim]
    return PartitionSpec(*entries[: ndim - 1], "tensor")


def _column(
    x: Array, splits: list[SplitLayer], mesh: AbstractMesh, sequence_parallel: bool
) -> list[Array]:
    def on_shard(x: Array, arrays: list[PyTree[Array]]) -> list[Array]:
        # Both transpose to one sum over the shards, after the siblings' gradients are
        # added.
        if sequence_parallel:
            x = jax.lax.all_gather(x, "tensor", axis=1, tiled=True)
        else:
            x = vary(x, "tensor")
        return [split.apply(own, x) for split, own in zip(splits, arrays)]

    arrays = [split.arrays for split in splits]
    specs = [split.specs for split in splits]
    ranks = [jax.eval_shape(split.apply, split.arrays, x).ndim for split in splits]
    rows = None
    spec = PartitionSpec()
    if sequence_parallel:
        rows = batch_axes(mesh, x.shape[0])
        spec = PartitionSpec(rows, "tensor")
    return jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(spec, specs),
        out_specs=[_split_last(rank, rows) for rank in ranks],
        axis_names=_manual_axes(mesh, sequence_parallel),
    )(x, arrays)


@jax.named_scope("redco_eqx.row")
def row(
    x: Inexact[Array, "*batch in"] | Sequence[Inexact[Array, "*batch _"]],
    layer: Layer | Sequence[Layer],
    *,
    unit: int = 1,
    sequence_parallel: bool = False,
) -> Inexact[Array, "*batch out"]:
    """Close a column split with a projection that is split by its inputs, and sum its
    output over the shards.

    In the forward pass, the sum is one all-reduce of the size of the output. The
    backward pass communicates nothing. The output is named `row_out`. The
    rematerialisation policy of that name (see [`scan_layers`][]) keeps it, because
    computing it again would communicate again.

    ```python
    (hidden,) = rx.layers.column(x, mlp.layers[0])
    x = x + rx.layers.row(jax.nn.gelu(hidden), mlp.layers[1])
    ```

    **Arguments:**

    - `x`: the input, or several inputs, one per layer.
    - `layer`: a Linear-like module, as for `column`, or several modules, whose outputs
        are added. Attention and MLP side by side then share **one** all-reduce.
    - `unit`: as for `column`.
    - `sequence_parallel`: splits the output over `tensor` along dim 1. It is then
        reduced and scattered instead of reduced.

    **Raises:**

    `ValueError` if the length does not divide evenly under `sequence_parallel`, or if
    the number of inputs differs from the number of layers.
    """
    xs = list(x) if isinstance(x, Sequence) else [x]
    layers = list(layer) if isinstance(layer, Sequence) else [layer]
    if len(xs) != len(layers) or not xs:
        raise ValueError(
            f"row: {len(xs)} inputs for {len(layers)} layers. Pass one input for each "
            "layer."
        )
    mesh = traced_mesh(layers, xs)
    # The compiler itself sums the output of one layer where it is split by its inputs.
    is_plain = len(xs) == 1 and not sequence_parallel
    if mesh is None or tensor_size(mesh) == 1 or is_plain:
        outputs = [apply(one, x) for x, one in zip(xs, layers)]
        return checkpoint_name(_added(outputs), "row_out")
    if sequence_parallel:
        for one in xs:
            check_sequence("row", one, mesh)
    splits = [split_layer(one, "row", tensor_size(mesh), unit) for one in layers]
    outputs = []
    split_xs = []
    found = []
    for one_x, one, split in zip(xs, layers, splits):
        if split is None:
            outputs.append(apply(one, one_x))
        else:
            split_xs.append(one_x)
            found.append(split)
    if found:
        outputs.append(_row(split_xs, found, mesh, sequence_parallel))
    # Added once. Inside the sum over the shards, each of them would add it.
    outputs += [split.bias for split in found if split.bias is not None]
    return checkpoint_name(_added(outputs), "row_out")


def _row(
    xs: list[Array],
    splits: list[SplitLayer],
    mesh: AbstractMesh,
    sequence_parallel: bool,
) -> Array:
    def on_shard(xs: list[Array], arrays: list[PyTree[Array]]) -> Array:
        outputs = [split.apply(own, x) for x, split, own in zip(xs, splits, arrays)]
        total = _added(outputs)
        if sequence_parallel:
            return jax.lax.psum_scatter(
                total, "tensor", scatter_dimension=1, tiled=True
            )
        return psum(total, "tensor")

    rows = None
    spec = PartitionSpec()
    if sequence_parallel:
        rows = batch_axes(mesh, xs[0].shape[0])
        spec = PartitionSpec(rows, "tensor")
    of_xs = [_split_last(x.ndim, rows) for x in xs]
    of_arrays = [split.specs for split in splits]
    return jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(of_xs, of_arrays),
        out_specs=spec,
        axis_names=_manual_axes(mesh, sequence_parallel),
    )(xs, [split.arrays for split in splits])


def _added(outputs: list[Array]) -> Array:
    # Without the 0 with which `sum` would begin.
    return sum(outputs[1:], outputs[0])


def check_sequence(name: str, x: Array, mesh: AbstractMesh | None) -> None:
    """Raise `ValueError` if `x` cannot be split over `tensor` along dim 1."""
    size = tensor_size(mesh)
    if x.ndim < 3 or x.shape[1] % size:
        raise ValueError(
            f"{name}: sequence_parallel=True splits dim 1 of (batch, length, features) "
            f"over tensor={size}, but the input has shape {tuple(x.shape)}. Pad the "
            f"length to a multiple of {size}, or pass sequence_parallel=False."
        )
