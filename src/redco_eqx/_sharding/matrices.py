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
LAST_NAMES = ("o", "out", "output", "down")
# Words in a name that tell matrices which read one input from matrices that follow one
# another: a gate and what it multiplies, mean and variance, two towers, the two ends of
# an edge, attention.
PARALLEL_WORDS = ("gate", "mu", "mean", "text", "src", "k", "key")


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

    def has_shape_of(self, other: "Link") -> bool:
        return (self.in_size, self.out_size) == (other.in_size, other.out_size)

    def feeds(self, after: "Link") -> bool:
        """True if the output fits the input of `after`, whole or as the two halves of a
        fused gate."""
        return self.out_size in (after.in_size, 2 * after.in_size)


def is_guess(chain: list[Link]) -> bool:
    """True if no name gives the order of the matrices in the chain: they could also be
    an attention layer."""
    return sum(len(link.members) for link in chain if not link.is_known) > 1


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
        if a.is_last and links.index(b) < links.index(a):
            return False
        has_one_order = is_list or not b.feeds(a)
        return has_one_order or rank[a] > rank[b]

    def next_of(a: Link) -> Link | None:
        others = links[links.index(a) + 1 :][:1] if is_list else left
        after = [b for b in others if is_before(a, b)]
        # A width that fits says more than the halves of a gate.
        after.sort(key=lambda b: a.out_size != b.in_size)
        # The last one of several squares comes after the others.
        of_one_size = [b for b in after if b.has_shape_of(after[0])]
        of_one_size.sort(key=lambda b: b.is_last)
        return next(iter(of_one_size), None)

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
    one another, see `_groups_of_squares`.
    """
    alike: dict[tuple[str, int, int], list[Matrix]] = {}
    for matrix in matrices:
        element = matrix.name_in(scope)[0] if is_list else ""
        shape = (matrix.in_size, matrix.out_size)
        alike.setdefault((element, *shape), []).append(matrix)
    of_matrix: dict[Matrix, Link] = {}
    for (_, in_size, out_size), members in alike.items():
        if in_size == out_size:
            groups, is_known = _groups_of_squares(scope, members)
        else:
            groups, is_known = [members], True
        for group in groups:
            is_last = _is_last(scope, group[0])
            link = Link(in_size, out_size, group, is_last, is_known or is_list)
            of_matrix |= dict.fromkeys(group, link)
    # In the order of the fields.
    return list(dict.fromkeys(of_matrix[matrix] for matrix in matrices))


def _is_last(scope: Node, matrix: Matrix) -> bool:
    return named("|".join(LAST_NAMES), matrix.name_in(scope)[-1])


def _groups_of_squares(
    scope: Node, squares: list[Matrix]
) -> tuple[list[list[Matrix]], bool]:
    """Group square matrices of one shape into parallel siblings, in the order of the
    fields; and tell if that is known.

    Names can prove siblings, an order (by numbers), or that one is last. Two or three
    others follow one another (RedCoast, section 3.1). Four or more could also be an
    attention with names of its own. A layout for one costs the other this many times
    the bytes of its best layout (compiled with the gradient, on `data` 2 x `tensor` 4):

        squares                   4      5      6      8
        columns and a last row    1.60   1.68   1.72   1.78    for a chain
        alternating               1.42   2.49   1.75   2.01    for an attention
        all columns               1.89   1.90   1.90   1.91    for a chain

    So four follow one another, and the last of five or more closes what the others
    open. This is a guess.
    """
    names = [matrix.name_in(scope)[-1] for matrix in squares]
    stems = [name.rstrip("0123456789") for name in names]
    num_alike = Counter(stems)
    last = [m for m in squares if _is_last(scope, m)]
    numbered = []
    for matrix, name, stem in zip(squares, names, stems):
        if stem != name and num_alike[stem] > 1 and matrix not in last:
            numbered.append(matrix)
    others = [m for m in squares if m not in last and m not in numbered]
    words = {
        word for m in others for part in m.name_in(scope) for word in part.split("_")
    }
    has_siblings = len(others) > 1 and not words.isdisjoint(PARALLEL_WORDS)
    is_few = len(squares) < 4
    if is_few and not has_siblings:
        return [[m] for m in squares], True
    if has_siblings or last or numbered:
        # Five or more are not just an attention; four numbers could count one.
        is_known = len(squares) <= 4 and (has_siblings or bool(last))
        together = [others] if others else []
        return [*together, *([m] for m in (*numbered, *last))], is_known
    if len(squares) == 4:
        return [[m] for m in squares], False
    *first, final = squares
    return [first, [final]], False
