"""Agreement between processes: facts that one knows, that all must share, and failures
that some saw.

Facts that must be the same are compared through the key-value store of JAX's service.
If they differed, the processes would wait for each other in a collective, or compute
wrong results. Such facts are the arguments of `fit`, for example, or the shapes of a
batch.
"""

import functools
import itertools
import json
import sys
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from redco_eqx._distributed.cluster import coordination_client
from redco_eqx._distributed.process_group import process_names
from redco_eqx._distributed.whereabouts import meeting, place_of

T = TypeVar("T")


def from_all(value: T) -> list[T]:
    """Return the values of all processes, in the order of the processes, on every
    process. The values must be plain JSON."""
    if jax.process_count() == 1:
        return [value]
    _meet(
        tuple(range(jax.process_count())), "a decision of all processes", {}, wait=True
    )
    # A gather needs arrays, of one shape on all processes.
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(text))))
    padded = np.pad(text, (0, int(sizes.max()) - len(text)))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def from_first(make: Callable[[], T]) -> T:
    """Call `make()` on process 0, and return its result, which must be plain JSON, on
    all processes.

    An error in `make()` is raised on the other processes as a `RuntimeError`.
    """
    if jax.process_count() == 1:
        return make()

    def on_first() -> str:
        return json.dumps(make()) if jax.process_index() == 0 else ""

    text = together(on_first, Exception)
    return json.loads(from_all(text)[0])


def together(load: Callable[[], T], failure: type[Exception]) -> T:
    """Return `load()`. If the call raises `failure` on one process, the error is raised
    on every process.

    If `failure` is `Exception`, the other processes raise a `RuntimeError`.
    """
    result = None
    problem = None
    try:
        result = load()
    except failure as error:
        problem = error
    own_reason = None
    if problem is not None:
        own_reason = f"{type(problem).__name__}: {problem}"
    reasons = from_all(own_reason)
    if problem is not None:
        raise problem
    kind = RuntimeError if failure is Exception else failure
    for process, reason in enumerate(reasons):
        if reason is not None:
            raise kind(f"on process {process}: {reason}")
    return cast(T, result)


class Vote:
    """A comparison that gives every process the greatest of some small numbers, without
    waiting.

    Each call takes the numbers of this process, and returns the greatest numbers of all
    processes from a few calls ago. The result is the same on each process if all
    processes call it at the same steps. The devices compare the numbers between two
    steps. With one process, a call returns its own numbers at once.
    """

    NUM_BEHIND = 2

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        sharding = NamedSharding(mesh, PartitionSpec())
        self._greatest = jax.jit(
            jnp.max, static_argnames="axis", out_shardings=sharding
        )
        self._behind: deque[Int[Array, " n"]] = deque()

    def __call__(self, *numbers: int) -> tuple[int, ...] | None:
        """Return the next answer, or `None` if there is none yet. The n-th answer
        belongs to the n-th call."""
        if jax.process_count() == 1:
            return numbers
        self._behind.append(self._greatest(_placed(self._mesh, numbers), axis=0))
        # The devices have computed an older answer by now, so reading it does not wait.
        if len(self._behind) <= self.NUM_BEHIND:
            return None
        return tuple(np.asarray(self._behind.popleft()).tolist())


@functools.lru_cache(maxsize=4)  # the numbers are nearly always zeros
def _placed(mesh: Mesh, numbers: tuple[int, ...]) -> Int[Array, "devices n"]:
    row = np.array([numbers], np.int32)
    sharding = NamedSharding(mesh, PartitionSpec(tuple(mesh.axis_names)))
    return jax.make_array_from_callback(
        (mesh.size, len(numbers)), sharding, lambda _: row
    )


# Facts that must be the same on every process of a mesh.

Facts: TypeAlias = dict[str, str]
"""Values as text, by the names that errors use for them."""


@functools.lru_cache
def _processes(mesh: Mesh) -> tuple[int, ...]:
    return tuple(sorted({device.process_index for device in mesh.devices.flat}))


def is_shared(mesh: Mesh) -> bool:
    """Return true for a mesh with devices of several processes."""
    return len(_processes(mesh)) > 1


def check_complete(where: str, mesh: Mesh) -> None:
    """Raise `ValueError` if the mesh lacks a process, or if processes have different
    numbers of devices."""
    here = _processes(mesh)
    everywhere = Counter(device.process_index for device in jax.devices())
    if len(here) < jax.process_count() or len({*everywhere.values()}) > 1:
        raise ValueError(
            f"{where}: the mesh has devices of the processes {here}, and by process "
            f"there are {dict(everywhere)} devices. All processes must take part, with "
            "as many devices each: see local_device_ids of initialize_distributed, and "
            "make_mesh()."
        )


_NUM_KEPT = 32

# By the processes of a mesh, which number their calls of `agree` alike.
_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
# Those that wait are kept apart, because a process may still read the newest one after
# many of the others.
_keys: defaultdict[tuple[tuple[int, ...], bool], deque[str]] = defaultdict(deque)

# A process makes batches ahead of others, for training and for an evaluation in
# between.
_NUM_DUPLICATES = 256
_duplicate_numbers: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(
    itertools.count
)
_duplicate_keys: deque[str] = deque()


