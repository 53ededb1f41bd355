"""Make batches from examples, epoch by epoch: read, collate and prefetch the rows of
this process.

The examples of a batch are a pure function of numbers that are equal on every process.
Each process reads only the rows that its devices need. With a sequence of examples,
nothing here waits for another process.
"""

import contextlib
import functools
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

from redco_eqx._base.protocols import (
    Batch,
    CollateFn,
    Examples,
    Key,
    check_functions,
    check_integers,
)
from redco_eqx._base.tree import leaves_with_paths
from redco_eqx._data.checksums import checksums_of
from redco_eqx._data.data import Data, Place, Stream, as_data, num_examples_of
from redco_eqx._data.order import SHUFFLED, Permutation, epoch_order
from redco_eqx._data.placement import (
    Job,
    batch_sizes,
    check_batch_size,
    local_rows,
    placed,
    rows_of_several,
)
from redco_eqx._data.workers import noting, run_ahead
from redco_eqx._distributed.consensus import (
    Duplicates,
    Facts,
    Vote,
    agree,
    difference,
    from_all,
    is_shared,
)
from redco_eqx._distributed.process_group import noting_exits

Made: TypeAlias = tuple[Batch, Place]
"""A batch on the mesh, with the place after it."""


class Epochs:
    """The batches of one epoch, or of all epochs of a run in an endless sequence. Each
    epoch has a different order.

    - `batch_size`: the number of examples in a batch.
    - `num_examples`, `num_batches`: those of the first epoch; `None` for a stream.
    - `examples_of`: a function from the epoch number to its examples (`None` for a
        stream).
    - `order`: the name of the method that makes an order from a key, for the record of
        a run; `None` if the examples keep their order.
    - `positions`: the position at which a stream begins, also for the record; `None`
        for a sequence.
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
        """**Arguments:** as for `batches`; examples may also be a function of the epoch
        number.

        Raises `ValueError` or `TypeError` as `batches` does, here and for the examples
        of a later epoch.
        """
        self._data = as_data(examples)
        self._mesh = mesh
        self._collate_fn = collate_fn
        self.batch_size = batch_size
        self._remainder = remainder
        # `with jax.enable_x64(...)` around the consumer does not affect other threads.
        self._x64: bool = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
        self.num_batches = self.num_examples = self.order = self.positions = None
        self.examples_of: Callable[[int], Any] = lambda _: None
        check_batch_size("batches", batch_size, mesh)
        if isinstance(self._data, Stream):
            self._begin_stream(self._data)
        else:
            self._begin_sequence(self._data)

    def _begin_stream(self, stream: Stream) -> None:
        from redco_eqx._data import streams  # imported only for a stream

        if self._remainder != "drop":
            raise ValueError(
                f"batches: remainder={self._remainder!r}, but examples is a Stream, "
                "which drops the rest. Pass list(stream), or any sequence."
            )
        begin = streams.first_position(stream, self.batch_size, self._mesh)
        self.positions = (begin,)
        kind = "batches" if stream.batched else "examples"
        how = f"in {begin.num_shards} shards" if stream.sharded else "whole"
        self._stream_text = f"a stream of {kind}, read {how}"

    def _begin_sequence(self, data: Data) -> None:
        given: Any = data.examples
        of_epoch: Callable[[int], Any] = given if callable(given) else lambda _: given
        # An epoch asks for its examples several times, and the function may take long.
        self.examples_of = functools.lru_cache(maxsize=1)(of_epoch)
        self.num_batches = self.place(0, 0).num_batches
        self.num_examples = len(self.examples_of(0))
        self.order = SHUFFLED if data.shuffle else None

    def __str__(self) -> str:
        if self.num_batches is None or self.num_examples is None:
            return f"{self._stream_text}, steps of {self.batch_size}"
        num_dropped = self.num_examples - self.num_batches * self.batch_size
        return (
            f"{self.num_examples} examples, {self.num_batches} steps of "
            f"{self.batch_size} per epoch, {num_dropped} dropped from each"
        )

    def num_steps(self, num_epochs: int) -> int | None:
        """Return the number of steps in `num_epochs` epochs, or `None` if it is not
        known yet. Raises `ValueError` for a stream."""
        if self.num_batches is None:
            raise ValueError(
                f"fit: num_epochs={num_epochs}, but train_examples is a Stream, whose "
                "length is unknown. Pass num_steps= instead."
            )
        if isinstance(self._data, Data) and callable(self._data.examples):
            return None
        return self.num_batches * num_epochs

    def place(self, epoch: int, batch: int) -> Place:
        """Return the place after `epoch` whole epochs and `batch` batches of the next
        one (or all its batches, if it has fewer)."""
        if isinstance(self._data, Stream):
            return Place(epoch, batch, None)
        num_whole, tail = batch_sizes(
            self.examples_of(epoch), self.batch_size, self._remainder, self._mesh
        )
        num_batches = num_whole + len(tail)
        return Place(epoch, min(batch, num_batches), num_batches)

    def after(
        self,
        place: Place,
        *,
        key: Key,
        verify: bool = True,
        say: Callable[[str], object] = lambda _: None,
    ) -> Generator[Made]:
        """Yield the batches that follow a place, each with the place after it. Closing
        the generator ends its threads.

        `key` determines the order of each epoch; `fit` passes `order_key`. If the place
        has no positions, a stream is read again up to it. `verify` and `say` are as for
        `Reading` (`streams.py`). The thread that reads the stream calls `say`.
        """
        while True:
            yield from self.rest(place, key=key, verify=verify, say=say)
            place = Place(place.epoch + 1, 0, None)

    def rest(
        self,
        place: Place,
        *,
        key: Key | None,
        verify: bool = True,
        say: Callable[[str], object] = lambda _: None,
    ) -> Generator[Made]:
        """Yield the batches of one epoch that follow a place, as `after` does. Raises
        at once if this is not possible."""
        epoch, start, *_ = place
        order = None
        if isinstance(self._data, Stream):
            length = self._stream_text
            jobs = self._stream_jobs(self._data, place, verify=verify, say=say)
        else:
            examples = self.examples_of(epoch)
            length = len(examples)
            if key is not None and self._data.shuffle:
                order = epoch_order(length, key, epoch)
            jobs = self._sequence_jobs(examples, epoch, start, order)
        duplicates = Duplicates(self._mesh)
        again = (
            f"batches({type(self._data).__name__}(..., prefetch=0), ..., "
            f"epoch={epoch}, start="
        )

        def make(numbered: tuple[int, Job]) -> Made:
            index, job = numbered
            with noting(
                f"This is batch {index} of epoch {epoch}; {again}{index}) makes it "
                "again."
            ):
                batch = self._collate_fn(job.read())
                with jax.enable_x64(self._x64):
                    made = placed(batch, self._mesh, job.size, job.num_here)
                self._compare_rows(duplicates, index, batch, job)
                return made, job.after

        # Some of the order stands for all of it, and for the key.
        first_few = None
        if order is not None:
            first_few = order(np.arange(min(4, order.num))).tolist()
        facts = {
            "len(examples)": length,
            "batch_size": self.batch_size,
            "epoch": epoch,
            "start": start,
            "remainder": self._remainder,
            "the order by key": first_few,
            "mesh": dict(self._mesh.shape),
        }
        agree(
            self._mesh,
            "batches",
            {name: str(value) for name, value in facts.items()},
            wait=False,
        )
        made = run_ahead(enumerate(jobs, start), make, self._data)
        if is_shared(self._mesh):
            made = _of_equal_shapes(made, self._mesh, start)
        if not isinstance(self._data, Stream):
            return made
        end = Place(epoch + 1, 0, None, self.positions)
        return _with_ends(made, self._mesh, start, end, is_whole=not self._data.sharded)

    def _compare_rows(
        self, duplicates: Duplicates, index: int, batch: Batch, job: Job
    ) -> None:
        """Compare the rows of a batch that several processes make, each for its own
        devices."""
        for processes, rows in rows_of_several(self._mesh, job.size).items():
            if job.num_here != job.size:
                # The batch has only the rows that this process needs.
                needed = local_rows(self._mesh, job.size).needed
                rows = np.searchsorted(needed, rows)
            in_common = jax.tree.map(functools.partial(_rows_of, rows=rows), batch)
            facts = {name: f"{x:08x}" for name, x in checksums_of(in_common).items()}
            duplicates.compare(processes, f"collate_fn: batch {index}", facts)

    def _stream_jobs(
        self,
        stream: Stream,
        place: Place,
        *,
        verify: bool,
        say: Callable[[str], object],
    ) -> Iterator[Job]:
        from redco_eqx._data import streams

        assert self.positions is not None
        position = streams.position_at(
            stream, self.positions[0], place, self.batch_size
        )
        return streams.read_batches(
            stream,
            place,
            position,
            self.batch_size,
            self._mesh,
            verify=verify,
            say=say,
        )

    def _sequence_jobs(
        self, examples: Examples, epoch: int, start: int, order: Permutation | None
    ) -> Iterator[Job]:
        num_whole, tail = batch_sizes(
            examples, self.batch_size, self._remainder, self._mesh
        )
        num_examples = len(examples)
        num_batches = num_whole + len(tail)
        if not 0 <= start <= num_batches:
            raise ValueError(
                f"batches: start={start}, but the epoch has {num_batches} batches "
                f"({num_examples} examples, batch_size={self.batch_size}). It must be "
                f"in 0..{num_batches}."
            )

        def rows(index: int) -> tuple[int, np.ndarray]:
            """The size of a batch, and the positions in the epoch of the rows that this
            process makes."""
            size = self.batch_size
            num_before = self.batch_size * index
            if index >= num_whole:
                in_tail = index - num_whole
                size = tail[in_tail]
                num_before = self.batch_size * num_whole + sum(tail[:in_tail])
            needed = local_rows(self._mesh, size).needed
            # "pad" repeats the last example.
            return size, np.minimum(num_before + needed, num_examples - 1)

        def read(wanted: list[int]) -> list[Any]:
            # An example that is repeated is read only once.
            found = {i: examples[i] for i in dict.fromkeys(wanted)}
            return [found[i] for i in wanted]

        def jobs() -> Iterator[Job]:
            # The order of a few positions takes as long to compute as that of hundreds.
            num_at_once = max(1, 512 // self.batch_size)
            for first in range(start, num_batches, num_at_once):
                end = min(first + num_at_once, num_batches)
                several = [rows(index) for index in range(first, end)]
                positions = np.concatenate([x for _, x in several])
                indices = positions if order is None else order(positions)
                # Examples need not support an index of NumPy.
                left = iter(indices.tolist())
                for index, (size, x) in enumerate(several, first):
                    num_here = len(x)
                    wanted = list(itertools.islice(left, num_here))
                    # After the last batch of an epoch comes the next epoch.
                    after = divmod(epoch * num_batches + index + 1, num_batches)
                    yield Job(
                        size,
                        num_here,
                        functools.partial(read, wanted),
                        Place(*after, num_batches),
                    )

        return jobs()


def _rows_of(leaf: Any, rows: np.ndarray) -> np.ndarray:
    x = np.asarray(leaf)
    # Indexing by an array makes a copy, which all rows do not need.
    return x if len(rows) == len(x) else x[rows]


def _of_equal_shapes(made: Generator[Made], mesh: Mesh, start: int) -> Generator[Made]:
    """Yield the same batches. Raises `ValueError` if the shapes of a batch differ from
    those of the first, or those of the first from another process's."""
    first: Facts = {}
    with contextlib.closing(made), noting_exits():
        for index, (batch, place) in enumerate(made, start):
            shapes = shapes_of(batch)
            if index == start:
                first = shapes
                agree(mesh, f"collate_fn: batch {index}", first, wait=False)
            if found := difference(shapes, first):
                name, here, there = found
                raise ValueError(
                    f"collate_fn: batch {index}: {name} is {here}, but was {there} in "
                    f"batch {start}. With several processes, an epoch must have one "
                    "shape (pad text to a fixed length)."
                )
            yield batch, place


