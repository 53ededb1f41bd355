"""What the processes must have in common in a stream of batches.

A difference would have them wait for each other in a collective, or compute nonsense. Nobody waits here: the
first process of a mesh keeps a record of each stream in the store that all can read, and the others compare
theirs with it: when shapes change, and twice a second from a thread.
"""

import atexit
import dataclasses
import json
import threading
import weakref
import zlib
from collections import Counter
from typing import ClassVar

import jax
from jax.sharding import Mesh

from redco_eqx._distributed.jax_internals import coordination_client
from redco_eqx._distributed.process_group import ProcessGroup, end_process, process_group
from redco_eqx._tree import leaves_with_paths
from redco_eqx._types import Batch

# How many records of streams the store holds, and how many changes of shapes a record.
_NUM_STREAMS, _NUM_CHANGES = 64, 16


@dataclasses.dataclass(frozen=True)
class CallFacts:
    """The arguments of `batches`, as far as they are the same on every process.

    - `num_examples`, `batch_size`, `epoch`, `start`, `remainder`: see `batches`; of a stream, in words, what
        is read of it.
    - `order`: the first numbers of the order by `key`; `None` without a key.
    - `mesh`: the size of each axis.
    """

    num_examples: int | str
    batch_size: int
    epoch: int
    start: int
    remainder: str
    order: list[int] | None
    mesh: dict[str, int]

    NAMES: ClassVar = {"num_examples": "len(examples)", "order": "the order by key"}

    def by_name(self) -> dict[str, str]:
        """The facts by the names that an error gives them."""
        return {self.NAMES.get(name, name): str(value) for name, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Record:
    """What one process has done in a stream.

    - `stream`: the number of the stream.
    - `call`: how it was opened.
    - `num_made`: the number after that of the newest batch.
    - `shapes`: from which batch on leaves have which dtypes and shapes, by path. The leading dim, which is the
        number of rows that a process needs, is left open.
    """

    stream: int
    call: CallFacts
    num_made: int = 0
    shapes: tuple[tuple[int, dict[str, str]], ...] = ()

    def add(self, index: int, batch: Batch) -> "Record":
        """The record after one more batch."""
        new = {
            path: f"{x.dtype}[{', '.join(['rows', *map(str, x.shape[1:])])}]"
            for path, x in leaves_with_paths(batch)
        }
        is_change = not self.shapes or self.shapes[-1][1] != new
        shapes = (*self.shapes[1 - _NUM_CHANGES :], (index, new)) if is_change else self.shapes
        return dataclasses.replace(self, num_made=index + 1, shapes=shapes)

    def shapes_at(self, index: int) -> dict[str, str] | None:
        """The shapes of a batch, `None` if it is not made, or forgotten."""
        if index >= self.num_made:
            return None
        return next((shapes for begin, shapes in reversed(self.shapes) if begin <= index), None)


def difference(mine: Record, theirs: Record, me: str, other: str) -> str | None:
    """What is wrong if two processes, `me` and `other`, have these records of one stream."""
    pairs = [("batches", mine.call.by_name(), theirs.call.by_name())]
    for index in sorted({begin for begin, _ in (*mine.shapes, *theirs.shapes)}):
        shapes, others = mine.shapes_at(index), theirs.shapes_at(index)
        if shapes is not None and others is not None:
            pairs.append((f"collate_fn: batch {index}", shapes, others))
    for where, facts, others in pairs:
        for name in {**facts, **others}:
            if facts.get(name) != others.get(name):
                return (
                    f"{where}: {name or 'the batch'} is {facts.get(name, 'missing')} on {me}, but "
                    f"{others.get(name, 'missing')} on {other}. Each process must be given the same examples "
                    "and options, and collate rows to the same shape (pad text to a fixed length)."
                )
    return None


class Stream:
    """One stream of batches, which is the same on every process of a mesh."""

    def __init__(self, group: ProcessGroup, first: int, key: str, record: Record):
        """**Arguments:**

        - `first`: the first process of the mesh.
        - `key`: where in the store of JAX's coordination service its record is.
        - `record`: that of this process.
        """
        self._group, self._first, self._key = group, first, key
        self._record, self._published = record, None
        self._is_compared = False
        self.exchange()

    def add(self, index: int, batch: Batch) -> None:
        """Raises `ValueError` if the first process has other leaves, dtypes or shapes in a batch."""
        before, self._record = self._record, self._record.add(index, batch)
        if not self._is_compared or self._record.shapes is not before.shapes:
            self.exchange()

    def exchange(self) -> None:
        """Writes the record of the first process, or compares with it as far as both have come.

        Raises `ValueError` if they differ.
        """
        client, record = coordination_client(), self._record
        if client is None:  # JAX has left the others
            return
        if self._group.process == self._first:
            if record is not self._published:
                text = json.dumps(dataclasses.asdict(record))
                client.key_value_set(f"{self._key}/record", text, allow_overwrite=True)
                self._published, self._is_compared = record, True
            return
        for _, text in client.key_value_dir_get(self._key):  # one, or none yet
            theirs = _from_json(text)
            self._is_compared = theirs.stream == record.stream and theirs.num_made > 0
            self._compare(theirs, self._first)

    def close(self) -> None:
        """Compares for the last time; ends the process if it differs from the first, or the first from it.

        Nobody waits: each writes first and reads then, so that of any two the later one sees both.
        """
        client, me = coordination_client(), self._group.process
        if client is None:
            return
        try:
            if me != self._first:
                text = json.dumps(dataclasses.asdict(self._record))
                client.key_value_set(f"{self._key}-closed/{me}", text, allow_overwrite=True)
            self.exchange()
            if me == self._first:
                for path, text in client.key_value_dir_get(f"{self._key}-closed"):
                    self._compare(_from_json(text), int(path.rpartition("/")[2]))
        except ValueError as error:
            end_process(str(error))
        except jax.errors.JaxRuntimeError:  # process 0 has ended
            return

    def _compare(self, theirs: Record, process: int) -> None:
        if theirs.stream != self._record.stream:  # an older one
            return
        names = self._group.names
        message = difference(self._record, theirs, names[self._group.process], names[process])
        if message is not None:
            raise ValueError(message)


def _from_json(text: str) -> Record:
    fields = json.loads(text)
    shapes = tuple((begin, shapes) for begin, shapes in fields["shapes"])
    return Record(fields["stream"], CallFacts(**fields["call"]), fields["num_made"], shapes)


class Streams:
    """The streams of a process group that are in use."""

    def __init__(self, group: ProcessGroup):
        self._group = group
        self._num_opened: Counter[int] = Counter()
        self._open: weakref.WeakSet[Stream] = weakref.WeakSet()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redco_eqx.streams", daemon=True)
        if group.ends_together:
            self._thread.start()
            atexit.register(self._end)

    def open(self, processes: list[int], call: CallFacts) -> Stream:
        """The next stream over a mesh on `processes`. Raises as `Stream.exchange`."""
        mesh = zlib.crc32(str(processes).encode())
        number = self._num_opened[mesh]
        self._num_opened[mesh] += 1
        key = f"redco_eqx/stream/{mesh}/{number % _NUM_STREAMS}"
        stream = Stream(self._group, processes[0], key, Record(number, call))
        with self._lock:
            self._open.add(stream)
        return stream

    def _watch(self) -> None:
        seconds = max(0.5, len(self._group.names) / 200)  # for process 0 a few hundred requests a second
        while not self._stop.wait(seconds):
            with self._lock:
                streams = list(self._open)
            for stream in streams:
                try:
                    stream.exchange()
                except ValueError as error:
                    end_process(str(error))
                except jax.errors.JaxRuntimeError:  # process 0 has ended
                    return

    def _end(self) -> None:
        # A thread that is inside JAX when the interpreter ends would abort it.
        self._stop.set()
        self._thread.join(5.0)


def open_stream(mesh: Mesh, call: CallFacts) -> Stream | None:
    """The record of the next stream over `mesh`; `None` if the mesh is on one process.

    Raises `ValueError` if the first process of the mesh has opened it otherwise.
    """
    processes = sorted({device.process_index for device in mesh.devices.flat})
    group = None if len(processes) == 1 else process_group()
    return None if group is None else group.part(Streams).open(processes, call)
