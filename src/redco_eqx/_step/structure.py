"""What a tree is besides its arrays, as one hashable value that compares by definition.

Two models built alike have equal structures, so that their states can be mapped over together and share
one compiled step. Equality of plain PyTree definitions cannot do that: it compares functions by identity
and takes `1`, `1.0` and `True` for the same.
"""

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from redco_eqx._tree import children, is_array, join, leaves_with_paths


class _Identity:
    """Equal only to a wrapper of the very same object (which it keeps alive)."""

    def __init__(self, x: Any):
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.x is other.x

    def __hash__(self) -> int:
        return id(self.x)


def fingerprint(x: Any, _open: tuple[int, ...] = ()) -> Any:
    """A hashable value that is equal for two objects with the same definition.

    Numbers compare with their type, NaN equals itself, functions by code, defaults and what they close
    over; arrays and unhashable objects by identity.
    """
    if id(x) in _open:
        return "recursion"
    of = functools.partial(fingerprint, _open=(*_open, id(x)))
    kind = type(x)
    if isinstance(x, float):
        return kind, float.hex(x)
    if isinstance(x, complex):
        return kind, float.hex(x.real), float.hex(x.imag)
    if x is None or isinstance(x, bool | int | str | bytes | type):
        return kind, x
    if is_array(x):
        return (kind, str(x.dtype), x.tobytes()) if isinstance(x, np.generic) else _Identity(x)
    if isinstance(x, jax.tree_util.PyTreeDef):
        data = x.node_data()
        if data is None:
            return "leaf" if x.num_leaves else "none"
        return data[0], of(data[1]), *(of(child) for child in x.children())
    if isinstance(x, types.FunctionType):
        cells = tuple(_cell(cell) for cell in x.__closure__ or ())
        return (
            (kind, x.__module__, x.__qualname__, x.__code__.co_filename, x.__code__)
            + (of(x.__defaults__), of(x.__kwdefaults__))
            + tuple(of(cell) for cell in cells)
        )
    if isinstance(x, types.MethodType):
        return kind, of(x.__func__), of(x.__self__)
    if isinstance(x, functools.partial):
        return kind, of(x.func), of(x.args), of(x.keywords)
    if isinstance(x, tuple | list):
        return kind, *(of(item) for item in x)
    if isinstance(x, dict):
        return kind, *((of(key), of(value)) for key, value in x.items())
    if isinstance(x, set | frozenset):
        return kind, frozenset(of(item) for item in x)
    plain = kind.__eq__ is object.__eq__ and kind.__init__ is object.__init__
    if plain and getattr(x, "__dict__", None) == {}:
        return kind  # a marker without any content, such as the one that `eqx.nn.Shared` leaves
    leaves, treedef = jax.tree.flatten(x)
    if not (len(leaves) == 1 and leaves[0] is x):
        return kind, of(treedef), *(of(leaf) for leaf in leaves)
    try:
        hash(x)
    except TypeError:
        return _Identity(x)
    if dataclasses.is_dataclass(x):
        return kind, *((f.name, of(getattr(x, f.name, None))) for f in dataclasses.fields(x) if f.compare)
    return kind, x


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


class Structure:
    """A tree with its arrays taken out: `Structure(tree).build(to_arrays(tree))` is `tree`."""

    def __init__(self, tree: PyTree):
        pairs = leaves_with_paths(tree)
        self._treedef = jax.tree.structure(tree)
        self._paths = tuple(path if is_array(leaf) else None for path, leaf in pairs)
        self._leaves = tuple(None if is_array(leaf) else leaf for _, leaf in pairs)

    def build(self, arrays: Mapping[str, Any]) -> PyTree:
        """The tree with `arrays[path]` at each path."""
        leaves = [leaf if path is None else arrays[path] for path, leaf in zip(self._paths, self._leaves)]
        return jax.tree.unflatten(self._treedef, leaves)

    @functools.cached_property
    def _fingerprint(self) -> Any:
        return self._paths, fingerprint(self._treedef), fingerprint(self._leaves)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._fingerprint)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self._hash != other._hash:
            return False
        return self._fingerprint == other._fingerprint

    def __repr__(self) -> str:
        return f"Structure({sum(path is not None for path in self._paths)} arrays)"


def check_static(tree: PyTree, path: str = "") -> None:
    """Refuses, by path, arrays and unhashable values in static fields.

    Raises `ValueError`: such a field would be compared by value on each call, or could change unseen.
    """
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            if not field.metadata.get("static", False) or not hasattr(tree, field.name):
                continue
            value, where = getattr(tree, field.name), join(path, field.name)
            if any(is_array(leaf) for leaf in jax.tree.leaves(value)):
                raise ValueError(
                    f"{where} is a static field that holds an array. Arrays belong in ordinary fields "
                    "(jax.lax.stop_gradient, or a NumPy array, keeps one from being trained)."
                )
            try:
                hash(value)
            except TypeError:
                raise ValueError(
                    f"{where} is a static field of type {type(value).__name__}, which is not hashable. "
                    "Use a tuple for a list, and a frozen dataclass for a dict."
                ) from None
    for name, child in children(tree):
        check_static(child, join(path, name))
