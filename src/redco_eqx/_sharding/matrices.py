"""The model as the path rules see it: named nodes, and the dims that a split cuts in a
matrix and its bias.

This file does not decide which matrices are split: `roles.py` does. A matrix is
anything that acts like a Linear: a module with a 2-D `weight` or `kernel`, a
convolution, or one of these with a LoRA branch beside it.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from jaxtyping import PyTree

from redco_eqx._base.tree import children, is_array, join


# Compared by identity: nodes are keys, and their values may be arrays.
@dataclasses.dataclass(eq=False)
class Node:
    """A node of the model. Only the shapes and dtypes of its arrays count.

    - `stack`: the number of leading dims that count stacked copies, for every array
        below.
    - `matrix`, `table`: set if this node is a Linear-like module, or an embedding table
        (rows to features).
    - `is_block`: true if the node is one of several (a stack, or an element of a list
        in which each has matrices). No matrix inside it then follows one outside.
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
        # By name, because models define norms of their own.
        return type(self.value).__name__.lower().endswith("norm")

    @property
    def has_known_rank(self) -> bool:
        """True if the type of some module below says how many dims its weight has
        without stacked copies."""
        return any(_own_stack(node) is not None for node in self.nodes())

    def child(self, *names: str) -> "Node | None":
        """The first direct child that is an array with one of these names."""
        return next((c for c in self.children if c.name in names and c.is_array), None)

    def nodes(self) -> "Iterator[Node]":
        """This node and every node below, each before its children."""
        yield self
        for child in self.children:
            yield from child.nodes()

    def arrays(self) -> "list[Node]":
        return [node for node in self.nodes() if node.is_array]

    def matrices(self) -> "list[Matrix]":
        """Every matrix below this node. A wrapped matrix counts once."""
        if self.matrix is not None:
            return [self.matrix]
        found = []
        for child in self.children:
            found += child.matrices()
        return found

    def attribute(self, *names: str) -> int | None:
        """The first positive int among these attributes of the module or of the
        module's `config`."""
        for owner in (self.value, getattr(self.value, "config", None)):
            for name in names:
                x = getattr(owner, name, None)
                # `True` is no number, and a module may have a submodule of this name.
                if type(x) is int and x > 0:
                    return x
        return None


class Follower(NamedTuple):
    """An array that is cut with a matrix: its bias, or a factor of its LoRA branch.

    - `split`: the split of the matrix that cuts it; under the other one, it is whole.
    - `dim`: the dim that is cut.
    """

    node: Node
    split: str
    dim: int


@dataclasses.dataclass(eq=False)
class Matrix:
    """A map from `in_size` to `out_size` features. Dims refer to the stored array."""

    node: Node  # the node that names the matrix: the wrapper, if a LoRA module wraps it
    weight: Node
    in_dim: int
    out_dim: int
    parts: int = 1  # number of fused matrices, separated by a dim before `out_dim`
    bias: Node | None = None
    followers: list[Follower] = dataclasses.field(default_factory=list)

    @property
    def in_size(self) -> int:
        return self.weight.shape[self.in_dim]

    @property
    def out_size(self) -> int:
        return self.weight.shape[self.out_dim] * self.parts

    def cut(self, split: str) -> dict[Node, int | None]:
        """The dim of each array that a `column` or `row` split cuts, or `None` if the
        array stays whole."""
        dims = {self.weight: {"column": self.out_dim, "row": self.in_dim}.get(split)}
        for follower in self.followers:
            dims[follower.node] = follower.dim if follower.split == split else None
        return dims

    def name_in(self, scope: Node) -> list[str]:
        """The parts of the matrix's path below `scope`, in lower case."""
        return self.node.path.removeprefix(scope.path).strip(".").lower().split(".")


def root_node(model: PyTree) -> Node:
    """Return the root node of a model. Arrays that `eqx.nn.Shared` ties appear once."""
    root = _node(model, "", "", None)
    _find_stacks(root, 0)
    # Each loop needs what the one before has found in all nodes below.
    for node in root.nodes():
        _find_matrix(node)
    for node in root.nodes():
        _attach_lora(node)
    for node in root.nodes():
        is_list = isinstance(node.value, list | tuple)
        # A list whose elements have one matrix each is itself a chain, as in an MLP.
        if is_list and all(len(c.matrices()) > 1 for c in node.children):
            for child in node.children:
                child.is_block = True
    return root


def _node(value: PyTree, path: str, name: str, parent: Node | None) -> Node:
    node = Node(path, name, value, parent)
    for key, child in children(value):
        node.children.append(_node(child, join(path, key), key, node))
    return node


