"""Agreement between processes: facts that one knows, that all must share, and failures that some saw.

Facts that must be the same are compared through the key-value store of JAX's service. If they differed, the
processes would wait for each other in a collective, or compute wrong results. Each process keeps a sequence of
entries, such as the arguments of `fit`, or new shapes of a batch. The n-th entries of any two processes must be
equal. The first process of the mesh reads the entries of all others, and each of the others reads the entries
of the first. They do so at each new entry, and twice a second in a thread, because a process that waits in a
collective adds no entry.
"""

import atexit
import functools
import json
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from redco_eqx._distributed.cluster import coordination_client
from redco_eqx._distributed.process_group import end_process, process_names

T = TypeVar("T")


def from_all(value: T) -> list[T]:
    """Return the values of all processes, in the order of the processes, on every process. The values must be
    plain JSON."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text))))
    padded = np.pad(text, (0, int(sizes.max()) - len(text)))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def from_first(make: Callable[[], T]) -> T:
    """Call `make()` on process 0, and return its result, which must be plain JSON, on all processes.

    An error in `make()` is raised on the other processes as a `RuntimeError`.
    """
    if jax.process_count() == 1:
        return make()
    text = together(lambda: "" if jax.process_index() else json.dumps(make()), Exception)
    return json.loads(from_all(text)[0])


def together(load: Callable[[], T], failure: type[Exception]) -> T:
    """Return `load()`. If the call raises `failure` on one process, the error is raised on every process.

    If `failure` is `Exception`, the other processes raise a `RuntimeError`.
    """
    result, problem = None, None
    try:
        result = load()
    except failure as error:
        problem = error
    reasons = from_all(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for process, reason in enumerate(reasons):
        if reason is not None:
            raise (RuntimeError if failure is Exception else failure)(f"on process {process}: {reason}")
    return cast(T, result)


class Vote:
    """A comparison that gives every process the greatest of some small numbers, without waiting.

    Each call takes the numbers of this process, and returns the greatest numbers of all processes from a few
    calls ago. The result is the same on each process if all processes call it at the same steps. The devices
    compare the numbers between two steps. With one process, a call returns its own numbers at once.
    """

    NUM_BEHIND = 2

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        sharding = NamedSharding(mesh, PartitionSpec())
        self._greatest = jax.jit(jnp.max, static_argnames="axis", out_shardings=sharding)
        self._behind: deque[Int[Array, " n"]] = deque()

    def __call__(self, *numbers: int) -> tuple[int, ...] | None:
        """Return the next answer, or `None` if there is none yet. The n-th answer belongs to the n-th call."""
        if jax.process_count() == 1:
            return numbers
        self._behind.append(self._greatest(_placed(self._mesh, numbers), axis=0))
        if len(self._behind) <= self.NUM_BEHIND:
            return None
        return tuple(np.asarray(self._behind.popleft()).tolist())


@functools.lru_cache(maxsize=4)  # the numbers are nearly always zeros
def _placed(mesh: Mesh, numbers: tuple[int, ...]) -> Int[Array, "devices n"]:
    row = np.array([numbers], np.int32)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    return jax.make_array_from_callback((mesh.size, len(numbers)), sharding, lambda _: row)


# Facts that must be the same on every process of a mesh.

Facts: TypeAlias = dict[str, str]
"""Values as text, by the names that errors use for them."""

_NUM_KEPT = 32  # entries, and streams


class Entry(NamedTuple):
    """Facts about a subject. For a stream of batches, they apply from batch number `batch` on."""

    number: int
    subject: str
    facts: Facts
    stream: int = -1
    batch: int = 0


class Entries:
    """The entries of one process about the meshes of the run, which are compared with the others' entries."""

    def __init__(self, process: int, names: Sequence[str], processes: Sequence[int]):
        """**Arguments:** `names`: the names of all processes of the run."""
        self._process, self._names, self._processes = process, names, processes
        self._key = f"redco_eqx/agreement/{zlib.crc32(str(processes).encode())}"
        self._entries: tuple[Entry, ...] = ()
        self._streams: dict[int, tuple[int, Facts]] = {}  # for each the next batch and its newest shapes

    def add(self, subject: str, facts: Facts, stream: int = -1, batch: int = 0) -> int:
        """Add an entry, and return its number. Raises `ValueError` if another process has a different one."""
        number = self._entries[-1].number + 1 if self._entries else 0
        entry = Entry(number, subject, facts, stream, batch)
        self._entries = (*self._entries[1 - _NUM_KEPT :], entry)
        client = coordination_client()
        if client is not None:
            text = json.dumps(self._entries)
            client.key_value_set(f"{self._key}/{self._process}/entries", text, allow_overwrite=True)
        self.compare()
        return number

    def add_batch(self, stream: int, index: int, shapes: Facts) -> None:
        """Add the shapes of a batch. `stream` is the number of the entry that opened the stream. Raises as
        `add`."""
        _, before = self._streams.get(stream, (0, None))
        self._streams = {**dict(list(self._streams.items())[-_NUM_KEPT:]), stream: (index + 1, shapes)}
        if shapes != before:
            self.add(f"collate_fn: batch {index}", shapes, stream, index)

    def compare(self) -> bool:
        """Compare the entries. Return true if the other processes have the same number of them. Raises
        `ValueError` with the first fact that differs."""
        client, is_first = coordination_client(), self._process == self._processes[0]
        if client is None or not self._entries:  # without a client, JAX has left the others
            return True
        num_there, newest = 0, self._entries[-1].number
        place = self._key if is_first else f"{self._key}/{self._processes[0]}"
        for path, text in client.key_value_dir_get(place):
            theirs = [Entry(*fields) for fields in json.loads(text)]
            num_there += theirs[-1].number >= newest
            for entry in theirs:
                self._compare(entry, int(path.split("/")[-2]))
        return num_there >= (len(self._processes) if is_first else 1)

    def watch(self, done: threading.Event) -> None:
        """Compare from time to time, and end the processes if they differ. Runs in a separate thread."""
        try:
            while not done.wait(max(0.5, len(self._names) / 200)):  # a few hundred requests a second in total
                self.compare()
        except ValueError as error:
            end_process(str(error))
        except jax.errors.JaxRuntimeError:  # process 0 has ended
            return

    def _compare(self, theirs: Entry, process: int) -> None:
        mine = next((entry for entry in self._entries if entry.number == theirs.number), None)
        if mine is None:
            reached, shapes = self._streams.get(theirs.stream, (0, {}))
            if theirs.number < self._entries[0].number or theirs.batch >= reached:
                return  # forgotten, or still to come
            mine = theirs._replace(facts=shapes)  # on this process the shapes did not change
        # Keep the order of the processes, so that all of them report the same.
        (one, this), (other, that) = sorted([(self._process, mine), (process, theirs)])
        one, other = self._names[one], self._names[other]
        names = [name for name in this.facts | that.facts if this.facts.get(name) != that.facts.get(name)]
        if this.subject != that.subject:
            problem = f"{this.subject} has been reached on {one}, but {that.subject} on {other}"
        elif names:
            here, there = (facts.get(names[0], "missing") for facts in (this.facts, that.facts))
            problem = f"{this.subject}: {names[0]} is {here} on {one}, but {there} on {other}"
        else:
            return
        raise ValueError(
            f"{problem}. Each process must be given the same state, examples, functions and options, and "
            "collate rows to the same shape (pad text to a fixed length)."
        )


