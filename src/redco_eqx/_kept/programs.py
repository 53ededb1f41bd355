"""Compiled programs, kept from call to call as long as what they were traced from is the same and there."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
from jaxtyping import PyTree

from redco_eqx._kept.captured import Captured

T = TypeVar("T")

# Enough for a few tasks that take turns at training, evaluation and prediction.
_MOST = 16


@dataclasses.dataclass(frozen=True)
class _Entry:
    key: Hashable
    captured: Captured
    variables: dict[str, Hashable]
    value: Any


_entries: list[_Entry] = []  # the one that was used last comes last


def kept(functions: tuple[Any, ...], key: Hashable, make: Callable[[], T]) -> T:
    """What `make()` returned before for the same functions and key, or returns now.

    Functions are the same if they have the same code, and capture the same: what their closures, defaults and
    global variables hold, and the functions that they call in turn. (Arrays compare by identity.) What
    `make` itself changes among that, such as a counter of traces, is not looked at. The value must not refer
    to the functions; it is let go when an object that they captured is.
    """
    try:
        before = Captured(functions, on_death=_let_go)
    except OverflowError:
        return make()
    key = key, _surroundings()
    for entry in reversed(_entries):
        if entry.key == key and all(before.variables.get(n) == x for n, x in entry.variables.items()):
            _entries.remove(entry)
            _entries.append(entry)
            return entry.value
    value = make()
    after = Captured(functions).variables
    stable = {name: x for name, x in before.variables.items() if after.get(name) == x}
    _entries.append(_Entry(key, before, stable, value))
    del _entries[:-_MOST]
    return value


def signature(tree: PyTree) -> Hashable:
    """What a compiled program asks of its arguments: structure, shapes, dtypes and shardings."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)


def _let_go() -> None:
    _entries[:] = [entry for entry in _entries if all(same.is_alive for same in entry.captured.objects)]


def _surroundings() -> Hashable:
    """JAX's options, which change what is traced and compiled."""
    options = tuple(repr(getattr(jax.config, name, None)) for name in jax.config.values)
    return options, jax.sharding.get_abstract_mesh()
