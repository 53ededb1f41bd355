"""The two rules: which dim of which matrix is split over the `tensor` axis, and why.

Consecutive Linear layers alternate between column and row splits; an attention's output
projection is split opposite to its query, key and value (RedCoast, section 3.1; the
layout is Megatron-LM's). Modules are resolved from the inside out: each module decides
the attention layers and chains that it can complete, and hands the remaining matrices
to its parent, up to the block.
"""

import dataclasses
import re
from collections.abc import Collection

import jax.numpy as jnp
from jaxtyping import PyTree

from redco_eqx._sharding.matrices import (
    Link,
    Matrix,
    Node,
    find_chains,
    is_guess,
    named,
    read_model,
)


@dataclasses.dataclass(frozen=True)
class Role:
    """The split of one array over the `tensor` axis.

    - `name`: `column`, `row`, `vocabulary`, `expert` (split), or `lora`, `router`,
        `norm`, `position`, `vector`, `buffer`, `input`, `head`, `whole` (not split).
    - `reason`: the reason in words.
    - `dim`: the dim that is split, or `None`.
    - `stack`: the number of leading dims that count stacked layers. No axis may split
        these.
    - `is_guess`: true if only the order of fields decided, which may be wrong.
    """

    name: str
    reason: str
    dim: int | None = None
    stack: int = 0
    is_guess: bool = False


def tensor_roles(model: PyTree, size: int) -> dict[str, Role]:
    """The role of each array of `model`, by path, on a `tensor` axis of size `size`."""
    return _Resolver(read_model(model), size).resolve()


_HEADS = (
    "num_heads",
    "n_heads",
    "num_attention_heads",
    "n_head",
    "heads",
    "nhead",
    "nheads",
)
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_heads",
    "n_head_kv",
)


