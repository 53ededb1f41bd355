"""The projections of an attention, found by names and widths: query, key, value, and the output they end in."""

import re
from typing import NamedTuple, TypeAlias

from redco_eqx._sharding.nodes import Matrix, Node


class Separate(NamedTuple):
    """A matrix for each of query, key and value."""

    query: Matrix
    key: Matrix
    value: Matrix


class FusedKeyValue(NamedTuple):
    """A matrix for the query, and one for key and value."""

    query: Matrix
    key_value: Matrix


class Fused(NamedTuple):
    """One matrix for all three."""

    query_key_value: Matrix


Inputs: TypeAlias = Separate | FusedKeyValue | Fused


class Heads(NamedTuple):
    """How many heads there are, where the model says so."""

    query: int | None
    key_value: int | None


def _projection(names: str) -> re.Pattern[str]:
    """Matches `q`, `wq`, `to_q`, `q_proj`, `q_lin`, ... for each of the given names."""
    return re.compile(rf"^(to_|w_?|linear_|c_|attn_)?({names})(_?proj(ection)?|_lin(ear)?|_layer)?$")


QUERY = _projection("q|query|queries")
KEY = _projection("k|key|keys")
VALUE = _projection("v|value|values")
_FUSED = _projection("qkv|query_key_value|attn|in")
_FUSED_KV = _projection("kv|key_value")
OUTPUT = _projection("o|out|output|dense|proj|c_proj")

_HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "nhead", "nheads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "n_head_kv")


def find_inputs(scope: Node, matrices: list[Matrix]) -> Inputs | None:
    """A complete set of query, key and value among the matrices, if their names say that there is just one."""

    def named(pattern: re.Pattern[str]) -> list[Matrix]:
        return [m for m in matrices if pattern.match(m.name_in(scope)[-1].lower())]

    query, key, value = (named(pattern) for pattern in (QUERY, KEY, VALUE))
    key_value, fused = named(_FUSED_KV), named(_FUSED)
    if len(query) == len(key_value) == 1 and not key:
        return FusedKeyValue(query[0], key_value[0])
    if len(query) == len(key) == len(value) == 1:
        return Separate(query[0], key[0], value[0])
    if len(fused) == 1 and not query:
        return Fused(fused[0])
    return None


def fit_together(inputs: Inputs) -> bool:
    """Whether the widths are those of an attention; of a fused matrix alone they say nothing."""
    match inputs:
        case Separate(query, key, value):
            fits = key.in_size == value.in_size
        case FusedKeyValue(query, key_value):
            fits = key_value.out_size % 2 == 0
        case Fused():
            return True
    key_width, _ = key_value_widths(inputs)
    return fits and key_width > 0 and query.out_size % key_width == 0


def key_value_widths(inputs: Separate | FusedKeyValue) -> tuple[int, int]:
    """How many features all heads of the keys have, and all of the values."""
    match inputs:
        case Separate(_, key, value):
            return key.out_size, value.out_size
        case FusedKeyValue(_, key_value):
            return key_value.out_size // 2, key_value.out_size // 2


def head_counts(scope: Node, inputs: Inputs) -> Heads:
    """The numbers of heads: those of the arrays, or what a module here or further out says and divides."""
    if not isinstance(inputs, Fused) and inputs.query.heads is not None:
        return Heads(inputs.query.heads, inputs[1].heads)
    node: Node | None = scope
    while node is not None:
        heads = node.attribute(*_HEADS)
        kv_heads = node.attribute(*_KV_HEADS)
        if heads is not None and isinstance(inputs, Fused):
            return Heads(heads, kv_heads or heads)
        if heads is not None and not isinstance(inputs, Fused) and inputs.query.out_size % heads == 0:
            if kv_heads is None:
                kv_heads = max(1, heads * key_value_widths(inputs)[0] // inputs.query.out_size)
            return Heads(heads, kv_heads)
        node = node.parent
    return Heads(None, None)


def find_output(scope: Node, rest: list[Matrix], inputs: Inputs, heads: Heads) -> Matrix | None:
    """The projection whose `in` is the width of what the attention makes of its values."""
    if isinstance(inputs, Fused):
        # Keys and values have as many heads as the query, or a known share of them.
        out_size = inputs.query_key_value.out_size
        shared = 2 * (heads.key_value or 0) / (heads.query or 1)
        fitting = [
            m
            for m in rest
            if out_size == 3 * m.in_size or (heads.query and out_size == m.in_size * (1 + shared))
        ]
    else:
        key_width, value_width = key_value_widths(inputs)
        repeats = inputs.query.out_size // key_width if key_width else 0  # query heads for each of the values
        fitting = [m for m in rest if m.in_size == value_width * repeats]
    by_name = [m for m in fitting if any(OUTPUT.match(n.lower()) for n in m.name_in(scope)[-2:])]
    return by_name[0] if by_name else fitting[0] if len(fitting) == 1 else None
