"""Assembly of a leaf on its devices, from slices of files."""

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from redco_eqx.models._files.names import Entry
from redco_eqx.models._files.safetensors import Stored

Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""First and last (exclusive) index of each dim."""


def place(
    entry: Entry,
    found: Mapping[str, Stored],
    sharding: NamedSharding,
    dtype: np.dtype | None,
) -> Array:
    """Make a leaf in the layout `sharding`. Each distinct slice is read once, and dropped when its devices have
    it.

    **Arguments:**

    - `found`: the stored array for each key.
    - `dtype`: the dtype to convert to; by default the one that can represent the stored arrays of all its keys.

    Raises `ValueError` for a dtype that JAX's configuration does not allow.
    """
    if dtype is None:
        dtype = functools.reduce(jnp.promote_types, (np.dtype(found[key].dtype) for key in entry.keys))
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise ValueError(
                f"load_pretrained: {entry.path} is float64 in {found[entry.keys[0]].file}. Pass "
                "dtype=jnp.float32, or call jax.config.update('jax_enable_x64', True)."
            )
    devices: dict[Bounds, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(entry.shape).items():
        bounds = tuple(dim.indices(size)[:2] for dim, size in zip(index or (), entry.shape))
        devices.setdefault(bounds, []).append(device)
    pieces = []
    for bounds, group in devices.items():
        host = _read(entry, found, bounds, dtype)
        # Devices must not share the host's memory, as they may on CPU.
        pieces += [jax.device_put(host, device, may_alias=False) for device in group]
    for key in entry.keys:
        found[key].release()
    return jax.make_array_from_single_device_arrays(entry.shape, sharding, pieces, dtype=dtype)


def _read(entry: Entry, found: Mapping[str, Stored], bounds: Bounds, dtype: np.dtype) -> np.ndarray:
    """Read a slice of a leaf, from each key that stores some of it."""
    size = entry.shape[-1] if entry.fused else None
    outer, inner = bounds[: len(entry.numbered)], _moved(bounds[len(entry.numbered) :], entry)
    if not outer:
        return _read_key(found[entry.keys[0]], inner, size).astype(dtype, copy=False)
    whole = np.empty([stop - start for start, stop in bounds], dtype)
    for index, key in entry.places:
        own = tuple(i - start for i, (start, _) in zip(index, outer))
        if all(start <= i < stop for i, (start, stop) in zip(index, outer)):
            whole[own] = _read_key(found[key], inner, size)
    return whole


def _read_rows(stored: Stored, bounds: Bounds) -> np.ndarray:
    """Read a slice of a stored array; beyond its last row it is zeros."""
    if not bounds or bounds[0][1] <= stored.shape[0]:
        return stored.read(tuple(slice(*pair) for pair in bounds))
    (first, last), *inner = bounds
    rows = np.zeros([last - first, *(stop - start for start, stop in inner)], np.dtype(stored.dtype))
    if first < stored.shape[0]:
        kept = stored.read((slice(first, stored.shape[0]), *(slice(*pair) for pair in inner)))
        rows[: len(kept)] = kept
    return rows


def _moved(bounds: Bounds, entry: Entry) -> Bounds:
    """Convert bounds in a leaf to bounds in the array of the file, where the leaf may begin later."""
    if entry.start == 0:
        return bounds
    (first, last), *others = bounds
    return ((first + entry.start, last + entry.start), *others)


def _read_key(stored: Stored, bounds: Bounds, size: int | None) -> np.ndarray:
    """Read a slice of a stored array. With `size`, its last dim stands for two, the second of that size."""
    if size is None:
        return _read_rows(stored, bounds)
    *outer, (first, last), (start, stop) = bounds
    index = tuple(slice(*pair) for pair in outer)
    if stop - start == size:  # the parts lie side by side
        whole = stored.read((*index, slice(first * size, last * size)))
        return whole.reshape(*whole.shape[:-1], last - first, size)
    rows = (slice(i * size + start, i * size + stop) for i in range(first, last))
    return np.stack([stored.read((*index, row)) for row in rows], axis=-2)
