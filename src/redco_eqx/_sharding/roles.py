"""The two rules: which dim of which matrix is split over the `tensor` axis, and why.

Consecutive Linear layers alternate between column and row splits; an attention's output projection is
split opposite to its query, key and value (RedCoast, section 3.1; the layout is Megatron-LM's). Modules
are resolved from the inside out: each takes the attentions and chains that it can complete, and hands
what is left to its parent, up to the block.
"""

import dataclasses
import itertools
import re

import jax.numpy as jnp
from jaxtyping import PyTree

from redco_eqx._sharding.attention import (
    Fused,
    FusedKeyValue,
    Heads,
    Inputs,
    Separate,
    find_inputs,
    find_output,
    fit_together,
    head_counts,
    key_value_widths,
)
from redco_eqx._sharding.chains import Link, alternate
from redco_eqx._sharding.links import find_chains
from redco_eqx._sharding.model_tree import read_model
from redco_eqx._sharding.nodes import Matrix, Node, is_norm, is_recurrent


@dataclasses.dataclass(frozen=True)
class Role:
    """What the `tensor` axis does to one array.

    - `name`: `column`, `row`, `vocabulary`, `expert` (split), or `lora`, `router`, `norm`, `position`,
        `vector`, `buffer`, `recurrent`, `grouped`, `input`, `head`, `whole` (not split).
    - `reason`: for a reader.
    - `dim`: the dim that is split, or `None`.
    - `stack`: how many leading dims number stacked layers, which no axis may split.
    """

    name: str
    reason: str
    dim: int | None = None
    stack: int = 0


def tensor_roles(model: PyTree, size: int) -> dict[str, Role]:
    """The role of each array of `model` on a `tensor` axis of the given size, by path."""
    root, tied = read_model(model)
    return _Resolver(root, tied, size).resolve()


_HEAD_NAMES = re.compile(r"^(lm_head|embed_out|unembed\w*|vocab_proj)$")
_SHORTCUT_NAMES = re.compile(r"shortcut")
_ROUTER_NAMES = re.compile(r"^(router|gate|gating|gate_network|wg)$")
_SMALL_TABLES = re.compile(r"pos|wpe|relative_attention_bias|token_type|segment")
_EXPERTS = ("num_experts", "n_experts", "num_local_experts", "n_routed_experts")


