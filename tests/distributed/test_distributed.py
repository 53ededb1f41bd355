"""Joining, agreeing and leaving: what can be seen on one host. `nox -s hosts` does it on several."""

import collections
import concurrent.futures
import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest

import redco_eqx as rx
from redco_eqx._data import consistency
from redco_eqx._distributed import initialize, rendezvous, store
from redco_eqx._distributed.cluster import Launch, find_launch, is_loopback, share_of_devices, tasks_on_node
from redco_eqx._distributed.rendezvous import meet

HOSTS = pathlib.Path(__file__).parent.parent / "hosts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, HOSTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


harness, program = load("harness"), load("program")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "JAX_COORDINATOR", "JAX_NUM_PROC", "JAX_PROCESS", "JAX_LOCAL")):
            monkeypatch.delenv(name)


# What the launcher says


def find(address=None, number=None, process=None, devices=None):
    return find_launch(address, number, process, devices, 5)


def test_one_process_does_nothing(monkeypatch):
    assert find() is None
    assert find(number=1) is None
    assert find("10.0.0.1:1234", 1, 0) is None
    rx.initialize_distributed()
    rx.initialize_distributed(num_processes=1)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert find() is None
    assert not jax.distributed.is_initialized()


def test_arguments_come_before_the_environment(monkeypatch):
    assert find("a:1", 4, 3) == Launch("a:1", 4, 3, None)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "b:2")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "8")
    monkeypatch.setenv("JAX_PROCESS_ID", "5")
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    assert find() == Launch("b:2", 8, 5, (2, 3))
    assert find(process=0) == Launch("b:2", 8, 0, (2, 3))
    assert find("[::1]:7", 2, 1, 4) == Launch("[::1]:7", 2, 1, (4,))
    launch = find("[::1]:7", 2, 1, [4, 5])
    assert launch is not None
    assert (launch.host, launch.port, launch.local_device_ids) == ("::1", 7, (4, 5))


