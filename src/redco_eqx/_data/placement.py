"""Put batches on the devices: which rows a process needs, and the arrays from
`collate_fn`."""

import dataclasses
import functools
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
    padded = batch_size if rest else 0
    tails = {"drop": [], "split": [rest - left_over, left_over], "pad": [padded]}
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
        times = ""
        if num_microbatches > 1:
            times = f"num_microbatches={num_microbatches} times "
        axes = ", ".join(
            f"{axis}={mesh.shape[axis]}" for axis in BATCH_AXES if axis in mesh.shape
        )
        raise ValueError(
            f"{where}: batch_size={batch_size} must be a positive multiple of "
            f"{times}{num_shards}, the number of data shards of the mesh ({axes}). Use "
            f"{max(batch_size // unit, 1) * unit}, for example."
        )


class LocalRows(NamedTuple):
    """The part of a batch that this process holds.

    - `sharding`: the sharding of the whole batch.
    - `needed`: the rows of the batch that the devices of this process need, ascending.
    - `ranges`: for each shard of the batch on these devices, by its first row, the
        range of `needed` that has its rows.
    """

    sharding: NamedSharding
    needed: Int[np.ndarray, " num_rows"]
    ranges: dict[int, slice]


@functools.lru_cache(maxsize=64)
def local_rows(mesh: Mesh, size: int) -> LocalRows:
    """Find the rows of a batch of this size that this process needs, and their place on
    its devices."""
    # JAX refuses to split a dim unevenly.
    is_split = size % num_batch_shards(mesh) == 0
    sharding = batch_sharding(mesh) if is_split else replicated(mesh)
    indices = sharding.addressable_devices_indices_map((size,))
    shards = [np.arange(size)[index] for index in indices.values()]
    needed = np.unique(shards)
    ranges = {}
    for shard in shards:
        # The rows of a shard follow one another in the batch, and so also in `needed`.
        first = int(shard[0])
        begin = int(np.searchsorted(needed, first))
        ranges[first] = slice(begin, begin + len(shard))
    return LocalRows(sharding, needed, ranges)


@functools.lru_cache(maxsize=64)
def rows_of_several(
    mesh: Mesh, size: int
) -> dict[tuple[int, ...], Int[np.ndarray, " num_rows"]]:
    """Return the rows of a batch of this size that this process and others need (in
    ascending order), by the processes that need them."""
    holders: dict[tuple[int, int], set[int]] = {}
    sharding = local_rows(mesh, size).sharding
    for device, (index,) in sharding.devices_indices_map((size,)).items():
        # A whole dim has the index `slice(None)`, which gets its numbers here.
        begin, end, _ = index.indices(size)
        holders.setdefault((begin, end), set()).add(device.process_index)
    rows: dict[tuple[int, ...], list[int]] = {}
    for (begin, end), processes in sorted(holders.items()):
        if len(processes) > 1 and jax.process_index() in processes:
            rows.setdefault(tuple(sorted(processes)), []).extend(range(begin, end))
    return {processes: np.array(numbers) for processes, numbers in rows.items()}


def placed(batch: Batch, mesh: Mesh, size: int, num_here: int) -> Batch:
    """Make the global arrays of a batch of this size from the rows that `collate_fn`
    has made here: those that this process needs, or all rows.

    Raises `ValueError` or `TypeError` for an object that is not a batch.
    """
    _check_batch(batch, num_here)
    sharding, _, ranges = local_rows(mesh, size)
    has_all_rows = num_here == size

    def on_mesh(x: Any) -> Array:
        def shard(index: Any) -> Any:
            rows = index[0]
            if not has_all_rows:
                # A whole dim has the index `slice(None)`, which has no start.
                rows = ranges[rows.start or 0]
            return x[rows]

        # Unlike `device_put`, this compares nothing between processes, so a thread may
        # call it.
        return from_callback((size, *x.shape[1:]), sharding, shard)

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
        if not _is_numeric(leaf):
            is_array = isinstance(leaf, _ARRAYS)
            kind = describe(leaf) if is_array else f"a {type(leaf).__name__}"
            raise TypeError(
                f"{name} is {kind}, but must be a NumPy array of numbers and booleans "
                f"only. {_remedy(leaf)}"
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


_ARRAYS = np.ndarray | np.generic | jax.Array


def _is_numeric(leaf: Any) -> bool:
    """Return true for an array of numbers or booleans. PRNG keys are neither."""
    if not isinstance(leaf, _ARRAYS):
        return False
    # Not `np.issubdtype`, which does not count bfloat16 as a number.
    return jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool


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
