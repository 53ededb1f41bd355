"""Matrices that are no module's `weight`: arrays `wq`, `W_in`, `w_out` right in a module or a dict."""

import re

import jax.numpy as jnp

from redco_eqx._sharding.attention import KEY, OUTPUT, QUERY, VALUE
from redco_eqx._sharding.nodes import Matrix, Node, is_norm, is_recurrent

_WEIGHT = re.compile(r"(?i)(w|weight|kernel)(_?[a-z]{1,2}|_\w+|[a-z]?_?\d+)?|\w+_(w|weight|kernel)")
_OTHER = re.compile(r"(?i)w[tp]e|.*(embed|pos|table|hh|recurrent).*")


def find_bare(node: Node) -> None:
    """Sets `matrix` of the arrays right below `node` that are matrices, by shape, type and name."""
    if node.weight() is not None or is_norm(node) or is_recurrent(node):
        return
    arrays = [c for c in node.children if c.is_array and jnp.issubdtype(c.value.dtype, jnp.inexact)]
    for array in arrays:
        is_named = _WEIGHT.fullmatch(array.name) and not _OTHER.fullmatch(array.name)
        if is_named and len(array.shape) - array.stack == 2 and min(array.shape[array.stack :]) > 1:
            array.matrix = _plain(array, arrays)
    _with_heads([array for array in arrays if len(array.shape) - array.stack == 3])


def _plain(array: Node, arrays: list[Node]) -> Matrix:
    """`(in, out)`, as in `x @ w`, unless its bias (`b_in` of `W_in`) says that it is `(out, in)`."""
    first, second = array.shape[array.stack :]
    names = {
        re.sub(r"(?i)weight|kernel", "bias", array.name),
        re.sub(r"(?i)w", "b", array.name, count=1),
    }
    bias = next((c for c in arrays if c.name in names and len(c.shape) == array.stack + 1), None)
    out_first = bias is not None and bias.shape[-1] == first != second
    i, o = (array.stack + 1, array.stack) if out_first else (array.stack, array.stack + 1)
    fits = bias is not None and bias.shape[-1] == array.shape[o]
    return Matrix(array, array, array.shape[i], array.shape[o], i, o, bias=bias if fits else None)


def _with_heads(arrays: list[Node]) -> None:
    """A complete attention of arrays with a dim for heads: `(dim, heads, head)`, or `(heads, dim, head)`."""
    found = [[a for a in arrays if pattern.match(a.name.lower())] for pattern in (QUERY, KEY, VALUE, OUTPUT)]
    if any(len(one) != 1 for one in found):
        return
    query, key, value, output = (one[0] for one in found)
    if len({x.stack for x in (query, key, value, output)}) > 1:
        return
    stack, own = query.stack, query.shape[query.stack :]
    # Heads are fewer than features; their size comes last.
    dim = 0 if own[0] <= own[1] else 1
    heads, size, width = own[dim], own[2], own[1 - dim]
    for array in (query, key, value):
        kv_heads, rest = array.shape[stack + dim], array.shape[stack + 1 - dim]
        if rest != width or array.shape[stack + 2] != size or heads % kv_heads:
            return
    shape = output.shape[stack:]
    if size >= width:
        return  # layers, rather, of square matrices
    if sorted(shape) != sorted((heads, size, width)) or shape.index(heads) == 2:
        return
    for array in (query, key, value):
        own_heads = array.shape[stack + dim]
        array.matrix = Matrix(
            array, array, width, own_heads * size, stack + 1 - dim, stack + dim, heads=own_heads
        )
    heads_dim, out_dim = stack + shape.index(heads), stack + len(shape) - 1 - shape[::-1].index(width)
    output.matrix = Matrix(output, output, heads * size, width, heads_dim, out_dim, heads=heads)
