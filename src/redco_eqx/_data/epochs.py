"""Epoch after epoch: a run's batches, each with the place in the run that it leads to."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from redco_eqx._data.batches import SHUFFLED, batch_sizes, check_batch_size, data_batches, stream_batches
from redco_eqx._data.data import Data, Stream, as_data
from redco_eqx._data.streams import Position, first_position, position_at, stream_facts
from redco_eqx._distributed.consensus import Vote
from redco_eqx._types import Batch, CollateFn, Examples, Key


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


class Epochs:
    """The training batches of a run, without end: each epoch in an order of its own, its ragged tail left out.

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
    ):
        """**Arguments:** as for `batches`; examples may also be a function from the number of the epoch.

        Raises `ValueError` or `TypeError` as `batches` does, here and for the examples of a later epoch.
        """
        self._data, self._collate_fn = as_data(examples), collate_fn
        self.batch_size, self._mesh = batch_size, mesh
        self._last: tuple[int, Examples] | None = None
        self.num_batches: int | None = None
        self.num_examples: int | None = None
        self.order: str | None = None
        self.positions: tuple[Position, ...] | None = None
        if isinstance(self._data, Stream):
            check_batch_size(batch_size, mesh)
            self.positions = (first_position(self._data, batch_size, mesh),)
        else:
            self.num_batches = self.place(0, 0).num_batches
            self.num_examples = len(self._of(self._data, 0))
            self.order = SHUFFLED if self._data.shuffle else None

    @property
    def first_examples(self) -> Examples | None:
        """The examples of the first epoch; `None` for a stream."""
        return None if isinstance(self._data, Stream) else self._of(self._data, 0)

    def __str__(self) -> str:
        if isinstance(self._data, Stream) and self.positions is not None:
            return f"{stream_facts(self._data, self.positions[0])}, steps of {self.batch_size}"
        assert self.num_examples is not None
        assert self.num_batches is not None
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
        num_batches = len(batch_sizes(self._of(self._data, epoch), self.batch_size, "drop", self._mesh))
        return Place(epoch, min(batch, num_batches), num_batches)

    def after(
        self,
        epoch: int,
        batch: int,
        *,
        key: Key,
        positions: Sequence[Sequence[Any]] | None = None,
        verify: bool = True,
        say: Callable[[str], object] = lambda _: None,
    ) -> Generator[tuple[Batch, Place]]:
        """The batches from a place on, each with the place after it. Closing the generator ends its threads.

        `key` gives the order of each epoch; that of `fit` is `order_key`. `positions` are those of all
        shards of a stream there, as the record of a run has them; without them it is read again as far. A
        stream that gives other items than before is refused by a `ValueError`, unless `verify` is false; how
        it gets there, `say` is told in words, by the thread that reads.
        """
        if isinstance(self._data, Stream):
            yield from self._of_stream(self._data, epoch, batch, positions, verify, say)
        else:
            yield from self._of_data(self._data, epoch, batch, key)

    def _of_data(self, data: Data, epoch: int, batch: int, key: Key) -> Generator[tuple[Batch, Place]]:
        while True:
            _, batch, num_batches, *_ = self.place(epoch, batch)
            made = data_batches(
                dataclasses.replace(data, examples=self._of(data, epoch)),
                self._collate_fn,
                batch_size=self.batch_size,
                mesh=self._mesh,
                key=key,
                epoch=epoch,
                start=batch,
            )
            with contextlib.closing(made):
                for index, x in enumerate(made, start=batch + 1):
                    is_last = index == num_batches
                    yield x, Place(epoch + is_last, 0 if is_last else index, num_batches)
            epoch, batch = epoch + 1, 0

    def _of_stream(
        self,
        stream: Stream,
        epoch: int,
        batch: int,
        positions: Sequence[Sequence[Any]] | None,
        verify: bool,
        say: Callable[[str], object],
    ) -> Generator[tuple[Batch, Place]]:
        begin = first_position(stream, self.batch_size, self._mesh)
        position = position_at(stream, begin, batch, positions, self.batch_size)
        while not (stream.is_once and epoch > 0):
            made = stream_batches(
                stream,
                self._collate_fn,
                batch_size=self.batch_size,
                mesh=self._mesh,
                epoch=epoch,
                position=position,
                start=batch,
                verify=verify,
                say=say,
            )
            first = batch + 1
            with contextlib.closing(made):
                for batch, (x, after, is_last) in enumerate(_with_ends(made, self._mesh), first):
                    if is_last:
                        yield x, Place(epoch + 1, 0, None, (begin,), is_end=stream.is_once)
                    else:
                        yield x, Place(epoch, batch, None, (after,))
            if batch == 0:
                raise ValueError(
                    f"Stream: epoch {epoch} has not one whole batch of {self.batch_size}. A function of the "
                    "epoch must give a new iterable each time."
                )
            epoch, batch, position = epoch + 1, 0, begin

    def _of(self, data: Data, epoch: int) -> Examples:
        if not callable(data.examples):
            return data.examples
        if self._last is None or self._last[0] != epoch:
            self._last = epoch, data.examples(epoch)
        return self._last[1]


def _with_ends(
    made: Iterator[tuple[Batch, Position, int, bool]], mesh: Mesh
) -> Generator[tuple[Batch, Position, bool]]:
    """Each batch with its position, and whether it is the last one of some process: all stop there.

    Of many processes none waits for another: what is asked about a batch is answered a few batches later.
    Raises `ValueError` on all of them if their checksums differ.
    """
    if jax.process_count() == 1:
        yield from ((batch, position, is_last) for batch, position, _, is_last in made)
        return
    vote = Vote(mesh)
    behind: deque[tuple[Batch, Position, int, bool] | None] = deque()
    held: tuple[Batch, Position, int, bool] | None = None
    while True:
        newest = next(made, None)
        behind.append(newest)
        checksum = 0 if newest is None else newest[2]
        answer = vote.of_earlier(int(newest is None), checksum, -checksum)
        if answer is None:
            continue
        is_end, greatest, negative_of_least = answer
        if greatest != -negative_of_least:
            raise ValueError(
                "Stream(sharded=False): the processes have not read the same examples for a batch, but what is "
                "read whole must be the same on all. Give its shuffle a seed, or let each read a part: "
                "sharded=True."
            )
        if held is not None:
            yield held[0], held[1], bool(is_end)
        if is_end:
            return
        held = behind.popleft()
