"""From examples to batches on the mesh: rows of this process, collation, prefetch, epoch after epoch.

Which examples make a batch is a pure function of numbers, equal on every process; each process reads
only the rows that its own devices hold. Of a sequence nothing here waits for another process.
"""

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from redco_eqx._base.protocols import Batch, CollateFn, Examples, Key, check_function
from redco_eqx._base.tree import leaves_with_paths
from redco_eqx._data.data import Data, Stream, as_data, num_examples_of
from redco_eqx._data.order import SHUFFLED, epoch_order
from redco_eqx._data.placement import Assembly, batch_sizes, check_batch_size, tail_sizes
from redco_eqx._data.streams import (
    Position,
    Reading,
    check_for_evaluation,
    first_position,
    position_at,
    read_batches,
    stream_facts,
)
from redco_eqx._data.workers import run_ahead, working
from redco_eqx._distributed.consensus import Facts, Vote, entries_of, from_all, is_shared


class Place(NamedTuple):
    """`epoch` epochs are done, and `batch` of the `num_batches` of another.

    - `num_batches`: `None` for a stream.
    - `positions`: where the stream that this process reads stands, for the record of the run.
    - `is_end`: whether no batch follows, because a stream that is read only once has ended.
    """

    epoch: int
    batch: int
    num_batches: int | None
    positions: tuple[Position, ...] | None = None
    is_end: bool = False

    @property
    def epochs_done(self) -> float:
        """With the fraction of the one in hand, if its length is known."""
        return self.epoch + (self.batch / self.num_batches if self.num_batches else 0.0)


class Made(NamedTuple):
    """A batch on the mesh.

    - `after`: the position of the stream after it; `None` of a sequence.
    - `is_last`: true of the last one of its epoch.
    """

    batch: Batch
    after: Position | None
    is_last: bool = False


