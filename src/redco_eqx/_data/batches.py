"""From examples to batches on the mesh: order of an epoch, rows of this process, collation, prefetch.

Which examples make a batch is a pure function of numbers, equal on every process; each process reads
only the rows that its own devices hold. Nothing here waits for another process.
"""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Int

from redco_eqx._data.consistency import CallFacts, Stream, open_stream
from redco_eqx._sharding.mesh import BATCH_AXES, batch_sharding, check_mesh, num_batch_shards, replicated
from redco_eqx._tree import describe, leaves_with_paths
from redco_eqx._types import Batch, CollateFn, Examples, Key

# Keeps the order of an epoch apart from whatever else is derived from the same key.
_EPOCH_ORDER = 0x65706F63


def batches(
    examples: Examples,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    mesh: Mesh,
    key: Key | None = None,
    epoch: int = 0,
    start: int = 0,
    remainder: str = "drop",
    prefetch: int = 2,
) -> Generator[Batch]:
    """The batches of one epoch, placed on the mesh with their leading dim split over its data shards.

    **Arguments:**

    - `examples`: anything with `len(examples)` and `examples[int]`: a list, a NumPy array, a Hugging
        Face dataset. Only the rows that this process needs are read.
    - `collate_fn`: turns a list of examples into a PyTree of arrays, each with leading dim
        `len(examples)`. Called once per batch, with this process's rows in global order; on several
        processes that is a part of the batch, so the other dims must not depend on which examples came
        (pad text to a fixed length). The arrays must be new ones: one that is filled again for the next
        batch may still be in use.
    - `batch_size`: number of examples in a batch, over all devices.
    - `mesh`: the mesh, as made by [`make_mesh`][].
    - `key`: shuffles the examples; `None` keeps their order.
    - `epoch`: each epoch has its own order.
    - `start`: index of the first batch to yield: `batches(start=k)` goes on where an epoch was left
        after `k` batches.
    - `remainder`: what becomes of the examples after the last whole batch. `"drop"` (training) leaves
        them out. `"split"` (evaluation) gives as many as divide over the data shards as one batch, and
        the rest as another that is replicated, both at their true size: no example is lost or counted
        twice. `"pad"` (prediction) fills the last batch up by repeating the last example.
    - `prefetch`: how many batches a background thread makes and places ahead; 0 for no thread.

    **Returns:**

    A generator. Closing it, or dropping it, ends its thread. An exception in `examples` or `collate_fn`
    is raised at the batch where it happened.

    **Raises:**

    At the call, `TypeError` or `ValueError` if an argument cannot be used, or differs from that of another
    process. At a batch, `TypeError` or `ValueError` naming the leaf, if `collate_fn` returns anything but
    numeric arrays with one row per example, or on another process arrays of another shape.
    """
    sizes = batch_sizes(examples, batch_size, remainder, mesh)
    num_examples = len(examples)
    if not 0 <= start <= len(sizes):
        raise ValueError(
            f"batches: start={start}, but the epoch has {len(sizes)} batches ({num_examples} examples, "
            f"batch_size={batch_size}). It must lie in 0..{len(sizes)}."
        )
    check_prefetch(prefetch)
    order = None if key is None else epoch_order(num_examples, key, epoch)
    start_of_order = None if order is None else order[:4].tolist()
    call = CallFacts(num_examples, batch_size, epoch, start, remainder, start_of_order, dict(mesh.shape))
    stream = open_stream(mesh, call)
    offsets = list(itertools.accumulate(sizes, initial=0))
    layouts = {size: _batch_layout(mesh, size) for size in set(sizes)}
    # `with jax.enable_x64(...)` around the consumer does not reach other threads.
    x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]

    def make(index: int) -> Batch:
        sharding, rows = layouts[sizes[index]]
        positions = np.minimum(offsets[index] + rows, num_examples - 1)  # past the end: "pad"
        wanted = (positions if order is None else order[positions]).tolist()
        try:
            read = {i: examples[i] for i in dict.fromkeys(wanted)}
            batch = collate_fn([read[i] for i in wanted])
            _check_batch(batch, len(rows))
            if stream is not None:
                stream.add(index, batch)
        except Exception as error:
            again = f"batches(..., epoch={epoch}, start={index}, prefetch=0)"
            error.add_note(f"This is batch {index} of epoch {epoch}; {again} makes it again.")
            raise
        with jax.enable_x64(x64):
            return jax.tree.map(lambda x: _place(x, sizes[index], sharding, rows), batch)

    made = _run_ahead(make, range(start, len(sizes)), prefetch)
    return made if stream is None else _compared(made, stream)


