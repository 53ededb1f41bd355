"""Compiled programs, kept from call to call as long as what they were traced from is the same and there."""

import dataclasses
import dis
import functools
import hashlib
import pathlib
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

# What functions capture: the values outside of their arguments that a trace of them would read.
#
# A compiled step may stand in for a new trace only while all of this is as it was. What cannot be compared by
# value is compared by identity, and held weakly: a kept step must not keep a user's arrays.


# Beyond so many values to compare (a table of words, say), compiling again is the better choice.
_MOST_NAMES = 20_000

# What is installed does not change while a program runs: its global names are not looked at.
_INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(pathlib.Path(jax.__file__).parents[1])}  # perhaps of a user alone, or of another environment
    | {str(pathlib.Path(__file__).parents[1]), "<frozen"}
)


class Same:
    """Equal only to another one of the very same object, while that is alive."""

    def __init__(self, x: object, on_death: Callable[[], None]):
        self._id = id(x)
        try:
            self._ref: Callable[[], object] = weakref.ref(x, lambda _: on_death())
        except TypeError:  # a kind of object that cannot be referred to weakly
            self._ref = lambda: x

    @property
    def is_alive(self) -> bool:
        """Whether the object is still there."""
        return self._ref() is not None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Same) or self._id != other._id:
            return False
        x = self._ref()
        return x is not None and x is other._ref()

    def __hash__(self) -> int:
        return self._id


class Captured:
    """What some functions capture, at one time.

    - `variables`: the value of each variable, default, attribute or entry, by where it was found; equal for
        what would be traced alike. Functions compare by their code and what they capture in turn.
    - `objects`: all that is compared by identity.
    - `has_tracer`: whether there is a value of a trace among it, which may be over.
    """

    def __init__(self, functions: tuple[Any, ...], on_death: Callable[[], None] = lambda: None):
        """Raises `OverflowError` if they capture more than is worth comparing.

        `on_death` is called when an object that is compared by identity has been freed.
        """
        self.variables: dict[str, Hashable] = {}
        self.objects: list[Same] = []
        self.has_tracer = False
        self._on_death = on_death
        self._seen: dict[int, tuple[int, Any]] = {}  # with the object, so that no id is used twice
        self._num_values = 0
        for i, function in enumerate(functions):
            self._variable(str(i), function)
        self._seen.clear()

    def _variable(self, path: str, x: Any) -> None:
        self.variables[path] = self._value(path, x)

    def _value(self, path: str, x: Any) -> Hashable:
        self._num_values += 1
        if self._num_values > _MOST_NAMES:
            raise OverflowError(f"{path} and what was before it hold more than {_MOST_NAMES} values")
        if x is None or isinstance(x, bool | int | str | bytes):
            return type(x), x
        if isinstance(x, float | complex):
            return type(x), repr(x)  # NaN is like NaN, and 0.0 not like -0.0
        self.has_tracer = self.has_tracer or isinstance(x, Tracer)
        if isinstance(x, jax.Array | type | types.ModuleType | types.BuiltinFunctionType):
            return self._same(x)
        if isinstance(x, np.ndarray | np.generic) and x.dtype != object:
            digest = hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()
            return type(x), x.shape, str(x.dtype), digest
        if id(x) in self._seen:
            return "seen", self._seen[id(x)][0]
        self._seen[id(x)] = len(self._seen), x
        return self._container(path, x)

    def _container(self, path: str, x: Any) -> Hashable:
        if isinstance(x, types.FunctionType):
            return self._function(path, x)
        if isinstance(x, types.MethodType):
            return self._values(path, (x.__func__, x.__self__))
        if isinstance(x, functools.partial):
            return self._values(path, (x.func, x.args, x.keywords))
        if isinstance(x, list | tuple):
            return self._same(type(x)), *self._values(path, x)
        if isinstance(x, dict):
            return self._same(type(x)), self._values(f"{path}:", x), self._values(path, x.values())
        if isinstance(x, set | frozenset):
            return self._same(type(x)), frozenset(self._values(path, x))
        if isinstance(getattr(x, "__wrapped__", None), types.FunctionType):  # of `jax.jit`
            return self._same(type(x)), self._value(path, x.__wrapped__)
        if not getattr(x, "__dict__", None):
            return self._same(x)
        if callable(x):
            self._variable(f"{path}.__call__", type(x).__call__)
        return self._same(type(x)), self._value(path, vars(x))

    def _values(self, path: str, items: Iterable[Any]) -> tuple[Hashable, ...]:
        """Of each item, under a path of its own: what two functions capture must not take one name."""
        return tuple(self._value(f"{path}[{i}]", x) for i, x in enumerate(items))

    def _function(self, path: str, function: types.FunctionType) -> Hashable:
        code = function.__code__
        self._variable(f"{path}.__defaults__", (function.__defaults__, function.__kwdefaults__))
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            self._variable(f"{path}.{name}", _content(cell))
        if not code.co_filename.startswith(_INSTALLED):
            for name, x in _globals(function):
                self._variable(f"{path}:{name}", x)
        return self._same(code)

    def _same(self, x: object) -> Same:
        same = Same(x, self._on_death)
        self.objects.append(same)
        return same


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The global variables that a function reads, and the attributes that it may read of modules among them."""
    names, attributes = _names(function.__code__)
    for name in sorted(names & function.__globals__.keys()):
        x = function.__globals__[name]
        yield name, x
        if isinstance(x, types.ModuleType) and not str(getattr(x, "__file__", None)).startswith(_INSTALLED):
            for attribute in sorted(attributes & vars(x).keys()):
                yield f"{name}.{attribute}", vars(x)[attribute]


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The names of globals and of attributes that a code reads, that of inner functions included."""
    names: set[str] = set()
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            names |= inner[0]
            attributes |= inner[1]
    return names, attributes


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
