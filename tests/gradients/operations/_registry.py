"""The operations that generated programs are made of, each with the settings that it
can be drawn with.

An operation is `(weight, x, index, **settings) -> y`:

- `weight(name, *shape, dtype=float64)`: a parameter of this shape.
- `x`: float64 `(batch, *spatial, channels)` with one or two spatial dims.
- `index`: int32 `(batch, 8)`, at least 0.
- `y`: as `x`, of the same batch; other dims may differ.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies as st

Apply = Callable[..., Any]


class Operation(NamedTuple):
    """`settings` holds a strategy of JSON values for each keyword of `apply`."""

    family: str
    apply: Apply
    settings: dict[str, st.SearchStrategy[Any]]


OPERATIONS: dict[str, Operation] = {}


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    """One of some values; a failing program is shrunk towards the first."""
    return st.sampled_from(values)


either = one_of(False, True)

# An operation may begin with:


def rows(weight: Any, x: Any) -> Any:
    """`x` as `(batch, length, channels)`."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def scaled(weight: Any, x: Any) -> Any:
    """Rows, each channel times a parameter."""
    return rows(weight, x) * weight("scale", x.shape[-1])


def mixed(weight: Any, x: Any) -> Any:
    """Rows, times a matrix with 8 columns."""
    return rows(weight, x) @ weight("weight", x.shape[-1], 8)


def operation(
    family: str, begin: Apply = lambda weight, x: x, **settings: Any
) -> Callable[[Apply], Apply]:
    """Enters a function under its own name."""

    def enter(apply: Apply) -> Apply:
        def begun(weight: Any, x: Any, index: Any, **settings: Any) -> Any:
            return apply(weight, begin(weight, x), index, **settings)

        OPERATIONS[apply.__name__] = Operation(family, begun, settings)
        return apply

    return enter
