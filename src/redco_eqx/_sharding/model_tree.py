"""A model as the rules see it: a tree of named nodes, with its matrices, tables, stacks and blocks found.

Nothing is decided here. A `Matrix` is whatever acts like a Linear: a module with a 2-D `weight` or
`kernel`, a convolution, or either of them with a LoRA branch beside it.
"""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from redco_eqx._sharding.bare import find_bare
from redco_eqx._sharding.nodes import Branch, Matrix, Node, Table, is_norm
from redco_eqx._tree import children, is_array, join, leaves_with_paths


def read_model(model: PyTree) -> tuple[Node, dict[str, str]]:
    """The root node, and for each leaf that `eqx.nn.Shared` ties: its path -> path of the real leaf."""
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x, model)
    tied: dict[str, str] = {}
    root = _read(abstract, "", "", None, tied)
    _find_stacks(root, 0)
    for node in root.walk():
        _recognise(node)
    for node in root.walk():
        _attach_lora(node)
    for node in root.walk():
        find_bare(node)
    for node in root.walk():
        _find_blocks(node)
    return root, tied


def _read(value: PyTree, path: str, name: str, parent: Node | None, tied: dict[str, str]) -> Node:
    node = Node(path, name, value, parent)
    if isinstance(value, eqx.nn.Shared):
        value = _expand(value, path, tied)
    for key, child in children(value):
        node.children.append(_read(child, join(path, key), key, node, tied))
    return node


def _expand(shared: eqx.nn.Shared, path: str, tied: dict[str, str]) -> PyTree:
    """The layers with the tied leaves put back, so that the rules see them where they are used."""
    try:
        whole = {"pytree": shared()}
    except Exception:  # `get` computes (a transpose, say), which abstract arrays cannot
        return shared
    real = {id(x): p for p, x in leaves_with_paths({"pytree": shared.pytree}) if is_array(x)}
    names = set(real.values())
    for leaf, x in leaves_with_paths(whole):
        if is_array(x) and leaf not in names and id(x) in real:
            tied[join(path, leaf)] = join(path, real[id(x)])
    return whole


# Stacks: layers made by `eqx.filter_vmap`, whose arrays have more dims than their type says.


def _own_stack(node: Node) -> int | None:
    """How many dims too many this module's weight has, if its type or its bias tells."""
    weight = node.weight()
    if weight is None:
        return None
    ndim, value = len(weight.shape), node.value
    window = _window_dims(node, weight)
    if window is not None:
        return ndim - 2 - window
    if isinstance(value, eqx.nn.LayerNorm | eqx.nn.RMSNorm):
        return ndim - len(value.shape)
    if isinstance(value, eqx.nn.GroupNorm | eqx.nn.BatchNorm):
        return ndim - 1
    if isinstance(value, eqx.nn.Linear | eqx.nn.Embedding):
        return ndim - 2
    out = getattr(value, "out_features", None)
    if isinstance(out, tuple):
        return ndim - 1 - len(out)
    sizes = {getattr(value, "in_features", None), out}
    if sizes == set(weight.shape[-2:]):
        return ndim - 2
    bias = node.child("bias")
    if bias is not None and ndim >= 2:
        return len(bias.shape) - 1
    return None


def _window_dims(node: Node, weight: Node) -> int | None:
    """The number of dims of a convolution's window; `None` if this is no convolution.

    One that is of no type known here has a bias `(out, 1, ...)`, to be added to its output.
    """
    if isinstance(node.value, eqx.nn.Conv | eqx.nn.ConvTranspose):
        return node.value.num_spatial_dims
    if hasattr(node.value, "in_features"):
        return None
    kernel_size = getattr(node.value, "kernel_size", None)
    if isinstance(kernel_size, tuple):
        return len(kernel_size)
    bias = node.child("bias")
    shape = () if bias is None else bias.shape
    num_ones = len(shape) - len(_without_ones(shape))
    if num_ones == 0 or len(weight.shape) < 2 + num_ones:
        return None
    # A stack of Linears with one output has a bias `(layers, 1)`, and a weight `(layers, 1, in)`.
    is_stack = weight.shape[:-1] == shape
    return num_ones if weight.shape[-2 - num_ones] == shape[-1 - num_ones] and not is_stack else None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without the ones at its end, but not without its first dim."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _find_stacks(node: Node, stack: int) -> None:
    known = [own for own in map(_own_stack, node.walk()) if own is not None]
    shapes = [leaf.shape for leaf in node.arrays()]
    while known and min(known) > stack and len({s[: stack + 1] for s in shapes}) == 1:
        stack += 1
    node.stack = stack
    for child in node.children:
        _find_stacks(child, stack)


# Recognising modules.

_TABLE_NAMES = re.compile(r"(^|_)(embed\w*|wte|wpe|relative_attention_bias|tok_embeddings)($|_)")


