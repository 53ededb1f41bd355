"""A model as the path rules see it: a tree of named nodes, and the matrices and tables found in it.

Nothing is decided here. A matrix is whatever acts like a Linear: a module with a 2-D `weight` or `kernel`, a
convolution, or either of them with a LoRA branch beside it.
"""

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jaxtyping import PyTree

from redco_eqx._tree import children, is_array, join


@dataclasses.dataclass(eq=False)
class Node:
    """A node of the model, with abstract arrays as its leaves.

    - `stack`: number of leading dims, of every array below, that number stacked copies.
    - `matrix`, `table`: set if this node is a Linear-like module, or an embedding table (rows to features).
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
    table: "Matrix | None" = None
    is_block: bool = False

    @property
    def is_array(self) -> bool:
        return is_array(self.value)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def is_norm(self) -> bool:
        return type(self.value).__name__.lower().endswith("norm")

    def child(self, *names: str) -> "Node | None":
        """The first direct child that is an array and has one of these names."""
        return next((c for c in self.children if c.name in names and c.is_array), None)

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
        owners = (self.value, getattr(self.value, "config", None))
        found = [getattr(owner, name, None) for owner in owners for name in names]
        return next((x for x in found if type(x) is int and x > 0), None)


@dataclasses.dataclass(eq=False)
class Matrix:
    """A map from `in_size` to `out_size` features; dims are those of the stored array."""

    node: Node  # where it is named: the wrapper, if a LoRA module wraps it
    weight: Node
    in_dim: int
    out_dim: int
    parts: int = 1  # several fused matrices, kept apart by a dim before `out_dim`
    bias: Node | None = None
    lora: "tuple[Branch, Branch] | None" = None  # (in -> rank, rank -> out)

    @property
    def in_size(self) -> int:
        return self.weight.shape[self.in_dim]

    @property
    def out_size(self) -> int:
        return self.weight.shape[self.out_dim] * self.parts

    @property
    def bias_dim(self) -> int:
        return self.weight.stack + (self.parts > 1)

    def name_in(self, scope: Node) -> list[str]:
        """The parts of its path below `scope`, in small letters."""
        return self.node.path.removeprefix(scope.path).strip(".").lower().split(".")


class Branch(NamedTuple):
    """One factor of a LoRA branch: the array, and its dim that is the base's in (or out) dim."""

    weight: Node
    dim: int


def read_model(model: PyTree) -> Node:
    """The root node. What `eqx.nn.Shared` ties is there once."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, model)
    root = _read(abstract, "", "", None)
    _find_stacks(root, 0)
    for node in root.walk():
        node.matrix, node.table = _matrix(node), _table(node)
    for node in root.walk():
        _attach_lora(node)
    for node in root.walk():
        _find_blocks(node)
    return root


def _read(value: PyTree, path: str, name: str, parent: Node | None) -> Node:
    node = Node(path, name, value, parent)
    node.children = [_read(child, join(path, key), key, node) for key, child in children(value)]
    return node


def _find_stacks(node: Node, stack: int) -> None:
    """Sets `stack` of all below: layers made by `eqx.filter_vmap` have more dims than their type says."""
    known = [own for own in map(_own_stack, node.walk()) if own is not None]
    shapes = [leaf.shape for leaf in node.arrays()]
    while known and min(known) > stack and len({s[: stack + 1] for s in shapes}) == 1:
        stack += 1
    node.stack = stack
    node.is_block = node.parent is not None and stack > node.parent.stack
    for child in node.children:
        _find_stacks(child, stack)


def _own_stack(node: Node) -> int | None:
    """Count the dims that this module's weight has too many, if its type or its bias tells."""
    weight, bias = node.child("weight", "kernel"), node.child("bias")
    if weight is None or len(weight.shape) < 2:
        return None
    window, out = getattr(node.value, "kernel_size", None), getattr(node.value, "out_features", None)
    if isinstance(window, tuple):
        return len(weight.shape) - 2 - len(window)
    if out is not None or hasattr(node.value, "num_embeddings"):
        return len(weight.shape) - (3 if isinstance(out, tuple) else 2)
    return None if bias is None else len(bias.shape) - 1


