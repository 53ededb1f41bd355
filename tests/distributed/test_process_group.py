"""Processes that end together: what can be seen on one host. `nox -s hosts` does it on several."""

import json
import re
import sys

import jax
import pytest
from hosts import harness, program

import redco_eqx as rx


def test_replicas_that_differ_are_not_saved(tmp_path):
    """Nor do they take the place of a checkpoint that can be read."""
    processes = harness.start_loopback(tmp_path, "drift", 1, str(tmp_path / "checkpoints"), num_devices=2)
    codes, _ = processes.leave(120)
    assert codes == [1, 1], processes.text()
    saved = [info.step for info in rx.list_checkpoints(tmp_path / "checkpoints")]
    late = -(-program.FAULT_AT // program.SAVE_EVERY) * program.SAVE_EVERY
    message = "head.bias should be the same on the devices of all processes, but differ. That was so at step"
    assert f"{message} {late}" in processes.text()
    assert max(saved) == late - program.SAVE_EVERY


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


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "KeyError: 'no such column'"),
        ("shape", "but float32[rows, 5] on process 1 (host"),
        ("fewer", "but 34 on process 1 (host"),
        ("hook", "should be the same on the devices of all processes, but differ"),
        ("drift", "head.bias should be the same on the devices of all processes, but differ. That was so"),
    ],
)
def test_a_fault_on_one_process_ends_both(tmp_path, fault, message):
    processes = harness.start_loopback(tmp_path, fault, 1, num_devices=2)
    codes, _ = processes.leave(120)
    assert codes == [1, 1], processes.text()
    for process in range(2):
        assert message in processes.text(process), process
        # Both see that parameters differ, and one that has heard of the other's failure tells no second one.
        culprit = r"\d" if fault in ("hook", "drift") else "1"
        assert re.search(rf"process {culprit} \(host", processes.text(process)), process


SCRIPT = """
import io, os, pathlib, signal, time
import redco_eqx as rx

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

process = int(os.environ["JAX_PROCESS_ID"])
rx.initialize_distributed(leave_seconds=1.0)
file = open(pathlib.Path(os.environ["OUT"]) / f"{process}.txt", "w")
file.write("not flushed")
if process == 2:
    slow = Slow()
if process == 3:
    close_stderr()
if process == int(os.environ["FAILING"]):
    exec(os.environ["FAULT"])
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("fault", "failing", "code", "message"),
    [
        ("raise KeyError('no such column')", 0, 1, "failed: KeyError: 'no such column'"),
        ("raise KeyError('no such column')", 1, 1, "failed: KeyError: 'no such column'"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, -9, "is lost: "),
    ],
)
def test_all_leave_by_name_and_lose_nothing(tmp_path, fault, failing, code, message):
    """Process 0 last: JAX aborts (-6) those that are still there when the one with its service is gone."""
    address = f"127.0.0.1:{harness.free_port()}"
    more = {"OUT": tmp_path, "FAULT": fault, "FAILING": failing}
    environments = [
        harness.environment(num_devices=1, **harness.joined(i, 4, address), **more) for i in range(4)
    ]
    processes = harness.start([[sys.executable, "-c", SCRIPT]] * 4, environments, tmp_path)
    codes, _ = processes.leave(60)
    assert codes == [code if process == failing else 1 for process in range(4)], processes.text()
    for process in {0, 1, 2} - {failing}:  # nobody reads what 3 writes
        assert re.search(rf"process {failing} \(host .*\) {message}", processes.text(process)), process
    for process in {0, 1, 2} - ({failing} if code < 0 else set()):
        assert (tmp_path / f"{process}.txt").read_text() == "not flushed", process
