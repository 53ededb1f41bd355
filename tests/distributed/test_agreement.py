"""A difference between processes is named: without waiting in a stream of batches, and before a step."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from redco_eqx._data.batches import shapes_of
from redco_eqx._distributed import consensus
from redco_eqx._distributed.consensus import Entries

CALL: dict[str, Any] = {
    "len(examples)": 29,
    "batch_size": 8,
    "epoch": 0,
    "start": 0,
    "remainder": "drop",
    "the order by key": [3, 1, 2, 0],
    "mesh": {"data": 4, "fsdp": 1, "tensor": 2},
}
NUM_PROCESSES = 3


class FakeClient:
    """The store of JAX's coordination service, in memory."""

    def __init__(self):
        self.values = {}
        self.lock = threading.Lock()

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        with self.lock:
            self.values[key] = value

    def key_value_dir_get(self, directory):
        with self.lock:
            return [(key, value) for key, value in self.values.items() if key.startswith(f"{directory}/")]


@pytest.fixture(autouse=True)
def client(monkeypatch):
    made = FakeClient()
    monkeypatch.setattr(consensus, "coordination_client", lambda: made)
    return made


@pytest.fixture
def processes():
    """The entries that three processes compare."""
    return new_entries()


def new_entries():
    names = [f"process {i}" for i in range(NUM_PROCESSES)]
    return [Entries(i, names, range(NUM_PROCESSES)) for i in range(NUM_PROCESSES)]


class Stream:
    """A stream of batches on one process."""

    def __init__(self, entries, opening):
        self.entries, self.exchange = entries, entries.compare
        self.number = entries.add("batches", opening)

    def add(self, index, batch):
        self.entries.add_batch(self.number, index, shapes_of(batch))


def open_stream(processes, process, **changes):
    return Stream(processes[process], {name: str(value) for name, value in (CALL | changes).items()})


def batch(*shape: int, dtype: Any = np.float32):
    return {"x": np.zeros(shape, dtype), "y": np.zeros(shape[:1], np.int32)}


def errors(acts):
    """The messages of what is raised, one after the other."""
    found = []
    for act in acts:
        try:
            act()
        except ValueError as error:
            found.append(str(error))
    return found


ORDERS = [(0, 1, 2), (2, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_equal_passes(processes, order):
    opened = {process: open_stream(processes, process) for process in order}
    for index in range(4):
        for process in order:  # each its own number of rows; all change at once
            opened[process].add(index, batch(4 + process, 3 + index // 2))
    for process in order:
        opened[process].exchange()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("odd", [0, 1])  # the first, and another
def test_another_call_is_named(processes, order, odd):
    opened, found = {}, []
    for process in order:
        changes = {"len(examples)": 28} if process == odd else {}
        found += errors([lambda p=process, c=changes: opened.update({p: open_stream(processes, p, **c)})])
    # Who came before the first process looks again, at a batch or from its thread.
    found += errors([stream.exchange for stream in opened.values()])
    assert found
    for message in found:
        assert message.startswith("batches: len(examples) is ")
        assert f"28 on process {odd}" in message
        assert "29 on process" in message


@pytest.mark.parametrize("at", [0, 2])
def test_other_leaves_are_named(client, at):
    for other, (leaf, wrong, right) in (
        (batch(4, 2), ("x", "float32[rows, 2]", "float32[rows, 3]")),
        (batch(4, 3, dtype=np.float16), ("x", "float16[rows, 3]", "float32[rows, 3]")),
        ({"x": np.zeros((4, 3), np.float32)}, ("y", "missing", "int32[rows]")),
        ({**batch(4, 3), "z": np.zeros(4)}, ("z", "float64[rows]", "missing")),
    ):
        client.values.clear()
        processes = new_entries()
        first, second = open_stream(processes, 0), open_stream(processes, 1)
        for index in range(at):
            first.add(index, batch(4, 3))
            second.add(index, batch(4, 3))
        first.add(at, batch(4, 3))
        second.exchange()  # which has not made that batch
        # One of the two sees it, at its batch or as its thread looks again.
        (found,) = errors([lambda s=second, o=other: s.add(at, o), first.exchange])[:1]
        here, there = re.findall(r" is (.*) on process \d, but (.*) on process \d", found)[0]
        assert f"collate_fn: batch {at}: {leaf} is " in found
        assert {here, there} == {wrong, right}


def test_another_kind_of_call_and_a_missing_fact_are_named(processes, client):
    open_stream(processes, 0)
    with pytest.raises(ValueError, match="batches has been reached on process 0, but fit on process 1"):
        processes[1].add("fit", {})
    client.values.clear()
    first, second, _ = new_entries()
    first.add("fit", {"a": "1"})
    with pytest.raises(ValueError, match="fit: b is missing on process 0, but 2 on process 1"):
        second.add("fit", {"a": "1", "b": "2"})


def test_the_store_does_not_grow(processes, client):
    for _ in range(3 * consensus._NUM_KEPT):
        stream = open_stream(processes, 0)
        for index in range(10):
            stream.add(index, batch(4, index % 7))
    assert len(client.values) == 1
    assert max(map(len, client.values.values())) < 8000


def test_a_slow_process_is_compared_with_what_is_still_known(processes):
    fast, slow = open_stream(processes, 0), open_stream(processes, 1)
    for index in range(3 * consensus._NUM_KEPT):
        fast.add(index, batch(4, index % 7))
    for index in range(3 * consensus._NUM_KEPT - 1):
        slow.add(index, batch(4, index % 7))
    with pytest.raises(ValueError, match=r"batch 95: x is .* but float32\[rows, 9\] on process 1"):
        slow.add(95, batch(4, 9))


def test_agreeing_waits_for_all_and_names_the_first_difference(processes, client):
    equal = {"batch_size": "8", "the order": "[1, 0]", "loss_fn": "a"}

    def everywhere(*facts):
        def one(process):
            try:
                entries = processes[process]
                entries.add("fit", facts[process])
                while not entries.compare():
                    time.sleep(0.01)
            except ValueError as error:
                return str(error)

        with ThreadPoolExecutor(NUM_PROCESSES) as threads:
            return list(threads.map(one, range(NUM_PROCESSES)))

    for _ in range(3):
        assert everywhere(equal, equal, equal) == [None] * 3
    for odd in range(NUM_PROCESSES):
        facts = [equal] * NUM_PROCESSES
        facts[odd] = {"batch_size": "8", "the order": "[0, 1]", "loss_fn": "b"}
        found = everywhere(*facts)
        for process in {0, odd}:
            message = found[process] or "nothing"
            assert message.startswith("fit: the order is ")
            assert "[0, 1] on process" in message
            assert "[1, 0] on process" in message
        client.values.clear()
        processes[:] = new_entries()
