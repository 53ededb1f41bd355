"""A stream that is being read: one epoch of it, from any position on."""

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from redco_eqx._data.data import Data, Stream, as_data, num_examples_of
from redco_eqx._data.placement import Assembly, Rows, needed_rows
from redco_eqx._data.position import Position, decode, encode
from redco_eqx._sharding.mesh import batch_sharding, num_batch_shards
from redco_eqx._types import Examples

_PLAIN = {bool, int, float, complex, str, bytes, type(None)}


class Reading(Iterator[Any]):
    """The items of an epoch from a position on."""

    def __init__(self, stream: Stream, epoch: int, position: Position):
        """Opens the stream, and goes to the position: by the source's own state, or by reading as far.

        Raises `ValueError` if the stream ends before, and `TypeError` if its function returns no iterable.
        """
        self._before = position
        self._num_read = 0
        source = _source(stream, epoch, position)
        has_exact_state = not stream.replay and not _refills(source)
        self._state = _state_of(source) if has_exact_state else None
        saved = None if position.state is None or not has_exact_state else decode(position.state)
        if self._state is not None and saved is not None:  # an iterable's is set before it is iterated
            self._state.set(saved)
        self._items = iter(source)
        if self._state is None and has_exact_state:
            self._state = _state_of(self._items)
            if self._state is not None and saved is not None:
                self._state.set(saved)
        if self._state is None or saved is None:
            self._leave_out(position.num_items, epoch)

    def __next__(self) -> Any:
        item = next(self._items)
        self._num_read += 1
        return item

    @property
    def position(self) -> Position:
        """The position after what has been read."""
        state = None if self._state is None else encode(self._state.get())
        return self._before._replace(num_items=self._before.num_items + self._num_read, state=state)

    def _leave_out(self, num_items: int, epoch: int) -> None:
        there = sum(1 for _ in itertools.islice(self._items, num_items))
        if there < num_items:
            raise ValueError(
                f"Stream: it was left after {num_items} items of epoch {epoch}, but now gives only {there}. It "
                "must give the same ones each time that it is read."
            )


def first_position(stream: Stream, batch_size: int, mesh: Mesh) -> Position:
    """The position before the first item, of the shard that this process reads.

    Raises `ValueError` if it is not said what a process reads, or if that is not possible.
    """
    pieces: dict[int, dict[Any, Any]] = {}
    for device, index in batch_sharding(mesh).devices_indices_map((batch_size,)).items():
        pieces.setdefault(device.process_index, {})[device] = index
    if len(pieces) > 1 and stream.sharded is None:
        raise ValueError(
            "Stream: on several processes say what each of them reads: Stream(..., sharded=False), the whole "
            "stream, the same on all; or sharded=True and a function, examples(epoch, shard, num_shards)."
        )
    if not stream.sharded:
        return Position(0, 1)
    rows = {process: tuple(needed_rows(piece, batch_size).tolist()) for process, piece in pieces.items()}
    shards = sorted(set(rows.values()))
    if sum(map(len, shards)) > batch_size:
        raise ValueError(
            "Stream(sharded=True): on this mesh some processes hold a part of the rows of others, so none can "
            "read a shard of its own. Order the devices of the mesh by process, or use sharded=False."
        )
    process = jax.process_index()
    if process not in rows:
        raise ValueError(f"Stream: process {process} has no device in the mesh, so that it reads no shard.")
    return Position(shards.index(rows[process]), len(shards))


def items_per_batch(stream: Stream, position: Position, batch_size: int) -> int:
    """How many items this process reads for a batch."""
    return 1 if stream.batched else batch_size // position.num_shards


def stream_facts(stream: Stream, position: Position) -> str:
    """What all processes must have in common, in words."""
    items = "batches" if stream.batched else "examples"
    return f"a stream of {items}, " + (
        f"read in {position.num_shards} shards" if stream.sharded else "read whole"
    )


def as_sequence(examples: Examples | Data | Stream, first: int | None = None) -> Data:
    """The same as a sequence: of a stream all its examples, or the first ones, in a list."""
    data = as_data(examples)
    if isinstance(data, Data):
        if first is None:
            return data
        few = [data.sequence[i] for i in range(min(num_examples_of(data.sequence), first))]
    else:
        check_for_evaluation(data)
        few = list(itertools.islice(Reading(data, 0, Position(0, 1)), first))
    return Data(few, prefetch=data.prefetch, num_workers=data.num_workers, processes=data.processes)