@pytest.mark.parametrize(
    ("arguments", "environment", "error", "message"),
    [
        (("a:1", 2, 2), {}, ValueError, r"process_id=2, .*num_processes=2 .*0\.\.1"),
        (("a:1", 2, -1), {}, ValueError, "process_id=-1"),
        (("a:1", 1, 1), {}, ValueError, r"process_id=1, .*0\.\.0"),
        (("a:1", 0, 0), {}, ValueError, "num_processes=0"),
        (("a", 2, 0), {}, ValueError, "coordinator_address='a'.*host:port"),
        (("a:", 2, 0), {}, ValueError, "host:port"),
        (("a:99999", 2, 0), {}, ValueError, "host:port"),
        (("a:1", 2, None), {}, ValueError, "not process_id.*JAX_PROCESS_ID"),
        (("a:1", None, None), {}, ValueError, "JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        ((None, 2, 0), {}, ValueError, "JAX_COORDINATOR_ADDRESS"),
        (("a:1", 2, True), {}, TypeError, "process_id=True"),
        (("a:1", 2, "0"), {}, TypeError, "process_id='0'"),
        (("a:1", 2, None), {"JAX_PROCESS_ID": "x"}, ValueError, "JAX_PROCESS_ID='x'"),
        (("a:1", 2, 0), {"JAX_LOCAL_DEVICE_IDS": "0;1"}, ValueError, "JAX_LOCAL_DEVICE_IDS='0;1'"),
        (
            (None, None, None),
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"},
            RuntimeError,
            "2 nodes and 2 tasks.*srun python",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(monkeypatch, arguments, environment, error, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        find(*arguments)


def slurm(monkeypatch, *, process, local, per_node, nodes="n[0-1]", tasks=2):
    values = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_PROCID": process,
        "SLURM_LOCALID": local,
        "SLURM_NODEID": process - local,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_slurm_with_one_task_on_a_node_uses_all_its_devices(monkeypatch):
    slurm(monkeypatch, process=1, local=0, per_node="1(x2)")
    launch = find()
    assert launch is not None
    assert (launch.host, launch.num_processes, launch.process_id) == ("n0", 2, 1)
    assert launch.local_device_ids is None  # JAX would take device 0 alone
    assert find(devices=3) == Launch(launch.coordinator_address, 2, 1, (3,))


def test_slurm_with_two_tasks_on_a_node_shares_its_devices(monkeypatch):
    slurm(monkeypatch, process=1, local=1, per_node="2", nodes="n0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    launch = find()
    assert launch is not None
    assert launch.local_device_ids == (4, 5, 6, 7)


def test_one_task_of_slurm_is_one_process(monkeypatch):
    slurm(monkeypatch, process=0, local=0, per_node="1", nodes="n0", tasks=1)
    assert find() is None
    monkeypatch.delenv("SLURM_STEP_NODELIST")  # the batch script of such a job
    assert find() is None


@pytest.mark.parametrize(
    ("text", "node", "expected"),
    [("1(x2)", 1, 1), ("2", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4,3", 1, 3), ("", 0, None)],
)
def test_tasks_on_node(text, node, expected):
    assert tasks_on_node({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}) == expected
    assert tasks_on_node({"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}) == 3


@pytest.mark.parametrize(
    ("local", "num_tasks", "visible", "expected"),
    [
        (0, 1, None, None),
        (0, 1, "0,1,2,3", None),
        (1, 2, None, (1,)),
        (1, 2, "0,1,2,3", (2, 3)),
        (3, 8, "0,1,2,3,4,5,6,7", (3,)),
        (3, 4, "3", None),  # the launcher has given each task its own
        (1, 2, "0,1,2", (1,)),
        (2, None, None, (2,)),
    ],
)
def test_share_of_devices(local, num_tasks, visible, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert share_of_devices(local, num_tasks, environment) == expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.1.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("n0", False)],
)
def test_is_loopback(host, expected):
    assert is_loopback(host) == expected


# Refused before anything hangs


def test_jax_was_used_before():
    jax.devices()
    with pytest.raises(RuntimeError, match=r"used already.*not of 2"):
        rx.initialize_distributed("127.0.0.1:1", 2, 0)


def test_joining_twice(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="joined already"):
        rx.initialize_distributed()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_seconds", 0),
        ("heartbeat_timeout_seconds", -1),
        ("shutdown_timeout_seconds", 0),
        ("leave_seconds", 0.0),
    ],
)
def test_times_are_positive(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}, but it must be positive"):
        rx.initialize_distributed(**{name: value})


def test_absent_coordinator_is_named():
    address = f"127.0.0.1:{harness.free_port()}"
    with pytest.raises(TimeoutError, match=f"process 3 of 4 found nobody at {address}.* for 0.3 s.*refused"):
        meet(Launch(address, 4, 3, None), 0.3)


def test_taken_port_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot open port {port} .*in use"):
            meet(Launch(f"127.0.0.1:{port}", 2, 0, None), 1.0)


def meet_all(places, timeout_seconds):
    """What `meet` raises for each of `(num_processes, process_id)`, all at once; `None` where it returns."""
    address = f"127.0.0.1:{harness.free_port()}"

    def run(place):
        try:
            meet(Launch(address, place[0], place[1], None), timeout_seconds)
            if place[1] == 0:  # as JAX's service does
                servers.append(socket.create_server(("", int(address.partition(":")[2]))))
        except Exception as error:
            return error

    servers = []
    with concurrent.futures.ThreadPoolExecutor(len(places)) as threads:
        outcomes = list(threads.map(run, places))
    for server in servers:
        server.close()
    return outcomes


def test_all_meet():
    assert meet_all([(4, 2), (4, 3), (4, 0), (4, 1)], 60.0) == [None] * 4


@pytest.mark.parametrize(
    ("places", "seconds", "kind", "message"),
    [
        ([(4, 0), (4, 2)], 0.5, TimeoutError, r"processes 1, 3 of 4 did not come .* within 0\.5 s"),
        ([(3, 0), (2, 1)], 60.0, ValueError, "process 1 on .* num_processes=2, but process 0 on .* 3"),
        ([(3, 0), (3, 1), (3, 1)], 60.0, ValueError, "process_id=1 was given twice"),
    ],
)
def test_who_does_not_fit_is_named_on_all(places, seconds, kind, message):
    for error in meet_all(places, seconds):
        assert isinstance(error, kind)
        assert re.search(message, str(error))


@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad Request\r\n", b"\x00\x00\x12\x04", b"{}\n"])
def test_another_service_at_the_address(greeting):
    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as thread:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joined = thread.submit(meet, Launch(address, 2, 1, None), 60.0)
        connection, _ = server.accept()
        with connection:
            connection.sendall(greeting)
            with pytest.raises(ValueError, match=f"answers at {address} is not process 0"):
                joined.result()


def test_strangers_are_ignored_and_a_restarted_process_is_taken():
    port = harness.free_port()
    address = f"127.0.0.1:{port}"
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        gathered = thread.submit(meet, Launch(address, 3, 0, None), 60.0)
        for text in (b"", b"GET / HTTP/1.1\r\n", b'{"process_id": 1, "num_processes": 3, "host": "a"}\n'):
            with rendezvous._connect(Launch(address, 3, 1, None), time.monotonic() + 60, 60.0) as stranger:
                stranger.sendall(text)
        waiting = []
        for process in (1, 2):
            connection = socket.create_connection(("127.0.0.1", port))
            hello = {"process_id": process, "num_processes": 3, "host": "b"}
            connection.sendall(json.dumps(hello).encode() + b"\n")
            waiting.append(connection)
        assert gathered.result() is None
        for connection in waiting:
            assert json.loads(connection.recv(1000)) == {"go": True}
            connection.close()


def test_own_name_that_others_cannot_reach(monkeypatch):
    held = {"network/1": "elsewhere"}
    monkeypatch.setattr(store, "put", held.__setitem__)
    monkeypatch.setattr(store, "wait", lambda key, seconds: held[key])
    monkeypatch.setattr(socket, "gethostname", lambda: "myhost")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    monkeypatch.setattr(initialize, "_platform", lambda: "cpu")
    launch = Launch("10.0.0.1:1", 2, 0, None)
    with pytest.raises(RuntimeError, match=r"'myhost', resolves to 127\.0\.1\.1.*/etc/hosts"):
        initialize._check_own_address(launch)
    monkeypatch.setattr(initialize, "_platform", lambda: "")
    with pytest.warns(UserWarning, match="does not matter"):
        initialize._check_own_address(launch)
    held["network/1"] = initialize._network()  # all on this host
    initialize._check_own_address(launch)
    held["network/1"] = "elsewhere"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("10.0.0.1", 0))])
    initialize._check_own_address(launch)


# Agreement on the data


class FakeStore:
    """The store in memory."""

    def __init__(self, monkeypatch):
        self.values = {}
        monkeypatch.setattr(store, "put", self.values.__setitem__)
        monkeypatch.setattr(store, "get", self.values.get)
        monkeypatch.setattr(store, "delete", self.values.pop)
        monkeypatch.setattr(store, "entries", self.entries)
        monkeypatch.setattr(store, "name_of", lambda process: f"process {process}")
        monkeypatch.setattr(consistency, "_own_keys", collections.deque())

    def entries(self, directory):
        start = f"{directory}/"
        return {k.removeprefix(start): v for k, v in self.values.items() if k.startswith(start)}


@pytest.fixture
def agreements(monkeypatch):
    """Those of three processes on one stream."""
    FakeStore(monkeypatch)
    made = []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        made.append(consistency.Agreement("0.0", [0, 1, 2]))
    return made


def batch(*shape: int, dtype: Any = np.float32):
    return {"x": np.zeros(shape, dtype), "y": np.zeros(shape[:1], np.int32)}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_agreed_calls(agreements, order):
    for process in order:
        agreements[process].check_call({"len(examples)": 29, "epoch": 0})
        agreements[process].check_batch(0, batch(4 + process, 3))  # each its own number of rows


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0), (2, 1, 0), (0, 2, 1), (2, 0, 1)])
def test_another_length_is_named_by_somebody(agreements, order):
    messages = []
    for process in order:
        try:
            agreements[process].check_call({"epoch": 0, "len(examples)": 28 if process == 1 else 29})
        except ValueError as error:
            messages.append(str(error))
    assert messages
    assert all("len(examples) is" in m and "28" in m and "29" in m and "process 1" in m for m in messages)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (batch(4, 2), r"batch 0: x is float32\[rows, 2\] on process 1, but float32\[rows, 3\] on process 0"),
        (batch(4, 3, dtype=np.float16), "float16"),
        ({"x": np.zeros((4, 3), np.float32)}, "y is missing on process 1"),
        ({**batch(4, 3), "z": np.zeros(4)}, r"z is float64\[rows\] on process 1, but missing on process 0"),
    ],
)
def test_other_leaves_are_named(agreements, other, text):
    agreements[0].check_batch(0, batch(4, 3))
    with pytest.raises(ValueError, match=text):
        agreements[1].check_batch(0, other)