def _find_stacks(node: Node, stack: int) -> None:
    """Set `stack` for all nodes below: layers from `eqx.filter_vmap` have more dims
    than their type says."""
    known = [own for own in map(_own_stack, node.nodes()) if own is not None]
    most = min(known, default=stack)
    shapes = [leaf.shape for leaf in node.arrays()]
    # All arrays of a stack begin with the number of its layers. Otherwise, the stack is
    # further inside.
    while stack < most and len({shape[: stack + 1] for shape in shapes}) == 1:
        stack += 1
    node.stack = stack
    node.is_block = node.parent is not None and stack > node.parent.stack
    for child in node.children:
        _find_stacks(child, stack)


def _own_stack(node: Node) -> int | None:
    """Count the extra dims of this module's weight, if its type says how many dims
    there should be."""
    weight = node.child("weight", "kernel")
    if weight is None or len(weight.shape) < 2:
        return None
    rank = len(weight.shape)
    window = getattr(node.value, "kernel_size", None)
    out = getattr(node.value, "out_features", None)
    if isinstance(window, tuple):  # (out, in, *window)
        return rank - 2 - len(window)
    if isinstance(out, tuple):  # fused matrices
        return rank - 3
    if out is not None or hasattr(node.value, "num_embeddings"):
        return rank - 2
    return None


TABLE_NAMES = re.compile(
    r"(^|_)(embed\w*|wte|wpe|relative_attention_bias|tok_embeddings)($|_)"
)


def _find_matrix(node: Node) -> None:
    """Set `table` or `matrix` of a node that is an embedding table or acts like a
    Linear."""
    weight = node.child("weight", "kernel")
    bias = node.child("bias")
    stack = node.stack
    if weight is None or node.is_norm:
        return
    rank = len(weight.shape) - stack
    window = getattr(node.value, "kernel_size", None)
    out = getattr(node.value, "out_features", None)
    has_name = "embed" in type(node.value).__name__.lower() or TABLE_NAMES.search(
        node.name
    )
    # A Linear may have such a name, too, as the head `embed_out`.
    is_by_name = has_name and not hasattr(node.value, "in_features")
    is_table = hasattr(node.value, "num_embeddings") or is_by_name
    if is_table and rank == 2:
        node.table = Matrix(node, weight, stack, stack + 1)
        return
    if node.attribute("groups") not in (None, 1):
        # Each group of outputs depends on its own inputs, so it is no matrix.
        return
    if isinstance(window, tuple) and rank == 2 + len(window):
        dims = (stack + 1, stack)
        parts = 1
    elif isinstance(out, tuple) and rank == 3:
        # Matrices of the same shape, separated by a dim: `(in, parts, out)` or
        # `(parts, out, in)`.
        dims = (stack + 2, stack + 1)
        if out == weight.shape[stack + 1 :]:
            dims = (stack, stack + 2)
        parts = out[0]
    elif rank == 2:
        dims = (stack, stack + 1)
        if _is_out_first(node, weight, bias):
            dims = (stack + 1, stack)
        parts = 1
    else:
        return
    node.matrix = Matrix(node, weight, *dims, parts=parts)
    # The bias of fused matrices has the shape `(parts, out)`.
    bias_dim = stack + (parts > 1)
    out_size = weight.shape[node.matrix.out_dim]
    if bias is not None and bias.shape[bias_dim:][:1] == (out_size,):
        node.matrix.bias = bias
        # A row split sums the outputs over the shards, and adds the bias after that.
        node.matrix.followers.append(Follower(bias, "column", bias_dim))


def _is_out_first(node: Node, weight: Node, bias: Node | None) -> bool:
    first, second = weight.shape[-2:]
    num_biases = None if bias is None else bias.shape[-1]
    out = getattr(node.value, "out_features", num_biases)
    if first != second and out in (first, second):
        return out == first
    # Some models call a Linear that is stored (in, out) a Conv1D, which is what it was
    # in the first of them.
    return weight.name == "weight" and type(node.value).__name__ != "Conv1D"


def _attach_lora(node: Node) -> None:
    """Combine a matrix and the branch `in -> rank -> out` beside it into one matrix."""
    factors = {}
    for c in node.children:
        # A factor is an array, or a module that has one.
        factors[c.name.lower()] = c if c.is_array else c.child("weight", "kernel")
    down = factors.get("lora_a")
    up = factors.get("lora_b")
    bases = [matrix for matrix in node.matrices() if matrix.weight not in (down, up)]
    if down is None or up is None:
        return
    if len(bases) != 1 or node.matrix is not None:
        return
    (base,) = bases
    has_in = base.in_size in down.shape[-2:]
    has_out = base.out_size in up.shape[-2:]
    if has_in and has_out:
        # Each factor is split along the side that it shares with the matrix. The rank
        # between them stays whole.
        in_dim = node.stack + down.shape[-2:].index(base.in_size)
        out_dim = node.stack + up.shape[-2:].index(base.out_size)
        base.followers.append(Follower(down, "row", in_dim))
        base.followers.append(Follower(up, "column", out_dim))
        base.node = node
        node.matrix = base