class Epochs:
    """The batches of each epoch, in an order of its own, and of a run: epoch after epoch, without end.

    - `batch_size`: number of examples in a batch.
    - `num_examples`, `num_batches`: those of the first epoch; `None` for a stream.
    - `order`: how the order follows from a key, for the record of a run; `None` for that of the examples.
    - `positions`: where a stream begins, for the same.
    """

    def __init__(
        self,
        examples: Examples | Callable[[int], Examples] | Data | Stream,
        collate_fn: CollateFn,
        *,
        batch_size: int,
        mesh: Mesh,
        remainder: str = "drop",
    ):
        """**Arguments:** as for `batches`; examples may also be a function from the number of the epoch.

        Raises `ValueError` or `TypeError` as `batches` does, here and for the examples of a later epoch.
        """
        self._data, self._mesh = as_data(examples), mesh
        self.batch_size, self._remainder = batch_size, remainder
        self.num_batches = self.num_examples = self.order = self.positions = None
        self._of: Callable[[int], Any] = lambda epoch: None
        if isinstance(self._data, Stream):
            check_batch_size(batch_size, mesh)
            tail_sizes(0, batch_size, remainder, mesh)
            if remainder != "drop":
                check_for_evaluation(self._data)
            self.positions = (first_position(self._data, batch_size, mesh),)
            self._facts = stream_facts(self._data, self.positions[0])
        else:
            given: Any = self._data.examples
            of_epoch: Callable[[int], Any] = given if callable(given) else lambda epoch: given
            self._of = functools.lru_cache(maxsize=1)(of_epoch)
            self.num_batches, self.num_examples = self.place(0, 0).num_batches, len(self._of(0))
            self.order = SHUFFLED if self._data.shuffle else None
        self._assembly = Assembly(collate_fn, mesh)

    @property
    def first_examples(self) -> Examples | None:
        """The examples of the first epoch; `None` for a stream."""
        return self._of(0)

    def __str__(self) -> str:
        if self.num_batches is None or self.num_examples is None:
            return f"{self._facts}, steps of {self.batch_size}"
        num_dropped = self.num_examples - self.num_batches * self.batch_size
        return (
            f"{self.num_examples} examples, {self.num_batches} steps of {self.batch_size} per epoch, "
            f"{num_dropped} dropped from each"
        )

    def num_steps(self, num_epochs: int) -> int | None:
        """The number of steps of so many epochs, if that is known now. Raises `ValueError` for a stream."""
        if self.num_batches is None:
            raise ValueError(
                f"fit: num_epochs={num_epochs}, but train_examples is a Stream, of which nobody knows how long "
                "it is: say num_steps= instead."
            )
        if isinstance(self._data, Data) and callable(self._data.examples):
            return None
        return self.num_batches * num_epochs

    def place(self, epoch: int, batch: int) -> Place:
        """The place after so many whole epochs and batches of another, at most all of them."""
        if isinstance(self._data, Stream):
            return Place(epoch, batch, None)
        num_whole, tail = self._sizes(self._of(epoch))
        num_batches = num_whole + len(tail)
        return Place(epoch, min(batch, num_batches), num_batches)

    def after(
        self,
        epoch: int,
        batch: int,
        *,
        key: Key,
        positions: Sequence[Sequence[Any]] | None = None,
        **reading: Any,
    ) -> Generator[tuple[Batch, Place]]:
        """The batches from a place on, each with the place after it. Closing the generator ends its threads.

        `key` gives the order of each epoch; that of `fit` is `order_key`. `positions` are those of all
        shards of a stream there, as the record of a run has them; without them it is read again as far.
        `reading`: the options of `Reading`, of which `say` is told by the thread that reads.
        """
        is_once = isinstance(self._data, Stream) and self._data.is_once
        while not (is_once and epoch > 0):
            _, batch, num_batches, *_ = self.place(epoch, batch)
            done = batch
            made = self.rest(epoch, batch, key=key, positions=positions, **reading)
            if isinstance(self._data, Stream) and is_shared(self._mesh):
                made = _with_ends(made, self._mesh, is_whole=not self._data.sharded)
            with contextlib.closing(made):
                for done, (x, after, is_last) in enumerate(made, batch + 1):
                    if is_last:
                        yield x, Place(epoch + 1, 0, num_batches, self.positions, is_end=is_once)
                    else:
                        yield x, Place(epoch, done, num_batches, None if after is None else (after,))
            if done == 0:
                raise ValueError(
                    f"Stream: epoch {epoch} has not one whole batch of {self.batch_size}. A function of the "
                    "epoch must give a new iterable each time."
                )
            epoch, batch, positions = epoch + 1, 0, None

    def rest(
        self,
        epoch: int,
        start: int,
        *,
        key: Key | None,
        positions: Sequence[Sequence[Any]] | None = None,
        **reading: Any,
    ) -> Generator[Made]:
        """The batches of one epoch from a batch on, as for `after`. Raises at once if that is not possible."""
        if isinstance(self._data, Stream):
            return self._rest_of_stream(self._data, epoch, start, positions, **reading)
        return self._rest_of_data(self._data, epoch, start, key)

    def _rest_of_data(self, data: Data, epoch: int, start: int, key: Key | None) -> Generator[Made]:
        examples, assembly = self._of(epoch), self._assembly
        num_whole, tail = self._sizes(examples)
        num_examples, num_batches = len(examples), num_whole + len(tail)
        if not 0 <= start <= num_batches:
            raise ValueError(
                f"batches: start={start}, but the epoch has {num_batches} batches ({num_examples} examples, "
                f"batch_size={self.batch_size}). It must lie in 0..{num_batches}."
            )
        order = None if key is None or not data.shuffle else epoch_order(num_examples, key, epoch)
        start_of_order = None if order is None else order(np.arange(min(4, num_examples))).tolist()

        def make(index: int) -> Made:
            size, offset = self.batch_size, self.batch_size * min(index, num_whole)
            if index >= num_whole:
                size, offset = tail[index - num_whole], offset + sum(tail[: index - num_whole])
            needed = assembly.needed(size)
            positions = np.minimum(offset + needed, num_examples - 1)  # past the end: "pad"
            wanted = (positions if order is None else order(positions)).tolist()
            what = f"batch {index} of epoch {epoch}"
            again = f"batches(Data(..., prefetch=0), ..., epoch={epoch}, start={index}) makes it again"
            with working(what, f"This is {what}; {again}."):
                with working("examples[i]"):
                    read = {i: examples[i] for i in dict.fromkeys(wanted)}
                with working("collate_fn"):
                    batch = assembly(size, needed, [read[i] for i in wanted])
            return Made(batch, None, index == num_batches - 1)

        made = run_ahead(iter(range(start, num_batches)), make, data)
        return self._compared(made, num_examples, epoch, start, start_of_order)

    def _rest_of_stream(
        self,
        stream: Stream,
        epoch: int,
        start: int,
        positions: Sequence[Sequence[Any]] | None,
        **reading: Any,
    ) -> Generator[Made]:
        assert self.positions is not None
        position = position_at(stream, self.positions[0], start, positions, self.batch_size)
        note = f"This happened when epoch {epoch} of the stream was read."

        def read() -> Iterator[tuple[int, tuple[Any, ...], Position, bool]]:
            with working(f"epoch {epoch} of the stream, going to item {position.num_items}", note):
                items = Reading(stream, epoch, position, **reading)
            items = read_batches(stream, items, self._assembly, self.batch_size, self._remainder, self._mesh)
            ready = None  # until it is known whether another one comes
            for index in itertools.count(start):
                try:
                    with working(f"batch {index} of epoch {epoch} of the stream, reading its examples", note):
                        job = next(items, None)
                except Exception:  # in the batch after this one
                    if ready is not None:
                        yield *ready, False
                    raise
                if ready is not None:
                    yield *ready, job is None
                if job is None:
                    return
                ready = index, *job

        def make(job: tuple[int, tuple[Any, ...], Position, bool]) -> Made:
            index, rows, after, is_last = job
            what = f"batch {index} of epoch {epoch} of the stream"
            with working(what, f"This is {what}."), working("collate_fn"):
                return Made(self._assembly(*rows), after, is_last)

        return self._compared(run_ahead(read(), make, stream), self._facts, epoch, start)

    def _sizes(self, examples: Examples) -> tuple[int, list[int]]:
        return batch_sizes(examples, self.batch_size, self._remainder, self._mesh)

    def _compared(
        self,
        made: Generator[Made],
        num_examples: int | str,
        epoch: int,
        start: int,
        order: list[int] | None = None,
    ) -> Generator[Made]:
        """The same, compared with the batches of the other processes. Raises at once if the calls differ."""
        entries = entries_of(self._mesh)
        if entries is None:
            return made
        facts = {
            "len(examples)": num_examples,
            "batch_size": self.batch_size,
            "epoch": epoch,
            "start": start,
            "remainder": self._remainder,
            "the order by key": order,
            "mesh": dict(self._mesh.shape),
        }
        stream = entries.add("batches", {name: str(value) for name, value in facts.items()})

        def compared() -> Generator[Made]:
            with contextlib.closing(made):
                for index, x in enumerate(made, start):
                    entries.add_batch(stream, index, shapes_of(x.batch))
                    yield x

        return compared()


