"""The two halves of a Megatron-split pair of layers: column and row, with their communication.

They change what is communicated, never what is computed: whatever the layout of the arrays, the result is
that of applying the layers one by one. On one device, and on a mesh whose `tensor` axis has size 1, that is
also what is done.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Inexact

from redco_eqx._parallel.mesh import batch_axes, tensor_size, traced_mesh
from redco_eqx._parallel.split import Layer, SplitLayer, apply, split_layer
from redco_eqx._parallel.sums import psum, vary

Remat: TypeAlias = Literal["none", "full", "row_out"]


# By the scopes an analysis of the program knows what is added up before it is summed over the shards.
@jax.named_scope("redco_eqx.column")
def column(
    x: Inexact[Array, "*batch in"],
    *layers: Layer,
    unit: int = 1,
    sequence_parallel: bool = False,
) -> tuple[Inexact[Array, "..."], ...]:
    """Sibling projections of one input, split over their outputs: query, key and value, or gate and up.

    Forward nothing is communicated. Backward the gradients of `x` are added up over the siblings first and
    then over the shards, in **one** all-reduce of the size of `x`, by every compiler; written as separate
    layers, they cost one for each sibling where the compiler does not merge them (on CPU).

    ```python
    attention = eqx.nn.MultiheadAttention(8, 64, key=key)
    q, k, v = rx.layers.column(x, attention.query_proj, attention.key_proj, attention.value_proj, unit=8)
    ```

    **Arguments:**

    - `x`: what all of them read.
    - `layers`: Linear-like modules: `eqx.nn.Linear` (applied to the last dim), one of your own with a `weight`
        or `kernel`, or either with a LoRA branch. A layer is split if its outputs divide. Anything else, such
        as a function, is applied as it is.
    - `unit`: how many neighbouring outputs belong together: the size of a head. A layer is split only if its
        number of units divides, as `shard_rules` does it.
    - `sequence_parallel`: `x` is split over `tensor` along its dim 1, `(batch, length, features)`: it is
        gathered here, and its gradient reduced and scattered, each of the size of the whole `x`.

    **Returns:**

    One output for each layer, whose last dim is split over `tensor`.

    **Raises:**

    `ValueError` if the length does not divide under `sequence_parallel`.
    """
    mesh = traced_mesh(layers, x)
    if mesh is None or tensor_size(mesh) == 1:
        return tuple(apply(layer, x) for layer in layers)
    if sequence_parallel:
        check_sequence("column", x, mesh)
    splits = [split_layer(layer, "out", tensor_size(mesh), unit) for layer in layers]
    found = [split for split in splits if split is not None]
    outputs = iter(_column(x, found, mesh, sequence_parallel) if found else ())
    return tuple(apply(layer, x) if split is None else next(outputs) for layer, split in zip(layers, splits))


def _column(x: Array, splits: list[SplitLayer], mesh: AbstractMesh, sequence_parallel: bool) -> list[Array]:
    def body(x: Array, arrays: list[list[Array]]) -> list[Array]:
        # `vary` transposes to one sum over the shards, after the siblings' gradients are added.
        x = jax.lax.all_gather(x, "tensor", axis=1, tiled=True) if sequence_parallel else vary(x, "tensor")
        return [split.build(own)(x) for split, own in zip(splits, arrays)]

    arrays, specs = [split.arrays for split in splits], [split.specs for split in splits]
    ranks = [jax.eval_shape(split.build(split.arrays), x).ndim for split in splits]
    # With a manual axis beside automatic ones, gathers and scatters over it do not stay what they are.
    rows = batch_axes(mesh, x.shape[0]) if sequence_parallel else None
    inner = PartitionSpec(rows, "tensor") if sequence_parallel else PartitionSpec()
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(inner, specs),
        out_specs=[PartitionSpec(*[rows, *[None] * rank][: rank - 1], "tensor") for rank in ranks],
        axis_names=set(mesh.axis_names) if sequence_parallel else {"tensor"},
    )(x, arrays)


@jax.named_scope("redco_eqx.row")
def row(
    x: Inexact[Array, "*batch in"] | Sequence[Inexact[Array, "*batch _"]],
    layer: Layer | Sequence[Layer],
    *,
    unit: int = 1,
    sequence_parallel: bool = False,
) -> Inexact[Array, "*batch out"]:
    """The projection that closes a column split: split over its inputs, its output is summed over the shards.

    Forward that is one all-reduce of the size of the output; backward nothing is communicated. The output is
    named `row_out`, so that the rematerialisation policy of that name (see [`scan_layers`][]) keeps it:
    recomputing it would communicate again.

    ```python
    (hidden,) = rx.layers.column(x, mlp.layers[0])
    x = x + rx.layers.row(jax.nn.gelu(hidden), mlp.layers[1])
    ```

    **Arguments:**

    - `x`: the input; or several, one for each layer.
    - `layer`: a Linear-like module, as for `column`; or several, whose outputs are added: attention and MLP
        side by side then share **one** all-reduce.
    - `unit`: as for `column`.
    - `sequence_parallel`: the output is split over `tensor` along its dim 1: reduced and scattered, instead of
        reduced.

    **Raises:**

    `ValueError` if the length does not divide under `sequence_parallel`, or there are not as many inputs as
    layers.
    """
    xs = list(x) if isinstance(x, Sequence) else [x]
    layers = list(layer) if isinstance(layer, Sequence) else [layer]
    if len(xs) != len(layers) or not xs:
        raise ValueError(f"row: {len(xs)} inputs for {len(layers)} layers. Pass one input for each layer.")
    mesh = traced_mesh(layers, xs)
    is_plain = mesh is None or tensor_size(mesh) == 1 or (len(xs) == 1 and not sequence_parallel)
    if is_plain or mesh is None:
        return checkpoint_name(_total([apply(one, x) for x, one in zip(xs, layers)]), "row_out")
    if sequence_parallel:
        for one in xs:
            check_sequence("row", one, mesh)
    splits = [split_layer(one, "in", tensor_size(mesh), unit) for one in layers]
    found = [(x, split) for x, split in zip(xs, splits) if split is not None]
    outputs = [apply(one, x) for x, one, split in zip(xs, layers, splits) if split is None]
    if found:
        outputs.append(_row([x for x, _ in found], [split for _, split in found], mesh, sequence_parallel))
    outputs += [split.bias for _, split in found if split.bias is not None]
    return checkpoint_name(_total(outputs), "row_out")


def _row(xs: list[Array], splits: list[SplitLayer], mesh: AbstractMesh, sequence_parallel: bool) -> Array:
    def body(xs: list[Array], arrays: list[list[Array]]) -> Array:
        total = _total([split.build(own)(x) for x, split, own in zip(xs, splits, arrays)])
        if sequence_parallel:
            return jax.lax.psum_scatter(total, "tensor", scatter_dimension=1, tiled=True)
        return psum(total, "tensor")

    rows = batch_axes(mesh, xs[0].shape[0]) if sequence_parallel else None
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(
            [PartitionSpec(*[rows, *[None] * x.ndim][: x.ndim - 1], "tensor") for x in xs],
            [split.specs for split in splits],
        ),
        out_specs=PartitionSpec(rows, "tensor") if sequence_parallel else PartitionSpec(),
        axis_names=set(mesh.axis_names) if sequence_parallel else {"tensor"},
    )(xs, [split.arrays for split in splits])


def _total(outputs: list[Array]) -> Array:
    total = outputs[0]
    for output in outputs[1:]:
        total = total + output
    return total


def check_sequence(name: str, x: Array, mesh: AbstractMesh) -> None:
    """Refuses, by `ValueError`, what cannot be split over `tensor` along dim 1."""
    size = tensor_size(mesh)
    if x.ndim < 3 or x.shape[1] % size:
        raise ValueError(
            f"{name}: sequence_parallel=True splits dim 1 of (batch, length, features) over tensor={size}, but "
            f"the input has shape {tuple(x.shape)}. Pad the length to a multiple of {size}, or pass "
            "sequence_parallel=False."
        )
