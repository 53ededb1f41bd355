"""Transfer of a model's arrays to files: one at a time, fetched by all processes, and written by the first."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

from redco_eqx._base.tree import AnyArray, lack_of_value
from redco_eqx.models._files.names import Entry
from redco_eqx.models._files.safetensors import NAMES, Record


class Piece(NamedTuple):
    """An array in a file, and its leaf (and place in it), or several leaves, which files store as one."""

    record: Record
    paths: tuple[str, ...]
    place: tuple[int, ...]


def check_arrays(what: str, arrays: dict[str, AnyArray]) -> None:
    """Raise `ValueError` for arrays without numbers, or with a dtype that the format has no name for."""
    for path, x in arrays.items():
        if problem := lack_of_value(x):
            raise ValueError(f"{what}: {path} {problem}. Save the model of the newest state.")
        if x.dtype.name not in NAMES:
            raise ValueError(f"{what}: {path} is {x.dtype.name}, not one of {', '.join(NAMES)}.")


def common_dtype(arrays: dict[str, AnyArray]) -> str:
    """Return the name of the dtype that can represent all the given dtypes."""
    return functools.reduce(jnp.promote_types, (x.dtype for x in arrays.values())).name


def pieces_of(entries: Iterable[Entry], arrays: dict[str, AnyArray]) -> list[Piece]:
    """Return the pieces to write, layer by layer also if layers are stacked."""
    pieces: dict[str, Piece] = {}
    for stack, group in itertools.groupby(entries, lambda entry: entry.stack):
        places = [(entry, index, key) for entry in group for index, key in entry.places]
        for entry, index, key in places if stack is None else sorted(places, key=lambda place: place[1][0]):
            dtype, paths = np.dtype(arrays[entry.path].dtype), (entry.path,)
            if before := pieces.get(key):  # files store both as one
                dtype = np.dtype(jnp.promote_types(dtype, before.record.dtype))
                paths = (*before.paths, entry.path)
            pieces[key] = Piece(Record(key, dtype, entry.file_shape), paths, index)
    return list(pieces.values())


def write_together(
    what: str,
    directory: Path,
    pieces: Iterable[Piece],
    arrays: dict[str, AnyArray],
    write: Callable[[Iterator[np.ndarray]], object],
) -> None:
    """Fetch the pieces one by one, and pass them to `write` on process 0. All processes must call this.

    An error in `write` is raised again. The other processes raise it as a `RuntimeError`.
    """
    fetched = (_fetch(arrays, piece) for piece in pieces)
    error = None
    try:
        if jax.process_index() == 0:
            write(fetched)
    except Exception as caught:
        error = caught
    if jax.process_count() > 1:
        for _ in fetched:  # every process takes part in each fetch, even if process 0 cannot write
            pass
        if multihost_utils.broadcast_one_to_all(np.int32(error is not None)) and error is None:
            raise RuntimeError(f"{what}: process 0 could not write {directory}; its error says why.")
    if error is not None:
        raise error


def _fetch(arrays: dict[str, AnyArray], piece: Piece) -> np.ndarray:
    found = [_fetch_one(arrays[path], piece.place) for path in piece.paths]
    whole = found[0] if len(found) == 1 else np.concatenate(found).astype(piece.record.dtype, copy=False)
    rows = tuple(slice(size) for size in piece.record.shape[:1])  # without padding rows
    return whole[rows].reshape(piece.record.shape)


def _fetch_one(x: Any, index: tuple[int, ...]) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x[index]
    # JAX keeps a host copy with its array, so fetch from a temporary copy on the devices.
    x = _take(x, index) if index else jnp.copy(x)
    if not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


@jax.jit
def _take(x: Array, index: tuple[Int[Array, ""], ...]) -> Array:
    for i in index:
        x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    return x
