"""Keep compiled programs from call to call, as long as the objects that they were traced from stay the same."""

import array
import collections
import contextlib
import functools
import hashlib
import itertools
import pathlib
import sys
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

# Installed modules do not change while a program runs, so their global names and classes are not compared.
_INSTALLED = tuple(str(pathlib.Path(x).parents[1]) for x in (collections.__file__, jax.__file__, __file__))

# With more values than this to compare (in a table of words, for example), compiling again is better.
_MOST_VALUES = 20_000


class NotComparableError(Exception):
    """There are too many values to compare, or one belongs to a trace, which may have ended."""


def definition(x: Any, *, deep: bool = False) -> tuple[Hashable, list[Any]]:
    """A key that is equal for values with the same definition, and the objects that it compares by `id`.

    Numbers are compared with their types, and NaN equals itself. Functions are compared by code, defaults,
    attributes and the values that they close over, and NumPy arrays and other objects by their contents. Opaque
    objects, such as JAX arrays, are compared by identity: the key is valid only as long as they exist.

    - `deep`: also compares the other values that functions may read: the globals that their code names, and in
        turn the functions, classes and modules among those. Raises `NotComparableError`.
    """
    objects: list[Any] = []
    seen: dict[int, tuple[int, Any]] = {}  # keeps the object alive, so that no `id` is used twice
    numbers = itertools.count()

    def key_of(x: Any) -> Hashable:
        kind = type(x)
        if deep and (isinstance(x, Tracer) or next(numbers) > _MOST_VALUES):
            raise NotComparableError
        if x is None or isinstance(x, bool | int | str | bytes | types.CodeType):
            return kind, x
        if isinstance(x, float | complex):
            return kind, repr(x)  # NaN equals NaN, and 0.0 differs from -0.0
        if isinstance(x, np.ndarray | np.generic) and x.dtype != object:
            digest = hashlib.blake2b(np.ascontiguousarray(x).tobytes(), digest_size=16).digest()
            return kind, x.shape, str(x.dtype), digest
        if isinstance(x, type) and (not deep or _is_installed(x.__module__)):
            return kind, x
        if id(x) in seen:
            return "seen", seen[id(x)][0]
        seen[id(x)] = len(seen), x
        parts = _parts(x, deep)
        alone = None if parts else _alone(x)
        objects.extend([x] if alone == id(x) else [])
        key = key_of(kind), alone, tuple(map(key_of, parts))
        if not deep:  # then a shared object equals a separate one
            del seen[id(x)]
        return key

    return key_of(x), objects


def _alone(x: Any) -> Hashable:
    """The key of an object without parts: the object itself if it defines equality, `None` for a marker, or its
    `id`."""
    kind = type(x)
    if kind.__eq__ is not object.__eq__ and not isinstance(x, jax.Array):
        # A weak reference has the hash of its object, which may have none, and a writable memory view has none.
        with contextlib.suppress(TypeError, ValueError):
            hash(x)
            return x
    is_marker = getattr(x, "__dict__", None) == {} and kind.__init__ is object.__init__
    return None if is_marker else id(x)  # `eqx.nn.Shared` leaves such a marker


def _parts(x: Any, deep: bool) -> list[Any]:
    """The values inside `x`."""
    if isinstance(x, jax.Array | types.ModuleType):
        return []
    parts = list(_of_function(x, deep)) if isinstance(x, types.FunctionType) else []
    for kind, contents in _CONTENTS.items():
        parts += [kind, *contents(x)] if isinstance(x, kind) else []
    # The slots of base classes, too, under the names that Python gives to private ones.
    own = (item for kind in type(x).__mro__ if "__slots__" in vars(kind) for item in vars(kind).items())
    parts += [getattr(x, name, None) for name, y in own if isinstance(y, types.MemberDescriptorType)]
    attributes = getattr(x, "__dict__", {}).items()
    return parts + [item for item in attributes if item[0] not in ("__dict__", "__weakref__")]


