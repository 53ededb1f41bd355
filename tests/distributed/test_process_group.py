"""Processes that agree, and end together: what can be seen on one host. `nox -s hosts` does it on several."""

import json
import pathlib
import re
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import fit_helpers as tiny
import jax
import numpy as np
import pytest
from helpers import in_long
from hosts import harness, program

import redco_eqx as rx
from redco_eqx._data.batches import shapes_of
from redco_eqx._distributed import consensus
from redco_eqx._distributed.consensus import Entries, from_all, from_first, together
from redco_eqx._distributed.process_group import Watchdog


def test_one_process_is_asked_alone():
    assert from_all((1, 2)) == [(1, 2)]
    assert from_first(lambda: (1, 2)) == (1, 2)
    assert together(lambda: (1, 2), OSError) == (1, 2)


def test_two_processes_equal_one(tmp_path):
    names = ["microbatches", "tensor8"]  # 2 x 4 with two microbatches; and all rows on both processes
    processes = harness.start_loopback(tmp_path, "equal", *names)
    try:
        with jax.enable_x64(True):
            one = tmp_path / "one"
            one.mkdir()
            program.equal(one, names)
    finally:
        codes, _ = processes.leave(240)
    assert codes == [0, 0], processes.text()
    expected = json.loads((one / "result.0.json").read_text())
    assert len(expected["tensor8"]["predictions"]) == program.NUM_PREDICT
    worst = harness.compare(harness.results(tmp_path), expected)
    assert all(difference < 1e-12 for difference in worst.values()), worst


