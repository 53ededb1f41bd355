"""Static fields: what is no array in a model, compared by value. Lists, dicts and other
values that could change are copied."""

import copy
import dataclasses
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from redco_eqx._base.tree import children, is_array, join, parts_of, static_fields

T = TypeVar("T")


def check_static(tree: PyTree, path: str = "") -> None:
    """Raise `ValueError`, naming the path, if a static field has an array, or a value
    that can be neither hashed nor compared with a copy of it.

    An array would be compared by value on each call. Without a value to compare, a
    change would not be noticed.
    """
    for name, value in static_fields(tree):
        where = join(path, name)
        _check_parts(where, value)
        if not _is_hashable(value) and not _equals_copy(value):
            raise ValueError(
                f"{where} is a static field of type {type(value).__name__}, which is "
                "not hashable, and no copy of it is equal to it and written alike. So "
                "no step could tell whether it changed. Hold plain values in lists, "
                "tuples, dicts, sets or dataclasses; or give its class an __eq__ and a "
                "__repr__ by value, or a __hash__."
            )
    for name, child in children(tree):
        check_static(child, join(path, name))


def with_own_static(tree: T) -> T:
    """A tree like this one, with a copy of each value of a static field that cannot be
    hashed. It is `tree` itself if there are none."""
    pairs = children(tree)
    parts = [with_own_static(child) for _, child in pairs]
    values = {
        name: _copied(value)
        for name, value in static_fields(tree)
        if not _is_hashable(value)
    }
    is_same = all(part is child for part, (_, child) in zip(parts, pairs))
    if (is_same and not values) or jax.tree_util.all_leaves([tree]):
        return tree
    node = jax.tree.structure(tree, is_leaf=lambda x: x is not tree)
    own = jax.tree.unflatten(node, parts)
    for name, value in values.items():
        object.__setattr__(own, name, value)  # a module is frozen
    return own


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _copied(value: Any) -> Any:
    """A copy of a value that cannot be hashed. What can be hashed is the same object in
    the copy, because some of it (a function, for example) equals only itself."""
    if _is_hashable(value):
        return value
    if type(value) is tuple:
        return tuple(map(_copied, value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*map(_copied, value))
    if isinstance(value, list):
        own = copy.copy(value)
        own[:] = map(_copied, value)
        return own
    if isinstance(value, dict):
        own = copy.copy(value)
        for key, part in value.items():
            own[key] = _copied(part)  # `update` of a Counter adds
        return own
    if isinstance(value, set):
        own = copy.copy(value)
        # Equal sets may have different orders, in which they would be written.
        own.clear()
        own.update(sorted(value, key=repr))
        return own
    if dataclasses.is_dataclass(value):
        own = copy.copy(value)
        for name, part in (parts_of(value) or {}).items():
            object.__setattr__(own, name, _copied(part))
        return own
    return copy.deepcopy(value)


def _equals_copy(value: Any) -> bool:
    try:
        own = _copied(value)
        # Compare the texts of two copies, because only those of sets have an order.
        again = _copied(own)
        return bool(own == value) and bool(again == own) and repr(again) == repr(own)
    except Exception:  # the methods of any class, which may raise anything
        return False


def _check_parts(
    where: str, value: Any, inner: str = "", above: tuple[int, ...] = ()
) -> None:
    """Raise `ValueError` if a value holds an array, or a container that holds itself.
    `inner` is the path of the value in the static field, and `above` has the ids of
    those that hold it."""
    parts = parts_of(value)
    if parts is None or (_is_hashable(value) and not isinstance(value, tuple)):
        if any(map(is_array, jax.tree.leaves(value))):
            place = f" at {inner}" if inner else ""
            raise ValueError(
                f"{where} is a static field that holds an array{place}. Arrays belong "
                "in ordinary fields (jax.lax.stop_gradient, or a NumPy array, keeps "
                "one from being trained)."
            )
        return
    if id(value) in above:
        raise ValueError(
            f"{where} is a static field with a {type(value).__name__} that holds "
            f"itself at {inner}, so it has no value to compare. Take it out of itself."
        )
    for name, part in parts.items():
        _check_parts(where, part, join(inner, name), (*above, id(value)))
