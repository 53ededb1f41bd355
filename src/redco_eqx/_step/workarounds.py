"""Workarounds for XLA: operations that its partitioner gets wrong."""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, TypeAlias

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from redco_eqx._base.jaxprs import Program, manual_axes, shape_of, source_line
from redco_eqx._base.rewriting import replace_operations
from redco_eqx._parallel.linear import psum, vary
from redco_eqx._sharding.mesh import batch_axes, mapped_axes, row_axes

# Grouped convolutions, cut by hand: XLA's partitioner is wrong where examples are split
# over devices.
#
# Seen on CPU, and in programs of the TPU compiler of 0.10.2. Needed by jaxlib 0.10.2
# and 0.12.0:
#
# - A weight gradient (`batch_group_count > 1`) is summed over all mesh axes, also over
#   those along which the examples are whole: it is too large by the size of these axes.
#   No upstream issue known.
# - Where the groups are examples (`vmap` over examples of a convolution with a kernel
#   for each, or of a weight gradient), or their kernel is split, results are wrong, or
#   the compiler raises or aborts. No upstream issue known.
# - With `feature_group_count > 1` and several channels in or out for each group, the
#   batch is gathered, and each device computes the whole batch: openxla/xla#47945 (to
#   be fixed by openxla/xla#48086).
#
# Inside a `shard_map` over all axes nothing is left to partition.


Params: TypeAlias = dict[str, Any]
"""The parameters of an operation."""

Kernels: TypeAlias = Collection[int]
"""The number of elements of each kernel that `tensor` splits. Two kernels of the same
size are assumed to have the same split, which at worst costs communication."""


def replace_convolution(
    equation: JaxprEqn, mesh: Mesh | AbstractMesh, kernels: Kernels
) -> Callable[..., Array] | None:
    """Return the replacement for `equation` in a program on `mesh`, if it is a grouped
    convolution.

    In a `shard_map` over all axes, nothing is replaced.

    Raises `ValueError`, naming the line, for a grouped convolution in a `shard_map`
    that leaves axes to the compiler.
    """
    params = equation.params
    if equation.primitive.name != "conv_general_dilated":
        return None
    if params["batch_group_count"] == params["feature_group_count"] == 1:
        return None
    manual = manual_axes(equation)
    left = [
        axis for axis, size in mesh.shape.items() if axis not in manual and size > 1
    ]
    if manual and left:
        raise ValueError(
            f"{source_line(equation)}: a grouped convolution in a shard_map over "
            f"{sorted(manual)} leaves the mesh axes {left} to the compiler, which gets "
            "its gradients wrong. Make the shard_map manual over them too "
            "(axis_names=)."
        )
    if manual:
        return None
    kernel = (
        equation.outvars[0] if params["batch_group_count"] > 1 else equation.invars[1]
    )
    return functools.partial(_cut, params, mesh, math.prod(shape_of(kernel)) in kernels)


def _cut(
    params: Params,
    mesh: Mesh | AbstractMesh,
    split_channels: bool,
    lhs: Array,
    rhs: Array,
) -> Array:
    """The convolution, cut over the axes of the batch along the examples, or else along
    the groups.

    A weight gradient contracts the examples, so the sum over devices is written out. If
    channels are split, `tensor` cuts the groups; otherwise, all devices along `tensor`
    do the same work.
    """
    dims = params["dimension_numbers"]
    contracts = params["batch_group_count"] > 1
    count = "batch_group_count" if contracts else "feature_group_count"
    examples_dim, groups_dim = (
        reversed(dims.lhs_spec[:2]) if contracts else dims.lhs_spec[:2]
    )
    left = {"examples": lhs.shape[examples_dim], "groups": params[count]}
    cuts: dict[str, list[str]] = {"examples": [], "groups": []}
    for axis, size in mesh.shape.items():
        if axis in row_axes(mesh):
            kinds = ["examples", "groups"]
        elif split_channels and axis not in mapped_axes():
            kinds = ["groups"]
        else:
            kinds = []
        kind = next((kind for kind in kinds if left[kind] % size == 0), None)
        if kind is not None and size > 1:
            left[kind] //= size
            cuts[kind].append(axis)
    examples, groups = (tuple(cuts[kind]) for kind in left)

    def spec(cut: dict[int, tuple[str, ...]]) -> PartitionSpec:
        return PartitionSpec(*(cut.get(dim) or None for dim in range(lhs.ndim)))

    def part(lhs: Array, rhs: Array) -> Array:
        # A sharding from outside may name axes that a `shard_map` does not have.
        own = {**params, count: left["groups"], "out_sharding": None}
        if contracts:
            return psum(jax.lax.conv_general_dilated_p.bind(lhs, rhs, **own), examples)
        return jax.lax.conv_general_dilated_p.bind(lhs, vary(rhs, examples), **own)

    if contracts:
        of_rhs = {dims.rhs_spec[1]: examples, dims.rhs_spec[0]: groups}
        of_out = {dims.out_spec[1]: groups}
    else:
        of_rhs = {dims.rhs_spec[0]: groups}
        of_out = {dims.out_spec[0]: examples, dims.out_spec[1]: groups}
    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(spec({examples_dim: examples, groups_dim: groups}), spec(of_rhs)),
        out_specs=spec(of_out),
    )(lhs, rhs)


