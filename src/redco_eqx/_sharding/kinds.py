"""The kind of each array of a model: matrix, table, norm or bias. A stack of layers has
the kinds of one."""

import re
from typing import Literal, TypeAlias

import jax.numpy as jnp
from jaxtyping import PyTree

from redco_eqx._sharding.matrices import TABLE_NAMES, Node, root_node

Kind: TypeAlias = Literal["matrix", "table", "norm", "bias", "other"]


def parameter_kinds(model: PyTree) -> dict[str, Kind]:
    """Tell for each array of `model` whether it is a matrix, a table, part of a norm,
    or a bias.

    Use the kinds to decide what an optimizer does with each array. The number of dims
    does not tell a norm from a matrix: the norms of stacked layers (`eqx.filter_vmap`,
    `stacked=True`) have two dims, and so do their biases.

    ```python
    kinds = rx.parameter_kinds(model)
    decayed = {path: kind == "matrix" for path, kind in kinds.items()}
    optimizer = optax.adamw(1e-3, mask=rx.by_path(decayed))
    ```

    **Arguments:**

    - `model`: any PyTree; its arrays may be abstract. Pass a model with an
        `eqx.nn.State` without that state.

    **Returns:**

    The kind of each array, by path. A list of layers, a stack of these layers, and one
    layer alone have the same kinds.

    - `"matrix"`: the weight of a linear layer, the kernel of a convolution, the factors
        of a LoRA branch, and the matrices of experts. So is any other array with two
        dims or more, after those that count layers.
    - `"table"`: an embedding, or a table of positions.
    - `"norm"`: a scale or a shift in a norm.
    - `"bias"`: the bias of any other layer.
    - `"other"`: an array that is not floating (it is not trained), a vector or scalar
        with another name, and an array with two dims that may be a stack of vectors.
        The last is possible only in modules of your own whose arrays have names that do
        not say what they are.
    """
    return {leaf.path: _kind(leaf) for leaf in root_node(model).arrays()}


_NORM_NAMES = re.compile(r"(^|_)(\w*norm\d*|ln|scale|gamma|gain)\d*($|_)")
_BIAS_NAMES = re.compile(r"(^|_)(bias|beta|shift)\d*($|_)")
_LAYER_SIZES = ("in_features", "out_features", "kernel_size", "num_embeddings")


def _kind(leaf: Node) -> Kind:
    owner = leaf.parent or leaf
    name = leaf.name.lower()
    if not jnp.issubdtype(leaf.value.dtype, jnp.inexact):
        return "other"
    # First by the type of the module that owns the array.
    if owner.is_norm:
        return "norm"
    if owner.table is not None and leaf is owner.table.weight:
        return "table"
    is_layer = any(hasattr(owner.value, size) for size in _LAYER_SIZES)
    if is_layer and name in ("weight", "kernel"):
        return "matrix"
    # Then by name. A size of 1 counts no features, as in (1, 1, features).
    num_dims = sum(size > 1 for size in leaf.shape[leaf.stack :])
    is_low = _may_be_stacked(leaf)
    may_be_vector = num_dims == 1 or is_low
    has_norm_name = _NORM_NAMES.search(name) or _NORM_NAMES.search(owner.name.lower())
    if may_be_vector and has_norm_name:
        return "norm"
    if num_dims > 1 and TABLE_NAMES.search(name):
        return "table"
    # `b` alone may also name a factor of a LoRA branch.
    if _BIAS_NAMES.search(name) or (may_be_vector and re.fullmatch(r"b\d*", name)):
        return "bias"
    # Last by the number of dims.
    if num_dims > 2 or (num_dims == 2 and not is_low):
        return "matrix"
    return "other"


def _may_be_stacked(leaf: Node) -> bool:
    """True if the first dim of `leaf` may count layers, although no type of a module
    says so.

    Then all arrays of some module around it have the same first size, none is a vector,
    and one has more dims than `leaf`: `{"up": (layers, d, f), "down": (layers, f, d),
    "scale": (layers, d)}`.
    """
    rank = len(leaf.shape) - leaf.stack
    around = leaf.parent
    while around is not None and around.stack == leaf.stack:
        if around.has_known_rank:
            # `stack` then counts all of its dims that stand for layers.
            return False
        shapes = [x.shape[leaf.stack :] for x in around.arrays()]
        ranks = [len(shape) for shape in shapes]
        has_no_vector = min(ranks) >= 2
        has_more_dims = max(ranks) > rank
        # With a vector, the first sizes may be equal for another reason: those of a
        # Linear are `(out, in)` and `(out,)`.
        if has_no_vector and has_more_dims and len({x[0] for x in shapes}) == 1:
            return True
        around = around.parent
    return False
