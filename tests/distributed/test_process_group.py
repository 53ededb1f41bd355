"""Processes that agree, and end together: what can be seen on one host. `nox -s hosts`
does it on several."""

import json
import pathlib
import re
import types
from typing import Any
from unittest import mock

import fit_helpers as tiny
import jax
import numpy as np
import pytest
from helpers import in_long
from hosts import harness, program

import redco_eqx as rx
from redco_eqx._distributed import consensus
from redco_eqx._distributed.consensus import from_all, from_first, together
from redco_eqx._distributed.process_group import Watchdog


def test_one_process_is_asked_alone():
    assert from_all((1, 2)) == [(1, 2)]
    assert from_first(lambda: (1, 2)) == (1, 2)
    assert together(lambda: (1, 2), OSError) == (1, 2)


def test_two_processes_equal_one(tmp_path):
    # 2 x 4 with two microbatches; and all rows on both processes.
    names = ["microbatches", "tensor8"]
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
            ("shape", "mask is float32[rows, 5], but was float32[rows, 4] in batch 0"),
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
    saves = (
        [str(tmp_path / "checkpoints")] if fault in ("drift", "allow_changes") else []
    )
    processes = harness.start_loopback(tmp_path, fault, 1, *saves, num_devices=2)
    codes, _ = processes.leave(120)
    assert codes == [1, 1], processes.text()
    for process in range(2):
        assert message in processes.text(process), process
        # Both see that parameters differ, and one that has heard of the other's failure
        # tells no second one.
        culprit = "1" if fault in ("shape", "fewer") else r"\d"
        assert re.search(rf"process {culprit} \(host", processes.text(process)), process
    if fault == "drift":
        late = -(-program.FAULT_AT // program.SAVE_EVERY) * program.SAVE_EVERY
        assert f"{message} {late}" in processes.text()
        assert max(tiny.steps_in(tmp_path / "checkpoints")) == late - program.SAVE_EVERY


PROGRAM = pathlib.Path(__file__).with_name("_agreeing.py")


# One child ends as a process of the run would, and one lives on with all that it has
# from its parent.
WITH_CHILDREN = """
os.fork() or end_process("of a child")
time.sleep(1)
os.fork() or time.sleep(40) or os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("fault", "odd", "number", "code", "message"),
    [
        (
            "raise KeyError('no such column')",
            0,
            4,
            1,
            "failed: KeyError: 'no such column'",
        ),
        (
            "raise KeyError('no such column')",
            1,
            3,
            1,
            "failed: KeyError: 'no such column'",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, 3, -9, "is lost: "),
        (WITH_CHILDREN, 1, 3, -9, "is lost: "),
    ],
)
def test_all_know_what_one_knows_leave_by_name_and_lose_nothing(
    tmp_path, fault, odd, number, code, message
):
    """Process 0 last: JAX aborts (-6) those that are still there when the one with its
    service is gone."""
    options: Any = {"program": PROGRAM, "num_processes": number, "num_devices": 1}
    processes = harness.start_loopback(tmp_path, odd, fault, **options)
    codes, _ = processes.leave(60)
    assert codes == [code if process == odd else 1 for process in range(number)], (
        processes.text()
    )
    for process in {0, 1, 2} - {odd}:  # nobody reads what 3 writes
        assert re.search(
            rf"process {odd} \(host .*\) {message}", processes.text(process)
        ), process
    for process in {0, 1, 2} - ({odd} if code < 0 else set()):
        assert (tmp_path / f"{process}.txt").read_text() == "not flushed", process


def test_a_run_needs_all_processes_with_equally_many_devices(monkeypatch):
    devices = [types.SimpleNamespace(process_index=i) for i in (0, 1, 1)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for there, here in ((devices, devices), (devices[:2], devices[:1])):
        monkeypatch.setattr(jax, "devices", lambda there=there: there)
        mesh = mock.Mock(spec=jax.sharding.Mesh, devices=np.array(here))
        with pytest.raises(
            ValueError,
            match=r"^fit: the mesh has devices of .*All processes must take part",
        ):
            consensus.check_complete("fit", mesh)
    consensus.check_complete(
        "fit", mock.Mock(spec=jax.sharding.Mesh, devices=np.array(devices[:2]))
    )


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
    beats = []
    beat = Watchdog.beat
    monkeypatch.setattr(
        Watchdog, "beat", lambda watchdog: [beats.append(watchdog), beat(watchdog)]
    )
    examples = tiny.make_examples(24)
    evaluation = rx.Evaluation(examples, predict_fn=tiny.predict_fn)
    tiny.counted(
        examples=examples,
        num_steps=3,
        evaluation=evaluation,
        step_timeout_seconds=600.0,
    )
    # The beginning, the rehearsal, three steps, and each pass over the 24 examples: six
    # batches, and its end.
    assert (len(beats), len(set(beats))) == (1 + 1 + 3 + 7 + 7, 1)