UNLIKE = "should be the same on the devices of all processes, but differ"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        # `nox -s hosts` tries these two, too.
        *in_long(
            ("shape", "but float32[rows, 5] on process 1 (host"),
            ("fewer", "but 34 on process 1 (host"),
        ),
        ("evaluation", "evaluate: the checksum of examples[0] is"),
        ("metrics", "evaluate: the checksum of what loss_fn computes is"),
        ("allow_changes", "allow_changes=False)) on process 0 (host"),
        ("drift", f"{program.LAST_BIAS} {UNLIKE}. This happened at step"),
    ],
)
def test_a_difference_on_one_process_ends_both(tmp_path, fault, message):
    """Replicas that differ do not take the place of a checkpoint that can be read."""
    saves = [str(tmp_path / "checkpoints")] if fault in ("drift", "allow_changes") else []
    processes = harness.start_loopback(tmp_path, fault, 1, *saves, num_devices=2)
    codes, _ = processes.leave(120)
    assert codes == [1, 1], processes.text()
    for process in range(2):
        assert message in processes.text(process), process
        # Both see that parameters differ, and one that has heard of the other's failure tells no second one.
        culprit = "1" if fault in ("shape", "fewer") else r"\d"
        assert re.search(rf"process {culprit} \(host", processes.text(process)), process
    if fault == "drift":
        late = -(-program.FAULT_AT // program.SAVE_EVERY) * program.SAVE_EVERY
        assert f"{message} {late}" in processes.text()
        assert max(tiny.steps_in(tmp_path / "checkpoints")) == late - program.SAVE_EVERY


PROGRAM = pathlib.Path(__file__).with_name("_agreeing.py")


@pytest.mark.parametrize(
    ("fault", "odd", "number", "code", "message"),
    [
        ("raise KeyError('no such column')", 0, 4, 1, "failed: KeyError: 'no such column'"),
        ("raise KeyError('no such column')", 1, 3, 1, "failed: KeyError: 'no such column'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, 3, -9, "is lost: "),
    ],
)
def test_all_know_what_one_knows_leave_by_name_and_lose_nothing(tmp_path, fault, odd, number, code, message):
    """Process 0 last: JAX aborts (-6) those that are still there when the one with its service is gone."""
    options: Any = {"program": PROGRAM, "num_processes": number, "num_devices": 1}
    processes = harness.start_loopback(tmp_path, odd, fault, **options)
    codes, _ = processes.leave(60)
    assert codes == [code if process == odd else 1 for process in range(number)], processes.text()
    for process in {0, 1, 2} - {odd}:  # nobody reads what 3 writes
        assert re.search(rf"process {odd} \(host .*\) {message}", processes.text(process)), process
    for process in {0, 1, 2} - ({odd} if code < 0 else set()):
        assert (tmp_path / f"{process}.txt").read_text() == "not flushed", process


def test_a_run_needs_all_processes_with_equally_many_devices(monkeypatch):
    devices = [types.SimpleNamespace(process_index=i) for i in (0, 1, 1)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for there, here in ((devices, devices), (devices[:2], devices[:1])):
        monkeypatch.setattr(jax, "devices", lambda there=there: there)
        mesh = mock.Mock(spec=jax.sharding.Mesh, devices=np.array(here))
        with pytest.raises(ValueError, match=r"^fit: the mesh has devices of .*All processes must take part"):
            consensus.check_complete("fit", mesh)
    consensus.check_complete("fit", mock.Mock(spec=jax.sharding.Mesh, devices=np.array(devices[:2])))


# A process in which no step finishes is ended, and what was written is kept


STUCK = """
import threading, time
from redco_eqx._distributed.process_group import Watchdog
def stuck(): time.sleep(3600)
log = open('log.txt', 'w'); log.write('not flushed')
with Watchdog(None): pass
with Watchdog(1) as watchdog:
    for _ in range(6): time.sleep(0.25); watchdog.beat()
    print('beats help', flush=True)
    worker = threading.Thread(target=stuck, daemon=True)
    worker.start()
    worker.join()
"""


def test_a_process_without_beats_is_ended_and_shows_all_threads(tmp_path):
    done = tiny.python(STUCK, cwd=tmp_path)
    said, errors = done.communicate(timeout=100)
    assert done.returncode == 1, errors
    assert said == "beats help\n"
    assert "no step has finished for 1 s" in errors
    assert "in stuck" in errors
    assert (tmp_path / "log.txt").read_text() == "not flushed"


def test_fit_tells_it_of_every_step(monkeypatch):
    """Steps of training, evaluation and prediction count."""
    beats, beat = [], Watchdog.beat
    monkeypatch.setattr(Watchdog, "beat", lambda watchdog: [beats.append(watchdog), beat(watchdog)])
    examples = tiny.make_examples(24)
    evaluation = rx.Evaluation(examples, predict_fn=tiny.predict_fn)
    tiny.counted(examples=examples, num_steps=3, evaluation=evaluation, step_timeout_seconds=600.0)
    # The beginning, the rehearsal, three steps, and each pass over the 24 examples: six batches, and its end.
    assert (len(beats), len(set(beats))) == (1 + 1 + 3 + 7 + 7, 1)


# A difference between processes is named: without waiting in a stream of batches, and before a step.

CALL: dict[str, Any] = {"len(examples)": 29, "batch_size": 8, "the order by key": [3, 1, 2, 0]}
NUM_PROCESSES = 3


class FakeClient:
    """The store of JAX's coordination service, in memory."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite):
        assert allow_overwrite
        self.values[key] = value

    def key_value_dir_get(self, directory):
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(f"{directory}/")]


@pytest.fixture
def client(monkeypatch):
    made = FakeClient()
    monkeypatch.setattr(consensus, "coordination_client", lambda: made)
    return made


@pytest.fixture
def processes(client):
    """The entries that three processes compare."""
    return new_entries()


def new_entries():
    names = [f"process {i}" for i in range(NUM_PROCESSES)]
    return [Entries(i, names, range(NUM_PROCESSES)) for i in range(NUM_PROCESSES)]


def open_stream(processes, process, **changes):
    """A stream of batches on one process."""
    entries = processes[process]
    number = entries.add("batches", {name: str(value) for name, value in (CALL | changes).items()})
    add = lambda index, batch: entries.add_batch(number, index, shapes_of(batch))  # noqa: E731
    return types.SimpleNamespace(exchange=entries.compare, add=add)


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


def test_a_batch_like_the_one_before_in_its_stream_adds_no_entry(processes):
    streams = [open_stream(processes, 0) for _ in range(2)]
    for index in range(3):
        for stream in streams:
            stream.add(index, batch(4, 3))
    assert processes[0].add("fit", {}) == 4  # after two calls, and the shapes of each


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
            processes[process].add("fit", facts[process])
            while not processes[process].compare():
                time.sleep(0.01)

        with ThreadPoolExecutor(NUM_PROCESSES) as threads:
            return list(threads.map(lambda i: errors([lambda: one(i)]), range(NUM_PROCESSES)))

    for _ in range(3):
        assert everywhere(equal, equal, equal) == [[]] * 3
    for odd in range(NUM_PROCESSES):
        facts = [equal] * NUM_PROCESSES
        facts[odd] = {"batch_size": "8", "the order": "[0, 1]", "loss_fn": "b"}
        found = everywhere(*facts)
        for process in {0, odd}:
            (message,) = found[process]
            assert message.startswith("fit: the order is ")
            assert "[0, 1] on process" in message
            assert "[1, 0] on process" in message
        client.values.clear()
        processes[:] = new_entries()
