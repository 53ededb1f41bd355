"""Processes of a run that say the same: facts that one knows or must share, failures that not all have seen.

Facts that must be the same are compared over the key-value store of JAX's service: a difference would have the
processes wait for each other in a collective, or compute nonsense. Each process keeps a sequence of entries,
such as the arguments of `fit`, or new shapes of a batch: the n-th entries of any two processes are equal. The
first process of the mesh reads the entries of all, the others those of the first: at each new entry, and twice
a second from a thread, since a process that waits in a collective adds none.
"""

import atexit
import functools
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from redco_eqx._distributed.cluster import coordination_client
from redco_eqx._distributed.process_group import ProcessGroup, end_process, process_group

T = TypeVar("T")


def from_all(value: T) -> list[T]:
    """The values that the processes hand in, in their order, on all of them. They must be plain JSON."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text))))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(text)] = text
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def from_first(make: Callable[[], T]) -> T:
    """The result of `make()` on process 0, on all of them; it must be plain JSON.

    An error that it raises there is raised on the others as a `RuntimeError`.
    """
    if jax.process_count() == 1:
        return make()
    text, problem = "", None
    if jax.process_index() == 0:
        try:
            text = json.dumps(make())
        except Exception as error:
            problem = error
    text, about = from_all((text, problem and f"{type(problem).__name__}: {problem}"))[0]
    if problem is not None:
        raise problem
    if about is not None:
        raise RuntimeError(f"on process 0: {about}")
    return json.loads(text)


def on_first(act: Callable[[], object]) -> None:
    """`act()` on process 0. What it raises there is raised on all."""
    from_first(lambda: act() and None)


def together(load: Callable[[], T], failure: type[Exception]) -> T:
    """`load()`, which raises `failure` on every process if it does so on one."""
    result, problem = None, None
    try:
        result = load()
    except failure as error:
        problem = error
    reasons = from_all(None if problem is None else str(problem))
    failed = [process for process, reason in enumerate(reasons) if reason is not None]
    if failed:
        raise problem or failure(f"this failed on the processes {failed}: {reasons[failed[0]]}")
    return cast(T, result)


class Vote:
    """Small numbers of which every process learns the greatest, without any of them waiting.

    Each call hands in this process's numbers, and gives the greatest of those of all processes of a few calls
    ago: the same on each of them, if all call it at the same steps. The devices compare them between two steps.
    On one process the answer is at once what was handed in.
    """

    NUM_BEHIND = 2

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._behind: deque[Int[Array, " n"]] = deque()

    def __call__(self, *numbers: int) -> tuple[int, ...]:
        return self.of_earlier(*numbers) or (0,) * len(numbers)

    def of_earlier(self, *numbers: int) -> tuple[int, ...] | None:
        """As a call, but `None` as long as there is no answer; so the n-th answer is of the n-th call."""
        if jax.process_count() == 1:
            return numbers
        self._behind.append(_greatest(self._mesh, numbers))
        if len(self._behind) <= self.NUM_BEHIND:
            return None
        return tuple(np.asarray(self._behind.popleft()).tolist())

    def now(self, *numbers: int) -> tuple[int, ...]:
        """The same for the numbers of this very call; waits."""
        self._behind.clear()
        if jax.process_count() == 1:
            return numbers
        return tuple(np.asarray(_greatest(self._mesh, numbers)).tolist())


def _greatest(mesh: Mesh, numbers: tuple[int, ...]) -> Int[Array, " n"]:
    return _compiled_max(mesh)(_placed(mesh, numbers))


@functools.lru_cache(maxsize=4)
def _compiled_max(mesh: Mesh) -> Callable[[Int[Array, "devices n"]], Int[Array, " n"]]:
    return jax.jit(lambda x: jnp.max(x, axis=0), out_shardings=NamedSharding(mesh, PartitionSpec()))


@functools.lru_cache(maxsize=4)  # nearly always zeros
def _placed(mesh: Mesh, numbers: tuple[int, ...]) -> Int[Array, "devices n"]:
    row = np.array([numbers], np.int32)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    return jax.make_array_from_callback((mesh.size, len(numbers)), sharding, lambda _: row)


# Facts that must be the same on every process of a mesh.

Facts: TypeAlias = dict[str, str]
"""Values as text, by the names that an error gives them."""

_NUM_KEPT = 32  # of entries, and of streams


class Entry(NamedTuple):
    """Facts about a subject; where that is a stream of batches, from one batch on."""

    number: int
    subject: str
    facts: Facts
    stream: int = -1
    batch: int = 0


class Entries:
    """The entries of this process about the meshes on some processes, compared with those of the others."""

    def __init__(self, group: ProcessGroup, processes: Sequence[int]):
        self._group, self._processes = group, processes
        self._key = f"redco_eqx/agreement/{zlib.crc32(str(processes).encode())}"
        self._entries: tuple[Entry, ...] = ()
        self._streams: dict[int, tuple[int, Facts]] = {}  # the next batch of each, and the newest shapes
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if group.ends_together:
            self._thread.start()
            atexit.register(self._stop)

    def add(self, subject: str, facts: Facts, stream: int = -1, batch: int = 0) -> int:
        """Adds an entry, and returns its number. Raises `ValueError` if another process has a different one."""
        number = self._entries[-1].number + 1 if self._entries else 0
        entry = Entry(number, subject, facts, stream, batch)
        self._entries = (*self._entries[1 - _NUM_KEPT :], entry)
        client = coordination_client()
        if client is not None:
            text = json.dumps(self._entries)
            client.key_value_set(f"{self._key}/{self._group.process}/entries", text, allow_overwrite=True)
        self.compare()
        return number

    def add_batch(self, stream: int, index: int, shapes: Facts) -> None:
        """A batch of a stream, which is the number of the entry that opened it. Raises as `add`."""
        _, before = self._streams.get(stream, (0, None))
        self._streams = {**dict(list(self._streams.items())[-_NUM_KEPT:]), stream: (index + 1, shapes)}
        if shapes != before:
            self.add(f"collate_fn: batch {index}", shapes, stream, index)

    def compare(self) -> bool:
        """True if the others have come as far. Raises `ValueError`, naming the first fact that differs."""
        client, me, first = coordination_client(), self._group.process, self._processes[0]
        if client is None or not self._entries:  # JAX has left the others
            return True
        num_there, newest = 0, self._entries[-1].number
        for path, text in client.key_value_dir_get(self._key if me == first else f"{self._key}/{first}"):
            process = int(path.split("/")[-2])
            theirs = [Entry(*fields) for fields in json.loads(text)]
            num_there += theirs[-1].number >= newest
            for entry in theirs:
                self._compare(entry, process)
        return num_there >= (len(self._processes) if me == first else 1)

    def wait(self) -> None:
        """Waits until the others have come as far. Raises as `compare`."""
        pause = 0.01
        while not self.compare():
            time.sleep(pause)
            pause = min(2 * pause, 0.25 + len(self._group.names) / 1000)

    def _watch(self) -> None:
        seconds = max(0.5, len(self._group.names) / 200)  # for process 0 a few hundred requests a second
        try:
            while not self._done.wait(seconds):
                self.compare()
        except ValueError as error:
            end_process(str(error))
        except jax.errors.JaxRuntimeError:  # process 0 has ended
            return

    def _stop(self) -> None:
        # A thread that is inside JAX when the interpreter ends would abort it.
        self._done.set()
        self._thread.join(5.0)

    def _compare(self, theirs: Entry, process: int) -> None:
        mine = next((entry for entry in self._entries if entry.number == theirs.number), None)
        if mine is None:
            reached, shapes = self._streams.get(theirs.stream, (0, {}))
            if theirs.number < self._entries[0].number or theirs.batch >= reached:
                return  # forgotten, or still to come
            mine = theirs._replace(facts=shapes)  # here the shapes did not change
        # In the order of the processes, so that all of them say the same.
        here, there = sorted([(self._group.process, mine), (process, theirs)])
        (one, this), (other, that) = ((self._group.names[index], entry) for index, entry in (here, there))
        problems = [
            f"{this.subject}: {name} is {this.facts.get(name) or 'missing'} on {one}, but "
            f"{that.facts.get(name) or 'missing'} on {other}"
            for name in this.facts | that.facts
            if this.facts.get(name) != that.facts.get(name)
        ]
        if this.subject != that.subject:
            problems = [f"{one} has come to {this.subject}, but {other} to {that.subject}"]
        if problems:
            raise ValueError(
                f"{problems[0]}. Each process must be given the same state, examples, functions and options, "
                "and collate rows to the same shape (pad text to a fixed length)."
            )


_made = functools.cache(Entries)
_lock = threading.Lock()  # a stream may be opened in a thread


@functools.lru_cache
def _processes(mesh: Mesh) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def is_shared(mesh: Mesh) -> bool:
    """True of a mesh with devices of several processes."""
    return len(_processes(mesh)) > 1


def entries_of(mesh: Mesh) -> Entries | None:
    """The entries of this process about a mesh; `None` if it is on one process."""
    group = process_group() if is_shared(mesh) else None
    with _lock:
        return None if group is None else _made(group, _processes(mesh))


def agree(mesh: Mesh, subject: str, facts: Facts) -> None:
    """Compares facts with the other processes of `mesh`, each of which calls this too: waits until they have.

    On a mesh of one process it does nothing. Raises `ValueError`, naming the first fact that differs, on the
    process where it differs from the first of the mesh, and on that.
    """
    entries = entries_of(mesh)
    if entries is not None:
        entries.add(subject, facts)
        entries.wait()
