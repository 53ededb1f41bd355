"""Leaves by name: paths, array predicates, and a tree as a flat `{path: array}`.

A leaf's path (`layers.0.attention.query.weight`) is its name everywhere: in rules,
checkpoints, files and errors.
"""

import dataclasses
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import PyTree

T = TypeVar("T")


# A type checker sees a JAX array. At run time, this includes everything that may stand
# for an array.
if TYPE_CHECKING:
    AnyArray: TypeAlias = jax.Array
else:
    AnyArray: TypeAlias = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


def is_array(x: object) -> bool:
    """True for an array: a JAX array, a NumPy array, or an abstract one
    (`jax.ShapeDtypeStruct`)."""
    return isinstance(x, AnyArray)


def is_key(x: object) -> bool:
    """True for an array of typed PRNG keys: concrete, abstract, or the type of one in a
    traced program."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def is_trainable(x: object) -> bool:
    """True for a JAX array of floating (or complex) numbers of 16 bits or more,
    concrete or abstract.

    NumPy arrays are constants: tables that weight decay must not shrink. Narrower
    floats store quantised weights, and JAX promotes them to no other type.
    """
    is_jax = isinstance(x, jax.Array | jax.ShapeDtypeStruct)
    return is_jax and jnp.issubdtype(x.dtype, jnp.inexact) and x.dtype.itemsize > 1


def describe(x: Any, *, leading: str = "") -> str:
    """An array's dtype and shape for messages: `float32[4,8]`, or `float32[n,8]` with
    `leading="n"`."""
    shape = (leading, *x.shape[1:]) if leading else x.shape
    return f"{x.dtype}[{','.join(map(str, shape))}]"


def size_text(num_bytes: int | float) -> str:
    """A number of bytes in readable form: `1.5 MiB`."""
    if num_bytes < 1024:
        return f"{num_bytes:.0f} B"
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1024:.2f} GiB"


def ring_bytes(kind: str, result_bytes: float, group_size: int) -> float:
    """Bytes that one device sends by the ring algorithm, for a collective of this kind
    with results of this size.

    This number makes kinds comparable, because an all-reduce is a reduce-scatter and an
    all-gather.
    """
    others = group_size - 1
    part = others / group_size
    if kind == "all-reduce":
        return result_bytes * 2 * part
    if kind == "reduce-scatter":  # its result is one part
        return result_bytes * others
    if kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
        return result_bytes * part
    return result_bytes


def table(rows: Sequence[Sequence[str]], *, right: Container[int] = ()) -> list[str]:
    """The lines of a table with columns as wide as needed. Those numbered in `right`
    are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = []
        for i, (x, width) in enumerate(zip(row, widths)):
            cells.append(x.rjust(width) if i in right else x.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def lack_of_value(x: object) -> str | None:
    """Say why an array has no numbers, for messages (`is abstract`,
    `has been deleted. ...`); else `None`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return "is abstract"
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
        return "has been deleted. It was donated, perhaps as part of an earlier state"
    return None


def excess_of(x: Any) -> str | None:
    """Say why JAX cannot store an array of NumPy: its dtype, or a number beyond 32
    bits; else `None`."""
    if x.dtype.kind in "OSUMm":
        return (
            f"is {describe(x)}, but JAX has no such dtype. Keep it as a tuple, in a "
            "static field"
        )
    dtype: Any = jax.dtypes.canonicalize_dtype(x.dtype)
    if dtype == x.dtype or not x.size:
        return None
    with np.errstate(over="ignore"):
        narrow = x.astype(dtype)
    is_wrong = narrow != x
    if dtype.kind not in "iu":
        # Rounding is no excess.
        is_wrong = np.isinf(narrow) & ~np.isinf(x)
    wrong = np.extract(is_wrong, x)
    if not len(wrong):
        return None
    advice = 'Make it smaller, or call jax.config.update("jax_enable_x64", True) first'
    return (
        f"has {wrong[0]}, but JAX stores it as {dtype}, where that does not fit. "
        f"{advice}"
    )


def first_few(names: Sequence[str], *, most: int = 10, separator: str = ", ") -> str:
    """Join names for messages: `a, b, c`, or the first ones and a count:
    `a, b, and 7 more`."""
    shown = list(names[:most])
    if len(names) > most:
        shown.append(f"and {len(names) - most} more")
    return separator.join(shown)


def join(*parts: str) -> str:
    """A path made from these parts. Empty parts are left out."""
    return ".".join(part for part in parts if part)


def path_of(keypath: KeyPath) -> str:
    """Return a JAX key path in the form `layers.0.weight`."""
    return jax.tree_util.keystr(keypath, simple=True, separator=".")


def children(node: PyTree) -> list[tuple[str, PyTree]]:
    """The direct children of a PyTree node as `(name, child)`; nothing for a leaf.

    The entries of an `eqx.nn.State` are named after the `StateIndex` that they belong
    to.
    """
    # Everything but the node itself is a leaf, so this goes down by one level.
    pairs, treedef = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda x: x is not node
    )
    if len(pairs) == 1 and pairs[0][1] is node:
        return []
    names = [path_of(keypath) for keypath, _ in pairs]
    if isinstance(node, eqx.nn.State):
        data = treedef.node_data()
        markers = data[1] if data is not None else ()
        names = [_state_name(marker, name) for marker, name in zip(markers, names)]
    return [(name, child) for name, (_, child) in zip(names, pairs)]


def _state_name(marker: object, default: str) -> str:
    # `make_with_state` marks an entry by root class and key path:
    # "Sequential.layers[1].ema_state_index".
    if not isinstance(marker, str):
        return default
    dotted = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", marker)
    return dotted.partition(".")[2] or default


def parts_of(value: object) -> dict[str, Any] | None:
    """The parts of a list, tuple, dict, set or dataclass by name; `None` for anything
    else. Unlike a PyTree, a dict may have keys of any kinds."""
    if isinstance(value, dict):
        return {str(key): part for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return {str(i): part for i, part in enumerate(value)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return None


def static_fields(node: object) -> Iterator[tuple[str, Any]]:
    """The static fields of a module itself, with their values."""
    if not dataclasses.is_dataclass(node) or isinstance(node, type):
        return
    for field in dataclasses.fields(node):
        if field.metadata.get("static", False) and hasattr(node, field.name):
            yield field.name, getattr(node, field.name)


def leaves_with_paths(tree: PyTree) -> list[tuple[str, PyTree]]:
    """Every leaf with its path, in JAX's order."""
    found = []
    for keypath, leaf in jax.tree.leaves_with_path(tree, is_leaf=_is_state):
        path = path_of(keypath)
        if not _is_state(leaf):
            found.append((path, leaf))
            continue
        # Its entries are named after what they belong to, which JAX does not do.
        for name, child in children(leaf):
            for inner, x in leaves_with_paths(child):
                found.append((join(path, name, inner), x))
    return found


def _is_state(x: object) -> bool:
    return isinstance(x, eqx.nn.State)


def to_paths(tree: PyTree, is_leaf: Callable[[PyTree], bool]) -> dict[str, PyTree]:
    """`{path: leaf}` for each leaf that `is_leaf` accepts.

    Raises `ValueError` if two leaves have the same path (as `{"a": {"b": x}, "a.b": y}`
    does).
    """
    flat: dict[str, PyTree] = {}
    for path, leaf in leaves_with_paths(tree):
        if not is_leaf(leaf):
            continue
        if path in flat:
            raise ValueError(
                f"two leaves have the path {path!r}. Rename one, or its dict key."
            )
        flat[path] = leaf
    return flat


def to_arrays(tree: PyTree) -> dict[str, Any]:
    """Return the arrays of a tree as a flat `{path: array}`, in the tree's order.

    ```python
    sizes = {path: x.size for path, x in rx.to_arrays(model).items()}
    ```

    Raises `ValueError` if two leaves have the same path.
    """
    return to_paths(tree, is_array)


def buffer_paths(tree: PyTree) -> set[str]:
    """Paths of arrays that are not trained because the class of a module names them.

    The class lists their paths inside the module in a tuple `buffers`. NumPy arrays
    need no such entry, unless something turns them into JAX arrays.
    """
    found: set[str] = set()
    if isinstance(tree, eqx.Module):
        own = getattr(type(tree), "buffers", None)
        # Anything else of this name is the module's own.
        if isinstance(own, tuple):
            found.update(own)
    for name, child in children(tree):
        found |= {join(name, inner) for inner in buffer_paths(child)}
    return found


def from_arrays(tree: T, arrays: Mapping[str, AnyArray]) -> T:
    """Replace each array of `tree` by the array with the same path; the inverse of
    `to_arrays`.

    ```python
    arrays = rx.to_arrays(model)
    arrays["layers.1.bias"] = jnp.zeros_like(arrays["layers.1.bias"])
    model = rx.from_arrays(model, arrays)
    ```

    **Raises:**

    `ValueError` naming every path that is missing or unexpected, or whose array has a
    different shape or dtype.
    """
    own = to_arrays(tree)
    missing = []
    different = []
    for path, x in own.items():
        if path not in arrays:
            missing.append(f"missing: {path} {describe(x)}")
            continue
        new = arrays[path]
        if (x.shape, x.dtype) != (new.shape, new.dtype):
            different.append(f"{path}: expected {describe(x)}, got {describe(new)}")
    unexpected = [
        f"unexpected: {path} {describe(x)}"
        for path, x in arrays.items()
        if path not in own
    ]
    problems = [*missing, *unexpected, *different]
    if problems:
        listed = first_few(problems, most=20, separator="\n  ")
        raise ValueError(f"from_arrays: the arrays do not fit the tree.\n  {listed}")
    leaves = [
        arrays[path] if is_array(leaf) else leaf
        for path, leaf in leaves_with_paths(tree)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def by_path(tree: PyTree) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Convert a mask or labels over a model for optax, which sees the parameters as
    `{path: array}`.

    ```python
    kinds = rx.parameter_kinds(model)
    decayed = {path: kind == "matrix" for path, kind in kinds.items()}
    optimizer = optax.adamw(1e-3, mask=rx.by_path(decayed))
    ```

    Do not decide by the number of dims: the norms of stacked layers have two.
    [`parameter_kinds`][] knows them.

    **Arguments:**

    - `tree`: the mask or the labels, as a tree like the model or as a dict by path. A
        value in place of a whole part, such as a layer, applies to everything in that
        part. The tree may also have values for leaves that are not trained.

    **Returns:**

    A function of the parameters, for `optax.masked`, `optax.partition`, `mask=` and
    others. (It is a function because optax calls any mask that is callable, and most
    models are.)

    **Raises:**

    The function raises `ValueError` for a parameter that has no value in `tree`.
    """
    values = dict(leaves_with_paths(tree))

    def value_of(path: str) -> Any:
        owner = path
        while owner and owner not in values:
            owner = owner.rpartition(".")[0]
        if owner not in values:
            raise ValueError(
                f"by_path: the tree has no value for the parameter {path}."
            )
        return values[owner]

    return lambda params: {path: value_of(path) for path in params}


def cast(tree: T, dtype: DTypeLike) -> T:
    """Cast the floating arrays of `tree` to `dtype`; integers, booleans, keys and
    non-arrays stay as they are.

    So does an `eqx.nn.State`: the running statistics of BatchNorm move by a small part
    of themselves in each step, which 16 bits would round away.

    Use it inside a loss or predict function to compute in low precision over float32
    parameters: `model, batch = cast((model, batch), jnp.bfloat16)`. Cast the batch too:
    bfloat16 times float32 is float32.

    ```python
    def half_loss(model, batch, key):
        model, batch = rx.cast((model, batch), jnp.bfloat16)
        return loss_fn(model, batch, key)
    ```
    """

    def one(x: PyTree) -> PyTree:
        if _is_state(x) or not is_array(x):
            return x
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if isinstance(x, jax.ShapeDtypeStruct):
            return x.update(dtype=dtype, weak_type=False)
        return x.astype(dtype)

    return jax.tree.map(one, tree, is_leaf=_is_state)
