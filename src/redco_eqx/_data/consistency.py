"""What the processes must have in common in a stream of batches, compared through the store.

A difference would have them wait for each other in a collective, or compute nonsense. Nobody waits here:
each process writes first and reads then, so that of any two the later one sees both. Only what changes
within a stream needs a second look, which the watching thread takes.
"""

import json
import threading
import zlib
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from redco_eqx._distributed import store
from redco_eqx._distributed.failure import add_check
from redco_eqx._distributed.jax_internals import coordination_client
from redco_eqx._tree import describe, leaves_with_paths
from redco_eqx._types import Batch

# How many notes of this process stay in the store. The others are at most a few batches behind.
_NUM_KEPT = 256

_num_streams: Counter[str] = Counter()
_own_keys: deque[str] = deque()
_open: dict[str, "Agreement"] = {}
_lock = threading.Lock()


class Agreement:
    """One stream of batches, which is the same on every process of a mesh."""

    def __init__(self, name: str, processes: list[int]):
        self._name = name
        self._processes = processes
        self._me = jax.process_index()
        self._shapes: list[tuple[int, dict[str, str]]] = []  # from which batch on
        self._num_made = 0

    def check_call(self, facts: Mapping[str, Any]) -> None:
        """Raises `ValueError` if another process has called with other facts."""
        self._compare("call", {name: str(value) for name, value in facts.items()}, "batches: ")

    def check_batch(self, index: int, batch: Batch) -> None:
        """Raises `ValueError` if another process has other leaves, dtypes or shapes in this batch.

        The leading dim may differ: it is the number of rows that a process needs.
        """
        shapes = {path: describe(x, leading="rows") for path, x in leaves_with_paths(batch)}
        if not self._shapes or shapes != self._shapes[-1][1]:
            is_change = bool(self._shapes)
            self._shapes = [*self._shapes[-_NUM_KEPT:], (index, shapes)]
            if is_change:
                self._write(f"changes/{self._name}/{index}", shapes)
            self._compare(f"shapes/{index}", shapes, f"collate_fn: batch {index}: ")
        self._num_made = index + 1

    def differs(self, index: int, process: int, shapes: dict[str, str]) -> str | None:
        """What is wrong if `process` changed to `shapes` in a batch that this process has made already."""
        if index >= self._num_made or process == self._me:
            return None
        mine = next((known for start, known in reversed(self._shapes) if start <= index), shapes)
        return self._difference(mine, process, shapes, f"collate_fn: batch {index}: ")

    def _compare(self, what: str, mine: dict[str, str], prefix: str) -> None:
        directory = f"agree/{self._name}/{what}"
        self._write(directory, mine)
        first = self._processes[0]
        if self._me == first:
            others = store.entries(directory)
        else:  # whoever differs from anybody differs from the first
            value = store.get(f"{directory}/{first}")
            others = {} if value is None else {str(first): value}
        for process, value in others.items():
            message = self._difference(mine, int(process), json.loads(value), prefix)
            if message is not None:
                raise ValueError(message)

    def _difference(
        self, mine: dict[str, str], process: int, theirs: dict[str, str], prefix: str
    ) -> str | None:
        for name in {**mine, **theirs}:
            if mine.get(name) != theirs.get(name):
                return (
                    f"{prefix}{name or 'the batch'} is {mine.get(name, 'missing')} on "
                    f"{store.name_of(self._me)}, but {theirs.get(name, 'missing')} on "
                    f"{store.name_of(process)}. Each process must be given the same examples and options, "
                    "and collate rows to the same shape (pad text to a fixed length)."
                )
        return None

    def _write(self, directory: str, value: dict[str, str]) -> None:
        key = f"{directory}/{self._me}"
        store.put(key, json.dumps(value))
        with _lock:
            _own_keys.append(key)
            old = _own_keys.popleft() if len(_own_keys) > _NUM_KEPT else None
        if old is not None:
            store.delete(old)


def open_stream(mesh: Mesh) -> Agreement | None:
    """The agreement on the next stream over `mesh`; `None` if the mesh is on one process."""
    processes = sorted({device.process_index for device in mesh.devices.flat})
    if len(processes) == 1 or coordination_client() is None:
        return None
    group = str(zlib.crc32(str(processes).encode()))
    name = f"{group}.{_num_streams[group]}"
    _num_streams[group] += 1
    agreement = Agreement(name, processes)
    with _lock:
        _open[name] = agreement
        while len(_open) > 16:
            del _open[next(iter(_open))]
    add_check(_check_changes)
    return agreement


def _check_changes() -> str | None:
    for key, value in store.entries("changes").items():
        name, index, process = key.split("/")
        agreement = _open.get(name)
        message = agreement and agreement.differs(int(index), int(process), json.loads(value))
        if message:
            return message
    return None