def test_a_change_on_one_process_is_found_by_the_others(agreements):
    for agreement in agreements[:2]:
        for index in range(3):
            agreement.check_batch(index, batch(4, 3))
    agreements[1].check_batch(3, batch(4, 5))
    changes = {key: json.loads(value) for key, value in store.entries("changes").items()}
    assert list(changes) == ["0.0/3/1"]
    shapes = changes["0.0/3/1"]
    assert agreements[0].differs(3, 1, shapes) is None  # not made there yet
    agreements[0].check_batch(3, batch(4, 3))
    assert "batch 3: x is float32[rows, 3] on process 0" in (agreements[0].differs(3, 1, shapes) or "")
    assert agreements[1].differs(3, 1, shapes) is None
    # All change at once: that is allowed.
    agreements[0].check_batch(4, batch(4, 5))
    agreements[1].check_batch(4, batch(4, 5))
    assert agreements[0].differs(4, 1, shapes) is None


def test_old_notes_are_removed(agreements):
    for index in range(3 * consistency._NUM_KEPT):
        agreements[0].check_batch(index, batch(4, index % 7))
    assert len(store.entries("changes")) + len(store.entries("agree")) == consistency._NUM_KEPT


# Really, with two processes


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
        ("shape", "mask is float32[rows, 4] on process 0"),
        ("fewer", "len(examples) is 3"),
    ],
)
def test_a_fault_on_one_process_ends_both(tmp_path, fault, message):
    processes = harness.start_loopback(tmp_path, fault, 1, num_devices=2)
    codes, _ = processes.leave(120)
    assert codes == [1, 1], processes.text()
    for process in range(2):
        assert message in processes.text(process), process
        assert "process 1 (host" in processes.text(process), process