_lock = threading.Lock()  # because a stream may be opened in a thread


@functools.lru_cache
def _processes(mesh: Mesh) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def is_shared(mesh: Mesh) -> bool:
    """Return true for a mesh with devices of several processes."""
    return len(_processes(mesh)) > 1


def check_complete(where: str, mesh: Mesh) -> None:
    """Raise `ValueError` if the mesh lacks a process, or if processes have different numbers of devices."""
    here, everywhere = _processes(mesh), Counter(device.process_index for device in jax.devices())
    if len(here) < jax.process_count() or len({*everywhere.values()}) > 1:
        raise ValueError(
            f"{where}: the mesh has devices of the processes {here}, and by process there are "
            f"{dict(everywhere)} devices. All processes must take part, with as many devices each: see "
            "local_device_ids of initialize_distributed, and make_mesh()."
        )


@functools.cache
def _made(processes: tuple[int, ...]) -> Entries:
    entries, done = Entries(jax.process_index(), process_names(), processes), threading.Event()
    thread = threading.Thread(target=entries.watch, args=(done,), daemon=True)
    thread.start()
    # A thread that is inside JAX when the interpreter ends would abort the interpreter.
    atexit.register(lambda: (done.set(), thread.join(5.0)))
    return entries


def entries_of(mesh: Mesh) -> Entries | None:
    """Return the entries of this process about a mesh (`None` on one process), which a thread compares."""
    with _lock:
        return _made(_processes(mesh)) if is_shared(mesh) else None


def agree(mesh: Mesh, subject: str, facts: Facts) -> None:
    """Compare facts with the other processes of `mesh`. Waits until all of them have called it.

    Does nothing on a mesh of one process. Raises `ValueError`, naming the first fact that differs, on the first
    process of the mesh and on the process that differs from it.
    """
    entries = entries_of(mesh)
    if entries is not None:
        entries.add(subject, facts)
        while not entries.compare():
            time.sleep(0.02 + jax.process_count() / 1000)
