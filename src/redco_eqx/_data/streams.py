"""Read one epoch of a stream, from any position."""

import ast
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from redco_eqx._base.warn import warn
from redco_eqx._data.checksums import checksum
from redco_eqx._data.data import Place, Position, Stream
from redco_eqx._data.placement import Job, local_rows
from redco_eqx._data.workers import noting
from redco_eqx._sharding.mesh import batch_sharding


def state_to_text(state: Any) -> str | None:
    """Write the state of a source as a Python literal. Return `None` if it contains
    anything but numbers, text, bytes, lists, tuples, sets and dicts."""
    text = repr(state)
    with contextlib.suppress(ValueError, SyntaxError):
        # The text of some other object may also happen to be a literal.
        if ast.literal_eval(text) == state:
            return text
    return None


PROOF = 1000
"""The minimum number of examples after a state that must be the same as before, so that
the state is used."""


class Reading(Iterator[Any]):
    """The items of an epoch after a position."""

    def __init__(
        self,
        stream: Stream,
        epoch: int,
        position: Position,
        *,
        verify: bool = True,
        say: Callable[[str], object] = lambda _: None,
    ):
        """Open the stream, and go to the position. Restore the state of the source, if
        the items from there match the stored checksum. Otherwise, read up to the
        position from the beginning.

        **Arguments:**

        - `verify`: true to reject items that differ from those that were read before.
        - `say`: called with a message about how the position was reached.

        Raises `ValueError` if the stream ends before the position or gives different
        items, and `TypeError` if its function does not return an iterable.
        """
        self._stream = stream
        self._epoch = epoch
        self._begin = Position(position.shard, position.num_shards)
        self._span = max(1, PROOF // 32) if stream.batched else PROOF
        num_items = position.num_items
        why = ""
        if None not in (position.state, position.checksum):
            try:
                if self._reaches(position, position):
                    say(
                        "the stream continues from the stored state of its source: the "
                        f"last {num_items - position.state_items} items are read "
                        "again, and are the same"
                    )
                    return
                why = (
                    " (the stored state of its source does not lead to the same items)"
                )
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                why = f" (its source cannot be set to the stored state: {problem})"
        if num_items:
            say(
                f"the stream is read again from its beginning: {num_items} items are "
                f"skipped{why}"
            )
        is_same = self._reaches(position, self._begin)
        if self._num_items < num_items:
            raise ValueError(
                f"Stream: the run stopped after {num_items} items of epoch {epoch}, "
                f"but the stream now gives only {self._num_items}. It must give the "
                "same items each time that it is read."
            )
        if not is_same:
            other = (
                f"the first {num_items} items of epoch {epoch} differ from those read "
                "before the save"
            )
            if verify:
                raise ValueError(
                    f"Stream: {other} (checksum {self._checksum}, but "
                    f"{position.checksum} was stored). It must give the same items "
                    "each time that it is read. Set a seed for its shuffle and for all "
                    "else in it that is random (DataLoader(shuffle=True) needs a new "
                    "generator= for each epoch). To continue anyway, pass "
                    "Checkpoints(..., allow_changes=True)."
                )
            say(f"{other}: continuing anyway (allow_changes=True)")

    def __next__(self) -> Any:
        item = next(self._items)
        is_among_first = self._num_items < 2 * self._num_readers
        if is_among_first:
            self._first.append(checksum(item))
            self._check_readers()
        self._num_items += 1
        self._checksum = checksum(item, self._checksum)
        return item

    def _check_readers(self) -> None:
        """Raise `ValueError` if each of the first two items came once from every worker
        of a `DataLoader`, which takes one item from each worker in turn."""
        num = self._num_readers
        if len(self._first) < 2 * num:
            return
        one = set(self._first[:num])
        other = set(self._first[num:])
        # If the two are equal, the stream may consist of equal items.
        if len(one) == len(other) == 1 and one != other:
            raise ValueError(
                f"Stream: each of the {num} workers of its DataLoader yields every "
                f"item, so each item is read {num} times in an epoch. {_OF_WORKERS}"
            )

    def position(self) -> Position:
        """Return the position after the items that have been read. Must be called after
        each batch, because it takes a state of the source from time to time."""
        num_items = self._num_items
        if num_items - self._marks[1].state_items >= self._span:
            text = None
            if self._state is not None:
                text = state_to_text(self._state.get())
            mark = self._begin._replace(
                state=text, state_items=num_items, state_checksum=self._checksum
            )
            # A position has the older of two states, so that at least `_span` items
            # follow it, which prove that it is correct.
            self._marks = self._marks[1], mark
        return self._marks[0]._replace(num_items=num_items, checksum=self._checksum)

    def _reaches(self, position: Position, begin: Position) -> bool:
        """Open the stream at the state of `begin`, or at its beginning if `begin` has
        no state, and go to a position. Return true if the items are the same as before.

        A state belongs either to the iterable, which must get it before the iteration,
        or to the iterator.
        """
        source = _source(self._stream, self._epoch, self._begin)
        self._first: list[int] = []
        self._num_readers = 0
        if not self._stream.disjoint_workers:
            self._num_readers = _num_readers(source)
        if self._num_readers:
            warn(
                f"Stream: its DataLoader has {self._num_readers} workers over an "
                "IterableDataset. Each of them yields every item, unless the dataset "
                f"divides its items. {_OF_WORKERS}"
            )
        owner: Any = source
        if _state_of(source) is None:
            owner = iter(source)
        elif begin.state is not None:
            owner = _twin(source)
        self._state = None
        if not _refills(source):
            self._state = _state_of(owner)
        if begin.state is not None:
            if self._state is None:
                raise LookupError("it has none now")
            self._state.set(ast.literal_eval(begin.state))
        self._items = owner if hasattr(owner, "__next__") else iter(owner)
        self._num_items = begin.state_items
        self._checksum = begin.state_checksum
        # The positions at which the last two states were taken.
        self._marks = begin, begin
        for _ in itertools.islice(self, position.num_items - begin.state_items):
            pass
        is_there = self._num_items == position.num_items
        return is_there and position.checksum in (None, self._checksum)


def first_position(stream: Stream, batch_size: int, mesh: Mesh) -> Position:
    """Return the position before the first item of the shard that this process reads.

    Raises `ValueError` if there are several processes and `sharded` is not set, or if
    `sharded=True` is not possible on this mesh.
    """
    rows: dict[int, set[int]] = {}
    indices = batch_sharding(mesh).devices_indices_map((batch_size,))
    for device, (index,) in indices.items():
        rows.setdefault(device.process_index, set()).update(range(batch_size)[index])
    if len(rows) > 1 and stream.sharded is None:
        raise ValueError(
            "Stream: with several processes, say what each of them reads. Pass "
            "sharded=False if each reads the same whole stream, or sharded=True and a "
            "function, examples(epoch, shard, num_shards)."
        )
    if not stream.sharded:
        return Position(0, 1)
    # Processes with the same rows read the same shard.
    shards = sorted({tuple(sorted(x)) for x in rows.values()})
    if sum(map(len, shards)) > batch_size:
        raise ValueError(
            "Stream(sharded=True): on this mesh the rows of some processes overlap in "
            "part, so the processes cannot read separate shards. Order the devices of "
            "the mesh by process, or use sharded=False."
        )
    own = tuple(sorted(rows[jax.process_index()]))
    return Position(shards.index(own), len(shards))


def position_at(
    stream: Stream, begin: Position, place: Place, batch_size: int
) -> Position:
    """Return the position of this process at a place: one of the positions of all
    shards, or, if the place has none, the position after the items of its batches.

    Raises `ValueError` if the stream was read in a different number of shards.
    """
    if place.positions is None:
        items_per_batch = 1 if stream.batched else batch_size // begin.num_shards
        return begin._replace(num_items=place.batch * items_per_batch)
    for position in (Position(*fields) for fields in place.positions):
        if position[:2] == begin[:2]:
            return position
    raise ValueError(
        f"Stream: it was read in {place.positions[0][1]} shards, and is now read in "
        f"{begin.num_shards}, so no process can continue where another stopped. Use as "
        "many processes as before."
    )


def read_batches(
    stream: Stream,
    place: Place,
    at: Position,
    batch_size: int,
    mesh: Mesh,
    *,
    verify: bool,
    say: Callable[[str], object],
) -> Iterator[Job]:
    """Read the items of one batch after the other, starting at a place. `at` is the
    position at that place. `verify` and `say` are as for `Reading`."""
    needed = local_rows(mesh, batch_size).needed
    num_here = len(needed)
    if stream.batched and not stream.sharded:
        num_here = batch_size
    if stream.batched:
        num_read = 1
    elif stream.sharded:
        num_read = len(needed)
    else:
        num_read = batch_size

    def rows_of(items: list[Any]) -> Any:
        if stream.batched:
            return items[0]
        if stream.sharded:
            return items
        return [items[row] for row in needed]

    with noting(f"This happened when epoch {place.epoch} of the stream was read."):
        source = Reading(stream, place.epoch, at, verify=verify, say=say)
        while len(items := list(itertools.islice(source, num_read))) == num_read:
            rows = rows_of(items)
            place = place._replace(
                batch=place.batch + 1, positions=(source.position(),)
            )
            # The default keeps these rows, while the name goes on to the next ones.
            yield Job(batch_size, num_here, lambda rows=rows: rows, place)


_OF_WORKERS = (
    "In its __iter__, take the part of torch.utils.data.get_worker_info().id, and pass "
    "Stream(..., disjoint_workers=True). Or pass num_workers=0 to the DataLoader, and "
    "Stream(..., num_workers=n) for n threads that collate."
)


def _num_readers(source: Any) -> int:
    """Count the workers of a torch `DataLoader` that may all yield the same items; 0
    for any other source, and if there is only one worker."""
    dataset = getattr(source, "dataset", None)
    num_workers = getattr(source, "num_workers", 0)
    if not isinstance(num_workers, int) or num_workers < 2:
        return 0
    if getattr(source, "worker_init_fn", None) is not None:
        # torch's other place to divide.
        return 0
    classes = type(dataset).__mro__
    # By name, because this package does not need torch.
    is_iterable = any(
        c.__name__ == "IterableDataset" and c.__module__.startswith("torch.")
        for c in classes
    )
    divides_itself = any(c.__module__.startswith("datasets.") for c in classes)
    return num_workers if is_iterable and not divides_itself else 0


class _State(NamedTuple):
    """The functions that get and set the state of a source."""

    get: Callable[[], Any]
    set: Callable[[Any], object]


def _state_of(source: Any) -> _State | None:
    """Return the functions for the state of a source, or `None` if it does not have
    them."""
    # Iterators of Grain have the first pair; `datasets` and torchdata the second.
    for get, set_ in (("get_state", "set_state"), ("state_dict", "load_state_dict")):
        if hasattr(source, get) and hasattr(source, set_):
            return _State(getattr(source, get), getattr(source, set_))
    return None


def _twin(source: Any) -> Any:
    """Make another iterable with the same attributes, so that setting a state does not
    change the user's iterable. Return `source` itself if that is not possible.

    A Hugging Face dataset with a state would begin there each time that it is iterated
    in that epoch.
    """
    # Do not use `copy.copy`: a copy of such a dataset shares even the attributes that
    # are set later.
    if hasattr(source, "__next__") or hasattr(type(source), "__del__"):
        return source
    try:
        twin = object.__new__(type(source))
        vars(twin).update(vars(source))
    except TypeError:  # an extension type, or one without attributes
        return source
    return twin


def _refills(source: Any) -> bool:
    """Return `True` for a Hugging Face dataset that shuffles with a buffer or contains
    such a dataset. The state of this dataset does not include the buffer.

    No check can prove that such a state is exact: in a mixture, items from a rarely
    sampled dataset may not appear for a long time.
    """
    if hasattr(source, "buffer_size"):
        return True
    # A DataLoader over a dataset, a dataset, one of its steps, and a mixture.
    names = ("dataset", "_ex_iterable", "ex_iterable")
    inner = [getattr(source, name, None) for name in names]
    inner += getattr(source, "ex_iterables", ())
    return any(_refills(x) for x in inner if x is not None)


def _source(stream: Stream, epoch: int, position: Position) -> Iterable[Any]:
    source: Any = stream.examples
    if stream.is_function:
        shard = (position.shard, position.num_shards) if stream.sharded else ()
        items = source(epoch, *shard)
        if not hasattr(items, "__iter__"):
            raise TypeError(
                f"Stream: examples({', '.join(map(str, (epoch, *shard)))}) returned a "
                f"{type(items).__name__}, but must return an iterable."
            )
        return items
    if hasattr(source, "set_epoch"):
        source.set_epoch(epoch)
    return source