@pytest.mark.parametrize("failing", [0, 1])
def test_process_0_leaves_last(tmp_path, failing):
    """JAX aborts (-6) the processes that are still there when the one with its service is gone."""
    script = (
        "import io, os, time\n"
        "import redco_eqx as rx\n"
        "class Slow(io.RawIOBase):\n"
        "    def flush(self):\n"
        "        time.sleep(0.8)\n"
        "process = int(os.environ['JAX_PROCESS_ID'])\n"
        "rx.initialize_distributed(leave_seconds=1.0)\n"
        "file = Slow() if process == 2 else None\n"
        f"if process == {failing}:\n"
        "    raise KeyError('no such column')\n"
        "time.sleep(60)\n"
    )
    address = f"127.0.0.1:{harness.free_port()}"
    environments = [harness.environment(num_devices=1, **harness.joined(i, 3, address)) for i in range(3)]
    processes = harness.start([[sys.executable, "-c", script]] * 3, environments, tmp_path)
    codes, _ = processes.leave(60)
    assert codes == [1, 1, 1], processes.text()
    for process in range(3):
        assert "KeyError: 'no such column'" in processes.text(process), process


def test_watchdog(tmp_path):
    script = (
        "import time\n"
        "from redco_eqx._distributed.watchdog import Watchdog, beat\n"
        "def stuck(): time.sleep(3600)\n"
        "log = open('log.txt', 'w'); log.write('not flushed')\n"
        "with Watchdog(None): pass\n"
        "with Watchdog(60): beat()\n"
        "with Watchdog(2): stuck()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "no step has finished for 2 s" in done.stderr
    assert "in stuck" in done.stderr
    assert (tmp_path / "log.txt").read_text() == "not flushed"


def test_watchdog_refuses_no_time():
    from redco_eqx._distributed.watchdog import Watchdog

    with pytest.raises(ValueError, match="step_timeout_seconds=0"):
        Watchdog(0.0)
