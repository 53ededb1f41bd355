"""Checks of the memory of arrays: a step donates it, so it must exist, and belong to
one leaf only."""

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np

from redco_eqx._base.tree import excess_of, is_key, lack_of_value


def check_buffers(where: str, arrays: dict[str, Any]) -> None:
    """Raise `ValueError`, naming the path, if an array has no value, or if two leaves
    are the same array."""
    own = {path: x for path, x in arrays.items() if isinstance(x, jax.Array)}
    for path, x in arrays.items():
        if (
            lack := excess_of(x)
            if isinstance(x, np.ndarray | np.generic)
            else lack_of_value(x)
        ):
            raise ValueError(f"{where}: {path} {lack}.")
    # Reading an address keeps Python's lock while it waits, and a callback may need the
    # lock before.
    jax.block_until_ready(list(own.values()))
    check_apart(
        where,
        [(buffer, path) for path, x in own.items() for buffer in _buffers(x)],
    )


def check_apart(where: str, arrays: Sequence[tuple[Hashable, str]]) -> None:
    """Raise `ValueError` if two leaves are the same array. `arrays` has the identity
    and the path of each leaf."""
    first: dict[Hashable, str] = {}
    for array, path in arrays:
        if first.setdefault(array, path) != path:
            raise ValueError(
                f"{where}: {first[array]} and {path} are one and the same array, which "
                "a step would update twice, separately. Tie them with eqx.nn.Shared, "
                "or copy one (jnp.copy)."
            )


def _buffers(x: jax.Array) -> list[Any]:
    """Identify the memory of an array by the address and device of each piece."""
    if x.size == 0 or is_key(x):
        return [id(x)]
    return [
        (piece.device, piece.data.unsafe_buffer_pointer())
        for piece in x.addressable_shards
    ]