def batch_sizes(examples: Examples, batch_size: int, remainder: str, mesh: Mesh) -> list[int]:
    """The number of rows of each batch of an epoch. One that the data shards divide is split over them.

    Arguments and errors as for [`batches`][].
    """
    check_mesh(mesh)
    num_examples, num_shards = _length(examples), num_batch_shards(mesh)
    if batch_size < 1 or batch_size % num_shards != 0:
        axes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in BATCH_AXES if axis in mesh.shape)
        raise ValueError(
            f"batches: batch_size={batch_size} must be a positive multiple of {num_shards}, the number "
            f"of data shards of the mesh ({axes}). "
            f"Use {max(batch_size // num_shards, 1) * num_shards}, say."
        )
    num_whole, tail = divmod(num_examples, batch_size)
    if remainder == "drop":
        last = []
    elif remainder == "split":
        last = [tail - tail % num_shards, tail % num_shards]
    elif remainder == "pad":
        last = [batch_size if tail else 0]
    else:
        raise ValueError(f'batches: remainder={remainder!r}, but it must be "drop", "split" or "pad".')
    sizes = [batch_size] * num_whole + [size for size in last if size]
    if not sizes:
        raise ValueError(
            f"batches: batch_size={batch_size}, but there are only {num_examples} examples, and "
            'remainder="drop" leaves out what does not fill a batch. Use a smaller batch_size, or '
            'remainder="split" or "pad".'
        )
    return sizes


def epoch_order(num_examples: int, key: Key, epoch: int) -> Int[np.ndarray, " num_examples"]:
    """The permutation in which an epoch goes through the examples, equal on every process.

    Raises `ValueError` if `epoch` is negative or `key` is not one PRNG key.
    """
    if epoch < 0:
        raise ValueError(f"batches: epoch={epoch}, but it must be 0 or more.")
    if not isinstance(key, jax.Array) or jax.random.key_data(key).ndim != 1:
        raise ValueError(f"batches: key must be one PRNG key, such as jax.random.key(0), but is {key!r}.")
    # Its first copy, because a key in a training state is replicated over all processes.
    words = np.asarray(jax.random.key_data(key.addressable_data(0)))
    # Sorting raw words, because NumPy promises the stream of a bit generator across its versions, and
    # that of `Generator.permutation` not: a run may be resumed under another version.
    seed = np.random.SeedSequence([_EPOCH_ORDER, epoch, *words.tolist()])
    return np.argsort(np.random.PCG64(seed).random_raw(num_examples), kind="stable")


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


def check_prefetch(prefetch: int) -> None:
    """Raises `ValueError` if it is negative."""
    if prefetch < 0:
        raise ValueError(f"batches: prefetch={prefetch}, but it must be 0 (no thread) or more.")


def _length(examples: Examples) -> int:
    sized = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    if not sized or isinstance(examples, Mapping):
        raise TypeError(
            f"batches: examples is a {type(examples).__name__}, but a sequence of examples is needed, "
            "with len(examples) and examples[int]. list(...) makes one of an iterable."
        )
    if len(examples) == 0:
        raise ValueError("batches: examples is empty.")
    return len(examples)


def _batch_layout(mesh: Mesh, size: int) -> tuple[NamedSharding, Int[np.ndarray, " num_rows"]]:
    """How a batch of `size` rows lies on the mesh, and which of them this process needs."""
    sharding = batch_sharding(mesh) if size % num_batch_shards(mesh) == 0 else replicated(mesh)
    rows = needed_rows(sharding.addressable_devices_indices_map((size,)), size)
    if not len(rows):
        raise ValueError(
            f"batches: process {jax.process_index()} has no device in the mesh, so no batch can be "
            "placed from it. Call batches only where the mesh has devices."
        )
    return sharding, rows


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


def _place(leaf: Any, size: int, sharding: NamedSharding, rows: Int[np.ndarray, " num_rows"]) -> Array:
    """The global array of `size` rows whose rows `rows` are `leaf`."""

    def piece(index: tuple[slice, ...] | None) -> Any:
        assert index is not None
        first, stop, _ = index[0].indices(size)
        local = int(np.searchsorted(rows, first))
        return leaf[local : local + stop - first]

    # Unlike `device_put` this compares nothing between processes, so that a thread may call it.
    return jax.make_array_from_callback((size, *leaf.shape[1:]), sharding, piece)


def _compared(made: Generator[Batch], stream: Stream) -> Generator[Batch]:
    """The batches, and at their end a last look at those of the other processes."""
    try:
        yield from made
    finally:
        stream.close()


def _run_ahead(make: Callable[[int], Batch], indices: range, num_ahead: int) -> Generator[Batch]:
    """`make(index)` for each index, made by a thread up to `num_ahead` before they are asked for."""
    if num_ahead == 0:
        for index in indices:  # not `map`, which would take a StopIteration in `make` for the end
            yield make(index)
        return
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="redco_eqx.batches")
    pending: deque[Future[Batch]] = deque()
    try:
        for index in indices:
            pending.append(thread.submit(make, index))
            if len(pending) > num_ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # Not waiting: the thread ends after the batch in hand, and garbage collection may run in it.
        thread.shutdown(wait=False, cancel_futures=True)
