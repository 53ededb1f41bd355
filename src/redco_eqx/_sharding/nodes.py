"""The parts of a model as the rules see it: named nodes, and the matrices and tables found in them."""

import dataclasses
from collections.abc import Iterator

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from redco_eqx._tree import is_array

Shape = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Node:
    """A node of the model, with abstract arrays as its leaves.

    - `stack`: number of leading dims, of every array below, that number stacked copies.
    - `matrix`, `table`: set if this node is a Linear-like module, or an embedding table.
    - `is_block`: whether it is one of several alike (an element of a homogeneous list, or a stack), so
        that no matrix inside it is consecutive to one outside.
    """

    path: str
    name: str
    value: PyTree
    parent: "Node | None"
    children: "list[Node]" = dataclasses.field(default_factory=list)
    stack: int = 0
    matrix: "Matrix | None" = None
    table: "Table | None" = None
    is_block: bool = False

    @property
    def is_array(self) -> bool:
        return is_array(self.value)

    @property
    def shape(self) -> Shape:
        return tuple(self.value.shape)

    def child(self, *names: str) -> "Node | None":
        """The first direct child that is an array and has one of these names."""
        return next((c for name in names for c in self.children if c.name == name and c.is_array), None)

    def weight(self) -> "Node | None":
        """The array named `weight` or `kernel`; also inside of a wrapper that has a single array of two dims or
        more (a weight that is masked, normalised or frozen)."""
        found = next((c for c in self.children if c.name in ("weight", "kernel")), None)
        if found is None or found.is_array:
            return found
        inside = [x for x in found.arrays() if len(x.shape) > 1 and jnp.issubdtype(x.value.dtype, jnp.number)]
        return inside[0] if len(inside) == 1 else None

    def walk(self) -> "Iterator[Node]":
        yield self
        for child in self.children:
            yield from child.walk()

    def arrays(self) -> "list[Node]":
        return [node for node in self.walk() if node.is_array]

    def matrices(self) -> "list[Matrix]":
        """Every matrix below, a wrapped one once."""
        if self.matrix is not None:
            return [self.matrix]
        return [matrix for child in self.children for matrix in child.matrices()]

    def attribute(self, *names: str) -> int | None:
        """The first positive int among these attributes of the module or of its `config`."""
        for owner in (self.value, getattr(self.value, "config", None)):
            for name in names:
                found = getattr(owner, name, None)
                if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                    return found
        return None


@dataclasses.dataclass(eq=False)
class Matrix:
    """A map from `in_size` to `out_size` features; dims are those of the stored array."""

    node: Node  # where it is named: the wrapper, if a LoRA module wraps it
    weight: Node
    in_size: int
    out_size: int
    in_dim: int
    out_dim: int
    groups: int = 1
    parts: int = 1  # several fused matrices, kept apart by a dim before `out_dim`
    heads: int | None = None  # of an array with a dim for heads, which is the one that is split
    bias: Node | None = None
    lora: "tuple[Branch, Branch] | None" = None  # (in -> rank, rank -> out)

    @property
    def bias_dim(self) -> int:
        return self.weight.stack + (self.parts > 1)

    def name_in(self, scope: Node) -> list[str]:
        """The parts of its path below `scope`."""
        path = self.node.path.removeprefix(scope.path).strip(".")
        return path.split(".")


@dataclasses.dataclass(eq=False)
class Branch:
    """One factor of a LoRA branch: the array, and its dim that is the base's in (or out) dim."""

    weight: Node
    dim: int

    @property
    def rank(self) -> int:
        return min(self.weight.shape[-2:])


@dataclasses.dataclass(eq=False)
class Table:
    """An embedding table: rows looked up along `dim`."""

    node: Node
    weight: Node
    num_rows: int
    width: int
    dim: int


def is_norm(node: Node) -> bool:
    kinds = eqx.nn.LayerNorm | eqx.nn.RMSNorm | eqx.nn.GroupNorm | eqx.nn.BatchNorm
    return isinstance(node.value, kinds) or type(node.value).__name__.lower().endswith("norm")


def is_recurrent(node: Node) -> bool:
    return node.child("weight_ih") is not None and node.child("weight_hh") is not None
