"""Transfer of arrays from files to devices, slice by slice, and from devices to files,
one array at a time."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from redco_eqx_models._files.names import Entry
from redco_eqx_models._files.safetensors import NAMES, Record, Stored
from redco_eqx_models._leaves import AnyArray

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""First and last (exclusive) index of each dim."""

NUM_READERS = 8
"""The number of threads that read the layers of a stack. One alone takes twice as long
as sending to a GPU."""


def place(
    entries: Iterable[Entry],
    found: dict[str, Stored],
    layout: dict[str, NamedSharding],
    dtype: np.dtype | None,
) -> dict[str, Array]:
    """Make the leaves of the entries, by path. Each distinct slice is read once, while
    the one before it is on its way to its devices, so at most two slices are on the
    host.

    **Arguments:**

    - `found`: the stored array for each key.
    - `layout`: the sharding for each path.
    - `dtype`: the dtype to convert to; by default the one that can represent the stored
        arrays of all keys of a leaf.

    Raises `ValueError` for a dtype that JAX's configuration does not allow.
    """
    made: dict[str, Array] = {}
    sent: list[Array] = []
    for entry in entries:
        kind = dtype or _dtype_of(entry, found)
        sharding = layout[entry.path]
        pieces = []
        for bounds, devices in _devices_by_slice(sharding, entry.shape).items():
            host = _read(entry, found, bounds, kind)
            jax.block_until_ready(sent)
            # Devices must not share the host's memory, as they may on CPU.
            sent = [jax.device_put(host, device, may_alias=False) for device in devices]
            pieces += sent
        for key in entry.keys:
            found[key].release()
        made[entry.path] = jax.make_array_from_single_device_arrays(
            entry.shape, sharding, pieces, dtype=kind
        )
    return made


def _devices_by_slice(
    sharding: NamedSharding, shape: tuple[int, ...]
) -> dict[Bounds, list[Any]]:
    """Return the devices of this process that hold each distinct slice of an array."""
    devices: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        # `indices` replaces the `None` of a slice that is whole.
        bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index or (), shape))
        devices.setdefault(bounds, []).append(device)
    return devices


def _dtype_of(entry: Entry, found: Mapping[str, Stored]) -> np.dtype:
    """Return the dtype that can represent the stored arrays of a leaf."""
    dtype = functools.reduce(
        jnp.promote_types, (np.dtype(found[key].dtype) for key in entry.keys)
    )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"load_pretrained: {entry.path} is float64 in {found[entry.keys[0]].file}. "
            "Pass dtype=jnp.float32, or call jax.config.update('jax_enable_x64', True)."
        )
    return dtype


def _read(
    entry: Entry, found: Mapping[str, Stored], bounds: Bounds, dtype: np.dtype
) -> np.ndarray:
    """Read a slice of a leaf, from each key that stores some of it."""
    size = entry.shape[-1] if entry.fused else None
    outer = bounds[: len(entry.numbered)]
    inner = bounds[len(entry.numbered) :]
    if inner:
        # The leaf may begin later in the array of the file.
        (first, last), *rest = inner
        inner = ((first + entry.start, last + entry.start), *rest)
    if not outer:
        return _read_key(found[entry.keys[0]], inner, size).astype(dtype, copy=False)
    whole = np.empty([stop - start for start, stop in bounds], dtype)

    def copy(share: list[tuple[tuple[int, ...], str]]) -> None:
        for index, key in share:
            own = tuple(i - start for i, (start, _) in zip(index, outer))
            if all(start <= i < stop for i, (start, stop) in zip(index, outer)):
                whole[own] = _read_key(found[key], inner, size)

    places = entry.places
    with ThreadPoolExecutor(NUM_READERS) as pool:
        # NumPy releases the lock of the interpreter while it copies. The list raises
        # the errors of the threads.
        list(pool.map(copy, [places[i::NUM_READERS] for i in range(NUM_READERS)]))
    return whole


def _read_rows(stored: Stored, bounds: Bounds) -> np.ndarray:
    """Read a slice of a stored array; beyond its last row it is zeros."""
    kept = stored.read(tuple(slice(*pair) for pair in bounds))
    if not bounds or bounds[0][1] <= stored.shape[0]:
        return kept
    rows = np.zeros([stop - start for start, stop in bounds], kept.dtype)
    rows[: len(kept)] = kept
    return rows