def _recognise(node: Node) -> None:
    weight = node.weight()
    if weight is None or is_norm(node) or not jnp.issubdtype(weight.value.dtype, jnp.number):
        return
    rank = len(weight.shape) - node.stack
    window = _window_dims(node, weight)
    if window is not None and rank == 2 + window:
        node.matrix = _conv(node, weight)
    elif rank == 3:
        node.matrix = _fused(node, weight)
    elif rank != 2:
        return
    elif _is_table(node):
        rows, width = weight.shape[-2:]
        node.table = Table(node, weight, rows, width, node.stack)
    else:
        node.matrix = _linear(node, weight)


def _is_table(node: Node) -> bool:
    if isinstance(node.value, eqx.nn.Embedding) or hasattr(node.value, "num_embeddings"):
        return True
    is_linear = isinstance(node.value, eqx.nn.Linear) or hasattr(node.value, "in_features")
    return not is_linear and (
        "embed" in type(node.value).__name__.lower() or bool(_TABLE_NAMES.search(node.name))
    )


def _linear(node: Node, weight: Node) -> Matrix:
    first, second = weight.shape[-2:]
    bias = node.child("bias")
    out_first = weight.name == "weight"
    sizes = (getattr(node.value, "out_features", None), getattr(node.value, "in_features", None))
    if first == second and type(node.value).__name__ == "Conv1D":
        out_first = False  # as GPT-2 calls a Linear that is stored (in, out)
    elif sizes == (first, second):
        out_first = True
    elif sizes == (second, first):
        out_first = False
    elif bias is not None and first != second:
        out_first = bias.shape[-1] == first
    i, o = (node.stack + 1, node.stack) if out_first else (node.stack, node.stack + 1)
    return Matrix(node, weight, weight.shape[i], weight.shape[o], i, o, bias=_fitting(bias, weight.shape[o]))


def _conv(node: Node, weight: Node) -> Matrix:
    groups = node.attribute("groups") or 1
    o, i = node.stack, node.stack + 1
    in_size, out_size = weight.shape[i] * groups, weight.shape[o]
    bias = _fitting(node.child("bias"), out_size)
    return Matrix(node, weight, in_size, out_size, i, o, groups=groups, bias=bias)


def _fitting(bias: Node | None, out_size: int) -> Node | None:
    """A bias that has an entry for each output, in the first dim that is not stacked."""
    has_entries = bias is not None and bias.shape[bias.stack : bias.stack + 1] == (out_size,)
    return bias if has_entries else None


def _fused(node: Node, weight: Node) -> Matrix | None:
    """Matrices of one shape kept apart, `(in, parts, out)` or `(parts, out, in)`: `out_features` says so."""
    out = getattr(node.value, "out_features", None)
    shape, stack = weight.shape, node.stack
    if not isinstance(out, tuple) or out not in (shape[stack + 1 :], shape[stack : stack + 2]):
        return None
    i, o = (stack, stack + 2) if out == shape[stack + 1 :] else (stack + 2, stack + 1)
    parts, width = out
    return Matrix(node, weight, shape[i], parts * width, i, o, parts=parts, bias=node.child("bias"))


# LoRA: a matrix with a branch `in -> rank -> out` beside it is one matrix.

_LORA_A = re.compile(r"(?i)^(lora_?a|lora_down|a)$")
_LORA_B = re.compile(r"(?i)^(lora_?b|lora_up|b)$")


def _attach_lora(node: Node) -> None:
    first = next((c for c in node.children if _LORA_A.match(c.name)), None)
    second = next((c for c in node.children if _LORA_B.match(c.name)), None)
    if first is None or second is None:
        return
    branches = {id(first.matrix), id(second.matrix)}
    bases = [node.matrix] if node.matrix else [m for m in node.matrices() if id(m) not in branches]
    if len(bases) != 1:
        return
    base = bases[0]
    down, up = _factor(first, base.in_size), _factor(second, base.out_size)
    if down is None or up is None or down.rank != up.rank:
        return
    base.lora = (down, up)
    base.node, node.matrix = node, base
    first.matrix = second.matrix = None


def _factor(node: Node, size: int) -> Branch | None:
    """The branch's array, and its dim of the given size (the larger one of a factor)."""
    weight = node if node.is_array else node.weight()
    if weight is None or len(weight.shape) - node.stack != 2:
        return None
    dim = max((node.stack, node.stack + 1), key=lambda d: weight.shape[d])
    return Branch(weight, dim) if weight.shape[dim] == size else None


def _find_blocks(node: Node) -> None:
    if node.parent is not None and node.stack > node.parent.stack:
        node.is_block = True
    if not isinstance(node.value, list | tuple) or not node.children:
        return
    kinds = [type(child.value) for child in node.children]
    alike = len(set(kinds)) == 1 or all(kinds.count(kind) > 1 for kind in kinds)
    if alike and all(len(child.matrices()) > 1 for child in node.children):
        for child in node.children:
            child.is_block = True