# Chains: matrices of a module that follow one another.


def named(names: str, name: str) -> bool:
    """True if a field's name is one of `names`, either alone or with a usual prefix or
    suffix.

    Examples are `to_q`, `wq`, `q_proj`, `c_proj` and `fc_out`.
    """
    pattern = rf"(to_|w_?|c_|attn_|{_KIND}_)?({names})(_?{_KIND})?"
    return re.fullmatch(pattern, name) is not None


_KIND = r"(proj(ection)?|lin(ear)?|fc|dense|layer|conv|map)"
# Names of the last matrix in a module.
_LAST = r"o|out|output|down|merge|second|last|dec\w*|proj"


@dataclasses.dataclass(eq=False)
class Link:
    """One step of a chain: a matrix, or parallel siblings of the same shape that read
    the same input.

    - `is_last`: true if the name says that nothing follows in the same module.
    - `is_known`: true if more than the order of the fields gives the place of the link
        in the chain.
    """

    in_size: int
    out_size: int
    members: list[Matrix]
    is_last: bool = False
    is_known: bool = True

    def feeds(self, after: "Link") -> bool:
        """True if the output fits the input of `after`, whole or as the two halves of a
        fused gate."""
        return self.out_size in (after.in_size, 2 * after.in_size)


def is_guess(chain: list[Link]) -> bool:
    """True if no name gives the order of the matrices in the chain: they could also be
    an attention layer."""
    num_unknown = sum(len(link.members) for link in chain if not link.is_known)
    return num_unknown > 1 and not any(link.is_last for link in chain)


def find_chains(scope: Node, matrices: list[Matrix]) -> list[list[Link]]:
    """The chains of the matrices in one module. A matrix that feeds no other is a chain
    by itself.

    In a list, each matrix follows the one before. If the shapes of fields allow both
    orders, a matrix whose name says that it is last comes last. Otherwise, groups of
    siblings come first, then the matrix with more outputs than inputs, then the one
    that is defined first (dict keys are sorted, so their order is the weakest
    evidence).
    """
    is_list = isinstance(scope.value, list | tuple)
    links = _links(scope, matrices, is_list)
    rank = {
        a: (not a.is_last, len(a.members), a.out_size, -i) for i, a in enumerate(links)
    }
    left = list(links)

    def is_before(a: Link, b: Link) -> bool:
        if not a.feeds(b):
            return False
        has_one_order = is_list or not b.feeds(a)
        return has_one_order or rank[a] > rank[b]

    def next_of(a: Link) -> Link | None:
        others = links[links.index(a) + 1 :][:1] if is_list else left
        return next((b for b in others if is_before(a, b)), None)

    chains: list[list[Link]] = []
    for link in links:
        if link not in left or next_of(link) is None:
            continue
        chain: list[Link] = []
        after: Link | None = link
        while after is not None:
            left.remove(after)
            chain.append(after)
            after = next_of(after)
        chains.append(chain)
    return [*chains, *([link] for link in left)]


def _links(scope: Node, matrices: list[Matrix], is_list: bool) -> list[Link]:
    """Group matrices into links.

    Matrices of the same shape are parallel siblings, and so one link (gate and up), if
    they are fields or lie in one element of a list. Square matrices could also follow
    one another. Their names may say that they do, by numbers or by a name that comes
    last. They are then not siblings.
    """
    paths = [matrix.name_in(scope) for matrix in matrices]
    stems = [path[-1].rstrip("0123456789") for path in paths]
    shapes = [(matrix.in_size, matrix.out_size) for matrix in matrices]
    series = Counter(stems)
    num_alike = Counter(zip(stems, shapes))
    links: dict[tuple[object, ...], Link] = {}
    for matrix, path, stem, shape in zip(matrices, paths, stems, shapes):
        name = path[-1]
        is_square = shape[0] == shape[1]
        is_last = named(_LAST, name)
        is_numbered = stem != name
        # Only square matrices may follow matrices of the same shape.
        is_one_of_series = is_numbered and num_alike[stem, shape] > 1
        is_alone = is_square and (is_last or is_one_of_series)
        element = path[0] if is_list else ""
        own_name = name if is_alone else ""
        link = links.setdefault((element, shape, own_name), Link(*shape, []))
        link.is_last = is_last
        # Two or three numbered names are an order (`conv1`, `conv2`); four could be an
        # attention layer.
        is_series = is_numbered and 1 < series[stem] < 4
        link.is_known = is_list or not is_square or is_last or is_series
        link.members.append(matrix)
    return list(links.values())
