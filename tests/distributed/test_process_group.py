"""Processes that agree, and end together: what can be seen on one host. `nox -s hosts` does it on several."""

import json
import re
import sys

import fit_helpers as tiny
import jax
import pytest
from hosts import harness, program

import redco_eqx as rx
from redco_eqx._distributed.consensus import from_all, from_first, together
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
        ("shape", "but float32[rows, 5] on process 1 (host"),
        ("fewer", "but 34 on process 1 (host"),
        ("hook", UNLIKE),
        ("drift", f"{program.LAST_BIAS} {UNLIKE}. This happened at step"),
    ],
)
def test_a_difference_on_one_process_ends_both(tmp_path, fault, message):
    """Replicas that differ do not take the place of a checkpoint that can be read."""
    saves = [str(tmp_path / "checkpoints")] if fault == "drift" else []
    processes = harness.start_loopback(tmp_path, fault, 1, *saves, num_devices=2)
    codes, _ = processes.leave(120)
    assert codes == [1, 1], processes.text()
    for process in range(2):
        assert message in processes.text(process), process
        # Both see that parameters differ, and one that has heard of the other's failure tells no second one.
        culprit = r"\d" if fault in ("hook", "drift") else "1"
        assert re.search(rf"process {culprit} \(host", processes.text(process)), process
    if saves:
        saved = tiny.steps_in(tmp_path / "checkpoints")
        late = -(-program.FAULT_AT // program.SAVE_EVERY) * program.SAVE_EVERY
        assert f"{message} {late}" in processes.text()
        assert max(saved) == late - program.SAVE_EVERY


SCRIPT = """
import io, os, pathlib, signal, time
import jax
import redco_eqx as rx
from redco_eqx._distributed.consensus import Vote, from_all, from_first, together

class Slow(io.RawIOBase):
    def flush(self):
        time.sleep(0.8)

def close_stderr():
    _, pipe = os.pipe()
    os.set_blocking(pipe, False)
    try:
        while os.write(pipe, bytes(4096)):
            pass
    except BlockingIOError:
        os.set_blocking(pipe, True)
    os.dup2(pipe, 2)

rx.initialize_distributed(leave_seconds=1.0)
me, number = jax.process_index(), jax.process_count()

def fail(*processes):
    if me in processes:
        raise OSError(f"no disk on {me}")
    return me

def error(act):
    try:
        return act()
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"

assert from_all({"of": "ä" * me}) == [{"of": "ä" * process} for process in range(number)]
assert from_first(lambda: [me, "x", None]) == [0, "x", None]
assert error(lambda: from_first(lambda: fail(1))) == 0
said = error(lambda: from_first(lambda: fail(0)))
assert said == ("" if me == 0 else "RuntimeError: on process 0: ") + "OSError: no disk on 0", said
said = error(lambda: from_first(lambda: {1, 2}))  # no JSON
assert "not JSON serializable" in said, said
assert together(fail, OSError) == me
said = error(lambda: together(lambda: fail(1, 2), OSError))
expected = f"no disk on {me}" if me in (1, 2) else "on process 1: OSError: no disk on 1"
assert said == f"OSError: {expected}", said
vote = Vote(rx.make_mesh())
answers = [vote(step * (me == 1), me) for step in range(1, 6)]
assert answers == [None, None, *((step, number - 1) for step in (1, 2, 3))], answers

file = open(pathlib.Path(os.environ["OUT"]) / f"{me}.txt", "w")
file.write("not flushed")
if me == 2:
    slow = Slow()
if me == 3:
    close_stderr()
if me == int(os.environ["FAILING"]):
    exec(os.environ["FAULT"])
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("fault", "failing", "num_processes", "code", "message"),
    [
        ("raise KeyError('no such column')", 0, 4, 1, "failed: KeyError: 'no such column'"),
        ("raise KeyError('no such column')", 1, 3, 1, "failed: KeyError: 'no such column'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, 3, -9, "is lost: "),
    ],
)
def test_all_know_what_one_knows_leave_by_name_and_lose_nothing(
    tmp_path, fault, failing, num_processes, code, message
):
    """Process 0 last: JAX aborts (-6) those that are still there when the one with its service is gone."""
    address, ids = f"127.0.0.1:{harness.free_port()}", range(num_processes)
    more = {"OUT": tmp_path, "FAULT": fault, "FAILING": failing}
    environments = [
        harness.environment(num_devices=1, **harness.joined(i, num_processes, address), **more) for i in ids
    ]
    processes = harness.start([[sys.executable, "-c", SCRIPT]] * num_processes, environments, tmp_path)
    codes, _ = processes.leave(60)
    assert codes == [code if process == failing else 1 for process in ids], processes.text()
    for process in {0, 1, 2} - {failing}:  # nobody reads what 3 writes
        assert re.search(rf"process {failing} \(host .*\) {message}", processes.text(process)), process
    for process in {0, 1, 2} - ({failing} if code < 0 else set()):
        assert (tmp_path / f"{process}.txt").read_text() == "not flushed", process


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
    assert len(beats) == 1 + 1 + 3 + 7 + 7
    assert len(set(beats)) == 1