def _read_key(stored: Stored, bounds: Bounds, size: int | None) -> np.ndarray:
    """Read a slice of a stored array. With `size`, its last dim stands for two, the
    second of that size."""
    if size is None:
        return _read_rows(stored, bounds)
    *outer, (first, last), (start, stop) = bounds
    index = tuple(slice(*pair) for pair in outer)
    if stop - start == size:
        # Whole parts lie side by side.
        whole = stored.read((*index, slice(first * size, last * size)))
        return whole.reshape(*whole.shape[:-1], last - first, size)
    rows = (slice(i * size + start, i * size + stop) for i in range(first, last))
    return np.stack([stored.read((*index, row)) for row in rows], axis=-2)


class Piece(NamedTuple):
    """An array in a file, and its leaf (and place in it), or several leaves, which
    files store as one."""

    record: Record
    paths: tuple[str, ...]
    place: tuple[int, ...]


def check_arrays(what: str, arrays: dict[str, AnyArray]) -> None:
    """Raise `ValueError` for arrays without numbers, or with a dtype that the format
    has no name for."""
    for path, x in arrays.items():
        if problem := _lack_of_value(x):
            raise ValueError(
                f"{what}: {path} {problem}. Save the model of the newest state."
            )
        if x.dtype.name not in NAMES:
            raise ValueError(
                f"{what}: {path} is {x.dtype.name}, not one of {', '.join(NAMES)}."
            )


def _lack_of_value(x: object) -> str | None:
    """Say why an array has no numbers, for messages; else `None`."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return "is abstract"
    if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
        return "has been deleted. It was donated, perhaps as part of an earlier state"
    return None


def common_dtype(arrays: dict[str, AnyArray]) -> str:
    """Return the name of the dtype that can represent all the given dtypes."""
    return functools.reduce(jnp.promote_types, (x.dtype for x in arrays.values())).name


def pieces_of(entries: Iterable[Entry], arrays: dict[str, AnyArray]) -> list[Piece]:
    """Return the pieces to write, layer by layer also if layers are stacked."""
    pieces: dict[str, Piece] = {}
    for stack, group in itertools.groupby(entries, lambda entry: entry.stack):
        places = []
        for entry in group:
            places += [(entry, index, key) for index, key in entry.places]
        if stack is not None:
            # By the number of the layer. Sorting keeps the order within a layer.
            places.sort(key=lambda place: place[1][0])
        for entry, index, key in places:
            dtype = np.dtype(arrays[entry.path].dtype)
            paths = (entry.path,)
            before = pieces.get(key)
            if before is not None:
                # Files store both as one.
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
    """Fetch the pieces one by one, and pass them to `write` on process 0. All processes
    must call this.

    An error in `write` is raised again. The other processes raise it as a
    `RuntimeError`.
    """
    fetched = (_fetch(arrays, piece) for piece in pieces)
    error = None
    try:
        if jax.process_index() == 0:
            write(fetched)
    except Exception as caught:
        error = caught
    if jax.process_count() > 1:
        for _ in fetched:
            # Every process takes part in each fetch, even if process 0 cannot write.
            pass
        has_failed = multihost_utils.broadcast_one_to_all(np.int32(error is not None))
        if has_failed and error is None:
            raise RuntimeError(
                f"{what}: process 0 could not write {directory}; its error says why."
            )
    if error is not None:
        raise error


def _fetch(arrays: dict[str, AnyArray], piece: Piece) -> np.ndarray:
    found = [_fetch_one(arrays[path], piece.place) for path in piece.paths]
    whole = found[0]
    if len(found) > 1:
        whole = np.concatenate(found).astype(piece.record.dtype, copy=False)
    # A padded vocabulary has more rows than the file. A scalar has none.
    rows = tuple(slice(size) for size in piece.record.shape[:1])
    return whole[rows].reshape(piece.record.shape)


def _fetch_one(x: Any, index: tuple[int, ...]) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x[index]
    # JAX keeps a host copy with its array, so fetch from a temporary copy on the
    # devices.
    x = _take(x, index) if index else jnp.copy(x)
    # No process has all of an array that is split over several.
    if not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


# The indices are arguments, so the layers of a stack share one compiled program.
@jax.jit
def _take(x: Array, index: tuple[Int[Array, ""], ...]) -> Array:
    for i in index:
        x = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    return x