def find_attention(
    scope: Node, matrices: list[Matrix]
) -> tuple[list[Matrix], Matrix] | None:
    """The attention layer among the matrices, if their names say that there is one, and
    their widths fit.

    It consists of query, key and value (as three matrices or as one) and the output
    projection.
    """
    *separate, fused = [
        [m for m in matrices if named(names, m.name_in(scope)[-1])]
        for names in (
            "q|query|queries",
            "k|key|keys",
            "v|value|values",
            "qkv|query_key_value|attn|in",
        )
    ]
    if [len(one) for one in separate] == [1, 1, 1]:
        inputs = [m for one in separate for m in one]
        query, key, value = inputs
        width = value.out_size * (query.out_size // key.out_size)
    elif len(fused) == 1 and not separate[0]:
        inputs = fused
        width = fused[0].out_size // 3
    else:
        return None
    for output in matrices:
        says_so = any(
            named("o|out|output|dense|proj", name)
            for name in output.name_in(scope)[-2:]
        )
        if says_so and output.in_size == width and output not in inputs:
            return inputs, output
    return None


def _head_counts(
    scope: Node, query: Matrix, key: Matrix
) -> tuple[int | None, int | None]:
    """Count the heads of the query, and of key and value.

    The numbers come from this module, or the nearest one around it, whose number of
    heads divides the query's outputs.
    """
    node: Node | None = scope
    while node is not None:
        heads = node.attribute(*_HEADS)
        if heads is not None and query.out_size % heads == 0:
            by_width = max(1, heads * key.out_size // query.out_size)
            return heads, node.attribute(*_KV_HEADS) or by_width
        node = node.parent
    return None, None


_HEAD_NAMES = re.compile(r"lm_head|embed_out|unembed\w*|vocab_proj")
_ROUTER_NAMES = re.compile(r"router|gate|gating|gate_network|wg")
_SMALL_TABLES = re.compile(r"pos|wpe|relative_attention_bias|token_type|segment")


class _Resolver:
    def __init__(self, root: Node, size: int):
        self.root = root
        self.size = size
        self.roles: dict[str, Role] = {}
        self.guesses: set[str] = set()  # paths
        tables = [
            node.table
            for node in root.walk()
            if node.table and not _SMALL_TABLES.search(node.name)
        ]
        self.vocabularies = {(table.in_size, table.out_size) for table in tables}

    def resolve(self) -> dict[str, Role]:
        for node in self.root.walk():
            self._by_type(node)
        self._singles(self._collect(self.root))
        for leaf in self.root.arrays():
            if not jnp.issubdtype(leaf.value.dtype, jnp.inexact):
                self._set(leaf, "buffer", f"{leaf.value.dtype} is not trained")
            elif sum(size > 1 for size in leaf.shape[leaf.stack :]) <= 1:
                self._set(leaf, "vector", "a vector or scalar")
            else:
                unknown = (
                    "no rule matches it: pass `loss_fn` and `batch`, or split it by "
                    "`overrides`"
                )
                self._set(leaf, "whole", unknown)
        return self.roles

    # One decision for each array.

    def _set(self, leaf: Node, name: str, reason: str, dim: int | None = None) -> None:
        if leaf.path in self.roles:
            return
        if dim is not None and leaf.shape[dim] % self.size:
            reason = self._indivisible(name, leaf.shape[dim])
            name = "whole"
            dim = None
        is_guess = leaf.path in self.guesses
        reason += "; a guess, by order alone" if is_guess else ""
        self.roles[leaf.path] = Role(name, reason, dim, leaf.stack, is_guess)

    def _indivisible(self, what: str, size: int) -> str:
        return f"{what}: {size} is not divisible by tensor={self.size}"

    def _split(self, matrix: Matrix, split: str, reason: str, name: str = "") -> None:
        """Decide how to split a matrix with its bias and LoRA branch: `column`, `row`
        or `whole`."""
        for leaf, dim in matrix.cut(split).items():
            if leaf is matrix.weight:
                self._set(leaf, name or split, reason, dim)
            elif dim is not None:
                self._set(leaf, name or split, "follows its weight", dim)
            elif leaf is matrix.bias:
                self._set(
                    leaf,
                    "vector",
                    "added once, after the sum over shards"
                    if split == "row"
                    else reason,
                )
            else:
                self._set(
                    leaf, "lora", "LoRA: between the rank and a side that is whole"
                )

    # Decisions by the type of a module alone.

    def _by_type(self, node: Node) -> None:
        if node.is_norm:
            for leaf in node.arrays():
                self._set(leaf, "norm", "a norm's scale and shift act on every feature")
        elif node.table is not None and _SMALL_TABLES.search(node.name):
            self._set(
                node.table.weight, "position", "a small table that every position needs"
            )
        elif node.table is not None:
            self._set(
                node.table.weight,
                "vocabulary",
                "each shard looks up its own rows",
                node.table.in_dim,
            )
        for router in (
            c.matrix
            for c in node.children
            if c.matrix and _ROUTER_NAMES.fullmatch(c.name)
        ):
            self._experts(node, router)

    def _experts(self, node: Node, router: Matrix) -> None:
        """Split the experts in `node`, the module that holds both the experts and their
        router. Each shard holds some complete experts, or a part of every expert if the
        block that computes the experts sets `expert_split`.
        """
        count = router.out_size
        for child in node.children:
            is_list = (
                isinstance(child.value, list | tuple) and len(child.children) == count
            )
            is_stack = (
                child.stack > node.stack
                and child.arrays()[0].shape[node.stack] == count
            )
            if is_list or is_stack:
                self._split(router, "whole", "every shard routes every token", "router")
            for matrix in child.matrices() if is_stack else ():
                if split := getattr(matrix.node.value, "expert_split", None):
                    self._split(matrix, split, "each shard has a part of each expert")
            for leaf in child.arrays() if is_stack and count % self.size == 0 else ():
                self._set(
                    leaf,
                    "expert",
                    f"each shard holds {count // self.size} experts",
                    node.stack,
                )

    # Decisions for matrices, from the inside out.

    def _collect(self, node: Node) -> list[Matrix]:
        """Decide the matrices that `node` can complete alone, and return the others, in
        order."""
        if node.matrix is not None:
            return self._open([node.matrix])
        left: list[Matrix] = []
        for child in node.children:
            inner = self._collect(child)
            if child.is_block:
                self._singles(inner)
            else:
                left += inner
        if attention := find_attention(node, left):
            self._attention(node, *attention)
            left = self._open(left)
        blocks = [
            below for below in node.walk() if below.is_block and below is not node
        ]
        if blocks:
            # A matrix beside a stack of blocks is applied before or after all of them.
            streams = {
                block.matrices()[0].in_size for block in blocks if block.matrices()
            }
            self._singles(left, streams)
            return []
        self._chains(node, left)
        return self._open(left)

    def _open(self, matrices: list[Matrix]) -> list[Matrix]:
        return [m for m in matrices if m.weight.path not in self.roles]

    def _attention(self, scope: Node, inputs: list[Matrix], output: Matrix) -> None:
        query, *key_value = inputs
        heads, kv_heads = _head_counts(scope, query, (key_value or inputs)[0])
        self.guesses -= {m.weight.path for m in inputs}
        if (heads or output.in_size) % self.size:
            what = self._indivisible(
                "heads" if heads else "attention width", heads or output.in_size
            )
            for matrix in (*inputs, output):
                self._split(matrix, "whole", what)
            return
        if key_value:
            self._split(query, "column", f"query: {heads or 'its'} heads split")
        else:
            crossed = (
                ""
                if query.parts > 1
                else ": an even split crosses their borders and costs permutes"
            )
            self._split(query, "column", f"fused query, key, value{crossed}")
        for matrix in key_value:
            if kv_heads and kv_heads % self.size:
                self._split(
                    matrix, "whole", self._indivisible("key/value heads", kv_heads)
                )
            else:
                self._split(matrix, "column", "key/value: split by heads, as the query")
        self._split(
            output, "row", "attention output: split opposite to query, key, value"
        )

    def _chains(self, scope: Node, matrices: list[Matrix]) -> None:
        """Split each run of two or more consecutive matrices."""
        for m in matrices if len(matrices) > 1 else ():
            if "shortcut" in m.node.name:
                # If it were split, its output would have to be gathered before it is
                # added to the output of the others.
                self._split(
                    m, "whole", "a shortcut from stream to stream, which stays whole"
                )
        inner = [
            m for m in self._open(matrices) if not _HEAD_NAMES.fullmatch(m.node.name)
        ]
        for chain in find_chains(scope, inner):
            if is_guess(chain):
                self.guesses |= {m.weight.path for link in chain for m in link.members}
            for link, (split, reason) in zip(
                chain, alternate(chain, self.size) if len(chain) > 1 else ()
            ):
                for matrix in link.members:
                    self._split(matrix, split, reason)

    def _singles(self, matrices: list[Matrix], streams: Collection[int] = ()) -> None:
        """Split matrices without a partner: vocabulary heads, and matrices that stand
        alone.

        `streams` are the widths of the residual streams beside blocks, which stay
        whole. A matrix that feeds a stream from outside stays whole, because every
        shard needs its output. Two matrices that keep the width of the stream, one
        before all blocks and one after them, also stay whole. A narrow head is not
        split along its input, because the last block returns that input whole.
        """
        keeps = [
            m for m in matrices if m.in_size == m.out_size and m.in_size in streams
        ]
        for m in matrices:
            is_read = m.in_size in streams
            is_fed = m.out_size in streams
            if (m.out_size, m.in_size) in self.vocabularies or _HEAD_NAMES.fullmatch(
                m.node.name
            ):
                self._split(
                    m,
                    "column",
                    "head: logits stay split over the vocabulary",
                    "vocabulary",
                )
            elif (is_fed and not is_read) or (m in keeps and len(keeps) > 1):
                self._split(
                    m, "whole", "feeds the blocks, whose stream stays whole", "input"
                )
            elif (
                is_read
                and m.out_size < m.in_size
                and m.in_size not in [a.out_size for a in keeps]
            ):
                self._split(
                    m, "column", "a head: its output is gathered where it is used"
                )
            elif m.in_size > m.out_size and m.in_size % self.size == 0:
                self._split(m, "row", "alone, narrowing: the smaller side is summed")
            elif m.out_size % self.size == 0:
                self._split(
                    m, "column", "alone: its output is gathered where it is used"
                )
            else:
                self._split(m, "row", "alone: its output does not divide evenly")


# The split of consecutive matrices.


def alternate(chain: list[Link], size: int) -> list[tuple[str, str]]:
    """Split the links of a chain (two or more) over `size` shards: `column`, `row` or
    `whole`, with reasons.

    A column split needs a whole input and keeps its output split; a row split takes a
    split input and sums its output. Of all ways to split every link, the result is the
    one that sends the fewest bytes: for a widening Linear followed by a narrowing one,
    this is Megatron's column-then-row split. Costs count the features of every
    activation that a collective returns, forward and backward.
    """
    # The cost of the remaining links depends on only one thing in the links before:
    # whether the activation between them is split. So only the best way to reach each
    # of the two cases is kept, and each way is extended by each split of the next link:
    #
    #   link needs its input leaves its output communicates whole whole whole nothing
    #   column whole split the input's gradient, summed: in_size row split whole its
    #   output, summed: out_size; if its input came whole
    #                                                    and is cut here, the gradient,
    #                                                    gathered: in_size
    #
    # A split activation that the next link needs whole is gathered, and its gradient is
    # summed: 2 * in_size.
    #
    # best[is the activation split]: (links left whole, cost, splits), compared in this
    # order.
    best: dict[bool, tuple[int, int, list[str]]] = {False: (0, 0, [])}
    for index, link in enumerate(chain):
        in_divides = link.in_size % size == 0
        out_divides = link.out_size % size == 0
        is_paired = any(b.in_size % size == 0 for b in chain[max(index, 1) : index + 2])
        options: dict[bool, list[tuple[int, int, list[str]]]] = {False: [], True: []}
        for is_split, (whole, cost, splits) in best.items():
            gather = 2 * link.in_size if is_split else 0
            # Only a link that could be a column counts as left whole, because a few
            # outputs are not worth a reduction.
            options[False].append(
                (whole + out_divides, cost + gather, [*splits, "whole"])
            )
            if is_paired and out_divides:
                options[True].append(
                    (whole, cost + gather + link.in_size, [*splits, "column"])
                )
            if is_paired and in_divides:
                back = 0 if is_split else link.in_size
                options[False].append(
                    (whole, cost + link.out_size + back, [*splits, "row"])
                )
        best = {is_split: min(ways) for is_split, ways in options.items() if ways}
    gather = {False: 0, True: chain[-1].out_size}
    _, _, splits = min(
        (whole, cost + gather[after], splits)
        for after, (whole, cost, splits) in best.items()
    )
    return [
        (split, _reason(link, splits, i, size))
        for i, (link, split) in enumerate(zip(chain, splits))
    ]


def _reason(link: Link, splits: list[str], i: int, size: int) -> str:
    if splits[i] == "column" and splits[i + 1 : i + 2] == ["row"]:
        siblings = (
            f", with {len(link.members) - 1} sibling" if len(link.members) > 1 else ""
        )
        return f"opens a pair: its {link.out_size} outputs stay split{siblings}"
    if splits[i] == "column":
        return "last of an odd chain: its output is gathered where it is used"
    if splits[i] == "row":
        is_paired = splits[i - 1 : i] == ["column"]
        before = (
            "closes a pair: its" if is_paired else "unpaired: its input is cut, its"
        )
        return f"{before} {link.out_size} outputs are summed"
    return (
        "consecutive, but no pair of its dims and its neighbours' is divisible by "
        f"tensor={size}"
    )