def read_batches(
    stream: Stream, reading: Reading, assembly: Assembly, batch_size: int, remainder: str, mesh: Mesh
) -> Iterator[tuple[Rows, Position]]:
    """What is read for one batch after the other, and the position after it. `remainder` as for `batches`."""
    needed = assembly.needed(batch_size)
    is_shared = not stream.sharded and jax.process_count() > 1
    read_here = needed if stream.sharded else np.arange(batch_size)
    if stream.batched:
        for item in reading:
            yield Rows(batch_size, read_here, item, checksum(item) if is_shared else 0), reading.position
        return
    while items := list(itertools.islice(reading, len(read_here))):
        if len(items) == len(read_here):
            mine = items if stream.sharded else [items[row] for row in needed]
            yield Rows(batch_size, needed, mine, checksum(items) if is_shared else 0), reading.position
        else:
            for size in tail_sizes(len(items), batch_size, remainder, num_batch_shards(mesh)):
                rows = assembly.needed(size)
                yield Rows(size, rows, [items[min(row, len(items) - 1)] for row in rows]), reading.position
                items = items[size:]


def checksum(x: Any, begin: int = 0) -> int:
    """Of the numbers and text in an example, from 0 to 2**30; of other objects their type alone counts."""
    is_sequence = isinstance(x, list | tuple)
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc":
        content = np.ascontiguousarray(x).tobytes()
    elif type(x) in _PLAIN or (is_sequence and _PLAIN.issuperset(map(type, x))):  # tokens, say: at once
        content = repr(x).encode()
    elif is_sequence or isinstance(x, dict):
        for item in x.items() if isinstance(x, dict) else x:
            begin = checksum(item, begin)
        return begin
    else:
        content = type(x).__name__.encode()
    return zlib.crc32(content, begin) % 2**30


def tail_sizes(num_examples: int, batch_size: int, remainder: str, num_shards: int) -> list[int]:
    """The sizes of the batches that are made of the examples after the last whole batch."""
    if remainder == "drop":
        return []
    if remainder == "split":
        sizes = [num_examples - num_examples % num_shards, num_examples % num_shards]
    elif remainder == "pad":
        sizes = [batch_size if num_examples else 0]
    else:
        raise ValueError(f'batches: remainder={remainder!r}, but it must be "drop", "split" or "pad".')
    return [size for size in sizes if size]


def check_for_evaluation(stream: Stream) -> None:
    """Raises `ValueError` if evaluation and prediction, which lose no example, cannot read a stream."""
    for name in ("sharded", "batched"):
        if getattr(stream, name):
            raise ValueError(
                f"Stream({name}=True) is for training. In evaluation and prediction a stream of examples is "
                "read whole, so that none is lost: sharded=False, batched=False."
            )


class _State(NamedTuple):
    """How a source's own state is had and set."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _state_of(source: Any) -> _State | None:
    for get, set_ in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(source, get) and hasattr(source, set_):
            return _State(getattr(source, get), getattr(source, set_))
    return None


def _refills(source: Any) -> bool:
    """Whether a dataset of Hugging Face shuffles by a buffer, whose content its state does not hold."""
    link = getattr(source, "_ex_iterable", None)
    while link is not None:
        if hasattr(link, "buffer_size"):
            return True
        link = getattr(link, "ex_iterable", None)
    return False


def _source(stream: Stream, epoch: int, position: Position) -> Iterable[Any]:
    if stream.is_function:
        arguments = (epoch, position.shard, position.num_shards) if stream.sharded else (epoch,)
        source = stream.examples(*arguments)  # pyright: ignore[reportCallIssue]
        if not hasattr(source, "__iter__"):
            raise TypeError(
                f"Stream: the function of the epoch returned a {type(source).__name__}, but must return an "
                "iterable of examples."
            )
        return source
    set_epoch = getattr(stream.examples, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)
    return stream.examples  # pyright: ignore[reportReturnType]