def _with_ends(made: Generator[Made], mesh: Mesh, *, is_whole: bool) -> Generator[Made]:
    """Each batch of a stream when it is known whether it is the last one of some process: all stop there.

    Of many processes none waits for another: what is asked about a batch is answered a few batches later.
    With `is_whole` all read the same. Raises `ValueError` on all of them if their checksums differ.
    """
    vote = Vote(mesh)
    behind: deque[Made | None] = deque()
    ready: Made | None = None
    with contextlib.closing(made):
        while True:
            newest = next(made, None)
            behind.append(newest)
            after = newest.after if newest is not None and is_whole else None
            checksum = 0 if after is None else after.checksum or 0
            answer = vote.of_earlier(int(newest is None), checksum, -checksum)
            if answer is None:
                continue
            is_end, greatest, negative_of_least = answer
            if greatest != -negative_of_least:
                raise ValueError(
                    "Stream(sharded=False): the processes have not read the same examples for a batch, but "
                    "what is read whole must be the same on all. Give its shuffle a seed, or let each read a "
                    "part: sharded=True."
                )
            if ready is not None:
                yield ready._replace(is_last=bool(is_end))
            if is_end:
                return
            ready = behind.popleft()


class Batches(Iterator[Batch]):
    """The batches of one epoch, and the place among them. Made by [`batches`][]."""

    def __init__(self, made: Generator[Made], epoch: int, start: int):
        self._made = made
        self._epoch, self._start = epoch, start
        self._position: Position | None = None
        self._is_over = False

    def __next__(self) -> Batch:
        try:
            batch, self._position, _ = next(self._made)
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
    if isinstance(data, Data):
        num_examples_of(data.sequence)  # no function of the epoch
        if positions is not None:
            raise ValueError("batches: positions are those of a Stream, but examples are a sequence.")
    epochs = Epochs(data, collate_fn, batch_size=batch_size, mesh=mesh, remainder=remainder)
    return Batches(epochs.rest(epoch, start, key=key, positions=positions), epoch, start)


def shapes_of(batch: Batch) -> Facts:
    """The dtype and shape of each leaf. The leading dim is left open: each process has its own rows."""
    return {
        path or "the batch": f"{x.dtype}[{', '.join(['rows', *map(str, x.shape[1:])])}]"
        for path, x in leaves_with_paths(batch)
    }
