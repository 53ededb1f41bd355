"""Functions in a model that hold arrays: no rule, optimizer or checkpoint sees
these."""

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

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


class Captured(NamedTuple):
    """A value that a function holds.

    - `name`: its path in the function.
    - `owner`: the innermost object that it is an attribute of, such as a module.
      `None` if a closure, a default or an argument of `functools.partial` has it.
    """

    name: str
    value: Any
    owner: Any = None


def check_captured(where: str, tree: PyTree) -> list[str]:
    """Refuse functions in `tree` with arrays that were meant to be trained, and return
    the paths of those with constants.

    An array that a function holds stays as it is, whatever the optimizer does. The
    array of a layer was surely meant to be trained. A function may hold an array by
    itself as a constant, as in the models of flowjax. NumPy arrays always are
    constants.

    Raises `ValueError`, with the path, for an array that belongs to an object, and for
    one that belongs to a trace, as in `init_model`: there JAX would fail later without
    a name.
    """
    constants = []
    for path, value in _functions_in(tree):
        held = first_captured(value)
        if held is None:
            continue
        said = (
            f"{where}: {path or 'the model'} is a function that holds the array "
            f"{held.name}, {describe(held.value)}"
        )
        field = (
            "Make what it belongs to a field of the module, as in self.linear = "
            "eqx.nn.Linear(...), and wrap it where it is called, as in "
            "jax.vmap(self.linear)(x). If it is a constant, make it a NumPy array."
        )
        if held.owner is not None:
            raise ValueError(
                f"{said}. A step cannot train it, and no layout or checkpoint has it. "
                f"{field}"
            )
        if isinstance(held.value, Tracer):
            raise ValueError(
                f"{said}, of a trace, which no one can use later. {field} If the "
                "function is not yours, make the model outside of init_model and jit, "
                "and place it by eqx.filter_shard(model, shard_rules(model, mesh))."
            )
        constants.append(path)
    return constants


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


def first_captured(function: Any) -> Captured | None:
    """The first array that a function holds and that could be trained, or that belongs
    to a trace. One that belongs to an object comes before others."""

    def is_wanted(held: Captured) -> bool:
        return isinstance(held.value, Tracer) or is_trainable(held.value)

    found = list(filter(is_wanted, _held(function)))
    of_objects = [held for held in found if held.owner is not None]
    return next(iter([*of_objects, *found]), None)


def first_module(function: Any) -> Captured | None:
    """The first module that a function holds."""
    modules = (held for held in _held(function) if isinstance(held.value, eqx.Module))
    return next(modules, None)


def _held(function: Any) -> Iterator[Captured]:
    """Every value that a function holds.

    The search looks into closures, defaults, `functools.partial`, bound methods, and
    functions that wrap another (of `jax.vmap` and `jax.jit`), but not into global
    variables.
    """
    seen: set[int] = set()
    left = [Captured("", function)]
    while left and len(seen) < 1000:  # an object may know the whole program
        held = left.pop()
        yield held
        if id(held.value) not in seen:
            seen.add(id(held.value))
            owner = held.value if _has_attributes(held.value) else held.owner
            left += [
                Captured(join(held.name, inner), value, owner)
                for inner, value in _held_by(held.value)
            ]


def _has_attributes(x: Any) -> bool:
    """Return false for functions and their wrappers, and for containers."""
    is_wrapper = hasattr(x, "__wrapped__") or isinstance(
        x, functools.partial | types.FunctionType | types.MethodType
    )
    is_container = isinstance(x, list | tuple | dict | inspect.BoundArguments)
    return not (is_wrapper or is_container)


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
