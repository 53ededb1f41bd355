"""From examples to batches on the mesh: order of an epoch, rows of this process, collation, prefetch.

Which examples make a batch is a pure function of numbers, equal on every process; each process reads
only the rows that its own devices hold. Nothing here waits for another process.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int, Integer, UInt64

from redco_eqx._data.data import Data, Stream, as_data, num_examples_of
from redco_eqx._data.placement import Assembly, Rows
from redco_eqx._data.streams import (
    Position,
    Reading,
    check_for_evaluation,
    first_position,
    position_at,
    read_batches,
    stream_facts,
    tail_sizes,
)
from redco_eqx._data.workers import run_ahead, working
from redco_eqx._distributed.agreement import Facts, entries_of
from redco_eqx._distributed.consensus import from_all
from redco_eqx._sharding.mesh import BATCH_AXES, check_mesh, num_batch_shards
from redco_eqx._tree import leaves_with_paths
from redco_eqx._types import Batch, CollateFn, Examples, Key, check_function

# The order of an epoch: a permutation of which any part is computed when it is wanted, in constant memory.
#
# A Feistel network over pairs of numbers: an index is `x * width + y`, and each round adds to one half a
# pseudo-random function of the other, so that every round can be undone. The pairs are hardly more than the
# examples; an index that falls among the others walks on along its cycle (Black and Rogaway, "Ciphers with
# Arbitrary Finite Domains", 2002).


SHUFFLED = "feistel"
"""Written into the record of a run: how its order follows from its key. A change of the order changes it."""

# Keeps the order of an epoch apart from whatever else is derived from the same key.
_EPOCH_ORDER = 0x65706F63

# From 16 on, the orders of 2 to 30 examples cannot be told from uniform ones in 200,000 draws.
_NUM_ROUNDS = 20


@dataclasses.dataclass(frozen=True, eq=False)
class Permutation:
    """A pseudo-random permutation of the numbers below `num`; called with positions, it says what is there.

    - `num`: how many numbers, from 1 to 2**63 - 1.
    - `keys`: one for each round.
    """

    num: int
    keys: UInt64[np.ndarray, " num_rounds"]

    def __call__(self, positions: Integer[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return the examples' numbers at `positions`, each below `num`. Costs microseconds for each."""
        numbers = self._once(positions.astype(np.uint64))
        while np.any(outside := numbers >= self.num):
            numbers[outside] = self._once(numbers[outside])
        return numbers.astype(np.int64)

    def _once(self, numbers: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
        """The network: a permutation of the numbers below `height * width`."""
        height = math.isqrt(self.num - 1) + 1
        width = -(-self.num // height)
        x, y = np.divmod(numbers, np.uint64(width))
        for first, second in self.keys.reshape(-1, 2):
            x = (x + _mixed(y ^ first) % np.uint64(height)) % np.uint64(height)
            y = (y + _mixed(x ^ second) % np.uint64(width)) % np.uint64(width)
        return x * np.uint64(width) + y


def epoch_order(num_examples: int, key: Key, epoch: int) -> Permutation:
    """The order in which an epoch goes through the examples, equal on every process and in every version.

    Raises `ValueError` if `epoch` is negative or `key` is not one PRNG key.
    """
    if epoch < 0:
        raise ValueError(f"batches: epoch={epoch}, but it must be 0 or more.")
    if not isinstance(key, jax.Array) or jax.random.key_data(key).ndim != 1:
        raise ValueError(f"batches: key must be one PRNG key, such as jax.random.key(0), but is {key!r}.")
    # Its first copy, because a key in a training state is replicated over all processes.
    words = np.asarray(jax.random.key_data(key.addressable_data(0)))
    seed = np.random.SeedSequence([_EPOCH_ORDER, epoch, *words.tolist()])  # NumPy promises that it stays
    return Permutation(num_examples, seed.generate_state(_NUM_ROUNDS, np.uint64))


def _mixed(x: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each bit of `x` turns half of the others."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


J = TypeVar("J")
B = TypeVar("B")


class Batches(Iterator[Batch]):
    """The batches of one epoch, and the place among them. Made by [`batches`][]."""

    def __init__(self, made: Generator[tuple[Batch, Position | None]], epoch: int, start: int):
        self._made = made
        self._epoch, self._start = epoch, start
        self._position: Position | None = None
        self._is_over = False

    def __next__(self) -> Batch:
        try:
            batch, self._position = next(self._made)
        except StopIteration:
            self._is_over = True
            raise
        self._start += 1
        return batch

    @property
    def place(self) -> dict[str, Any]:
        """The arguments of `batches` that go on after the last batch: plain JSON, for a checkpoint's `extras`.

        After the last batch of an epoch the next epoch's, once the iterator has ended. Of a stream it is a
        collective call, as each process knows its own shard.
        """
        if self._is_over:
            return {"epoch": self._epoch + 1, "start": 0}
        place: dict[str, Any] = {"epoch": self._epoch, "start": self._start}
        if self._position is not None:
            shards = {position[0]: list(position) for position in from_all(list(self._position))}
            place["positions"] = list(shards.values())
        return place

    def close(self) -> None:
        """Ends its threads."""
        self._made.close()


def batches(
    examples: Examples | Data | Stream,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    mesh: Mesh,
    key: Key | None = None,
    epoch: int = 0,
    start: int = 0,
    positions: Sequence[Sequence[Any]] | None = None,
    remainder: str = "drop",
) -> Batches:
    """The batches of one epoch, placed on the mesh with their leading dim split over its data shards.

    ```python
    for batch in rx.batches(examples, collate_fn, batch_size=64, mesh=mesh, key=jax.random.key(2)):
        state, metrics = step(state, batch)
    ```

    The iterator says its place, from which another one goes on, in another process, too:

    ```python
    iterator = rx.batches(examples, collate_fn, batch_size=64, mesh=mesh, key=jax.random.key(2))
    batch = next(iterator)
    rest = rx.batches(examples, collate_fn, batch_size=64, mesh=mesh, key=jax.random.key(2), **iterator.place)
    ```

    **Arguments:**

    - `examples`: anything with `len(examples)` and `examples[int]`: a list, a NumPy array, a Hugging
        Face dataset. Only the rows that this process needs are read. [`Data`][] says how they are read; a
        [`Stream`][] has examples that come one after the other.
    - `collate_fn`: turns a list of examples into a PyTree of arrays, each with leading dim
        `len(examples)`. Called once per batch, with this process's rows in global order; on several
        processes that is a part of the batch, so the other dims must not depend on which examples came
        (pad text to a fixed length). The arrays must be new ones: one that is filled again for the next
        batch may still be in use.
    - `batch_size`: number of examples in a batch, over all devices.
    - `mesh`: the mesh, as made by [`make_mesh`][].
    - `key`: shuffles the examples; `None` keeps their order, and so does a stream always.
    - `epoch`: each epoch has its own order.
    - `start`: index of the first batch to yield: `batches(start=k)` goes on where an epoch was left
        after `k` batches.
    - `positions`: where the shards of a stream stand there, as `place` says it; without them the stream is
        read again as far.
    - `remainder`: what becomes of the examples after the last whole batch. `"drop"` (training) leaves
        them out. `"split"` (evaluation) gives as many as divide over the data shards as one batch, and
        the rest as another that is replicated, both at their true size: no example is lost or counted
        twice. `"pad"` (prediction) fills the last batch up by repeating the last example.

    **Returns:**

    An iterator with a `place` (see [`Batches`][]). Closing it, or dropping it, ends its threads. An exception
    in `examples` or `collate_fn` is raised at the batch where it happened.

    **Raises:**

    At the call, `TypeError` or `ValueError` if an argument cannot be used, or differs from that of another
    process. At a batch, `TypeError` or `ValueError` naming the leaf, if `collate_fn` returns anything but
    numeric arrays with one row per example, or on another process arrays of another shape.
    """
    check_function("batches", "collate_fn", collate_fn, "examples")
    data = as_data(examples)
    if isinstance(data, Stream):
        position = first_position(data, batch_size, mesh)
        position = position_at(data, position, start, positions, batch_size)
        read = stream_batches(
            data, collate_fn, batch_size=batch_size, mesh=mesh, epoch=epoch, position=position, start=start,
            remainder=remainder,
        )  # fmt: skip
        made = _picked(read, lambda x: (x[0], x[1]))
    elif positions is not None:
        raise ValueError("batches: positions are those of a Stream, but examples are a sequence.")
    else:
        of_data = data_batches(
            data, collate_fn, batch_size=batch_size, mesh=mesh, key=key, epoch=epoch, start=start,
            remainder=remainder,
        )  # fmt: skip
        made = _picked(of_data, lambda batch: (batch, None))
    return Batches(made, epoch, start)


def data_batches(
    data: Data,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    mesh: Mesh,
    key: Key | None,
    epoch: int,
    start: int,
    remainder: str = "drop",
) -> Generator[Batch]:
    """`batches` of a sequence."""
    examples = data.sequence
    sizes = batch_sizes(examples, batch_size, remainder, mesh)
    num_examples = len(examples)
    if not 0 <= start <= len(sizes):
        raise ValueError(
            f"batches: start={start}, but the epoch has {len(sizes)} batches ({num_examples} examples, "
            f"batch_size={batch_size}). It must lie in 0..{len(sizes)}."
        )
    order = None if key is None or not data.shuffle else epoch_order(num_examples, key, epoch)
    start_of_order = None if order is None else order(np.arange(min(4, num_examples))).tolist()
    opening = _opening(num_examples, batch_size, epoch, start, remainder, start_of_order, mesh.shape)
    assembly = Assembly(collate_fn, mesh)

    def make(index: int) -> Batch:
        needed = assembly.needed(sizes[index])
        positions = np.minimum(sizes.offset(index) + needed, num_examples - 1)  # past the end: "pad"
        wanted = (positions if order is None else order(positions)).tolist()
        again = f"batches(Data(..., prefetch=0), ..., epoch={epoch}, start={index}) makes it again"
        with working(f"batch {index} of epoch {epoch}", f"This is batch {index} of epoch {epoch}; {again}."):
            with working("examples[i]"):
                read = {i: examples[i] for i in dict.fromkeys(wanted)}
            with working("collate_fn"):
                return assembly(Rows(sizes[index], needed, [read[i] for i in wanted]))

    made = _run_ahead(data, iter(range(start, len(sizes))), make)
    return _compared(made, mesh, opening, start, lambda batch: batch)


def stream_batches(
    stream: Stream,
    collate_fn: CollateFn,
    *,
    batch_size: int,
    mesh: Mesh,
    epoch: int,
    position: Position,
    start: int = 0,
    remainder: str = "drop",
    verify: bool = True,
    say: Callable[[str], object] = lambda _: None,
) -> Generator[tuple[Batch, Position, int, bool]]:
    """`batches` of a stream, from a position on: each with the position after it, a checksum (see `Rows`), and
    whether it is the last one that is read here, which on several processes is left to `Epochs`.

    `start` is the number of the batch there; `verify` and `say` as for `Reading`.
    """
    check_batch_size(batch_size, mesh)
    if remainder != "drop":
        check_for_evaluation(stream)
    tail_sizes(0, batch_size, remainder, 1)
    opening = _opening(stream_facts(stream, position), batch_size, epoch, start, remainder, None, mesh.shape)
    assembly = Assembly(collate_fn, mesh)

    def read() -> Iterator[tuple[int, Rows, Position, bool]]:
        note = f"This happened when epoch {epoch} of the stream was read."
        with working(f"epoch {epoch} of the stream, going to item {position.num_items}", note):
            reading = Reading(stream, epoch, position, verify=verify, say=say)
        items = read_batches(stream, reading, assembly, batch_size, remainder, mesh)
        held = None
        for index in itertools.count(start):
            found, problem = None, None
            try:
                with working(f"batch {index} of epoch {epoch} of the stream, reading its examples", note):
                    found = next(items, None)
            except Exception as error:
                problem = error
            if jax.process_count() > 1 and found is not None:
                yield index, *found, False
            elif held is not None:  # one is read ahead, not collated: so the last is known
                yield index - 1, *held, found is None and problem is None
            if problem is not None:
                raise problem
            if found is None:
                return
            held = found if jax.process_count() == 1 else None

    def make(job: tuple[int, Rows, Position, bool]) -> tuple[Batch, Position, int, bool]:
        index, rows, after, is_last = job
        what = f"batch {index} of epoch {epoch} of the stream"
        with working(what, f"This is {what}."), working("collate_fn"):
            return assembly(rows), after, rows.checksum, is_last

    made = _run_ahead(stream, read(), make)
    return _compared(made, mesh, opening, start, lambda made: made[0])


class BatchSizes(Sequence[int]):
    """The number of rows of each batch of an epoch."""

    def __init__(self, batch_size: int, num_whole: int, tail: list[int]):
        self._batch_size, self._num_whole, self._tail = batch_size, num_whole, tail

    def __len__(self) -> int:
        return self._num_whole + len(self._tail)

    def __getitem__(self, index: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._batch_size if index < self._num_whole else self._tail[index - self._num_whole]

    def offset(self, index: int) -> int:
        """Count the rows before a batch."""
        return min(index, self._num_whole) * self._batch_size + sum(
            self._tail[: max(index - self._num_whole, 0)]
        )


def batch_sizes(examples: Examples, batch_size: int, remainder: str, mesh: Mesh) -> BatchSizes:
    """The number of rows of each batch of an epoch. One that the data shards divide is split over them.

    Arguments and errors as for [`batches`][].
    """
    num_examples = num_examples_of(examples)
    num_shards = check_batch_size(batch_size, mesh)
    num_whole, tail = divmod(num_examples, batch_size)
    sizes = BatchSizes(batch_size, num_whole, tail_sizes(tail, batch_size, remainder, num_shards))
    if not len(sizes):
        raise ValueError(
            f"batch_size={batch_size}, but there are only {num_examples} examples, which do not fill a batch "
            'of training. Use a smaller batch_size. (For evaluation, batches takes remainder="split" or "pad".)'
        )
    return sizes


def check_batch_size(batch_size: int, mesh: Mesh) -> int:
    """The number of data shards. Raises `ValueError` if it does not divide `batch_size`."""
    check_mesh(mesh)
    num_shards = num_batch_shards(mesh)
    if batch_size < 1 or batch_size % num_shards != 0:
        axes = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in BATCH_AXES if axis in mesh.shape)
        raise ValueError(
            f"batches: batch_size={batch_size} must be a positive multiple of {num_shards}, the number "
            f"of data shards of the mesh ({axes}). "
            f"Use {max(batch_size // num_shards, 1) * num_shards}, say."
        )
    return num_shards


def _run_ahead(data: Data | Stream, jobs: Iterator[J], make: Callable[[J], B]) -> Generator[B]:
    num_ahead = max(data.prefetch, data.num_workers)
    num_threads = max(data.num_workers, 1)
    seconds = data.timeout_seconds
    return run_ahead(jobs, make, num_ahead=num_ahead, num_threads=num_threads, timeout_seconds=seconds)


def _opening(
    num_examples: int | str,
    batch_size: int,
    epoch: int,
    start: int,
    remainder: str,
    order: list[int] | None,
    mesh: Mapping[str, int],
) -> Facts:
    """The arguments of `batches` that are the same on every process."""
    facts = {
        "len(examples)": num_examples,
        "batch_size": batch_size,
        "epoch": epoch,
        "start": start,
        "remainder": remainder,
        "the order by key": order,
        "mesh": dict(mesh),
    }
    return {name: str(value) for name, value in facts.items()}


def _shapes(batch: Batch) -> Facts:
    """The dtype and shape of each leaf. The leading dim is left open: each process has its own rows."""
    return {
        path or "the batch": f"{x.dtype}[{', '.join(['rows', *map(str, x.shape[1:])])}]"
        for path, x in leaves_with_paths(batch)
    }


def _compared(
    made: Generator[B], mesh: Mesh, opening: Facts, start: int, batch_of: Callable[[B], Batch]
) -> Generator[B]:
    """The same, compared with the batches of the other processes. Raises at once if the calls differ."""
    entries = entries_of(mesh)
    if entries is None:
        return made
    stream = entries.add("batches", opening)

    def compared() -> Generator[B]:
        with contextlib.closing(made):
            for index, x in enumerate(made, start):
                entries.add_batch(stream, index, _shapes(batch_of(x)))
                yield x

    return compared()


def _picked(
    made: Generator[B], pick: Callable[[B], tuple[Batch, Position | None]]
) -> Generator[tuple[Batch, Position | None]]:
    with contextlib.closing(made):
        yield from map(pick, made)
