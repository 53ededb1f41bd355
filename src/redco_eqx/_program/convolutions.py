"""Grouped convolutions, cut by hand: XLA's partitioner is wrong where examples are split over devices.

Seen in jaxlib 0.10.2 on CPU, and in what the TPU compiler of that version makes:

- A weight gradient (`batch_group_count > 1`) is summed over all mesh axes, also those along which the examples
  are whole: it is too large by their size.
- Where the groups are examples (`vmap` over examples of a convolution with a kernel for each, or of a weight
  gradient), or a kernel is split, results are wrong, or the compiler raises or aborts.

Inside a `shard_map` over all axes nothing is left to partition.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from redco_eqx._parallel.sums import psum, vary
from redco_eqx._program.rewrite import manual_axes, source_line
from redco_eqx._sharding.mesh import BATCH_AXES


def replace_convolution(
    equation: jex_core.JaxprEqn, mesh: Mesh | AbstractMesh, split_sizes: Collection[int]
) -> Callable[..., Array] | None:
    """What takes the place of `equation` in a program on `mesh`, if it is a grouped convolution.

    - `split_sizes`: how many numbers the kernels have whose channels `tensor` splits. It only decides what is
        communicated: with a kernel of that size, channels are taken to be split already.

    Raises `ValueError`, naming the line, in a `shard_map` that leaves axes of the mesh to the compiler.
    """
    params = equation.params
    if equation.primitive.name != "conv_general_dilated":
        return None
    if params["batch_group_count"] == params["feature_group_count"] == 1:
        return None
    manual = manual_axes(equation)
    left = [axis for axis, size in mesh.shape.items() if axis not in manual and size > 1]
    if manual and left:
        raise ValueError(
            f"{source_line(equation)}: a grouped convolution in a shard_map over {sorted(manual)} leaves the "
            f"mesh axes {left} to the compiler, which gets its gradients wrong. Make the shard_map manual over "
            "them too (axis_names=)."
        )
    if manual:
        return None
    kernel: Any = equation.outvars[0] if params["batch_group_count"] > 1 else equation.invars[1]
    return functools.partial(_cut, params, mesh, math.prod(kernel.aval.shape) in split_sizes)


def _cut(
    params: dict[str, Any], mesh: Mesh | AbstractMesh, split_channels: bool, lhs: Array, rhs: Array
) -> Array:
    """The convolution, cut over the axes of the batch: along its examples, or else its groups.

    The examples are what a weight gradient contracts, and its sum over devices is written out. `tensor` cuts
    the groups if channels are split; else, along `tensor`, each device does the same.
    """
    dims, contracts = params["dimension_numbers"], params["batch_group_count"] > 1
    count = "batch_group_count" if contracts else "feature_group_count"
    examples_dim, groups_dim = reversed(dims.lhs_spec[:2]) if contracts else dims.lhs_spec[:2]
    left = {"examples": lhs.shape[examples_dim], "groups": params[count]}
    cuts: dict[str, list[str]] = {"examples": [], "groups": []}
    for axis, size in mesh.shape.items():
        kinds = ["examples", "groups"] if axis in BATCH_AXES else ["groups"] if split_channels else []
        kind = next((kind for kind in kinds if left[kind] % size == 0), None)
        if kind is not None and size > 1:
            left[kind] //= size
            cuts[kind].append(axis)
    examples, groups = (tuple(cuts[kind]) for kind in left)

    def spec(cut: dict[int, tuple[str, ...]]) -> PartitionSpec:
        return PartitionSpec(*(cut.get(dim) or None for dim in range(lhs.ndim)))

    def part(lhs: Array, rhs: Array) -> Array:
        own = {**params, count: left["groups"]}
        if contracts:
            return psum(_convolve(own, lhs, rhs), examples) if examples else _convolve(own, lhs, rhs)
        return _convolve(own, lhs, vary(rhs, examples) if examples else rhs)

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


_SETTINGS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "dimension_numbers",
    "feature_group_count",
    "batch_group_count",
    "precision",
    "preferred_element_type",
)


def _convolve(params: dict[str, Any], lhs: Array, rhs: Array) -> Array:
    return jax.lax.conv_general_dilated(lhs, rhs, **{name: params[name] for name in _SETTINGS})
