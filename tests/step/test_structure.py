"""`Structure`: equality by definition, and `check_static`."""

import copy
import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_eqx._base.tree import to_arrays
from redco_eqx._step.kept import definition
from redco_eqx._step.state import Structure, check_static

KEY = jax.random.key(0)


class Holder(eqx.Module):
    """A value as a leaf, and one as a static field, around an array."""

    leaf: Any
    weight: Any
    static: Any = eqx.field(static=True, default=None)


@dataclasses.dataclass(frozen=True)
class Config:
    rate: Any
    name: str = "relu"


class StaticOnly(eqx.Module):
    """Has no leaves at all."""

    size: Any = eqx.field(static=True)


class Colour(enum.Enum):
    RED = 1


class Slotted:
    """Keeps its value out of `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


class OnSlots(Slotted):
    """Has a `__dict__`, and nothing in it."""


@dataclasses.dataclass
class Owner:
    """Compares by value, cannot be hashed."""

    size: int = 1


def hold(x: Any) -> list[Structure]:
    """`x` at the places where a value that is no array can be."""
    places = [Structure(Holder(x, jnp.ones(2))), Structure([x, {"x": (x,)}])]
    return places + ([Structure(Holder(None, jnp.ones(2), x))] if is_hashable(x) else [])


def is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def activation(scale: float, x: Any) -> Any:
    return scale * x


def scale_by(factor: Any) -> Callable[[Any], Any]:
    return lambda x: factor * x


def with_default(factor: Any) -> Callable[..., Any]:
    def f(x: Any, factor: Any = factor, *, other: Any = factor) -> Any:
        return x * factor * other

    return f


def recursive(depth: int) -> Callable[[int], int]:
    def f(n: int) -> int:
        return depth if n == 0 else f(n - 1)

    return f


def nested(factor: float) -> Callable[[Any], Any]:
    inner = scale_by(factor)
    return lambda x: inner(inner(x))


# Each builds a value that is equal in meaning to any other that it builds.
BUILDERS: dict[str, Callable[[], Any]] = {
    "lambda": lambda: lambda x: x + 1,
    "closure": lambda: scale_by(2.0),
    "closure over a closure": lambda: nested(2.0),
    "closure over NaN": lambda: scale_by(float("nan")),
    "closure over a list": lambda: scale_by([1, [2.0, "a"]]),
    "closure over a module without arrays": lambda: scale_by(StaticOnly(3)),
    "defaults": lambda: with_default(3),
    "recursive function": lambda: recursive(1),
    "partial": lambda: functools.partial(activation, 0.5),
    "partial with keywords": lambda: functools.partial(activation, scale=0.5),
    "partial of a lambda": lambda: functools.partial(lambda a, b: a + b, (1, 2)),
    "jax partial": lambda: jax.tree_util.Partial(activation, 0.5),
    "method": lambda: Config(1).__repr__,
    "vmapped lambda": lambda: jax.vmap(lambda x: x + 1),
    "built-in": lambda: jax.nn.gelu,
    "operator": lambda: operator.add,
    "class": lambda: Config,
    "config": lambda: Config(0.5),
    "config with NaN": lambda: Config(float("nan")),
    "NaN": lambda: float("nan"),
    "complex NaN": lambda: complex(float("nan"), 1),
    "numpy dtype": lambda: np.dtype("float32"),
    "enum": lambda: Colour.RED,
    "tuple": lambda: (1, (2.0, "a"), None),
    "range": lambda: range(3),
    "frozenset": lambda: frozenset({1, (2, "a")}),
    "module without arrays": lambda: StaticOnly(3),
    "module with a NaN": lambda: StaticOnly(float("nan")),
    "string": lambda: "".join(["ab", "c"]),
    "bytes": lambda: bytes([1, 2]),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_built_alike_is_equal(name):
    for first, second in zip(hold(BUILDERS[name]()), hold(BUILDERS[name]()), strict=True):
        assert first == second
        assert hash(first) == hash(second)


# Pairs that Python, or a comparison that is not careful, takes for equal.
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "float and bool": (1.0, True),
    "zero and False": (0, False),
    "signed zeros": (0.0, -0.0),
    "complex and float": (1.0, 1 + 0j),
    "neighbouring floats": (0.1, math.nextafter(0.1, 1)),
    "string and bytes": ("a", b"a"),
    "tuple and list": ((1,), [1]),
    "nested int and float": ((1, (2,)), (1, (2.0,))),
    "int in a dict": ({"a": 1}, {"a": True}),
    "in a frozenset": (frozenset({1}), frozenset({1.0})),
    "two lambdas": (lambda x: x + 1, lambda x: x + 2),
    "lambdas with int and float": (lambda x: x + 1, lambda x: x + 1.0),
    "lambdas that call others": (lambda x: jnp.sin(x), lambda x: jnp.cos(x)),
    "closures": (scale_by(1), scale_by(2)),
    "closures over int and float": (scale_by(1), scale_by(1.0)),
    "closures over closures": (nested(1.0), nested(2.0)),
    "closures over configs": (scale_by(Config(1)), scale_by(Config(1.0))),
    "closures over modules without arrays": (scale_by(StaticOnly(1)), scale_by(StaticOnly(1.0))),
    "defaults": (with_default(1), with_default(2)),
    "recursive functions": (recursive(1), recursive(2)),
    "partials": (functools.partial(activation, 0.5), functools.partial(activation, 0.25)),
    "partials int and bool": (functools.partial(activation, 1), functools.partial(activation, True)),
    "partials by keyword": (functools.partial(activation, 1), functools.partial(activation, scale=1)),
    "methods": (Config(1).__repr__, Config(2).__repr__),
    "methods int and float": (Config(1).__repr__, Config(1.0).__repr__),
    "configs": (Config(1), Config(2)),
    "configs with int and float": (Config(1), Config(1.0)),
    "modules without arrays": (StaticOnly(1), StaticOnly(2)),
    "modules with int and float": (StaticOnly(1), StaticOnly(1.0)),
    "dtypes": (np.dtype("float32"), np.dtype("float64")),
    "classes": (Config, Holder),
    "None and zero": (None, 0),
    "built-ins": (len, abs),
    "ufuncs": (np.sin, np.cos),
    "getters": (operator.itemgetter(0), operator.itemgetter(1)),
    "compiled functions": (jax.jit(jnp.sin), jax.jit(jnp.cos)),
    "sentinels": (object(), object()),
    "objects with slots": (Slotted(1), Slotted(2)),
    "objects on slots": (OnSlots(1), OnSlots(2)),
    "arrays closed over": (scale_by(jnp.ones(2)), scale_by(jnp.ones(2))),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_defined_differently_is_unequal(name):
    first, second = DIFFERENT[name]
    for one, two in zip(hold(first), hold(second)):
        assert one != two
    for one, again in zip(hold(first), hold(first), strict=True):
        assert one == again


def test_an_array_that_is_closed_over_compares_by_identity():
    x = jnp.ones(2)
    assert hold(scale_by(x)) == hold(scale_by(x))


def test_an_unhashable_object_compares_by_what_it_holds():
    owner = Owner()
    assert Structure([owner]) == Structure([Owner()])
    assert Structure([owner]) != Structure([Owner(2)])


def test_arrays_do_not_take_part():
    assert Structure(Holder(1, jnp.ones(2))) == Structure(Holder(1, np.zeros((3, 3), np.int8)))
    assert Structure(Holder(1, jnp.ones(2))) == Structure(Holder(1, jax.ShapeDtypeStruct((2,), jnp.int32)))
    # An array and none do differ.
    assert Structure(Holder(1, jnp.ones(2))) != Structure(Holder(1, None))
    assert Structure(Holder(1, jnp.ones(2))) != Structure(Holder(jnp.ones(2), 1))


def test_the_type_of_a_node_takes_part():
    class Other(eqx.Module):
        leaf: Any
        weight: Any
        static: Any = eqx.field(static=True, default=None)

    assert Structure(Holder(1, 2)) != Structure(Other(1, 2))
    assert Structure([1, None]) != Structure([1])
    assert Structure({"a": 1}) != Structure({"b": 1})


def test_unequal_to_other_types():
    assert Structure(1) != 1
    assert Structure(None) != None  # noqa: E711


SHARED: dict[str, Callable[[], Any]] = {
    "MLP": lambda: eqx.nn.MLP(2, 2, 4, 1, activation=lambda x: x**2, key=KEY),
    "attention": lambda: eqx.nn.MultiheadAttention(2, 4, key=KEY),
    "sequential": lambda: eqx.nn.Sequential([eqx.nn.Linear(2, 2, key=KEY), eqx.nn.Lambda(lambda x: 2 * x)]),
    "shared": lambda: eqx.nn.Shared(
        (eqx.nn.Embedding(4, 2, key=KEY), eqx.nn.Linear(2, 4, key=KEY)),
        where=lambda pair: pair[1].weight,
        get=lambda pair: pair[0].weight,
    ),
    "batch norm": lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(2, "batch", mode="ema"),
    "dropout": lambda: eqx.nn.Dropout(0.5),
}


@pytest.mark.parametrize("name", SHARED)
def test_models_built_alike_have_equal_structures(name):
    first, second = Structure(SHARED[name]()), Structure(SHARED[name]())
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize("name", SHARED)
def test_build_is_the_inverse_of_taking_the_arrays_out(name):
    model = SHARED[name]()
    arrays = to_arrays(model)
    built = Structure(model).build(arrays)
    assert jax.tree.structure(built) == jax.tree.structure(model)
    for x, y in zip(jax.tree.leaves(built), jax.tree.leaves(model), strict=True):
        assert x is y


def test_build_ignores_arrays_that_are_not_its_own():
    assert Structure({"a": jnp.ones(2)}).build({"a": 1, "b": 2}) == {"a": 1}


def test_one_compilation_serves_models_built_alike_and_no_others():
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def f(structure, arrays):
        traces.append(structure)
        return structure.build(arrays).leaf

    for value in (1, 1, 1.0, True, math.nan, math.nan):
        f(Structure(Holder(value, jnp.ones(2))), {"weight": jnp.ones(2)})
    assert len(traces) == 4


def test_dict_order_does_not_matter_to_a_tree():
    assert Structure({"a": 1, "b": 2}) == Structure({"b": 2, "a": 1})


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, 2.0, math.nan, math.inf]),
    st.sampled_from([0j, 1 + 0j, complex(math.nan, 0)]),
    st.text("ab", max_size=1),
    st.binary(max_size=1),
)
HASHABLE = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=2).map(tuple), max_leaves=5)
STATIC = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=5,
)


def spelled(x: Any) -> str:
    """An independent account of a value: how Python writes it down, dicts in order."""
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key!r}: {spelled(x[key])}" for key in sorted(x)) + "}"
    if isinstance(x, list | tuple):
        return f"{type(x).__name__}({', '.join(spelled(item) for item in x)})"
    return repr(x)


@settings(deadline=None, max_examples=300)
@given(STATIC, STATIC)
def test_equal_where_python_spells_them_alike(first, second):
    one, two = Structure([first, jnp.ones(1)]), Structure([second, jnp.ones(1)])
    assert (one == two) == (spelled(first) == spelled(second))
    assert one != two or hash(one) == hash(two)


@settings(deadline=None, max_examples=300)
@given(HASHABLE, HASHABLE)
def test_static_fields_are_equal_where_python_spells_them_alike(first, second):
    one, two = Structure(Holder(0, 0, first)), Structure(Holder(0, 0, second))
    assert (one == two) == (spelled(first) == spelled(second))
    assert one != two or hash(one) == hash(two)


@settings(deadline=None, max_examples=100)
@given(STATIC)
def test_a_deep_copy_is_equal_and_builds_back(tree):
    structure, other = Structure(tree), Structure(copy.deepcopy(tree))
    assert structure == other
    assert hash(structure) == hash(other)
    assert spelled(structure.build({})) == spelled(tree)


@settings(deadline=None, max_examples=100)
@given(STATIC)
def test_a_definition_can_be_hashed(tree):
    hash(definition(tree)[0])


# Static fields.


class Static(eqx.Module):
    weight: Any
    table: Any = eqx.field(static=True)


@pytest.mark.parametrize("make", [lambda: np.ones(2), lambda: (1, np.ones(2))], ids=["array", "tuple"])
@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_an_array_in_a_static_field_is_refused_by_path(make):
    model = {"layers": [1, Static(jnp.ones(1), make())]}
    with pytest.raises(ValueError, match=r"layers\.1\.table is a static field that holds an array"):
        check_static(model)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("make", [lambda: jnp.ones(2), lambda: eqx.nn.Linear(2, 2, key=KEY)])
def test_a_jax_array_in_a_static_field_is_refused(make):
    with pytest.raises(ValueError, match="table is a static field that holds an array"):
        check_static(Static(jnp.ones(1), make()))


@pytest.mark.parametrize("value", [[1, 2], {"a": 1}, {1}, (1, [2])], ids=repr)
def test_an_unhashable_static_field_is_refused_by_path(value):
    with pytest.raises(ValueError, match=rf"0\.table is a static field of type {type(value).__name__}"):
        check_static([Static(jnp.ones(1), value)])


@pytest.mark.parametrize(
    "value",
    [1, "a", (1, (2,)), None, jnp.sin, Config(1), np.dtype("int8")],
    ids=["int", "str", "tuple", "none", "jitted", "dataclass", "dtype"],
)
def test_hashable_static_fields_are_taken(value):
    check_static([Static(jnp.ones(1), value)])


@pytest.mark.parametrize("name", SHARED)
def test_static_fields_of_equinox_layers_are_taken(name):
    made = SHARED[name]()
    check_static(made[0] if isinstance(made, tuple) else made)
