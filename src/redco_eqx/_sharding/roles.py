"""The two rules: which dim of which matrix is split over the `tensor` axis, and why.

Consecutive Linear layers alternate between column and row splits; an attention's output projection is
split opposite to its query, key and value (RedCoast, section 3.1; the layout is Megatron-LM's). Modules
are resolved from the inside out: each takes the attentions and chains that it can complete, and hands
what is left to its parent, up to the block.
"""

import dataclasses
import re
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import PyTree

from redco_eqx._sharding.matrices import Link, Matrix, Node, find_chains, is_guess, named, read_model


@dataclasses.dataclass(frozen=True)
class Role:
    """The split of one array over the `tensor` axis.

    - `name`: `column`, `row`, `vocabulary`, `expert` (split), or `lora`, `router`, `norm`, `position`,
        `vector`, `buffer`, `input`, `head`, `whole` (not split).
    - `reason`: for a reader.
    - `dim`: the dim that is split, or `None`.
    - `stack`: how many leading dims number stacked layers, which no axis may split.
    - `is_guess`: whether the order of fields alone decided, which may be wrong.
    """

    name: str
    reason: str
    dim: int | None = None
    stack: int = 0
    is_guess: bool = False


def tensor_roles(model: PyTree, size: int) -> dict[str, Role]:
    """The role of each array of `model` on a `tensor` axis of the given size, by path."""
    return _Resolver(read_model(model), size).resolve()


class Attention(NamedTuple):
    """Query, key and value, as three matrices or as one; the projection they end in; numbers of heads."""

    inputs: list[Matrix]
    output: Matrix | None
    heads: int | None
    kv_heads: int | None


_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "nhead", "nheads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_head_kv")


