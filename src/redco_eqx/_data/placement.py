"""Batches on the mesh: which rows a process needs, what `collate_fn` may return, and where it goes."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from redco_eqx._sharding.mesh import batch_sharding, num_batch_shards, replicated
from redco_eqx._tree import describe, leaves_with_paths
from redco_eqx._types import Batch, CollateFn


def needed_rows(indices: Mapping[Any, tuple[slice, ...] | None], size: int) -> Int[np.ndarray, " num_rows"]:
    """The rows that some devices hold together, ascending, each once.

    **Arguments:**

    - `indices`: for each device the index of its piece, as given by
        `sharding.addressable_devices_indices_map((size,))`.
    - `size`: number of rows of the whole array.
    """
    needed = np.zeros(size, bool)
    for index in indices.values():
        needed[index] = True
    return np.flatnonzero(needed)


def _batch_layout(mesh: Mesh, size: int) -> tuple[NamedSharding, Int[np.ndarray, " num_rows"]]:
    """Lay a batch of `size` rows on the mesh, and list the rows that this process needs."""
    sharding = batch_sharding(mesh) if size % num_batch_shards(mesh) == 0 else replicated(mesh)
    rows = needed_rows(sharding.addressable_devices_indices_map((size,)), size)
    if not len(rows):
        raise ValueError(
            f"batches: process {jax.process_index()} has no device in the mesh, so no batch can be "
            "placed from it. Call batches only where the mesh has devices."
        )
    return sharding, rows


class Rows(NamedTuple):
    """The examples that are read for one batch.

    - `size`: the number of rows of the batch.
    - `here`: those rows that are in `items`.
    - `items`: an example for each, or what else `collate_fn` takes.
    - `checksum`: of what every process has read for it; 0 if that is not the same, or there is only one.
    """

    size: int
    here: Int[np.ndarray, " num_rows"]
    items: Any
    checksum: int = 0


class Assembly:
    """Makes batches of examples, and places them. May be called by several threads."""

    def __init__(self, collate_fn: CollateFn, mesh: Mesh):
        """Raises `ValueError` if this process has no device in the mesh."""
        self._collate_fn, self._mesh = collate_fn, mesh
        self._layouts: dict[int, tuple[NamedSharding, Int[np.ndarray, " num_rows"]]] = {}
        self.needed(num_batch_shards(mesh))
        # `with jax.enable_x64(...)` around the consumer does not reach other threads.
        self._x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def needed(self, size: int) -> Int[np.ndarray, " num_rows"]:
        """The rows of a batch of this size that this process needs."""
        return self._layout(size)[1]

    def __call__(self, rows: Rows) -> Batch:
        """The batch, as global arrays. Raises what `collate_fn` raises, or if it returns what is no batch."""
        batch = self._collate_fn(rows.items)
        _check_batch(batch, len(rows.here))
        sharding, _ = self._layout(rows.size)
        with jax.enable_x64(self._x64):
            for path, leaf in leaves_with_paths(batch):
                _check_fits(path, leaf)
            return jax.tree.map(lambda x: _place(x, rows.size, sharding, rows.here), batch)

    def _layout(self, size: int) -> tuple[NamedSharding, Int[np.ndarray, " num_rows"]]:
        if size not in self._layouts:
            self._layouts[size] = _batch_layout(self._mesh, size)
        return self._layouts[size]


def _check_batch(batch: Batch, num_examples: int) -> None:
    leaves = leaves_with_paths(batch)
    if not leaves:
        raise ValueError(
            f"collate_fn returned {batch!r}, which holds no array. Return a PyTree of NumPy arrays "
            f"with leading dim {num_examples}, the number of examples that it was given."
        )
    for path, leaf in leaves:
        name = f"collate_fn: leaf {path!r}" if path else "collate_fn: the batch"
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
            raise TypeError(
                f"{name} is a {type(leaf).__name__}, but must be a NumPy array. np.asarray, or "
                "np.stack over the examples, makes one."
            )
        if not (jnp.issubdtype(leaf.dtype, jnp.number) or jnp.issubdtype(leaf.dtype, jnp.bool_)):
            raise TypeError(
                f"{name} is {describe(leaf)}, but a batch holds numbers and booleans only. Encode it, "
                "or leave it out (keys for random numbers are given to the loss function)."
            )
        if leaf.shape[:1] != (num_examples,):
            raise ValueError(
                f"{name} is {describe(leaf)}, but its leading dim must be {num_examples}, the number "
                "of examples that collate_fn was given. Stack one row per example; what all examples "
                "share belongs in the model or in the loss function."
            )


def _check_fits(path: str, leaf: Any) -> None:
    """Raises `ValueError` for numbers of 64 bits that JAX would make others of where it holds 32 bits."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    if dtype == leaf.dtype or not leaf.size:
        return
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        wrong = [x for x in (leaf.min(), leaf.max()) if not limits.min <= x <= limits.max]
    else:
        with np.errstate(over="ignore"):
            wrong = leaf[np.isinf(leaf.astype(dtype)) & ~np.isinf(leaf)]
    if len(wrong):
        raise ValueError(
            f"collate_fn: {f'leaf {path!r}' if path else 'the batch'} is {describe(leaf)} and has {wrong[0]}, "
            f"but JAX holds it as {dtype}, where that does not fit. Make it smaller, or "
            'jax.config.update("jax_enable_x64", True) first.'
        )


def _place(leaf: Any, size: int, sharding: NamedSharding, rows: Int[np.ndarray, " num_rows"]) -> Array:
    """The global array of `size` rows whose rows `rows` are `leaf`."""
    # Unlike `device_put` this compares nothing between processes, so that a thread may call it.
    piece = partial(_piece, leaf, size, rows)
    return jax.make_array_from_callback((size, *leaf.shape[1:]), sharding, piece)


def _piece(leaf: Any, size: int, rows: Int[np.ndarray, " num_rows"], index: tuple[slice, ...] | None) -> Any:
    """Cut out the piece that a device holds."""
    assert index is not None
    first, stop, _ = index[0].indices(size)
    local = int(np.searchsorted(rows, first))
    return leaf[local : local + stop - first]
