"""The two rules: which dim of which matrix is split over the `tensor` axis, and why.

Consecutive Linear layers alternate between column and row splits; an attention's output
projection is split opposite to its query, key and value (RedCoast, section 3.1; the
layout is Megatron-LM's). Modules are resolved from the inside out: each module decides
the attention layers and chains that it can complete, and hands the remaining matrices
to its parent, up to the block.
"""

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import PyTree

from redco_eqx._sharding.matrices import (
    Link,
    Matrix,
    Node,
    find_chains,
    is_guess,
    named,
    root_node,
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
    - `is_guess`: true if names and shapes do not tell how the program uses the array.
        Another layout may send several times less.
    """

    name: str
    reason: str
    dim: int | None = None
    stack: int = 0
    is_guess: bool = False


def tensor_roles(model: PyTree, size: int) -> dict[str, Role]:
    """The role of each array of `model`, by path, on a `tensor` axis of size `size`."""
    return _Resolver(root_node(model), size).resolve()


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


# Names that fused matrices have in an attention alone.
_FUSED_ALONE = "qkv|query_key_value"


def find_attention(
    scope: Node, matrices: list[Matrix]
) -> tuple[list[Matrix], Matrix] | None:
    """The attention layer among the matrices, if their names say that there is one, and
    their widths fit.

    It consists of query, key and value (as three matrices or as one) and the output
    projection.
    """

    def with_name(names: str) -> list[Matrix]:
        return [m for m in matrices if named(names, m.name_in(scope)[-1])]

    queries = with_name("q|query|queries")
    keys = with_name("k|key|keys")
    values = with_name("v|value|values")
    fused = with_name(f"{_FUSED_ALONE}|attn|in")
    if len(queries) == len(keys) == len(values) == 1:
        inputs = [*queries, *keys, *values]
        query, key, value = inputs
        # Several heads of the query may share one of key and value.
        width = value.out_size * (query.out_size // key.out_size)
    elif len(fused) == 1 and not queries:
        inputs = fused
        width = fused[0].out_size // 3
    else:
        return None
    fits = [m for m in matrices if m.in_size == width and m not in inputs]
    for output in fits:
        # Some models put it in a list: `to_out.0`.
        ends = output.name_in(scope)[-2:]
        if any(named("o|out|output|dense|proj", name) for name in ends):
            return inputs, output
    # If no name says which is the output projection, but only one matrix can be it.
    back = [m for m in fits if m.out_size == inputs[0].in_size]
    is_certain = len(inputs) == 3 or named(_FUSED_ALONE, inputs[0].name_in(scope)[-1])
    if is_certain and len(back) == 1 and "gate" not in back[0].node.name:
        return inputs, back[0]
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
            # All heads have the same width.
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
        self.doubts: dict[str, str] = {}  # by path of a weight, in words
        self.vocabularies: set[tuple[int, int]] = set()  # (rows, features)
        for node in root.nodes():
            if node.table and not _SMALL_TABLES.search(node.name):
                self.vocabularies.add((node.table.in_size, node.table.out_size))

    def resolve(self) -> dict[str, Role]:
        # The first decision about an array stays, so the strongest evidence comes
        # first: types, then matrices by names and shapes, then what is left.
        for node in self.root.nodes():
            self._by_type(node)
        for node in self.root.nodes():
            self._doubt_ensemble(node)
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
                self._set(leaf, "whole", unknown, is_guess=True)
        return self.roles

    # One decision for each array.

    def _set(
        self,
        leaf: Node,
        name: str,
        reason: str,
        dim: int | None = None,
        *,
        is_guess: bool = False,
    ) -> None:
        if leaf.path in self.roles:
            return
        if dim is not None and leaf.shape[dim] % self.size:
            reason = self._indivisible(name, leaf.shape[dim])
            name = "whole"
            dim = None
        if leaf.path in self.doubts:
            reason += f"; {self.doubts[leaf.path]}"
            is_guess = True
        self.roles[leaf.path] = Role(name, reason, dim, leaf.stack, is_guess)

    def _indivisible(self, what: str, size: int) -> str:
        return f"{what}: {size} is not divisible by tensor={self.size}"

    def _split(
        self,
        matrix: Matrix,
        split: str,
        reason: str,
        name: str = "",
        *,
        is_guess: bool = False,
    ) -> None:
        """Decide how to split a matrix with its bias and LoRA branch: `column`, `row`
        or `whole`."""
        for leaf, dim in matrix.cut(split).items():
            if leaf is matrix.weight:
                self._set(leaf, name or split, reason, dim, is_guess=is_guess)
            elif dim is not None:
                self._set(leaf, name or split, "follows its weight", dim)
            elif leaf is matrix.bias and split == "row":
                self._set(leaf, "vector", "added once, after the sum over shards")
            elif leaf is matrix.bias:
                self._set(leaf, "vector", reason)
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
        for child in node.children:
            if child.matrix and _ROUTER_NAMES.fullmatch(child.name):
                self._experts(node, child.matrix)

    def _experts(self, node: Node, router: Matrix) -> None:
        """Split the experts in `node`, the module that holds both the experts and their
        router. Each shard holds some complete experts, or a part of every expert if the
        block that computes the experts sets `expert_split`.
        """
        # A matrix with the name of a router (the gate of an MLP, for example) is one
        # only if it has an output for each expert beside it.
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
            if not is_stack:
                continue
            for matrix in child.matrices():
                if split := getattr(matrix.node.value, "expert_split", None):
                    self._split(matrix, split, "each shard has a part of each expert")
            if count % self.size == 0:
                reason = f"each shard holds {count // self.size} experts"
                for leaf in child.arrays():
                    self._set(leaf, "expert", reason, node.stack)

    def _doubt_ensemble(self, node: Node) -> None:
        """Doubt the splits inside a stack whose copies cannot follow one another.

        They may be the members of an ensemble: splitting their number would send less.
        Names and shapes do not say that nothing routes between them.
        """
        outside = node.parent.stack if node.parent else 0
        matrices = self._open(node.matrices())
        if node.stack == outside or not matrices:
            return
        count = matrices[0].weight.shape[outside]
        returns = any(m.out_size == matrices[0].in_size for m in matrices)
        if not returns and count % self.size == 0:
            doubt = f"its {count} copies may be an ensemble, which could be split"
            self.doubts |= {m.weight.path: doubt for m in matrices}

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
            below for below in node.nodes() if below.is_block and below is not node
        ]
        if blocks:
            # A matrix beside a stack of blocks is applied before or after all of them.
            # The first matrix of a block reads the stream that goes through the blocks.
            firsts = [block.matrices()[:1] for block in blocks]
            streams = {first[0].in_size for first in firsts if first}
            self._singles(left, streams)
            return []
        self._chains(node, left)
        return self._open(left)

    def _open(self, matrices: list[Matrix]) -> list[Matrix]:
        return [m for m in matrices if m.weight.path not in self.roles]

    def _attention(self, scope: Node, inputs: list[Matrix], output: Matrix) -> None:
        query, *key_value = inputs
        key = key_value[0] if key_value else query
        heads, kv_heads = _head_counts(scope, query, key)
        for matrix in inputs:
            self.doubts.pop(matrix.weight.path, None)
        # The scores of a head are sums over its features, which a split inside the head
        # would have to add over the shards. If the number of heads is not known, only
        # the width can be checked.
        if heads:
            what = "heads"
            num_units = heads
        else:
            what = "attention width"
            num_units = output.in_size
        if num_units % self.size:
            reason = self._indivisible(what, num_units)
            for matrix in (*inputs, output):
                self._split(matrix, "whole", reason)
            return
        if key_value:
            self._split(query, "column", f"query: {heads or 'its'} heads split")
        else:
            reason = "fused query, key, value"
            crosses = query.parts == 1
            if crosses:
                reason += ": an even split crosses their borders and costs permutes"
            self._split(query, "column", reason, is_guess=crosses)
        # Several heads of the query may share one of key and value, so these may have
        # too few to split.
        for matrix in key_value:
            if kv_heads and kv_heads % self.size:
                reason = self._indivisible("key/value heads", kv_heads)
                self._split(matrix, "whole", reason)
            else:
                self._split(matrix, "column", "key/value: split by heads, as the query")
        self._split(
            output, "row", "attention output: split opposite to query, key, value"
        )

    def _chains(self, scope: Node, matrices: list[Matrix]) -> None:
        """Split each chain of two or more consecutive matrices."""
        for m in matrices:
            if len(matrices) > 1 and "shortcut" in m.node.name:
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
                for link in chain:
                    for matrix in link.members:
                        self.doubts[matrix.weight.path] = "a guess, by order alone"
            if len(chain) == 1:
                # A module around this one may have a matrix before or after it.
                continue
            for link, (split, reason) in zip(chain, alternate(chain, self.size)):
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
        kept_widths = {m.in_size for m in keeps}
        for m in matrices:
            takes_stream = m.in_size in streams
            gives_stream = m.out_size in streams
            # A head maps the features of a table to its rows.
            has_shape = (m.out_size, m.in_size) in self.vocabularies
            is_head = has_shape or _HEAD_NAMES.fullmatch(m.node.name)
            is_one_of_two = m in keeps and len(keeps) > 1
            is_narrow = m.out_size < m.in_size
            if is_head:
                self._split(
                    m,
                    "column",
                    "head: logits stay split over the vocabulary",
                    "vocabulary",
                )
            elif (gives_stream and not takes_stream) or is_one_of_two:
                self._split(
                    m, "whole", "feeds the blocks, whose stream stays whole", "input"
                )
            elif takes_stream and is_narrow and m.in_size not in kept_widths:
                self._split(
                    m, "column", "a head: its output is gathered where it is used"
                )
            elif is_narrow and m.in_size % self.size == 0:
                self._split(m, "row", "alone, narrowing: the smaller side is summed")
            elif m.out_size % self.size == 0:
                reason = "alone: its output is gathered where it is used"
                # Beside blocks, it is known where the gathered output goes.
                has_others = len(self.root.matrices()) > 1
                self._split(m, "column", reason, is_guess=has_others and not streams)
            else:
                self._split(m, "row", "alone: its output does not divide evenly")


# The split of consecutive matrices.


class _Way(NamedTuple):
    """The splits of the first links of a chain. Two ways compare by these fields, in
    this order.

    - `num_whole`: the number of links that stay whole, although they could be columns.
    - `cost`: the features that collectives return.
    - `splits`: one for each link.
    """

    num_whole: int
    cost: int
    splits: tuple[str, ...]

    def then(self, split: str, cost: int, num_whole: int = 0) -> "_Way":
        """Split one more link at this cost."""
        return _Way(self.num_whole + num_whole, self.cost + cost, (*self.splits, split))


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
    #   link     needs its input    leaves its output    communicates
    #   whole    whole              whole                nothing
    #   column   whole              split                the input's gradient, summed:
    #                                                    in_size
    #   row      split              whole                its output, summed: out_size;
    #                                                    if its input came whole and is
    #                                                    cut here, the gradient,
    #                                                    gathered: in_size
    #
    # A split activation that the next link needs whole is gathered, and its gradient is
    # summed: 2 * in_size.
    #
    # The keys of `best` tell whether the activation is split.
    best = {False: _Way(0, 0, ())}
    for index, link in enumerate(chain):
        in_divides = link.in_size % size == 0
        out_divides = link.out_size % size == 0
        # A split pays only in a pair, whose second link takes a split input: this link,
        # unless it is the first one, or the next link.
        seconds = chain[max(index, 1) : index + 2]
        is_paired = any(second.in_size % size == 0 for second in seconds)
        options: dict[bool, list[_Way]] = {False: [], True: []}
        for is_split, way in best.items():
            gather = 2 * link.in_size if is_split else 0
            # Only a link that could be a column counts as left whole, because a few
            # outputs are not worth a reduction.
            options[False].append(way.then("whole", gather, num_whole=int(out_divides)))
            if is_paired and out_divides:
                options[True].append(way.then("column", gather + link.in_size))
            if is_paired and in_divides:
                back = 0 if is_split else link.in_size
                options[False].append(way.then("row", link.out_size + back))
        best = {is_split: min(ways) for is_split, ways in options.items() if ways}
    if True in best:
        # The user of the last activation needs it whole.
        split_way = best[True]
        best[True] = split_way._replace(cost=split_way.cost + chain[-1].out_size)
    splits = min(best.values()).splits
    return [
        (split, _reason(link, splits, i, size))
        for i, (link, split) in enumerate(zip(chain, splits))
    ]


def _reason(link: Link, splits: Sequence[str], i: int, size: int) -> str:
    before = splits[i - 1] if i > 0 else ""
    after = splits[i + 1] if i + 1 < len(splits) else ""
    if splits[i] == "column" and after == "row":
        siblings = ""
        if len(link.members) > 1:
            siblings = f", with {len(link.members) - 1} sibling"
        return f"opens a pair: its {link.out_size} outputs stay split{siblings}"
    if splits[i] == "column":
        return "last of an odd chain: its output is gathered where it is used"
    if splits[i] == "row" and before == "column":
        return f"closes a pair: its {link.out_size} outputs are summed"
    if splits[i] == "row":
        return f"unpaired: its input is cut, its {link.out_size} outputs are summed"
    return (
        "consecutive, but no pair of its dims and its neighbours' is divisible by "
        f"tensor={size}"
    )