def agree(mesh: Mesh, subject: str, facts: Facts, *, wait: bool = True) -> None:
    """Compare facts with the other processes of `mesh`. Does nothing on a mesh of one
    process.

    The n-th calls on any two processes must have the same subject and facts. The first
    process of the mesh waits for those of all others, and each of the others waits for
    those of the first. With `wait=False`, they compare only facts that are already
    known, so of two processes the later one finds a difference.

    Raises `ValueError`, naming the first fact that differs.
    """
    processes = _processes(mesh)
    if len(processes) > 1:
        _meet(processes, subject, facts, wait=wait)


def _meet(
    processes: tuple[int, ...], subject: str, facts: Facts, *, wait: bool
) -> None:
    client = coordination_client()
    if client is None:  # JAX has left the others
        return
    me = jax.process_index()
    first = processes[0]
    place = f"redco_eqx/agreement/{_name(processes)}/{next(_numbers[processes])}"
    keys = _keys[processes, wait]
    keys.append(f"{place}/{me}/facts")
    where, _ = place_of(sys._getframe())
    client.key_value_set(keys[-1], json.dumps([subject, facts, where]))
    if len(keys) > _NUM_KEPT:
        client.key_value_delete(keys.popleft())
    # The first process compares all, and each of the others only with the first one.
    awaited = {first}
    directory = f"{place}/{first}"
    if me == first:
        awaited = {*processes}
        directory = place
    pause = 0.001
    # With more processes, each asks less often, because one service answers all.
    longest = 0.02 + jax.process_count() / 1000
    with meeting(sorted(awaited)) as waiting:
        while True:
            found = client.key_value_dir_get(directory)
            come = {int(path.split("/")[-2]): text for path, text in found}
            for process, text in come.items():
                _compare((me, subject, facts, where), (process, *json.loads(text)))
            waiting.absent = sorted(awaited - {*come})
            if not wait or not waiting.absent:
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)


class Duplicates:
    """A comparison of results that several processes of `mesh` compute alike, without
    waiting.

    Each process stores its own result, and then reads those of others. So of two
    processes, the later one sees both. All processes must create this at the same time,
    but any thread may use it.
    """

    def __init__(self, mesh: Mesh):
        self._place = ""
        if is_shared(mesh):
            processes = _processes(mesh)
            number = next(_duplicate_numbers[processes])
            self._place = f"redco_eqx/duplicates/{_name(processes)}/{number}"

    def compare(self, processes: tuple[int, ...], subject: str, facts: Facts) -> None:
        """Compare the facts about the result `subject` with those of `processes`, which
        make it, too.

        Raises `ValueError`, naming the first fact that differs.
        """
        client = coordination_client()
        if client is None:  # JAX has left the others
            return
        me = jax.process_index()
        first = processes[0]
        place = f"{self._place}/{subject}/{_name(processes)}"
        own = f"{place}/{me}/facts"
        client.key_value_set(own, json.dumps(facts))
        _duplicate_keys.append(own)
        while len(_duplicate_keys) > _NUM_DUPLICATES:
            client.key_value_delete(_duplicate_keys.popleft())
        directory = place if me == first else f"{place}/{first}"
        for path, text in client.key_value_dir_get(directory):
            other = int(path.split("/")[-2])
            found = difference(facts, json.loads(text))
            if found:
                name, mine, theirs = found
                names = process_names()
                raise ValueError(
                    f"{subject}: the rows of {name} have the checksum {mine} on "
                    f"{names[me]}, but {theirs} on {names[other]}. The devices of both "
                    "need these rows, so collate_fn makes them on each, and must "
                    "return the same numbers. Draw its random numbers from a generator "
                    "whose seed comes from the example, as "
                    "np.random.default_rng(index), or draw them in loss_fn from its "
                    "key."
                )


def _name(processes: tuple[int, ...]) -> int:
    return zlib.crc32(str(processes).encode())


def _compare(*both: tuple[int, str, Facts, str]) -> None:
    # Keep the order of the processes, so that all of them report the same.
    in_order = sorted(both, key=lambda x: x[0])
    (one, here, this, first_place), (other, there, that, second_place) = in_order
    one = process_names()[one]
    other = process_names()[other]
    if here != there:
        raise ValueError(
            f"{here} has been reached on {one}, but {there} on {other}. Each process "
            "must make the same calls of the library, in the same order. The first is "
            f"at {first_place}; the second is at {second_place}."
        )
    found = difference(this, that)
    if found is None:
        return
    name, mine, theirs = found
    problem = f"{here}: {name} is {mine} on {one}, but {theirs} on {other}"
    raise ValueError(
        f"{problem}. Each process must be given the same state, examples, functions "
        "and options, and collate rows to the same shape (pad text to a fixed length)."
    )


def difference(this: Facts, that: Facts) -> tuple[str, str, str] | None:
    """Return the name of the first fact that differs, and its two values. Return `None`
    if all are the same."""
    for name in this | that:
        values = this.get(name, "missing"), that.get(name, "missing")
        if values[0] != values[1]:
            return name, *values
    return None