def _with_ends(
    made: Generator[Made], mesh: Mesh, start: int, end: Place, *, is_whole: bool
) -> Generator[Made]:
    """Yield each batch of a stream when it is known whether it is the last one on any
    process. All processes stop at that batch.

    No process waits for another: the answer about a batch comes a few batches later.
    With `is_whole`, all processes read the same examples. Raises `ValueError` on all of
    them if the checksums of these differ, or if an epoch that is read from its
    beginning has no batch.
    """
    vote = Vote(mesh)
    behind: deque[Made | None] = deque()
    ready: Made | None = None
    with contextlib.closing(made):
        while True:
            try:
                newest = next(made, None)
            except Exception:  # in a batch after this one
                if ready is not None:
                    yield ready
                raise
            behind.append(newest)
            checksum = 0
            if is_whole and newest is not None:
                checksum = _checksum_at(newest[1])
            # A vote knows only the greatest of some numbers. The least one is the
            # greatest of the negative numbers, with its sign changed.
            answer = vote(int(newest is None), checksum, -checksum)
            if answer is None:
                continue
            is_end, greatest, negative_of_least = answer
            if greatest != -negative_of_least:
                raise ValueError(
                    "Stream(sharded=False): the processes read different examples for "
                    "a batch, but each of them must read the same. Set a seed for the "
                    "shuffle of the stream, or pass sharded=True, so that each process "
                    "reads a part."
                )
            if ready is not None:
                yield ready[0], end if is_end else ready[1]
            elif is_end and start == 0:
                raise ValueError(
                    f"Stream: epoch {end.epoch - 1} ends before its first batch is "
                    "full. Use a smaller batch_size. If earlier epochs were longer, "
                    "the function of the epoch must return a new iterable each time."
                )
            if is_end:
                return
            ready = behind.popleft()


