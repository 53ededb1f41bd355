"""Leaves by name: paths, array predicates, and a tree as a flat `{path: array}`.

A leaf's path (`layers.0.attention.query.weight`) is its one name everywhere: in rules, checkpoints, files
and errors.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

T = TypeVar("T")


def is_array(x: Any) -> bool:
    """Whether `x` is an array: of JAX, of NumPy, or abstract (`jax.ShapeDtypeStruct`)."""
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def is_trainable(x: Any) -> bool:
    """Whether `x` is a floating (or complex) JAX array, concrete or abstract.

    NumPy arrays are constants: tables that weight decay must not shrink.
    """
    is_jax = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    return is_jax and jnp.issubdtype(x.dtype, jnp.inexact)


def describe(x: Any) -> str:
    """An array's dtype and shape, `float32[4,8]`, for messages."""
    return f"{x.dtype}[{','.join(str(n) for n in x.shape)}]"


def listed(names: Sequence[str], limit: int = 1, *, separator: str = ", ") -> str:
    """The first names, and how many more there are, for messages: `a, b and 3 more`."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return separator.join(names[:limit]) + more


def join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def path_of(keypath: tuple[Any, ...]) -> str:
    """A JAX key path as `layers.0.weight`."""
    parts = []
    for entry in keypath:
        for attribute in ("name", "idx", "key"):
            if hasattr(entry, attribute):
                parts.append(str(getattr(entry, attribute)))
                break
        else:
            parts.append(str(entry))
    return ".".join(parts)


def children(node: Any) -> list[tuple[str, Any]]:
    """The direct children of a PyTree node as `(name, child)`; nothing for a leaf.

    The entries of an `eqx.nn.State` are named after the `StateIndex` that they belong to.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    if len(pairs) == 1 and pairs[0][1] is node:
        return []
    names = [path_of(keypath) for keypath, _ in pairs]
    if isinstance(node, eqx.nn.State):
        data = treedef.node_data()
        markers = data[1] if data is not None else ()
        names = [_state_name(marker, name) for marker, name in zip(markers, names)]
    return [(name, child) for name, (_, child) in zip(names, pairs)]


def _state_name(marker: Any, default: str) -> str:
    # `make_with_state` marks an entry by root class and key path: "Sequential.layers[1].ema_state_index".
    if not isinstance(marker, str):
        return default
    dotted = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", marker)
    return dotted.partition(".")[2] or default


def leaves_with_paths(tree: PyTree) -> list[tuple[str, Any]]:
    """Every leaf with its path, in JAX's order."""
    flat = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, eqx.nn.State) and x is not tree
    )[0]
    if isinstance(tree, eqx.nn.State):
        flat = [((), tree)]
    found = []
    for keypath, leaf in flat:
        if isinstance(leaf, eqx.nn.State):
            for name, child in children(leaf):
                found += [(join(path_of(keypath), name, path), x) for path, x in leaves_with_paths(child)]
        else:
            found.append((path_of(keypath), leaf))
    return found


def to_paths(tree: PyTree, is_leaf: Any = is_array) -> dict[str, Any]:
    """`{path: leaf}` of the leaves for which `is_leaf` holds.

    Raises `ValueError` if two leaves have the same path (as `{"a": {"b": x}, "a.b": y}` does).
    """
    flat: dict[str, Any] = {}
    for path, leaf in leaves_with_paths(tree):
        if not is_leaf(leaf):
            continue
        if path in flat:
            raise ValueError(f"two leaves have the path {path!r}. Rename one, or its dict key.")
        flat[path] = leaf
    return flat


def to_arrays(tree: PyTree) -> dict[str, Any]:
    """The arrays of a tree as a flat `{path: array}`, in the tree's order.

    Raises `ValueError` if two leaves have the same path.
    """
    return to_paths(tree)


def from_arrays(tree: T, arrays: Mapping[str, Any]) -> T:
    """`tree` with each of its arrays replaced by the one of the same path; the inverse of `to_arrays`.

    **Raises:**

    `ValueError` naming every path that is missing, unexpected, or has another shape or dtype.
    """
    own = to_arrays(tree)
    problems = [f"missing: {path} {describe(x)}" for path, x in own.items() if path not in arrays]
    problems += [f"unexpected: {path} {describe(x)}" for path, x in arrays.items() if path not in own]
    problems += [
        f"{path}: expected {describe(x)}, got {describe(arrays[path])}"
        for path, x in own.items()
        if path in arrays and (x.shape, x.dtype) != (arrays[path].shape, arrays[path].dtype)
    ]
    if problems:
        raise ValueError("from_arrays: the arrays do not fit the tree.\n  " + "\n  ".join(problems))
    leaves = [arrays[path] if is_array(leaf) else leaf for path, leaf in leaves_with_paths(tree)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def cast(tree: T, dtype: Any) -> T:
    """The floating arrays of `tree` in `dtype`; integers, booleans, keys and non-arrays as they are.

    For low-precision compute over float32 parameters, inside a loss or predict function:
    `model, batch = cast((model, batch), jnp.bfloat16)`. Cast the batch too: bfloat16 times float32 is
    float32.
    """

    def one(x: Any) -> Any:
        if is_array(x) and jnp.issubdtype(x.dtype, jnp.floating):
            if isinstance(x, jax.ShapeDtypeStruct):
                return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
            return x.astype(dtype)
        return x

    return jax.tree.map(one, tree)