class _Resolver:
    def __init__(self, root: Node, tied: dict[str, str], size: int):
        self.root, self.tied, self.size = root, tied, size
        self.roles: dict[str, Role] = {}
        tables = [node.table for node in root.walk() if node.table is not None]
        self.weights = {id(m.weight) for m in root.matrices()} | {id(table.weight) for table in tables}
        self.vocabularies = [t for t in tables if not _SMALL_TABLES.search(t.node.name)]

    def resolve(self) -> dict[str, Role]:
        for node in self.root.walk():
            self._by_type(node)
        self._singles(self._collect(self.root))
        for matrix in self.root.matrices():
            if matrix.weight.path in self.tied:
                self._tied(matrix)
        for leaf in self.root.arrays():
            if leaf.path not in self.tied:
                self.roles.setdefault(leaf.path, _unknown(leaf))
        return {leaf.path: self.roles[leaf.path] for leaf in self.root.arrays() if leaf.path in self.roles}

    # One answer for an array.

    def _set(self, leaf: Node | None, name: str, reason: str, dim: int | None = None) -> None:
        if leaf is None or leaf.path in self.tied:
            return
        if dim is not None and not self._divides(leaf.shape[dim]):
            # The features divide, but not the dim that is split: of heads, or of one of several fused parts.
            name, reason, dim = "whole", self._indivisible("a dim of", leaf.shape[dim]), None
        self.roles.setdefault(leaf.path, Role(name, reason, dim, leaf.stack))

    def _divides(self, size: int) -> bool:
        return size % self.size == 0

    def _indivisible(self, what: str, size: int) -> str:
        return f"{what} {size} does not divide by tensor={self.size}"

    def _column(self, matrix: Matrix, reason: str, name: str = "column") -> None:
        self._set(matrix.weight, name, reason, matrix.out_dim)
        self._set(matrix.bias, name, "follows its weight", matrix.bias_dim)
        if matrix.lora is not None:
            down, up = matrix.lora
            self._set(down.weight, "lora", "into the rank of a LoRA branch beside a column split")
            self._set(up.weight, name, "LoRA: split as its base", up.dim)

    def _row(self, matrix: Matrix, reason: str) -> None:
        self._set(matrix.weight, "row", reason, matrix.in_dim)
        self._set(matrix.bias, "vector", "added once, after the sum over shards")
        if matrix.lora is not None:
            down, up = matrix.lora
            self._set(down.weight, "row", "LoRA: split as its base", down.dim)
            self._set(up.weight, "lora", "out of the rank of a LoRA branch beside a row split")

    def _whole(self, matrix: Matrix, reason: str, name: str = "whole") -> None:
        self._set(matrix.weight, name, reason)
        self._set(matrix.bias, "vector", reason)
        for branch in matrix.lora or ():
            self._set(branch.weight, name, reason)

    # What the type of a module decides alone.

    def _by_type(self, node: Node) -> None:
        if node.is_array:
            if not jnp.issubdtype(node.value.dtype, jnp.inexact) and id(node) not in self.weights:
                self._set(node, "buffer", f"{node.value.dtype} is not trained")
        elif is_norm(node):
            for leaf in node.arrays():
                self._set(leaf, "norm", "a norm's scale and shift act on every feature")
        elif is_recurrent(node):
            for leaf in node.arrays():
                self._set(leaf, "recurrent", "a recurrent cell would communicate at every time step")
        elif node.table is not None:
            self._table(node)
        else:
            self._experts(node)

    def _table(self, node: Node) -> None:
        table = node.table
        assert table is not None
        if _SMALL_TABLES.search(node.name):
            self._set(table.weight, "position", "a small table that every position needs")
        elif self._divides(table.num_rows):
            self._set(table.weight, "vocabulary", "each shard looks up its own rows", table.dim)
        else:
            self._set(table.weight, "whole", self._indivisible("a vocabulary of", table.num_rows))

    def _experts(self, node: Node) -> None:
        """Stacked experts beside a router: each shard holds some of them whole."""
        routers = [c for c in node.children if c.matrix is not None and _ROUTER_NAMES.match(c.name)]
        count = node.attribute(*_EXPERTS) or next((r.matrix.out_size for r in routers if r.matrix), None)
        if count is None:
            return
        found = False
        for child in node.children:
            if child in routers:
                continue
            leaves = child.arrays()
            stacked = child.stack > node.stack or (child.is_array and len(child.shape) - child.stack in (2, 3))
            if stacked and all(leaf.shape[node.stack] == count for leaf in leaves):
                found = True
                self._split_experts(node, child, leaves, count)
            elif isinstance(child.value, list | tuple) and len(child.children) == count:
                found = found or any(c.matrices() for c in child.children)
        if found:
            for router in routers:
                if router.matrix is not None and router.matrix.out_size == count:
                    self._whole(router.matrix, "every shard routes every token", name="router")

    def _split_experts(self, node: Node, child: Node, leaves: list[Node], count: int) -> None:
        if self._divides(count):
            for leaf in leaves:
                self._set(leaf, "expert", f"each shard holds {count // self.size} experts", node.stack)
        elif child.is_array:
            self._set(child, "whole", self._indivisible("the number of experts", count))

    # Matrices: from the inside out.

    def _collect(self, node: Node) -> list[Matrix]:
        """Decides what `node` can complete alone, and returns the matrices that are left, in order."""
        if node.matrix is not None:
            open_ = node.matrix.weight.path not in self.roles and node.matrix.weight.path not in self.tied
            return [node.matrix] if open_ else []
        left: list[Matrix] = []
        for child in node.children:
            inner = self._collect(child)
            if child.is_block:
                self._singles(inner)
            else:
                left += inner
        left, waiting = self._attention(node, left)
        if waiting or not left:
            return left
        left = self._ends(node, left)
        if any(below.is_block for below in node.walk() if below is not node):
            # What stands beside a stack of blocks is applied before or after all of them.
            self._singles(left)
            return []
        return self._chains(node, left)

    # Attention.

    def _attention(self, scope: Node, matrices: list[Matrix]) -> tuple[list[Matrix], bool]:
        """Takes out a complete attention. The flag says that its output projection is still to come."""
        inputs = find_inputs(scope, matrices)
        if inputs is None:
            return matrices, False
        rest = [m for m in matrices if m not in inputs]
        heads = head_counts(scope, inputs)
        output = find_output(scope, rest, inputs, heads)
        fits = fit_together(inputs)
        if output is None or not fits:
            # A fused name alone says little; a complete set waits for a projection further out.
            is_complete = fits and not isinstance(inputs, Fused)
            return matrices, is_complete and scope.parent is not None and not scope.is_block
        self._split_attention(inputs, output, heads)
        return [m for m in rest if m is not output], False

    def _split_attention(self, inputs: Inputs, output: Matrix, heads: Heads) -> None:
        if not self._divides(heads.query or output.in_size):
            reason = self._indivisible("number of heads" if heads.query else "attention width",
                                       heads.query or output.in_size)  # fmt: skip
            for matrix in (*inputs, output):
                self._whole(matrix, reason)
            return
        match inputs:
            case Fused(fused):
                apart = "kept apart: each is split by heads"
                crossed = "an even split crosses their borders and costs permutes"
                self._column(fused, f"fused query, key, value, {apart if fused.parts > 1 else crossed}")
            case Separate() | FusedKeyValue():
                query, *key_values = inputs
                self._column(query, f"query: {_count(heads.query, 'heads')} split")
                for matrix in key_values:
                    if self._divides(heads.key_value or key_value_widths(inputs)[0]):
                        self._column(matrix, f"key/value: {_count(heads.key_value, 'heads')} split")
                    else:
                        reason = self._indivisible("number of key/value heads", heads.key_value or 0)
                        self._whole(matrix, reason)
        self._row(output, "attention output: split opposite to query, key, value")

    # Consecutive matrices.

    def _chains(self, scope: Node, matrices: list[Matrix]) -> list[Matrix]:
        """Splits each run of two or more consecutive matrices; returns the single ones."""
        matrices = self._shortcuts(matrices)
        grouped = [m for m in matrices if m.groups > 1]
        taken: set[int] = set()
        for chain in find_chains(scope, [m for m in matrices if m.groups == 1 and not self._is_head(m)]):
            if len(chain) == 1:
                continue
            for link, role in zip(chain, alternate(chain, self.size)):
                for matrix in link.members:
                    taken.add(id(matrix))
                    if role.name == "column":
                        self._column(matrix, role.reason)
                    elif role.name == "row":
                        self._row(matrix, role.reason)
                    else:
                        self._whole(matrix, role.reason)
            if grouped:
                self._follow(grouped, chain, matrices)
        return [m for m in matrices if id(m) not in taken]

    def _shortcuts(self, matrices: list[Matrix]) -> list[Matrix]:
        """Decides what stands beside other matrices, from their input to their output; returns the rest.

        Split, it would have to be gathered where its output is added to theirs.
        """
        left = [m for m in matrices if not _SHORTCUT_NAMES.search(m.node.name)]
        for m in matrices:
            if m in left:
                continue
            if any(a.in_size == m.in_size for a in left) and any(a.out_size == m.out_size for a in left):
                self._whole(m, "a shortcut from stream to stream, which stays whole")
        return [m for m in matrices if m.weight.path not in self.roles]

    def _follow(self, grouped: list[Matrix], chain: list[Link], matrices: list[Matrix]) -> None:
        """A grouped convolution between a column and a row split keeps its channels split."""
        for before, after in itertools.pairwise(chain):
            role = self.roles.get(before.members[0].weight.path)
            if role is None or role.name != "column":
                continue
            start, end = matrices.index(before.members[-1]), matrices.index(after.members[0])
            for matrix in grouped:
                between = start < matrices.index(matrix) < end
                if between and matrix.in_size == matrix.out_size == before.out_size:
                    if self._divides(matrix.groups):
                        self._column(matrix, "grouped: its channels stay split")
                    else:
                        self._whole(matrix, self._indivisible("number of groups", matrix.groups), "grouped")

    def _ends(self, scope: Node, matrices: list[Matrix]) -> list[Matrix]:
        """Decides the ends of a residual stream so that it stays whole; returns the rest.

        What feeds the blocks from outside is whole: every shard needs its output. So are two that keep its
        width, one before all blocks and one behind. A narrow head is not cut along its input, which comes whole
        from the last block.
        """
        walk = list(scope.walk())
        blocks = [node for node in walk if node is not scope and (node.is_block or _is_residual(node))]
        streams = {node.matrices()[0].in_size for node in blocks if node.matrices()}
        if not streams:
            return matrices
        place = {id(node): i for i, node in enumerate(walk)}
        borders = [place[id(node)] for node in [*blocks, *filter(is_norm, walk)]]

        def precedes(a: Matrix, b: Matrix) -> bool:
            """Whether `b` comes later and fits what `a` makes."""
            return a.out_size == b.in_size and place[id(a.node)] < place[id(b.node)]

        def follows(a: Matrix, b: Matrix) -> bool:
            """Whether `b` may read what `a` makes, with neither a norm nor a block between."""
            is_around = a.in_size not in streams and a.out_size in streams  # the blocks stand between
            is_parted = any(place[id(a.node)] < x < place[id(b.node)] for x in borders)
            return precedes(a, b) and not is_around and not is_parted

        inside = [place[id(below)] for node in blocks for below in node.walk()]
        square = [m for m in matrices if m.in_size == m.out_size and m.in_size in streams]
        before = [m for m in square if place[id(m.node)] < min(inside)]
        behind = [m for m in square if place[id(m.node)] > max(inside)]
        around = before + behind if before and behind else []
        left = []
        for m in matrices:
            others = [other for other in matrices if other is not m]
            is_open = not any(follows(m, other) for other in others)
            is_first = not any(follows(other, m) for other in others)
            if m in around:
                self._whole(m, "before or behind the blocks, whose stream stays whole", name="input")
            elif self._is_vocabulary(m) or m.groups > 1 or (m.in_size in streams) == (m.out_size in streams):
                left.append(m)
            elif m.out_size in streams and not any(precedes(other, m) for other in others):
                self._whole(m, "feeds the blocks, whose stream stays whole", name="input")
            elif m.in_size > m.out_size and is_open and is_first:
                if self._divides(m.out_size):
                    self._column(m, "a head: its output is gathered where it is used")
                else:
                    self._whole(m, self._indivisible("a head of", m.out_size), name="head")
            else:
                left.append(m)
        return left

    def _is_vocabulary(self, matrix: Matrix) -> bool:
        """Whether this is a head over a vocabulary, by its name or by its shape, which is that of a table."""
        shape = (matrix.out_size, matrix.in_size)
        return self._is_head(matrix) or any((t.num_rows, t.width) == shape for t in self.vocabularies)

    def _is_head(self, matrix: Matrix) -> bool:
        return bool(_HEAD_NAMES.match(matrix.node.name))

    def _singles(self, matrices: list[Matrix]) -> None:
        """Matrices with no partner: vocabulary heads, and what stands alone."""
        for m in matrices:
            vocabulary = self._is_vocabulary(m)
            if vocabulary and self._divides(m.out_size):
                self._column(m, "head: logits stay split over the vocabulary", "vocabulary")
            elif vocabulary:
                self._whole(m, self._indivisible("a vocabulary of", m.out_size))
            elif m.groups > 1:
                self._whole(m, "a grouped convolution with no split neighbour", name="grouped")
            elif m.in_size > m.out_size and self._divides(m.in_size):
                self._row(m, "alone, narrowing: the smaller side is summed")
            elif self._divides(m.out_size):
                self._column(m, "alone: its output is gathered where it is used")
            elif self._divides(m.in_size):
                self._row(m, "alone: its output does not divide")
            else:
                self._whole(m, self._indivisible(f"neither {m.in_size} nor", m.out_size))

    def _tied(self, matrix: Matrix) -> None:
        """A matrix whose weight is another leaf: its bias follows that leaf."""
        real = self.roles[self.tied[matrix.weight.path]]
        if real.dim is not None and real.dim == matrix.out_dim:
            self._set(matrix.bias, real.name, "follows its weight", matrix.bias_dim)


def _is_residual(node: Node) -> bool:
    """Whether this is like a block: several matrices and a norm, as wide where it ends as where it begins."""
    matrices = node.matrices()
    is_one = len(matrices) > 1 and matrices[0].in_size == matrices[-1].out_size
    return is_one and any(is_norm(below) for below in node.walk())


def _count(number: int | None, what: str) -> str:
    return f"{number} {what}" if number else what


def _unknown(leaf: Node) -> Role:
    if sum(size > 1 for size in leaf.shape[leaf.stack :]) <= 1:
        return Role("vector", "a vector or scalar", stack=leaf.stack)
    return Role("whole", "no rule knows this array: split it by `overrides`", stack=leaf.stack)
