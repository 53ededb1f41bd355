"""How the arrays of one Linear-like layer are cut over the `tensor` axis, for use inside a `shard_map`."""

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from redco_eqx._sharding.model_tree import read_model
from redco_eqx._sharding.nodes import Matrix
from redco_eqx._tree import is_array, leaves_with_paths

Layer: TypeAlias = Callable[[Array], Array]
"""A layer, called on an array; `eqx.nn.Linear` on its last dim."""


@dataclasses.dataclass(frozen=True)
class SplitLayer:
    """A layer taken apart: arrays that a `shard_map` cuts by `specs`, and how to put it together again.

    - `bias`: what a row split adds after the sum over shards; the layer then has zeros in its place.
    """

    arrays: list[Array]
    specs: list[PartitionSpec]
    build: Callable[[list[Array]], Layer]
    bias: Array | None = None


def split_layer(layer: Layer, side: Literal["out", "in"], num_shards: int, unit: int) -> SplitLayer | None:
    """The layer cut over its outputs (column) or inputs (row); `None` if it cannot be.

    It can be if `shard_rules` would see exactly one matrix in it (with its bias and LoRA branch), and the
    features on that side divide into whole units on every shard.
    """
    matrix = _only_matrix(layer)
    if matrix is None:
        return None
    dim = matrix.out_dim if side == "out" else matrix.in_dim
    if matrix.weight.shape[dim] % (num_shards * unit):
        return None
    cut = _cut(matrix, side)
    arrays, static = eqx.partition(layer, is_array)
    leaves, treedef = jax.tree.flatten(arrays)
    paths = [path for path, _ in leaves_with_paths(arrays)]
    if set(paths) != set(cut):
        return None
    bias = None
    if side == "in" and matrix.bias is not None:
        index = paths.index(matrix.bias.path)
        bias, leaves[index] = leaves[index], jnp.zeros_like(leaves[index])
    specs = [
        PartitionSpec() if d is None else PartitionSpec(*[None] * d, "tensor") for d in map(cut.get, paths)
    ]

    def build(leaves: list[Array]) -> Layer:
        whole = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        return lambda x: apply(whole, x)

    return SplitLayer(leaves, specs, build, bias)


def apply(layer: Layer, x: Array) -> Array:
    """The layer on the last dim of `x`. `eqx.nn.Linear` itself takes single vectors only."""
    if isinstance(layer, eqx.nn.Linear):
        for _ in range(x.ndim - 1):
            layer = jax.vmap(layer)
    return layer(x)


def _only_matrix(layer: Layer) -> Matrix | None:
    root, tied = read_model(layer)
    matrices = root.matrices()
    if tied or len(matrices) != 1 or matrices[0].node is not root:
        return None
    matrix = matrices[0]
    is_linear = len(matrix.weight.shape) == (3 if matrix.parts > 1 else 2)
    return matrix if is_linear and matrix.groups == 1 else None


def _cut(matrix: Matrix, side: Literal["out", "in"]) -> dict[str, int | None]:
    """`{path: dim that is cut}` of every array that belongs to the matrix."""
    is_out = side == "out"
    cut: dict[str, int | None] = {matrix.weight.path: matrix.out_dim if is_out else matrix.in_dim}
    if matrix.bias is not None:
        cut[matrix.bias.path] = matrix.bias_dim if is_out else None
    if matrix.lora is not None:
        down, up = matrix.lora
        cut[down.weight.path] = None if is_out else down.dim
        cut[up.weight.path] = up.dim if is_out else None
    return cut
