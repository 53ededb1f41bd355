"""A stream that is being read: one epoch of it, from any position on."""

import array
import base64
import contextlib
import dataclasses
import importlib
import itertools
import json
import marshal
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from redco_eqx._data.data import Data, Stream, as_data, num_examples_of
from redco_eqx._data.placement import Assembly, Rows, needed_rows
from redco_eqx._sharding.mesh import batch_sharding, num_batch_shards
from redco_eqx._types import Examples

# The position in a stream, and a source's own state as text.


class Position(NamedTuple):
    """A position of one shard of a stream in an epoch. Plain numbers and text, for a checkpoint.

    - `shard`, `num_shards`: which part of the stream; 0 of 1 is the whole.
    - `num_items`: how many items (examples, or batches) have been read.
    - `state`: the source's own state there or a little before; `None` if it has none.
    - `checksum`: of the items that have been read; `None` if that is not known.
    - `state_items`, `state_checksum`: how many had been read when the state was taken, and their checksum. What
        is read from there must lead to `checksum`: this proves the state.
    """

    shard: int
    num_shards: int
    num_items: int = 0
    state: str | None = None
    checksum: int | None = None
    state_items: int = 0
    state_checksum: int = 0


def state_to_text(state: Any) -> str | None:
    """A source's state as JSON; `None` if there is something in it that has no form here.

    Numbers, text, bytes, lists, tuples, dicts, and arrays of NumPy and torch have one.
    """
    try:
        return json.dumps(_encoded(state))
    except TypeError:
        return None


def state_from_text(text: str) -> Any:
    """The inverse of `state_to_text`."""
    return _decoded(json.loads(text))


def _encoded(x: Any) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if type(x) in (list, tuple):
        return {type(x).__name__: [_encoded(item) for item in x]}
    if type(x) is dict:  # as pairs, because its keys may be numbers
        return {"dict": [[_encoded(key), _encoded(value)] for key, value in x.items()]}
    if type(x) is bytes:
        return {"bytes": base64.b64encode(x).decode()}
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc":
        array = np.ascontiguousarray(x)
        return {"array": [array.dtype.str, list(x.shape), base64.b64encode(array.tobytes()).decode()]}
    to_numpy = getattr(x, "numpy", None)
    if type(x).__module__ == "torch" and callable(to_numpy):
        return {"tensor": _encoded(to_numpy())}
    raise TypeError(f"a {type(x).__name__} has no form in JSON")


