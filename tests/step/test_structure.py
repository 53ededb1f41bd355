"""`Structure`: everything in a model except its arrays, compared by value."""

import dataclasses
import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_eqx._step.state import Structure

ONES = jnp.ones(2)


class Holder(eqx.Module):
    """A value as a leaf, and one as a static field, around an array."""

    leaf: Any
    weight: Any
    static: Any = eqx.field(static=True, default=None)


@dataclasses.dataclass(frozen=True)
class Config:
    rate: Any
    name: str = "relu"


@dataclasses.dataclass
class Owner:
    """Compares by value, cannot be hashed."""

    size: int = 1


def hold(x: Any) -> list[Structure]:
    """`x` at the places where a value that is no array can be."""
    return [
        Structure(Holder(x, ONES)),
        Structure([x, {"x": (x,)}]),
        Structure(Holder(None, ONES, x)),
        Structure(Holder(None, ONES, [x])),
        Structure(Holder(None, ONES, {"a": (x,)})),
    ]


def activation(scale: float, x: Any) -> Any:
    return scale * x


# Each builds a value that is equal to any other that it builds.
BUILDERS: dict[str, Any] = {
    "function": lambda: activation,
    "config": lambda: Config(0.5),
    "frozenset": lambda: frozenset({1, (2, "a")}),
    "unhashable object": lambda: Owner(),
}


def test_built_alike_is_equal():
    for name, build in BUILDERS.items():
        for first, second in zip(hold(build()), hold(build()), strict=True):
            assert first == second, name
            assert hash(first) == hash(second), name


# Pairs that Python, or a comparison that is not careful, takes for equal.
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "in a frozenset": (frozenset({1}), frozenset({1.0})),
    "lambdas": (lambda x: x + 1, lambda x: x + 1),
    "partials int and bool": (
        functools.partial(activation, 1),
        functools.partial(activation, True),
    ),
    "partials by keyword": (
        functools.partial(activation, 1),
        functools.partial(activation, scale=1),
    ),
    "methods int and float": (Config(1).__repr__, Config(1.0).__repr__),
    "dtypes": (np.dtype("float32"), np.dtype("float64")),
    "ufuncs": (np.sin, np.cos),
    "sentinels": (object(), object()),
    "unhashable objects": (Owner(1), Owner(2)),
}


def test_defined_differently_is_unequal_and_equal_to_itself():
    for name, (first, second) in DIFFERENT.items():
        for one, two in zip(hold(first), hold(second)):
            assert one != two, name
        for one, again in zip(hold(first), hold(first), strict=True):
            assert one == again, name


def test_arrays_do_not_take_part_but_the_tree_does():
    assert Structure(Holder(1, ONES)) == Structure(Holder(1, np.zeros((3, 3), np.int8)))
    assert Structure(Holder(1, ONES)) == Structure(
        Holder(1, jax.ShapeDtypeStruct((2,), jnp.int32))
    )
    for other in (Holder(1, None), Holder(ONES, 1), [1, ONES]):
        assert Structure(Holder(1, ONES)) != Structure(other)
    assert Structure(1) != 1


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 1.0, 2.0, math.nan, math.inf]),
    st.sampled_from([0j, 1 + 0j, complex(math.nan, 0)]),
    st.text("ab", max_size=1),
    st.binary(max_size=1),
)
VALUES = st.recursive(
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


@settings(deadline=None, max_examples=200)
@given(VALUES, VALUES)
def test_equal_where_python_spells_them_alike(first, second):
    for one, two in zip(hold(first), hold(second)):
        assert (one == two) == (spelled(first) == spelled(second))
        assert one != two or hash(one) == hash(two)
