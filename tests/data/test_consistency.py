"""What differs between the processes of a stream is named, by whichever comes later."""

import itertools
from typing import Any

import numpy as np
import pytest

from redco_eqx._data import consistency
from redco_eqx._data.consistency import CallFacts, Streams
from redco_eqx._distributed.process_group import ProcessGroup

CALL: dict[str, Any] = {
    "num_examples": 29,
    "batch_size": 8,
    "epoch": 0,
    "start": 0,
    "remainder": "drop",
    "order": [3, 1, 2, 0],
    "mesh": {"data": 4, "fsdp": 1, "tensor": 2},
}
NUM_PROCESSES = 3


class FakeClient:
    """The store of JAX's coordination service, in memory."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, directory):
        return [(key, value) for key, value in self.values.items() if key.startswith(f"{directory}/")]


@pytest.fixture
def client(monkeypatch):
    made = FakeClient()
    monkeypatch.setattr(consistency, "coordination_client", lambda: made)
    return made


@pytest.fixture
def streams(client):
    """Those of three processes."""
    names = [f"process {i}" for i in range(NUM_PROCESSES)]
    return [Streams(ProcessGroup(i, names)) for i in range(NUM_PROCESSES)]


def open_stream(streams, process, **changes):
    return streams[process].open(list(range(NUM_PROCESSES)), CallFacts(**(CALL | changes)))


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


ORDERS = list(itertools.permutations(range(NUM_PROCESSES)))


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_equal_passes(streams, order):
    opened = {process: open_stream(streams, process) for process in order}
    for index in range(4):
        for process in order:  # each its own number of rows; all change at once
            opened[process].add(index, batch(4 + process, 3 + index // 2))
    for process in order:
        opened[process].exchange()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("odd", [0, 1])  # the first, and another
def test_another_call_is_named(streams, order, odd):
    opened, found = {}, []
    for process in order:
        changes = {"num_examples": 28} if process == odd else {}
        found += errors([lambda p=process, c=changes: opened.update({p: open_stream(streams, p, **c)})])
    # Who came before the first process looks again, at a batch or from its thread.
    found += errors([stream.exchange for stream in opened.values()])
    assert found
    for message in found:
        assert message.startswith("batches: len(examples) is ")
        assert f"28 on process {odd}" in message
        assert "29 on process" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 16}, "batch_size is 16 on process 1, but 8 on process 0"),
        ({"epoch": 1}, "epoch is 1 on process 1"),
        ({"start": 2}, "start is 2 on process 1"),
        ({"remainder": "pad"}, "remainder is pad on process 1, but drop on process 0"),
        ({"order": [0, 1, 2, 3]}, r"the order by key is \[0, 1, 2, 3\] on process 1"),
        ({"order": None}, "the order by key is None on process 1"),
        ({"mesh": {"data": 8, "fsdp": 1, "tensor": 1}}, "mesh is {'data': 8"),
    ],
)
def test_each_fact_of_a_call_is_compared(streams, changes, message):
    open_stream(streams, 0)
    with pytest.raises(ValueError, match=f"batches: {message}"):
        open_stream(streams, 1, **changes)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (batch(4, 2), r"x is float32\[rows, 2\] on process 1, but float32\[rows, 3\] on process 0"),
        (batch(4, 3, dtype=np.float16), r"x is float16\[rows, 3\]"),
        ({"x": np.zeros((4, 3), np.float32)}, "y is missing on process 1"),
        ({**batch(4, 3), "z": np.zeros(4)}, r"z is float64\[rows\] on process 1, but missing on process 0"),
        (np.zeros(4), r"the batch is float64\[rows\] on process 1, but missing on process 0"),
    ],
)
@pytest.mark.parametrize("at", [0, 2])
def test_other_leaves_are_named(streams, other, message, at):
    first, second = open_stream(streams, 0), open_stream(streams, 1)
    for index in range(at):
        for stream in (first, second):
            stream.add(index, batch(4, 3))
    first.add(at, batch(4, 3))
    first.exchange()  # as its thread does
    with pytest.raises(ValueError, match=f"collate_fn: batch {at}: {message}"):
        second.add(at, other)


def test_a_change_is_found_when_both_have_made_the_batch(streams):
    first, second = open_stream(streams, 0), open_stream(streams, 1)
    for index in range(3):
        first.add(index, batch(4, 3))
        second.add(index, batch(4, 3))
    first.add(3, batch(4, 5))
    second.exchange()  # which has not made that batch
    second.add(3, batch(4, 3))
    with pytest.raises(
        ValueError, match=r"batch 3: x is float32\[rows, 3\] on process 1, but float32\[rows, 5\]"
    ):
        second.exchange()


def test_the_store_does_not_grow(streams, client):
    stream = open_stream(streams, 0)
    for _ in range(3 * consistency._NUM_STREAMS):
        stream = open_stream(streams, 0)
    assert len(client.values) == consistency._NUM_STREAMS
    for index in range(40 * consistency._NUM_CHANGES):
        stream.add(index, batch(4, index % 7))
    assert max(map(len, client.values.values())) < 5000