def _decoded(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    ((kind, content),) = x.items()
    match kind:
        case "list" | "tuple":
            return (list if kind == "list" else tuple)(_decoded(item) for item in content)
        case "dict":
            return {_decoded(key): _decoded(value) for key, value in content}
        case "bytes":
            return base64.b64decode(content)
        case "array":
            dtype, shape, text = content
            return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
        case _:
            return importlib.import_module("torch").from_numpy(_decoded(content))


_PLAIN = {bool, int, float, complex, str, bytes, type(None)}

PROOF = 1000
"""Over how many examples, at least, a state must give the same ones before it is used."""


class _Mark(NamedTuple):
    """A place to which a stream can be set: after so many items, of this checksum; by a state, if any."""

    num_items: int = 0
    checksum: int = 0
    state: str | None = None


class Reading(Iterator[Any]):
    """The items of an epoch from a position on."""

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        position: Position,
        *,
        verify: bool = True,
        say: Callable[[str], object] = lambda _: None,
    ):
        """Opens the stream, and goes to the position: by the source's own state, if what is read from there
        gives the checksum that was stored, and else by reading as far from the beginning.

        **Arguments:**

        - `verify`: whether other items than those that were read before are refused.
        - `say`: is told in words how the position is found.

        Raises `ValueError` if the stream ends before, or gives other items, and `TypeError` if its function
        returns no iterable.
        """
        self._stream, self._epoch, self._shard = stream, epoch, position
        self._span = max(1, PROOF // 32) if stream.batched else PROOF
        mark = _Mark(position.state_items, position.state_checksum, position.state)
        num_items, why = position.num_items, ""
        self._back: str | None = None
        if position.state is not None and position.checksum is not None:
            problem = self._set(mark, position)
            if problem is None:
                say(
                    "the stream is set to the state that its source had there: the last "
                    f"{num_items - mark.num_items} items are read again, and are the same"
                )
                return
            why = f" ({problem})" if problem else ""
        if num_items:
            say(f"the stream is read again from its beginning: {num_items} items are left out{why}")
        if why or position.state is None or position.checksum is None:
            self._open(_Mark(), again=bool(why))
        there = self._leave_out(num_items)
        if there < num_items:
            raise ValueError(
                f"Stream: it was left after {num_items} items of epoch {epoch}, but now gives only {there}. It "
                "must give the same ones each time that it is read."
            )
        if position.checksum not in (None, self._checksum):
            other = f"the first {num_items} items of epoch {epoch} are others than when the run was saved"
            if verify:
                raise ValueError(
                    f"Stream: {other} (checksum {self._checksum}, but {position.checksum} was stored). It must "
                    "give the same ones each time that it is read: give a seed to its shuffle, and to all "
                    "that is random in it (DataLoader(shuffle=True) needs a generator=, made anew for each "
                    "epoch). Checkpoints(..., allow_changes=True) goes on all the same."
                )
            say(f"{other}: going on all the same (allow_changes=True)")

    def __next__(self) -> Any:
        item = next(self._items)
        self._num_items += 1
        self._checksum = checksum(item, self._checksum)
        if self._num_items == 1:  # not before: what was iterated already has a state of its end
            self._marks = (self._new_mark(),) * 2
        return item

    def position(self) -> Position:
        """The position after what has been read. Asked after each batch: now and then it takes a state."""
        if self._num_items - self._marks[1].num_items >= self._span:
            self._marks = self._marks[1], self._new_mark()
        mark = self._marks[0]
        if mark.state is None or mark.num_items == self._num_items:  # from which nothing was read, as a proof
            mark = _Mark()
        shard, num_shards, *_ = self._shard
        return Position(
            shard, num_shards, self._num_items, mark.state, self._checksum, mark.num_items, mark.checksum
        )

    def _new_mark(self) -> _Mark:
        text = None if self._state is None else state_to_text(self._state.get())
        return _Mark(self._num_items, self._checksum, text)

    def _set(self, mark: _Mark, position: Position) -> str | None:
        """Goes to the position from a state before it. Returns why not, which is empty if there is no state."""
        try:
            if not self._open(mark):
                return ""
            self._leave_out(position.num_items - mark.num_items)
        except Exception as error:
            return f"its source cannot be set to the state that it had there: {type(error).__name__}: {error}"
        if (self._num_items, self._checksum) == (position.num_items, position.checksum):
            return None
        return "the state that its source had there does not lead to the same items"

    def _open(self, mark: _Mark, *, again: bool = False) -> bool:
        """Opens the stream at its beginning, and sets it to a state, if any. Returns whether it has states.

        An iterator that is opened `again` is set back.
        """
        source = _source(self._stream, self._epoch, self._shard)
        has_state, is_iterator = not _refills(source), hasattr(source, "__next__")
        if has_state and mark.state is not None and not is_iterator and _state_of(source) is not None:
            source = _twin(source)
        self._state = _state_of(source) if has_state else None
        if self._state is not None:  # an iterable's is set before it is iterated
            if is_iterator and again and self._back is not None:
                self._state.set(state_from_text(self._back))
            if mark.state is not None:
                self._back = state_to_text(self._state.get()) if is_iterator else None
                self._state.set(state_from_text(mark.state))
        self._items = iter(source)
        if self._state is None and has_state:
            self._state = _state_of(self._items)
            if self._state is not None and mark.state is not None:
                self._state.set(state_from_text(mark.state))
        if self._state is None or mark.state is None:
            mark = _Mark()
        self._num_items, self._checksum, _ = mark
        self._marks = mark, mark
        return self._state is not None

    def _leave_out(self, num_items: int) -> int:
        """Skip this many items; returns the number that there were."""
        return sum(1 for _ in itertools.islice(self, num_items))


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
    """Count the items that this process reads for a batch."""
    return 1 if stream.batched else batch_size // position.num_shards


def position_at(
    stream: Stream, begin: Position, batch: int, positions: Sequence[Sequence[Any]] | None, batch_size: int
) -> Position:
    """The position of this process before the batch of this number: of those of all shards, or by counting.

    Raises `ValueError` if it was read in another number of shards.
    """
    if positions is None:
        return begin._replace(num_items=batch * items_per_batch(stream, begin, batch_size))
    found = {position.shard: position for position in (Position(*fields) for fields in positions)}
    num_shards = {position.num_shards for position in found.values()}
    if num_shards != {begin.num_shards} or begin.shard not in found:
        raise ValueError(
            f"Stream: it was read in {max(num_shards)} shards, and is now read in {begin.num_shards}, so that "
            "no process can go on where one was. Go on with as many processes."
        )
    return found[begin.shard]


def stream_facts(stream: Stream, position: Position) -> str:
    """Say what all processes must have in common."""
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
    options = {name: getattr(data, name) for name in ("prefetch", "num_workers", "timeout_seconds")}
    return Data(few, **options)


def read_batches(
    stream: Stream, reading: Reading, assembly: Assembly, batch_size: int, remainder: str, mesh: Mesh
) -> Iterator[tuple[Rows, Position]]:
    """Read for one batch after the other; yields rows and the position after them. `remainder` as for
    `batches`."""
    needed = assembly.needed(batch_size)
    is_shared = not stream.sharded and jax.process_count() > 1
    read_here = needed if stream.sharded else np.arange(batch_size)
    if stream.batched:
        for item in reading:
            after = reading.position()
            yield Rows(batch_size, read_here, item, (after.checksum or 0) if is_shared else 0), after
        return
    while items := list(itertools.islice(reading, len(read_here))):
        after = reading.position()
        if len(items) == len(read_here):
            mine = items if stream.sharded else [items[row] for row in needed]
            yield Rows(batch_size, needed, mine, (after.checksum or 0) if is_shared else 0), after
        else:
            for size in tail_sizes(len(items), batch_size, remainder, num_batch_shards(mesh)):
                rows = assembly.needed(size)
                yield Rows(size, rows, [items[min(row, len(items) - 1)] for row in rows]), after
                items = items[size:]


def checksum(x: Any, begin: int = 0) -> int:
    """Add the numbers and text in an example to a checksum from 0 to 2**30, which goes on from `begin`.

    Of other objects their type and size alone count, since their content may cost more than reading them did.
    """
    content = _content(x)
    if content is not None:
        return zlib.crc32(content, begin) % 2**30
    for item in _parts(x):
        begin = checksum(item, begin)
    return begin


def _content(x: Any) -> Any:
    """The bytes of what has no parts, or only numbers and text; `None` for what has parts."""
    is_sequence = isinstance(x, list | tuple)
    if is_sequence and x and type(x[0]) is int:  # tokens, say: the fastest way
        with contextlib.suppress(TypeError, OverflowError):
            return array.array("q", x)
    # Not version 3 or 4 of `marshal`, where the bytes depend on what refers to an object.
    if type(x) in _PLAIN or (is_sequence and _PLAIN.issuperset(map(type, x))):
        return marshal.dumps(list(x) if is_sequence else x, 2)
    if isinstance(x, np.ndarray | np.generic):
        return None if x.dtype.hasobject else np.ascontiguousarray(x).tobytes()
    if is_sequence or isinstance(x, Mapping) or _is_dataclass(x) or _array_of(x) is not None:
        return None
    if isinstance(x, str | bytes | bytearray | int | float):
        return repr(x).encode()
    size = getattr(x, "size", None)  # of an image
    return repr((type(x).__name__, size if isinstance(size, int | tuple) else None)).encode()


def _parts(x: Any) -> Iterable[Any]:
    if isinstance(x, Mapping):
        return x.items()
    if isinstance(x, np.ndarray):
        return x.ravel().tolist()
    if _is_dataclass(x):
        return (getattr(x, field.name) for field in dataclasses.fields(x))
    return x if isinstance(x, list | tuple) else [_array_of(x)]


def _array_of(x: Any) -> np.ndarray | None:
    """That of an array of torch or JAX, where NumPy can have it."""
    if hasattr(x, "__array__"):
        with contextlib.suppress(TypeError, RuntimeError):
            return np.asarray(x)
    return None


def _is_dataclass(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


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
    """Functions that get and set a source's own state."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def _state_of(source: Any) -> _State | None:
    for get, set_ in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(source, get) and hasattr(source, set_):
            return _State(getattr(source, get), getattr(source, set_))
    return None


def _twin(source: Any) -> Any:
    """Another iterable with the same attributes, where that can be: a state that is set leaves the user's be.

    A dataset of Hugging Face begins at it each time that it is iterated in that epoch.
    """
    # Not `copy.copy`: that of such a dataset has the very same attributes, those that are set later, too.
    if hasattr(type(source), "__del__"):
        return source
    try:
        twin = object.__new__(type(source))
        vars(twin).update(vars(source))
    except TypeError:  # an extension type, or one without attributes
        return source
    return twin


def _refills(source: Any) -> bool:
    """True of a dataset of Hugging Face that shuffles, itself or within, by a buffer, which its state lacks.

    Nothing can prove that its state is exact: of a rare part of a mixture an item may not come for long.
    """
    inner = [getattr(source, name, None) for name in ("dataset", "_ex_iterable", "ex_iterable")]
    inner += getattr(source, "ex_iterables", ())
    return hasattr(source, "buffer_size") or any(_refills(x) for x in inner if x is not None)


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
