"""The operations that generated programs are made of, each with the settings that it can be drawn with.

An operation is `(weight, x, index, **settings) -> y`:

- `weight(name, *shape, dtype=float64)`: a parameter of this shape.
- `x`: float64 `(batch, *spatial, channels)` with one or two spatial dims.
- `index`: int32 `(batch, 8)`, at least 0.
- `y`: as `x`, of the same batch; other dims may differ.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Apply = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Operation:
    """`settings` holds a strategy of JSON values for each keyword of `apply`."""

    family: str
    apply: Apply
    settings: dict[str, st.SearchStrategy[Any]]


OPERATIONS: dict[str, Operation] = {}


def operation(family: str, **settings: st.SearchStrategy[Any]) -> Callable[[Apply], Apply]:
    """Enters a function under its own name."""

    def enter(apply: Apply) -> Apply:
        OPERATIONS[apply.__name__] = Operation(family, apply, settings)
        return apply

    return enter


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    """One of some values; a failing program is shrunk towards the first."""
    return st.sampled_from(values)


def rows(x: Any) -> Any:
    """`x` as `(batch, length, channels)`."""
    return x.reshape(x.shape[0], -1, x.shape[-1])
