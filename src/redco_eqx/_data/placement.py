"""Put batches on the devices: which rows a process needs, and the arrays from
`collate_fn`."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from redco_eqx._base.protocols import Batch, Examples
from redco_eqx._base.tree import describe, excess_of, leaves_with_paths
from redco_eqx._data.data import Place, num_examples_of
from redco_eqx._sharding.mesh import (
    BATCH_AXES,
    batch_sharding,
    check_mesh,
    from_callback,
    num_batch_shards,
    replicated,
)


class Job(NamedTuple):
    """A batch to make.

    - `size`: the number of rows of the batch.
    - `num_here`: the number of rows that `collate_fn` makes on this process.
    - `read`: returns the argument for `collate_fn`.
    - `after`: the place after the batch.
    """

    size: int
    num_here: int
    read: Callable[[], Any]
    after: Place


def batch_sizes(
    examples: Examples, batch_size: int, remainder: str, mesh: Mesh
) -> tuple[int, list[int]]:
    """Compute the number of whole batches in an epoch, and the sizes of the batches for
    the remaining examples.

    A batch is split over the data shards if its size is a multiple of their number.
    Arguments and errors are those of `batches`, without those of `check_batch_size`.
    """
    num_examples = num_examples_of(examples)
    num_whole, rest = divmod(num_examples, batch_size)
    tail = tail_sizes(rest, batch_size, remainder, mesh)
    if num_whole == 0 and not tail:
        raise ValueError(
            f"batch_size={batch_size}, but there are only {num_examples} examples, "
            "which do not fill a batch "
            "of training. Use a smaller batch_size. (For evaluation, batches takes "
            'remainder="split" or "pad".)'
        )
    return num_whole, tail


def tail_sizes(rest: int, batch_size: int, remainder: str, mesh: Mesh) -> list[int]:
    """Compute the sizes of the batches for the examples after the last whole batch."""
    left_over = rest % num_batch_shards(mesh)
    tails = {
        "drop": [],
        "split": [rest - left_over, left_over],
        "pad": [batch_size if rest else 0],
    }
    if remainder not in tails:
        raise ValueError(
            f'batches: remainder={remainder!r}, but it must be "drop", "split" or '
            '"pad".'
        )
    return [size for size in tails[remainder] if size]


def check_batch_size(
    where: str, batch_size: int, mesh: Mesh, num_microbatches: int = 1
) -> None:
    """Raise `ValueError` if a batch does not divide evenly over microbatches and data
    shards."""
    check_mesh(mesh)
    num_shards = num_batch_shards(mesh)
    unit = num_microbatches * num_shards
    if batch_size < 1 or batch_size % unit != 0:
        times = (
            f"num_microbatches={num_microbatches} times "
            if num_microbatches > 1
            else ""
        )
        axes = ", ".join(
            f"{axis}={mesh.shape[axis]}" for axis in BATCH_AXES if axis in mesh.shape
        )
        raise ValueError(
            f"{where}: batch_size={batch_size} must be a positive multiple of "
            f"{times}{num_shards}, the number of data shards of the mesh ({axes}). Use "
            f"{max(batch_size // unit, 1) * unit}, for example."
        )


@functools.lru_cache(maxsize=64)
def layout(
    mesh: Mesh, size: int
) -> tuple[NamedSharding, Int[np.ndarray, " num_rows"], dict[int, slice]]:
    """Return the sharding of a batch of this size, the rows of the batch that this
    process needs (in ascending order), and for each piece of the batch, by its first
    row, the part of these rows that it consists of.
    """
    sharding = (
        batch_sharding(mesh) if size % num_batch_shards(mesh) == 0 else replicated(mesh)
    )
    indices = sharding.addressable_devices_indices_map((size,))
    rows = [np.arange(size)[index] for index in indices.values()]
    here = np.unique(rows)
    pieces = {
        int(x[0]): slice(n := int(np.searchsorted(here, x[0])), n + len(x))
        for x in rows
    }
    return sharding, here, pieces


@functools.lru_cache(maxsize=64)
def rows_of_several(
    mesh: Mesh, size: int
) -> dict[tuple[int, ...], Int[np.ndarray, " num_rows"]]:
    """Return the rows of a batch of this size that this process and others need (in
    ascending order), by the processes that need them."""
    holders: dict[tuple[int, int], set[int]] = {}
    for device, (index,) in layout(mesh, size)[0].devices_indices_map((size,)).items():
        begin, end, _ = index.indices(size)
        holders.setdefault((begin, end), set()).add(device.process_index)
    rows: dict[tuple[int, ...], list[int]] = {}
    for (begin, end), processes in sorted(holders.items()):
        if len(processes) > 1 and jax.process_index() in processes:
            rows.setdefault(tuple(sorted(processes)), []).extend(range(begin, end))
    return {processes: np.array(numbers) for processes, numbers in rows.items()}


def checksums_of(batch: Batch, rows: Int[np.ndarray, " num_rows"]) -> dict[str, str]:
    """Compute a checksum of these rows of each leaf of a batch, by its path."""
    found = {}
    for path, leaf in leaves_with_paths(batch):
        x = np.asarray(leaf)
        x = np.ascontiguousarray(x if len(rows) == len(x) else x[rows])
        # The bytes, because the types that NumPy does not know (bfloat16) offer no
        # buffer.
        found[path or "the batch"] = (
            f"{zlib.crc32(x.reshape(-1).view(np.uint8).data):08x}"
        )
    return found


def placed(batch: Batch, mesh: Mesh, size: int, num_here: int) -> Batch:
    """Make the global arrays of a batch of this size from the rows that `collate_fn`
    has made here: those that this process needs, or all rows.

    Raises `ValueError` or `TypeError` for an object that is not a batch.
    """
    _check_batch(batch, num_here)
    sharding, _, pieces = layout(mesh, size)

    def on_mesh(x: Any) -> Array:
        def piece(index: Any) -> Any:
            return x[index[0] if num_here == size else pieces[index[0].start or 0]]

        # Unlike `device_put`, this compares nothing between processes, so a thread may
        # call it.
        return from_callback((size, *x.shape[1:]), sharding, piece)

    return jax.tree.map(on_mesh, batch)


def _check_batch(batch: Batch, num_examples: int) -> None:
    """Raise for an object that is not a batch, and for 64-bit numbers that do not fit
    into JAX's 32 bits."""
    leaves = leaves_with_paths(batch)
    if not leaves:
        raise ValueError(
            f"collate_fn returned {batch!r}, which holds no array. Return a PyTree of "
            f"NumPy arrays with leading dim {num_examples}, the number of examples "
            "that it was given."
        )
    for path, leaf in leaves:
        name = f"collate_fn: leaf {path!r}" if path else "collate_fn: the batch"
        is_array = isinstance(leaf, np.ndarray | np.generic | jax.Array)
        if not is_array or not (
            jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool
        ):
            raise TypeError(
                f"{name} is "
                f"{describe(leaf) if is_array else f'a {type(leaf).__name__}'}, but "
                f"must be a NumPy array of numbers and booleans only. {_remedy(leaf)}"
            )
        if leaf.shape[:1] != (num_examples,):
            raise ValueError(
                f"{name} is {describe(leaf)}, but its leading dim must be "
                f"{num_examples}, the number of examples that collate_fn was given. "
                "Stack one row per example. Put anything that all examples share in "
                "the model or in the loss function."
            )
        if excess := excess_of(leaf):
            raise ValueError(f"{name} is {describe(leaf)} and {excess}.")


def _remedy(leaf: object) -> str:
    """Say how to turn an object of a batch into arrays."""
    name = type(leaf).__name__
    if isinstance(leaf, Mapping):
        return (
            f"JAX does not look into a {name}. Return a dict of NumPy arrays, such as "
            "{name: np.asarray(x) for name, x in batch.items()}."
        )
    if dataclasses.is_dataclass(leaf):
        return (
            "JAX does not look into a plain dataclass. Return vars(batch), which is a "
            "dict, or write @jax.tree_util.register_dataclass above @dataclass of "
            f"{name}."
        )
    return (
        "Use np.asarray, or np.stack over the examples. Encode everything else, or "
        "leave it out (the loss function gets keys for random numbers)."
    )
