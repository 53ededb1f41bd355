"""Functions in a model that hold arrays: no rule, optimizer or checkpoint sees
these."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jax.core import Tracer
from jaxtyping import PyTree

from redco_eqx._base.tree import (
    children,
    describe,
    is_array,
    is_trainable,
    join,
    parts_of,
    static_fields,
)


def check_captured(where: str, tree: PyTree) -> None:
    """Raise `ValueError`, naming the path, if a function in `tree` holds an array that
    could be trained.

    Such an array would stay as it is, whatever the optimizer does. If it belongs to a
    trace, as in `init_model`, JAX would fail later without a name. NumPy arrays are
    constants, and may be held.
    """
    for path, value in _functions_in(tree):
        found = first_captured(value)
        if found is None:
            continue
        name, x = found
        raise ValueError(
            f"{where}: {path or 'the model'} is a function that holds the array "
            f"{name}, {describe(x)}. A step cannot train it, and no layout or "
            "checkpoint has it. Make what it belongs to a field of the module, as in "
            "self.linear = eqx.nn.Linear(...), and wrap it where it is called, as in "
            "jax.vmap(self.linear)(x). If it is a constant, make it a NumPy array."
        )


def _functions_in(tree: PyTree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf and every value of a static field that can be called, with its path;
    also those in a list, dict or dataclass in a static field."""
    for name, value in static_fields(tree):
        yield from _callables_in(value, join(path, name))
    inner = children(tree)
    if not inner and callable(tree):
        yield path, tree
    for name, child in inner:
        yield from _functions_in(child, join(path, name))


def _callables_in(
    value: Any, path: str, above: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    if callable(value):
        yield path, value
    elif id(value) not in above:  # a list may hold itself
        for name, part in (parts_of(value) or {}).items():
            yield from _callables_in(part, join(path, name), (*above, id(value)))


def first_captured(function: Any) -> tuple[str, Any] | None:
    """The first array that a function holds and that could be trained, or that belongs
    to a trace: its path in the function, and the array."""
    return _first_held(function, lambda x: isinstance(x, Tracer) or is_trainable(x))


def first_module(function: Any) -> tuple[str, eqx.Module] | None:
    """The first module that a function holds: its path in the function, and the
    module."""
    return _first_held(function, lambda x: isinstance(x, eqx.Module))


def _first_held(
    function: Any, is_wanted: Callable[[Any], bool]
) -> tuple[str, Any] | None:
    """The first wanted value that a function holds: its path in the function, and the
    value.

    The search looks into closures, defaults, `functools.partial`, bound methods, and
    functions that wrap another (of `jax.vmap` and `jax.jit`), but not into global
    variables.
    """
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("", function)]
    while left and len(seen) < 1000:  # an object may know the whole program
        name, x = left.pop()
        if is_wanted(x):
            return name, x
        if id(x) not in seen:
            seen.add(id(x))
            left += [(join(name, inner), value) for inner, value in _held_by(x)]
    return None


def _held_by(x: Any) -> list[tuple[str, Any]]:
    """The values that an object holds, by name. The name of a function that it wraps is
    empty."""
    if isinstance(x, type | types.ModuleType) or is_array(x):
        return []
    if isinstance(x, functools.partial):
        arguments = [(str(i), value) for i, value in enumerate(x.args)]
        return [*arguments, *x.keywords.items(), ("", x.func)]
    if isinstance(x, types.MethodType):
        return [("", x.__func__), ("self", x.__self__)]
    if isinstance(x, inspect.BoundArguments):  # of `optax.inject_hyperparams`
        return list(x.arguments.items())
    if not jax.tree_util.all_leaves([x]):
        return children(x)
    held = []
    if isinstance(x, types.FunctionType):
        held += enumerate(x.__defaults__ or ())
        held += (x.__kwdefaults__ or {}).items()
        held += zip(x.__code__.co_freevars, map(_content_of, x.__closure__ or ()))
    held += getattr(x, "__dict__", {}).items()  # of an object that can be called
    held = [(str(name), value) for name, value in held if name != "__wrapped__"]
    return [*held, ("", getattr(x, "__wrapped__", None))]


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None
