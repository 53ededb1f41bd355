"""Compiled programs, kept from call to call as long as what they were traced from is the same and there."""

import collections
import contextlib
import hashlib
import pathlib
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from redco_eqx._step.state import PARTS, closure

# What is installed does not change while a program runs: its global names and its classes are not looked into.
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(pathlib.Path(jax.__file__).parents[1])}  # perhaps of a user alone, or of another environment
    | {str(pathlib.Path(__file__).parents[1])}
)

# Beyond so many values to compare (a table of words, say), compiling again is the better choice.
_MOST_VALUES = 20_000

# Enough for a few tasks that take turns at training, evaluation and prediction.
_MOST = 16

T = TypeVar("T")

# By what a program is for, its value, and what must stay alive; the one that was used last comes last.
_entries: collections.OrderedDict[Hashable, tuple[Any, list[Any]]] = collections.OrderedDict()


def kept(functions: tuple[Any, ...], key: Hashable, make: Callable[[], T]) -> T:
    """Return what `make()` returned before for the same functions and key, or returns now.

    Functions are the same if they have the same code (that of one `def`, which is not run again in a notebook)
    and capture the same: what their closures, defaults and attributes hold, the globals that their code names,
    and the functions, classes and modules among all of that in turn. Numbers, text and NumPy arrays compare by
    value; arrays of JAX, and what cannot be looked into, by identity, and weakly: a program is let go with
    them. What changes while it is traced, such as a list of calls, is other than before, and compiles again.
    The value must not refer to the functions.
    """
    captured = captured_by(functions)
    if captured is None:
        return make()
    content, objects = captured
    # JAX's options change what is traced and compiled.
    options = tuple(repr(getattr(jax.config, name, None)) for name in jax.config.values)
    full = key, content, options, jax.sharding.get_abstract_mesh()
    if full not in _entries:
        value = make()
        _entries[full] = value, [_held(x, full) for x in objects]
        if len(_entries) > _MOST:
            _entries.popitem(last=False)
        return value
    _entries.move_to_end(full)
    return _entries[full][0]


def signature(tree: PyTree) -> Hashable:
    """The arguments that a compiled program asks for: structure, shapes, dtypes and shardings."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)


def captured_by(functions: tuple[Any, ...]) -> tuple[Hashable, list[Any]] | None:
    """A key, equal for functions that would be traced alike, and all objects that stand in it by their `id`.

    `None` if they capture too much to compare, or a value of a trace, which may be over.
    """
    objects: list[Any] = []
    seen: dict[int, tuple[int, Any]] = {}  # with the object, so that no `id` is used twice
    num_values = 0

    def key_of(x: Any) -> Hashable:
        nonlocal num_values
        num_values += 1
        if isinstance(x, Tracer) or num_values > _MOST_VALUES:
            raise _NotComparableError
        if x is None or isinstance(x, bool | int | str | bytes):
            return type(x), x
        if isinstance(x, float | complex):
            return type(x), repr(x)  # NaN is like NaN, and 0.0 not like -0.0
        if isinstance(x, np.ndarray | np.generic) and x.dtype != object:
            digest = hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()
            return type(x), x.shape, str(x.dtype), digest
        if id(x) in seen:
            return "seen", seen[id(x)][0]
        seen[id(x)] = len(seen), x
        parts = _parts(x)
        objects.extend([] if parts else [x])
        return None if parts else id(x), key_of(type(x)), tuple(map(key_of, parts))

    with contextlib.suppress(_NotComparableError):
        return key_of(functions), objects
    return None


class _NotComparableError(Exception):
    """There are too many values to compare, or one is of a trace."""


def _parts(x: Any) -> list[Any]:
    """The values that `x` holds; none for what is compared by identity."""
    is_opaque = isinstance(x, jax.Array | types.ModuleType | types.CodeType)
    if is_opaque or (isinstance(x, type) and _is_installed(x.__module__)):
        return []
    parts = [y for kind, contents in _CONTENTS.items() if isinstance(x, kind) for y in (kind, *contents(x))]
    parts += [getattr(x, name, None) for name in getattr(type(x), "__slots__", ())]
    attributes = getattr(x, "__dict__", {}).items()
    return parts + [item for item in attributes if item[0] not in ("__dict__", "__weakref__")]


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    """The code of a function, and what it may read: closure, defaults, and globals by the names in the code."""
    yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
    names, scopes = _names(function.__code__), [closure(function)]
    if not _is_installed(function.__globals__.get("__name__", "")):
        scopes += [function.__globals__, sys.modules]
    for scope in scopes:
        for name in sorted(names & scope.keys()):
            x = scope[name]
            yield name, x
            # Of a module, what has one of the names, too: an attribute is read by its name.
            if isinstance(x, types.ModuleType) and not _is_installed(x.__name__):
                scopes += [] if any(vars(x) is other for other in scopes) else [vars(x)]


def _names(code: types.CodeType) -> set[str]:
    """The names of all but local variables in a code, and of attributes: with those of inner functions."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return {*code.co_freevars, *code.co_names}.union(*inner)


def _held(x: Any, entry: Hashable) -> Any:
    """`x`, weakly if it is of a kind that can be: then the entry goes with it."""
    is_weak = type(x).__weakrefoffset__ != 0
    return weakref.ref(x, lambda _: _entries.pop(entry, None)) if is_weak else x


_CONTENTS: dict[type, Callable[[Any], Any]] = {
    types.FunctionType: _of_function,
    **PARTS,
    property: lambda x: (x.fget,),
    type: lambda x: x.__bases__,
    np.ndarray: lambda x: x.tolist(),  # of objects
    **dict.fromkeys((set, frozenset, bytearray, collections.deque), iter),
}


def _is_installed(module: str) -> bool:
    file = str(getattr(sys.modules.get(module), "__file__", None))
    return module in sys.builtin_module_names or file.startswith(_INSTALLED)