def _of_function(function: types.FunctionType, deep: bool) -> Iterator[Any]:
    """The code of a function and the values that it may read: defaults, closure, globals named in the code."""
    code, cells = function.__code__, {}
    yield from (code, code.co_filename, function.__defaults__, function.__kwdefaults__)
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # the cell may not be filled yet
            cells[name] = cell.cell_contents
    names, scopes = _names(code), [cells]
    if deep and not _is_installed(function.__globals__.get("__name__", "")):
        scopes += [function.__globals__, sys.modules]
    for scope in scopes:
        for name in sorted(names & scope.keys()):
            x = scope[name]
            yield name, x
            # Add the attributes of a module with one of these names, because code reads attributes by name.
            if deep and isinstance(x, types.ModuleType) and not _is_installed(x.__name__):
                scopes += [] if any(vars(x) is other for other in scopes) else [vars(x)]


def _names(code: types.CodeType) -> set[str]:
    """The names of attributes and of non-local variables in a code object and in its inner functions."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, types.CodeType)]
    return {*code.co_freevars, *code.co_names}.union(*inner)


_CONTENTS: dict[Any, Callable[[Any], Any]] = {
    types.MethodType: lambda x: (x.__func__, x.__self__),
    functools.partial: lambda x: (x.func, x.args, x.keywords),
    jax.tree_util.PyTreeDef: lambda x: (x.node_data(), x.num_leaves, *x.children()),
    property: lambda x: (x.fget,),
    **dict.fromkeys((staticmethod, classmethod), lambda x: (x.__func__,)),
    type: lambda x: x.__bases__,
    np.ndarray: lambda x: x.tolist(),  # an array of objects
    **dict.fromkeys((tuple, list, set, frozenset, bytearray, array.array, collections.deque), iter),
    **dict.fromkeys((dict, types.MappingProxyType), lambda x: x.items()),
}
"""The values that make up objects of each kind, in order."""


def _is_installed(module: str) -> bool:
    file = str(getattr(sys.modules.get(module), "__file__", None))
    return module in sys.builtin_module_names or file.startswith(_INSTALLED)


# Keeping compiled programs from call to call.

# Enough for a few tasks that alternate training, evaluation and prediction.
_MOST = 16

T = TypeVar("T")

# For each key, the value and the objects that must stay alive. The most recently used entry comes last.
_entries: collections.OrderedDict[Hashable, tuple[Any, list[Any]]] = collections.OrderedDict()


def kept(functions: tuple[Any, ...], key: Hashable, make: Callable[[], T]) -> T:
    """Return the earlier value of `make()` for the same functions and key, or call it now.

    Functions are the same if they have the same code and capture the same values: those in their closures,
    defaults and attributes, the globals that their code names, and in turn the functions, classes and modules
    among all of these. Numbers, text and NumPy arrays are compared by value. JAX arrays and opaque objects are
    compared by identity, through weak references, so the program is dropped when they are. If an object changes
    while it is traced, such as a list of calls, the program is compiled again. The value must not refer to the
    functions.
    """
    captured = captured_by(functions)
    if captured is None:
        return make()
    content, objects = captured
    # JAX's options affect the traced and compiled program.
    options = tuple(repr(getattr(jax.config, name, None)) for name in jax.config.values)
    full = key, content, options, jax.sharding.get_abstract_mesh()
    if full not in _entries:
        _entries[full] = make(), [_held(x, full) for x in objects]
        if len(_entries) > _MOST:
            _entries.popitem(last=False)
    _entries.move_to_end(full)
    return _entries[full][0]


def signature(tree: PyTree) -> Hashable:
    """The signature of a compiled program: structure, shapes, dtypes and shardings of its arguments."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)


def captured_by(values: tuple[Any, ...]) -> tuple[Hashable, list[Any]] | None:
    """The `definition` of values, with everything that functions among them may read; `None` if there is
    none."""
    with contextlib.suppress(NotComparableError):
        return definition(values, deep=True)
    return None


def _held(x: Any, entry: Hashable) -> Any:
    """A weak reference to `x`, which removes the entry when `x` is dropped, or `x` itself if it allows none."""
    is_weak = type(x).__weakrefoffset__ != 0
    return weakref.ref(x, lambda _: _entries.pop(entry, None)) if is_weak else x