def find_attention(scope: Node, matrices: list[Matrix]) -> Attention | None:
    """The attention among the matrices, if their names say that there is just one and their widths fit.

    Its output may be further out, and is `None` then; a fused name alone says too little for that.
    """
    found = [
        [m for m in matrices if named(names, m.name_in(scope)[-1])]
        for names in ("q|query|queries", "k|key|keys", "v|value|values", "qkv|query_key_value|attn|in")
    ]
    *separate, fused = found
    is_fused = len(fused) == 1 and not separate[0]
    if not is_fused and [len(one) for one in separate] != [1, 1, 1]:
        return None
    inputs = fused if is_fused else [m for one in separate for m in one]
    query, key, value = inputs[0], inputs[-2:][0], inputs[-1]
    if not is_fused and (key.in_size != value.in_size or query.out_size % key.out_size):
        return None
    heads, kv_heads = _head_counts(scope, query, None if is_fused else key)
    if is_fused:
        # Keys and values have as many heads as the query, or a known share of them.
        share = (kv_heads or 1) / (heads or 1) if heads and kv_heads else 1
        fitting = [m for m in matrices if m is not query and query.out_size == m.in_size * (1 + 2 * share)]
    else:
        width = value.out_size * (query.out_size // key.out_size)
        fitting = [m for m in matrices if m not in inputs and m.in_size == width]
    by_name = [m for m in fitting if any(named("o|out|output|dense|proj", n) for n in m.name_in(scope)[-2:])]
    output = by_name[0] if by_name else fitting[0] if len(fitting) == 1 else None
    return None if is_fused and output is None else Attention(inputs, output, heads, kv_heads)


def _head_counts(scope: Node, query: Matrix, key: Matrix | None) -> tuple[int | None, int | None]:
    """Count the heads of the query, and of key and value: numbers that a module here or further out says, and
    that divide."""
    node: Node | None = scope
    while node is not None:
        heads, kv_heads = node.attribute(*_HEADS), node.attribute(*_KV_HEADS)
        if heads is not None and query.out_size % heads == 0:
            by_width = heads if key is None else max(1, heads * key.out_size // query.out_size)
            return heads, kv_heads or by_width
        node = node.parent
    return None, None


_HEAD_NAMES = re.compile(r"lm_head|embed_out|unembed\w*|vocab_proj")
_ROUTER_NAMES = re.compile(r"router|gate|gating|gate_network|wg")
_SMALL_TABLES = re.compile(r"pos|wpe|relative_attention_bias|token_type|segment")


class _Resolver:
    def __init__(self, root: Node, size: int):
        self.root, self.size = root, size
        self.roles: dict[str, Role] = {}
        self.guesses: set[str] = set()  # paths
        tables = [node.table for node in root.walk() if node.table is not None]
        self.weights = {id(m.weight) for m in [*root.matrices(), *tables]}
        large = [table for table in tables if not _SMALL_TABLES.search(table.node.name)]
        self.vocabularies = {(table.in_size, table.out_size) for table in large}

    def resolve(self) -> dict[str, Role]:
        for node in self.root.walk():
            self._by_type(node)
        self._singles(self._collect(self.root))
        for leaf in self.root.arrays():
            is_vector = sum(size > 1 for size in leaf.shape[leaf.stack :]) <= 1
            self._set(leaf, *(_VECTOR if is_vector else _UNKNOWN))
        return self.roles

    # One answer for an array.

    def _set(self, leaf: Node | None, name: str, reason: str, dim: int | None = None) -> None:
        if leaf is None or leaf.path in self.roles:
            return
        if dim is not None and not self._divides(leaf.shape[dim]):
            # The features divide, but not the dim that is split: of one of several fused parts.
            name, reason, dim = "whole", self._indivisible("a dim of", leaf.shape[dim]), None
        is_guess = leaf.path in self.guesses
        reason += "; a guess, by order alone" if is_guess else ""
        self.roles[leaf.path] = Role(name, reason, dim, leaf.stack, is_guess)

    def _divides(self, size: int) -> bool:
        return size % self.size == 0

    def _indivisible(self, what: str, size: int) -> str:
        return f"{what} {size} does not divide by tensor={self.size}"

    def _split(self, matrix: Matrix, split: str, reason: str, name: str = "") -> None:
        """Decides a matrix, its bias and its LoRA branch: by `column`, by `row`, or `whole`."""
        name, is_column, is_row = name or split, split == "column", split == "row"
        dim = matrix.out_dim if is_column else matrix.in_dim if is_row else None
        self._set(matrix.weight, name, reason, dim)
        if is_column:
            self._set(matrix.bias, name, "follows its weight", matrix.bias_dim)
        else:
            self._set(matrix.bias, "vector", "added once, after the sum over shards" if is_row else reason)
        for branch, is_split in zip(matrix.lora or (), (is_row, is_column)):
            if is_split:
                self._set(branch.weight, name, "LoRA: split as its base", branch.dim)
            else:
                self._set(branch.weight, "lora", "LoRA: between the rank and a side that is whole")

    def _column_if(self, matrix: Matrix, what: str, number: int, reason: str, name: str = "column") -> None:
        """Decides a matrix by columns if their number, of heads or of words, divides."""
        if self._divides(number):
            self._split(matrix, "column", reason, name)
        else:
            self._split(matrix, "whole", self._indivisible(what, number))

    # The type of a module alone.

    def _by_type(self, node: Node) -> None:
        if node.is_array:
            if not jnp.issubdtype(node.value.dtype, jnp.inexact) and id(node) not in self.weights:
                self._set(node, "buffer", f"{node.value.dtype} is not trained")
        elif node.is_norm:
            for leaf in node.arrays():
                self._set(leaf, "norm", "a norm's scale and shift act on every feature")
        elif node.table is not None:
            table = node.table
            if _SMALL_TABLES.search(node.name):
                self._set(table.weight, "position", "a small table that every position needs")
            elif self._divides(table.in_size):
                self._set(table.weight, "vocabulary", "each shard looks up its own rows", table.in_dim)
            else:
                self._set(table.weight, "whole", self._indivisible("a vocabulary of", table.in_size))
        else:
            self._experts(node)

    def _experts(self, node: Node) -> None:
        """Split experts that are stacked beside their router: each shard holds some whole."""
        for router in (c.matrix for c in node.children if c.matrix and _ROUTER_NAMES.fullmatch(c.name)):
            count = router.out_size
            for child in node.children:
                is_list = isinstance(child.value, list | tuple) and len(child.children) == count
                is_stack = child.stack > node.stack and child.arrays()[0].shape[node.stack] == count
                if is_list or is_stack:
                    self._split(router, "whole", "every shard routes every token", "router")
                for leaf in child.arrays() if is_stack and self._divides(count) else ():
                    self._set(leaf, "expert", f"each shard holds {count // self.size} experts", node.stack)

    # Matrices: from the inside out.

    def _collect(self, node: Node) -> list[Matrix]:
        """Decides what `node` can complete alone, and returns the matrices that are left, in order."""
        if node.matrix is not None:
            return self._open([node.matrix])
        left: list[Matrix] = []
        for child in node.children:
            inner = self._collect(child)
            if child.is_block:
                self._singles(inner)
            else:
                left += inner
        attention = find_attention(node, left)
        if attention is not None and attention.output is not None:
            self._attention(attention, attention.output)
        elif attention is not None and node.parent is not None and not node.is_block:
            return left  # its output projection is further out
        left = self._ends(node, self._open(left))
        if any(below.is_block for below in node.walk() if below is not node):
            # What stands beside a stack of blocks is applied before or after all of them.
            self._singles(left)
            return []
        return self._chains(node, left)

    def _open(self, matrices: list[Matrix]) -> list[Matrix]:
        return [m for m in matrices if m.weight.path not in self.roles]

    def _attention(self, attention: Attention, output: Matrix) -> None:
        heads, (query, *key_value) = attention.heads, attention.inputs
        if not self._divides(heads or output.in_size):
            what = "number of heads" if heads else "attention width"
            for matrix in (*attention.inputs, output):
                self._split(matrix, "whole", self._indivisible(what, heads or output.in_size))
            return
        if not key_value:
            apart = "kept apart: each is split by heads"
            crossed = "an even split crosses their borders and costs permutes"
            self._split(query, "column", f"fused query, key, value, {apart if query.parts > 1 else crossed}")
        else:
            self._split(query, "column", f"query: {heads or 'its'} heads split")
        for matrix in key_value:
            number, reason = attention.kv_heads or matrix.out_size, "key/value: split by heads, as the query"
            self._column_if(matrix, "number of key/value heads", number, reason)
        self._split(output, "row", "attention output: split opposite to query, key, value")

    def _chains(self, scope: Node, matrices: list[Matrix]) -> list[Matrix]:
        """Splits each run of two or more consecutive matrices; returns the single ones."""
        for m in matrices if len(matrices) > 1 else ():
            if "shortcut" in m.node.name:
                # Split, it would have to be gathered where its output is added to that of the others.
                self._split(m, "whole", "a shortcut from stream to stream, which stays whole")
        matrices = self._open(matrices)
        for chain in find_chains(scope, [m for m in matrices if not _HEAD_NAMES.fullmatch(m.node.name)]):
            if is_guess(chain):
                self.guesses |= {m.weight.path for link in chain for m in link.members}
            for link, (name, reason) in zip(chain, alternate(chain, self.size) if len(chain) > 1 else ()):
                for matrix in link.members:
                    self._split(matrix, name, reason)
        return self._open(matrices)

    def _ends(self, scope: Node, matrices: list[Matrix]) -> list[Matrix]:
        """Decides the ends of a residual stream so that it stays whole; returns the rest.

        What feeds the blocks from outside is whole: every shard needs its output. So are two that keep its
        width, one before all blocks and one behind. A narrow head is not cut along its input, which comes whole
        from the last block.
        """
        nodes = list(scope.walk())
        blocks = [node for node in nodes if node is not scope and (node.is_block or _is_residual(node))]
        streams = {node.matrices()[0].in_size for node in blocks if node.matrices()}
        if not streams:
            return matrices
        inside = [nodes.index(node) for node in blocks]
        square = [m for m in matrices if m.in_size == m.out_size and m.in_size in streams]
        above = [m for m in square if nodes.index(m.node) < min(inside)]
        below = [m for m in square if nodes.index(m.node) > max(inside)]
        for m in (*above, *below) if above and below else ():
            self._split(m, "whole", "before or behind the blocks, whose stream stays whole", "input")
        for m in self._open(matrices):
            if self._is_vocabulary(m) or (m.in_size in streams) == (m.out_size in streams):
                continue
            i, still = matrices.index(m), self._open(matrices)
            reads = any(other.out_size == m.in_size for other in matrices[:i] if other in still)
            feeds = any(other.in_size == m.out_size for other in matrices[i + 1 :])
            if m.out_size in streams and not reads:
                self._split(m, "whole", "feeds the blocks, whose stream stays whole", "input")
            elif m.in_size > m.out_size and not reads and not feeds:
                self._column_if(m, "a head of", m.out_size, "a head: its output is gathered where it is used")
        return self._open(matrices)

    def _is_vocabulary(self, matrix: Matrix) -> bool:
        """True of a head over a vocabulary, by its name or by its shape, which is that of a table."""
        is_table = (matrix.out_size, matrix.in_size) in self.vocabularies
        return is_table or _HEAD_NAMES.fullmatch(matrix.node.name) is not None

    def _singles(self, matrices: list[Matrix]) -> None:
        """Decides matrices with no partner: vocabulary heads, and what stands alone."""
        for m in matrices:
            if self._is_vocabulary(m):
                reason = "head: logits stay split over the vocabulary"
                self._column_if(m, "a vocabulary of", m.out_size, reason, "vocabulary")
            elif m.in_size > m.out_size and self._divides(m.in_size):
                self._split(m, "row", "alone, narrowing: the smaller side is summed")
            elif self._divides(m.out_size):
                self._split(m, "column", "alone: its output is gathered where it is used")
            elif self._divides(m.in_size):
                self._split(m, "row", "alone: its output does not divide")
            else:
                self._split(m, "whole", self._indivisible(f"neither {m.in_size} nor", m.out_size))


def _is_residual(node: Node) -> bool:
    """True of what is like a block: several matrices and a norm, as wide where it ends as where it begins."""
    matrices = node.matrices()
    is_one = len(matrices) > 1 and matrices[0].in_size == matrices[-1].out_size
    return is_one and any(below.is_norm for below in node.walk())


_VECTOR = ("vector", "a vector or scalar")
_UNKNOWN = ("whole", "no rule knows it: pass `loss_fn` and `batch`, or split it by `overrides`")


# The split of consecutive matrices.


def alternate(chain: list[Link], size: int) -> list[tuple[str, str]]:
    """Split the links of a chain (two or more) over `size` shards: `column`, `row` or `whole`, and why.

    A column split keeps its output split and needs a whole input; a row split takes a split input and sums its
    output. Of all ways to split every link, the one that sends the fewest bytes is taken: for a widening and a
    narrowing Linear that is Megatron's column then row.
    Costs count the features of every activation that a collective returns, forward and backward.
    """
    # What the links that are left cost depends on one thing alone of those before: whether the activation
    # between them is split. So for each of the two only the best way there is kept, and each way is extended by
    # each split of the next link:
    #
    #   link     needs its input    leaves its output    communicates
    #   whole    whole              whole                nothing
    #   column   whole              split                the input's gradient, summed: in_size
    #   row      split              whole                its output, summed: out_size; of an input that came
    #                                                    whole and is cut here, the gradient, gathered: in_size
    #
    # A split activation that the next link needs whole is gathered, and its gradient summed: 2 * in_size.
    #
    # best[is the activation split]: (links left whole, cost, splits), compared in this order.
    best: dict[bool, tuple[int, int, list[str]]] = {False: (0, 0, [])}
    for index, link in enumerate(chain):
        paired = any(b.in_size % size == 0 for b in chain[max(index, 1) : index + 2])
        options: dict[bool, tuple[int, int, list[str]]] = {}
        for is_split, (whole, cost, names) in best.items():
            gather = 2 * link.in_size if is_split else 0
            # Only what could be a column counts as left whole: a few outputs are not worth a reduction.
            left = whole + (link.out_size % size == 0)
            candidates = [("whole", False, left, cost + gather)]
            if paired and link.out_size % size == 0:
                candidates.append(("column", True, whole, cost + gather + link.in_size))
            if paired and link.in_size % size == 0:
                back = 0 if is_split else link.in_size
                candidates.append(("row", False, whole, cost + link.out_size + back))
            for name, after, *score in candidates:
                option = (score[0], score[1], [*names, name])
                if after not in options or option < options[after]:
                    options[after] = option
        best = options
    last = chain[-1].out_size
    finished = [(w, c + (last if is_split else 0), names) for is_split, (w, c, names) in best.items()]
    _, _, names = min(finished)
    return [(name, _reason(chain, names, i, size)) for i, name in enumerate(names)]


def _reason(chain: list[Link], names: list[str], i: int, size: int) -> str:
    link = chain[i]
    after = chain[i + 1] if i + 1 < len(chain) else None
    before = chain[i - 1] if i else None
    if names[i] == "column":
        if after is not None and link.out_size == 2 * after.in_size and link.members[0].parts == 1:
            return "opens a pair: a fused gate, whose halves an even split crosses (costs permutes)"
        if after is not None and names[i + 1] == "row":
            several = f", with {len(link.members) - 1} sibling" if len(link.members) > 1 else ""
            return f"opens a pair: its {link.out_size} outputs stay split{several}"
        return "last of an odd chain: its output is gathered where it is used"
    if names[i] == "row":
        if before is not None and names[i - 1] == "column":
            return f"closes a pair: its {link.out_size} outputs are summed"
        return f"unpaired: its input is cut, its {link.out_size} outputs are summed"
    if before is not None and names[i - 1] == "row":
        return f"its {link.out_size} outputs do not divide by tensor={size}, and its input is whole"
    width = after.in_size if after is not None else link.in_size
    return f"the width {width} between consecutive Linears does not divide by tensor={size}"