_TABLE_NAMES = re.compile(r"(^|_)(embed\w*|wte|wpe|relative_attention_bias|tok_embeddings)($|_)")


def _table(node: Node) -> Matrix | None:
    weight = node.child("weight", "kernel")
    if weight is None or node.is_norm or len(weight.shape) != node.stack + 2:
        return None
    is_named = "embed" in type(node.value).__name__.lower() or _TABLE_NAMES.search(node.name)
    is_table = hasattr(node.value, "num_embeddings") or (is_named and not hasattr(node.value, "in_features"))
    return Matrix(node, weight, node.stack, node.stack + 1) if is_table else None


def _matrix(node: Node) -> Matrix | None:
    weight, bias, stack = node.child("weight", "kernel"), node.child("bias"), node.stack
    if weight is None or node.is_norm or _table(node) or node.attribute("groups") not in (None, 1):
        return None
    rank = len(weight.shape) - stack
    window, out = getattr(node.value, "kernel_size", None), getattr(node.value, "out_features", None)
    if isinstance(window, tuple) and rank == 2 + len(window):
        dims, parts = (stack + 1, stack), 1
    elif isinstance(out, tuple) and rank == 3:
        # Matrices of one shape kept apart: `(in, parts, out)` or `(parts, out, in)`.
        dims, parts = (stack, stack + 2) if out == weight.shape[stack + 1 :] else (stack + 2, stack + 1), out[0]
    elif rank == 2:
        dims, parts = (stack + 1, stack) if _is_out_first(node, weight, bias) else (stack, stack + 1), 1
    else:
        return None
    matrix = Matrix(node, weight, *dims, parts=parts)
    if bias is not None and bias.shape[matrix.bias_dim :][:1] == (weight.shape[matrix.out_dim],):
        matrix.bias = bias
    return matrix


def _is_out_first(node: Node, weight: Node, bias: Node | None) -> bool:
    first, second = weight.shape[-2:]
    sizes = (getattr(node.value, "out_features", None), getattr(node.value, "in_features", None))
    if first == second and type(node.value).__name__ == "Conv1D":
        return False  # as GPT-2 calls a Linear that is stored (in, out)
    if sizes in ((first, second), (second, first)):
        return sizes == (first, second)
    if bias is not None and first != second:
        return bias.shape[-1] == first
    return weight.name == "weight"


def _attach_lora(node: Node) -> None:
    """Makes one matrix of a matrix and a branch `in -> rank -> out` beside it, or in it."""
    down, up = (next((c for c in node.children if c.name.lower() in names), None) for names in _LORA)
    if down is None or up is None:
        return
    bases = [node.matrix] if node.matrix else [m for m in node.matrices() if m.node not in (down, up)]
    if len(bases) != 1:
        return
    base = bases[0]
    factors = [factor if factor.is_array else factor.child("weight", "kernel") for factor in (down, up)]
    branches = []
    for factor, size in zip(factors, (base.in_size, base.out_size)):
        if factor is None or size not in factor.shape[-2:] or len(factor.shape) != node.stack + 2:
            return
        branches.append(Branch(factor, node.stack + factor.shape[-2:].index(size)))
    base.lora = branches[0], branches[1]
    base.node, node.matrix = node, base
    down.matrix = up.matrix = None


_LORA = (("lora_a", "loraa", "lora_down"), ("lora_b", "lorab", "lora_up"))


def _find_blocks(node: Node) -> None:
    if not isinstance(node.value, list | tuple) or not node.children:
        return
    kinds = [type(child.value) for child in node.children]
    alike = len(set(kinds)) == 1 or all(kinds.count(kind) > 1 for kind in kinds)
    if alike and all(len(child.matrices()) > 1 for child in node.children):
        for child in node.children:
            child.is_block = True
