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
from jaxtyping import Int

from redco_eqx._base.protocols import Examples
from redco_eqx._data.data import Data, Stream, as_data, num_examples_of
from redco_eqx._data.placement import Assembly, needed_rows, tail_sizes
from redco_eqx._sharding.mesh import batch_sharding

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
        self._stream, self._epoch = stream, epoch
        self._begin = Position(position.shard, position.num_shards)
        self._span = max(1, PROOF // 32) if stream.batched else PROOF
        num_items, why = position.num_items, ""
        # Of an iterator that is read only once a state that fails could not be undone.
        if None not in (position.state, position.checksum) and not stream.is_once:
            problem = self._set(position)
            if problem is None:
                num_again = num_items - position.state_items
                say(
                    "the stream is set to the state that its source had there: the last "
                    f"{num_again} items are read again, and are the same"
                )
                return
            why = f" ({problem})"
        if num_items:
            say(f"the stream is read again from its beginning: {num_items} items are left out{why}")
        self._open()
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
            self._marks = (self._mark(),) * 2
        return item

    def position(self) -> Position:
        """The position after what has been read. Asked after each batch: now and then it takes a state."""
        if self._num_items - self._marks[1].num_items >= self._span:
            self._marks = self._marks[1], self._mark()
        mark = self._marks[0]
        if mark.state is None or mark.num_items == self._num_items:  # from which nothing was read, as a proof
            mark = self._begin
        at = {"state_items": mark.num_items, "state_checksum": mark.checksum or 0}
        return mark._replace(num_items=self._num_items, checksum=self._checksum, **at)

    def _mark(self) -> Position:
        """Here, with the source's own state if it has one."""
        text = None if self._state is None else state_to_text(self._state.get())
        return self._begin._replace(num_items=self._num_items, state=text, checksum=self._checksum)

    def _set(self, position: Position) -> str | None:
        """Goes to the position from a state before it. Returns why that is not possible."""
        try:
            self._open(position.state_items, position.state_checksum, position.state)
            self._leave_out(position.num_items - position.state_items)
        except Exception as error:
            return f"its source cannot be set to the state that it had there: {type(error).__name__}: {error}"
        if (self._num_items, self._checksum) == (position.num_items, position.checksum):
            return None
        return "the state that its source had there does not lead to the same items"

    def _open(self, num_items: int = 0, begin: int = 0, state: str | None = None) -> None:
        """Opens the stream at its beginning, or at a state after so many items, of this checksum.

        A state is that of the iterable, set before that is iterated, or of the iterator.
        """
        source = _source(self._stream, self._epoch, self._begin)
        has_state = _state_of(source) is not None
        if state is not None and has_state and not hasattr(source, "__next__") and not _refills(source):
            source = _twin(source)
        owner: Any = source if has_state else iter(source)
        self._state = None if _refills(source) or self._stream.is_once else _state_of(owner)
        if state is not None:
            if self._state is None:
                raise LookupError("it has none now")
            self._state.set(state_from_text(state))
        self._items = iter(source) if owner is source else owner
        self._num_items, self._checksum = num_items, begin
        self._marks = (self._begin._replace(num_items=num_items, state=state, checksum=begin),) * 2

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


def position_at(
    stream: Stream, begin: Position, batch: int, positions: Sequence[Sequence[Any]] | None, batch_size: int
) -> Position:
    """The position of this process before the batch of this number: of those of all shards, or by counting.

    Raises `ValueError` if it was read in another number of shards.
    """
    if positions is None:
        per_batch = 1 if stream.batched else batch_size // begin.num_shards
        return begin._replace(num_items=batch * per_batch)
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
        return dataclasses.replace(data, examples=few)
    check_for_evaluation(data)
    few = list(itertools.islice(Reading(data, 0, Position(0, 1)), first))
    return Data(few, prefetch=data.prefetch, num_workers=data.num_workers, timeout_seconds=data.timeout_seconds)


def read_batches(
    stream: Stream, reading: Reading, assembly: Assembly, batch_size: int, remainder: str, mesh: Mesh
) -> Iterator[tuple[tuple[int, Int[np.ndarray, " num_rows"], Any], Position]]:
    """Read for one batch after the other; yields the arguments of `assembly`, and the position after them."""
    needed = assembly.needed(batch_size)
    num_read = 1 if stream.batched else len(needed) if stream.sharded else batch_size
    while items := list(itertools.islice(reading, num_read)):
        after = reading.position()
        if stream.batched:
            rows = needed if stream.sharded else np.arange(batch_size)
            yield (batch_size, rows, items[0]), after
            continue
        is_whole = len(items) == num_read
        for size in [batch_size] if is_whole else tail_sizes(len(items), batch_size, remainder, mesh):
            rows = assembly.needed(size)
            mine = items if stream.sharded else [items[min(row, len(items) - 1)] for row in rows]
            yield (size, rows, mine), after
            items = items[size:]


def checksum(x: Any, begin: int = 0) -> int:
    """Add the numbers and text in an example to a checksum from 0 to 2**30, which goes on from `begin`.

    Of other objects their type and size alone count, since their content may cost more than reading them did.
    """
    content, parts = _contents(x)
    if content is not None:
        return zlib.crc32(content, begin) % 2**30
    for part in parts:
        begin = checksum(part, begin)
    return begin


def _contents(x: Any) -> tuple[Any, Iterable[Any]]:
    """The bytes of what has no parts, or only numbers and text; `None` and its parts for all else."""
    if isinstance(x, list | tuple):
        if x and type(x[0]) is int:  # tokens, say: the fastest way
            with contextlib.suppress(TypeError, OverflowError):
                return array.array("q", x), ()
        # Not version 3 or 4 of `marshal`, where the bytes depend on what refers to an object.
        return marshal.dumps(list(x), 2) if _PLAIN.issuperset(map(type, x)) else None, x
    if type(x) in _PLAIN:
        return marshal.dumps(x, 2), ()
    if isinstance(x, np.ndarray | np.generic):
        return (None, x.ravel().tolist()) if x.dtype.hasobject else (np.ascontiguousarray(x).tobytes(), ())
    if isinstance(x, Mapping):
        return None, x.items()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return None, [getattr(x, field.name) for field in dataclasses.fields(x)]
    if hasattr(x, "__array__"):  # of torch or JAX, where NumPy can have it
        with contextlib.suppress(TypeError, RuntimeError):
            return None, [np.asarray(x)]
    if isinstance(x, str | bytes | bytearray | int | float):
        return repr(x).encode(), ()
    size = getattr(x, "size", None)  # of an image
    return repr((type(x).__name__, size if isinstance(size, int | tuple) else None)).encode(), ()


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