def replace_mapped_convolution(
    equation: JaxprEqn, mesh: Mesh | AbstractMesh, axis: str
) -> Callable[..., Array] | None:
    """Return the replacement for `equation` in a program that is then mapped over
    `axis`, if it is a convolution: one that each shard computes by itself.

    `vmap` would make groups of the shards in a weight gradient.
    """
    if equation.primitive.name != "conv_general_dilated" or manual_axes(equation):
        return None

    def on_shard(lhs: Array, rhs: Array) -> Array:
        # A sharding from outside may name axes that a `shard_map` does not have.
        own = {**equation.params, "out_sharding": None}
        return equation.primitive.bind(lhs, rhs, **own)

    return jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        axis_names={axis},
    )


# Fourier transforms, cut by hand: with a split dim the CPU compiler's program fails.
#
# - An FFT over a split dim ends in an internal error when it runs (`fft_thunk.cc`,
#   about the order of dims in memory; the same check as in jax-ml/jax#22484): jaxlib
#   0.10.2 and 0.12.0.
# - Or the partitioner aborts (`fft_handler.cc`, openxla/xla#45402): jaxlib 0.10.2, no
#   longer 0.11.0.
# - An FFT over another dim gathers a split batch (openxla/xla#24): jaxlib 0.10.2, no
#   longer 0.12.0.


def replace_fft(
    equation: JaxprEqn, mesh: Mesh | AbstractMesh
) -> Callable[..., Array] | None:
    """Return the replacement for `equation`, if it is an FFT: an FFT over dims that are
    whole on each device.

    The leading dim is split over the axes of the batch, unless it is transformed or
    does not divide evenly. In a `shard_map`, nothing is replaced.
    """
    if equation.primitive.name != "fft" or manual_axes(equation):
        return None
    num_dims = len(equation.params["fft_lengths"])  # the last dims are transformed

    def in_order(x: Array) -> Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def part(x: Array) -> Array:
        # Fix the layout before and after, because the transpose of an FFT is an FFT,
        # too.
        return in_order(equation.primitive.bind(in_order(x), **equation.params))

    def transform(x: Array) -> Array:
        spec = PartitionSpec(
            batch_axes(mesh, x.shape[0]) if x.ndim > num_dims else None
        )
        return jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    return transform


# Pads, taken apart: the partitioner is wrong where a whole dim is padded into a split
# one.
#
# A pad that cuts one end and extends the other gives wrong values, and one with
# elements between others ends in an error of the verifier: jaxlib 0.10.2 and 0.12.0. No
# upstream issue known.


def replace_pad(equation: JaxprEqn) -> Callable[..., Array] | None:
    """Return the replacement for `equation`, if it is such a pad: simple pads, a
    reshape and a slice. In a `shard_map`, nothing is replaced."""
    config = equation.params.get("padding_config", ())
    if not any(
        between or low * high < 0 for low, high, between in config
    ) or manual_axes(equation):
        return None

    def pad(x: Array, value: Array) -> Array:
        ends: list[tuple[int, int]] = []
        for dim, (low, high, between) in enumerate(config):
            # first, the last element also gets those that follow it.
            last = between if x.shape[dim] else 0
            ends.append((low, high - last))
            if last:
                parts = jax.lax.expand_dims(x, [dim + 1])
                parts = jax.lax.pad(
                    parts,
                    value,
                    [(0, last * (i == dim + 1), 0) for i in range(parts.ndim)],
                )
                x = parts.reshape(
                    *x.shape[:dim], x.shape[dim] * (last + 1), *x.shape[dim + 1 :]
                )
        x = jax.lax.pad(
            x, value, [(max(low, 0), max(high, 0), 0) for low, high in ends]
        )
        limits = [size + min(high, 0) for size, (_, high) in zip(x.shape, ends)]
        return jax.lax.slice(x, [max(-low, 0) for low, _ in ends], limits)

    return pad


def for_partitioner(
    program: Program, mesh: Mesh | AbstractMesh | None, kernels: Kernels = ()
) -> Program:
    """Replace operations of `program` that the partitioner gets wrong on `mesh`
    (`None`: one device).

    - `kernels`: see [`Kernels`][].

    Raises `ValueError`, naming the line, for an operation that cannot be corrected.
    """
    if mesh is None or mesh.size == 1:
        return program
    return program.replace(_corrected(program.closed.jaxpr, mesh, kernels))


def is_wrong_on(jaxpr: Jaxpr, mesh: Mesh | AbstractMesh) -> bool:
    """True if `for_partitioner` would replace an operation."""
    return mesh.size > 1 and _corrected(jaxpr, mesh, ()) is not jaxpr


def _corrected(jaxpr: Jaxpr, mesh: Mesh | AbstractMesh, kernels: Kernels) -> Jaxpr:
    def replacement(e: JaxprEqn) -> Callable[..., Array] | None:
        return (
            replace_convolution(e, mesh, kernels)
            or replace_fft(e, mesh)
            or replace_pad(e)
        )

    return replace_operations(jaxpr, replacement)