def _checksum_at(place: Place) -> int:
    """Return the checksum of the items of a stream before a place."""
    if not place.positions:
        return 0
    return place.positions[0].checksum or 0


class Batches(Iterator[Batch]):
    """The batches of one epoch, and the current place in it. [`batches`][] returns
    it."""

    def __init__(self, made: Generator[Made], place: Place):
        self._made = made
        self._place = place
        self._end = Place(place.epoch + 1, 0, None)

    def __next__(self) -> Batch:
        try:
            batch, self._place = next(self._made)
        except StopIteration:
            self._place = self._end
            raise
        except BaseException:
            self._end = self._place  # nothing follows, but the epoch has not ended
            raise
        return batch

    @property
    def place(self) -> dict[str, Any]:
        """The arguments with which `batches` continues after the last batch that it
        yielded. They are plain JSON, so you can put them in the `extras` of a
        checkpoint.

        After the last batch of an epoch, these are the arguments for the next epoch.
        For a stream, all processes must read `place`, because each knows the position
        in only one shard.
        """
        epoch, start, _, positions = self._place
        place: dict[str, Any] = {"epoch": epoch, "start": start}
        if positions is not None:
            # Processes that read the same shard are at the same position.
            shards = {}
            for of_process in from_all(positions):
                shards |= {shard[0]: list(shard) for shard in of_process}
            place["positions"] = list(shards.values())
        return place

    def close(self) -> None:
        """End the threads of this iterator."""
        self._end = self._place
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
    """Iterate over the batches of one epoch, placed on the mesh with their leading dim
    split over its data shards.

    ```python
    order = dict(batch_size=64, mesh=mesh, key=jax.random.key(2))
    for batch in rx.batches(examples, collate_fn, **order):
        state, metrics = step(state, batch)
    ```

    The iterator has a place. Another iterator can continue from there, even in another
    process:

    ```python
    order = dict(batch_size=64, mesh=mesh, key=jax.random.key(2))
    iterator = rx.batches(examples, collate_fn, **order)
    batch = next(iterator)
    rest = rx.batches(examples, collate_fn, **order, **iterator.place)
    ```

    **Arguments:**

    - `examples`: anything with `len(examples)` and `examples[int]`: a list, a NumPy
        array, a Hugging Face dataset. Each process reads only the rows that it needs.
        Pass [`Data`][] to set how they are read, or a [`Stream`][] for examples that
        come one after the other (with `remainder="drop"`).
    - `collate_fn`: turns a list of examples into a PyTree of arrays, each with leading
        dim `len(examples)`. It is called once per batch, with this process's rows in
        global order. With several processes, these rows are a part of the batch, so the
        other dims must not depend on the examples (pad text to a fixed length). If the
        devices of several processes need the same rows (`tensor` over processes), each
        of these processes makes them, so their random numbers must come from the
        example or from a seed. Return new arrays each time, because an earlier array
        may still be in use.
    - `batch_size`: the number of examples in a batch, over all devices.
    - `mesh`: the mesh, as made by [`make_mesh`][].
    - `key`: shuffles the examples. `None` keeps their order. A stream always keeps its
        order.
    - `epoch`: the epoch number; each epoch has a different order.
    - `start`: the index of the first batch to yield. `batches(start=k)` continues an
        epoch after its first `k` batches.
    - `positions`: the positions of the shards of a stream at `start`, as in `place`.
        Without them, the stream is read again up to `start`.
    - `remainder`: how to treat the examples after the last whole batch. `"drop"`
        (training) leaves them out. `"split"` (evaluation) makes up to two smaller
        batches: one of as many examples as divide over the data shards, and a
        replicated one of the rest. No example is lost or counted twice. `"pad"`
        (prediction) fills the last batch by repeating the last example.

    **Returns:**

    An iterator with a `place` (see [`Batches`][]). Its threads end when you close or
    drop it. An exception in `examples` or `collate_fn` is raised at the batch where it
    happened.

    **Raises:**

    `TypeError` or `ValueError`. At the call: an argument cannot be used, or differs
    from that of another process. At a batch: `collate_fn` returns anything but numeric
    arrays with one row per example, or (with several processes) arrays of other shapes
    than in the first batch, or than on another process, or other numbers than on
    another process that makes the same rows. The message names the leaf.
    """
    check_functions("batches", collate_fn=collate_fn)
    check_integers("batches", batch_size=batch_size, epoch=epoch, start=start)
    data = as_data(examples)
    if isinstance(data, Data):
        num_examples_of(data.sequence)  # no function of the epoch
        if positions is not None:
            raise ValueError(
                "batches: positions are those of a Stream, but examples are a sequence."
            )
    epochs = Epochs(
        data, collate_fn, batch_size=batch_size, mesh=mesh, remainder=remainder
    )
    place = Place(int(epoch), int(start), None, positions)
    return Batches(epochs.rest(place, key=key), place)


def shapes_of(batch: Batch) -> Facts:
    """Return the dtype and shape of each leaf. The leading dim is left open, because
    each process has different rows."""
    shapes = {}
    for path, x in leaves_with_paths(batch):
        dims = ", ".join(["rows", *map(str, x.shape[1:])])
        shapes[path or "the batch"] = f"{x.dtype}[{dims}]"
    return shapes
