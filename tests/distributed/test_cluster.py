"""Launchers' descriptions of a run, and how its processes find each other: before
anything hangs."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import socket
import struct
import threading
import time
from typing import Any

import jax
import pytest
import yaml
from fit_helpers import raised
from hosts import harness

import redco_eqx as rx
from redco_eqx._distributed.cluster import Launch, find_launch, share_of_devices
from redco_eqx._distributed.initialize import Member, check_addresses, rendezvous


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(
            (
                "SLURM_",
                "OMPI_",
                "JAX_COORDINATOR",
                "JAX_NUM_PROC",
                "JAX_PROCESS",
                "JAX_LOCAL",
            )
        ):
            monkeypatch.delenv(name)


def find(address=None, number=None, process=None, devices=None) -> Any:
    return find_launch(address, number, process, devices, 5)


def test_one_process_does_nothing(monkeypatch):
    assert [find(), find(number=1), find("10.0.0.1:1234", 1, 0)] == [None] * 3
    rx.initialize_distributed()
    rx.initialize_distributed(num_processes=1)
    monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
    assert find() is None
    assert not jax.distributed.is_initialized()


def test_arguments_come_before_the_environment(monkeypatch):
    assert find("a:1", 4, 3) == Launch("a:1", 4, 3, None)
    for name, value in {
        **harness.joined("5", "8", "b:2"),
        "JAX_LOCAL_DEVICE_IDS": "2,3",
    }.items():
        monkeypatch.setenv(name, value)
    assert find() == Launch("b:2", 8, 5, (2, 3))
    assert find(process=0) == Launch("b:2", 8, 0, (2, 3))
    assert find("[::1]:7", 2, 1, 4) == Launch("[::1]:7", 2, 1, (4,))
    launch = find("[::1]:7", 2, 1, [4, 5])
    assert (launch.place, launch.local_device_ids) == (("::1", 7), (4, 5))


OF_SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
# The address, the number of processes and the process; more of the environment.
REFUSED = [
    pytest.param(
        ("a:1", 2, 2),
        {},
        ValueError,
        r"process_id=2, .*num_processes=2 .*0\.\.1",
        id="process_id-too_large",
    ),
    pytest.param(
        ("a:1", 2, -1), {}, ValueError, "process_id=-1", id="process_id-negative"
    ),
    pytest.param(
        ("a:1", 1, 1),
        {},
        ValueError,
        r"process_id=1, .*0\.\.0",
        id="process_id-too_large_for_one",
    ),
    pytest.param(
        ("a:1", 0, 0), {}, ValueError, "num_processes=0", id="num_processes-zero"
    ),
    pytest.param(
        ("a", 2, 0),
        {},
        ValueError,
        "coordinator_address='a'.*host:port",
        id="coordinator_address-without_port",
    ),
    pytest.param(
        ("a:", 2, 0), {}, ValueError, "host:port", id="coordinator_address-empty_port"
    ),
    pytest.param(
        ("a:99999", 2, 0),
        {},
        ValueError,
        "host:port",
        id="coordinator_address-port_too_large",
    ),
    pytest.param(
        ("a:1", 2, None),
        {},
        ValueError,
        "lacks process_id.*JAX_PROCESS_ID",
        id="process_id-missing",
    ),
    pytest.param(
        ("a:1", None, None),
        {},
        ValueError,
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID",
        id="num_processes_and_process_id-missing",
    ),
    pytest.param(
        (None, 2, 0),
        {},
        ValueError,
        "JAX_COORDINATOR_ADDRESS",
        id="coordinator_address-missing",
    ),
    pytest.param(
        ("a:1", 2, None),
        {"JAX_PROCESS_ID": "x"},
        ValueError,
        r"JAX_PROCESS_ID\) is 'x'",
        id="process_id-text_in_the_environment",
    ),
    pytest.param(
        ("a:1", 2, 0),
        {"JAX_LOCAL_DEVICE_IDS": "0;1"},
        ValueError,
        r"JAX_LOCAL_DEVICE_IDS\) is '0;1'",
        id="local_device_ids-text_in_the_environment",
    ),
    pytest.param(
        (None, None, None),
        OF_SLURM,
        RuntimeError,
        "2 nodes and 2 tasks.*srun python",
        id="slurm-without_srun",
    ),
]


@pytest.mark.parametrize(("arguments", "environment", "error", "message"), REFUSED)
def test_what_does_not_fit_together_is_refused(
    arguments, environment, error, message, monkeypatch
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    raised(error, find, *arguments, match=message)


def slurm(monkeypatch, *, process, local, num_nodes, nodes="n[0-1]", tasks=2):
    values = {
        "JOB_ID": 7,
        "STEP_NODELIST": nodes,
        "NTASKS": tasks,
        "PROCID": process,
        "LOCALID": local,
    }
    values |= {"STEP_NUM_TASKS": tasks, "STEP_NUM_NODES": num_nodes}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


def test_slurm_shares_the_devices_of_a_node_between_its_tasks(monkeypatch):
    slurm(monkeypatch, process=1, local=0, num_nodes=2)
    launch = find()
    assert (launch.place[0], launch.num_processes, launch.process_id) == ("n0", 2, 1)
    assert launch.local_device_ids is None  # JAX would take device 0 alone
    assert find(devices=3) == Launch(launch.coordinator_address, 2, 1, (3,))

    slurm(monkeypatch, process=1, local=1, num_nodes=1, nodes="n0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert find().local_device_ids == (4, 5, 6, 7)


def test_one_task_of_slurm_is_one_process(monkeypatch):
    slurm(monkeypatch, process=0, local=0, num_nodes=1, nodes="n0", tasks=1)
    assert find() is None
    monkeypatch.delenv("SLURM_STEP_NODELIST")  # the batch script of such a job
    assert find() is None


@pytest.mark.parametrize(
    ("local", "slurm", "visible", "expected"),
    [
        (0, (2, 2), None, None),
        (0, (1, 1), "0,1,2,3", None),
        (1, (2, 1), None, (1,)),
        (1, (2, 1), "0,1,2,3", (2, 3)),
        (3, (16, 2), "0,1,2,3,4,5,6,7", (3,)),
        (3, (4, 1), "3", None),  # the launcher has given each task its own
        (1, (2, 1), "0,1,2", (1,)),
        (1, (7, 4), "0,1,2,3", (2, 3)),  # not as many on each node
        (2, None, None, (2,)),
    ],
)
def test_share_of_devices(monkeypatch, local, slurm, visible, expected):
    if slurm is not None:
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", str(slurm[0]))
        monkeypatch.setenv("SLURM_STEP_NUM_NODES", str(slurm[1]))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert share_of_devices(local) == expected
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    assert share_of_devices(local) is None


def test_joining_twice(monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    raised(RuntimeError, rx.initialize_distributed, match="joined already")


# The barrier before JAX joins the processes: who is missing, or told wrongly, is named
# on all


def test_an_absent_coordinator_and_a_taken_port_are_named():
    address = f"127.0.0.1:{harness.free_port()}"
    with pytest.raises(
        TimeoutError, match=f"process 3 .* of 4 has no answer .* at {address}.*refused"
    ):
        rendezvous(Launch(address, 4, 3, None), 0.3)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            OSError, match=f"in use.*{port}.*another port for coordinator_address"
        ):
            rendezvous(Launch(f"127.0.0.1:{port}", 2, 0, None), 1.0)


def rendezvous_of(places, timeout_seconds) -> tuple[int, list[Any]]:
    """A port, and what it returns or raises for each of `(num_processes, process_id)`,
    all at once."""
    port = harness.free_port()
    launches = [
        Launch(f"127.0.0.1:{port}", number, process, None) for number, process in places
    ]
    with concurrent.futures.ThreadPoolExecutor(len(places)) as threads:
        futures = [
            threads.submit(rendezvous, launch, timeout_seconds) for launch in launches
        ]
    return port, [future.exception() or future.result() for future in futures]


def test_all_are_connected_by_name_and_leave_the_port_to_jax():
    port, outcomes = rendezvous_of([(3, 2), (3, 0), (3, 1)], 60.0)
    with socket.create_server(("", port)):  # as JAX's service does
        found = {
            process: connections
            for process, (_, connections) in zip((2, 0, 1), outcomes)
        }
        assert {process: sorted(x) for process, x in found.items()} == {
            0: [1, 2],
            1: [0],
            2: [0],
        }
        for names, _ in outcomes:
            short = [re.sub(r" \(host .*, pid \d+\)", "", name) for name in names]
            assert short == [f"process {i}" for i in range(3)]
        for process in (1, 2):
            for connection in (found[process][0], found[0][process]):
                with socket.socket(fileno=os.dup(connection.fileno())) as link:
                    assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    # Two hours without.
                    assert (
                        link.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60
                    )
            found[process][0].send_bytes(f"from {process}".encode())
            assert found[0][process].recv_bytes() == f"from {process}".encode()
            found[process][0].close()
            raised(EOFError, found[0][process].recv_bytes)


@pytest.mark.parametrize(
    ("places", "seconds", "kind", "message"),
    [
        (
            [(4, 0), (4, 2)],
            0.5,
            TimeoutError,
            r"in 0\.5 s 2 of 4 processes did not reach .* 1, 3\.",
        ),
        (
            [(3, 0), (2, 1)],
            60.0,
            ValueError,
            r"process 1 \(host .* has num_processes=2, not 3",
        ),
        ([(3, 0), (3, 1), (3, 1)], 60.0, ValueError, "process_id=1 was given twice"),
    ],
)
def test_who_does_not_fit_is_named_on_all(places, seconds, kind, message):
    for (_, process), error in zip(places, rendezvous_of(places, seconds)[1]):
        assert isinstance(error, RuntimeError if process else kind)
        assert re.search(message, str(error))


def framed(value):
    """A message as `multiprocessing.connection` sends it: its length, and the bytes."""
    text = json.dumps(value).encode()
    return struct.pack("!i", len(text)) + text


ANSWERS = [
    b"HTTP/1.1 400 Bad\r\n",
    b"\x00\x00\x12\x04",
    b"\x00\x00\x00\x02{!",
    framed({"error": "no"}),
    b"",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_another_service_at_the_address(answer):
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joined = thread.submit(rendezvous, Launch(address, 2, 1, None), 60.0)
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)
            # The client may have left already.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            raised(
                TimeoutError,
                joined.result,
                match=f"at {address}.* no other program uses it",
            )


def test_strangers_are_ignored_and_a_restarted_process_is_taken():
    port = harness.free_port()

    def connect(text):
        connection = connect_to(port)
        connection.sendall(text)
        return connection

    def member(process):
        return framed(
            Member(process, 3, f"name {process}", socket.gethostname(), "10.0.0.1")
        )

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        gathered = thread.submit(
            rendezvous, Launch(f"127.0.0.1:{port}", 3, 0, None), 60.0
        )
        for text in (b"", b"GET / HTTP/1.1\r\n", framed({"user": 1}), member(1)):
            connect(text).close()
        waiting = [connect(member(process)) for process in (1, 2)]
        names, _ = gathered.result()
        assert names[1:] == ["name 1", "name 2"]
        for connection in waiting:
            assert connection.recv(10_000) == framed({"names": names})
            connection.close()


def drip(connected, stop, text=b"\x00\x00\x0f\xff" + b"{" * 4000):
    """Send a byte now and then, until the other side has enough."""
    with contextlib.suppress(OSError):
        for i in range(len(text)):
            connected.sendall(text[i : i + 1])
            if stop.wait(0.2):
                return


@pytest.mark.parametrize("kind", ["drips", "is silent"])
def test_a_port_whose_program_never_completes_its_answer(kind):
    """The limit is for all of the answer: a byte that arrives gives no more time."""
    stop, begin = threading.Event(), time.monotonic()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joined = thread.submit(rendezvous, Launch(address, 2, 1, None), 1.0)
        connected, _ = server.accept()
        with connected:
            if kind == "drips":
                threading.Thread(
                    target=drip, args=(connected, stop), daemon=True
                ).start()
            raised(
                TimeoutError,
                lambda: joined.result(30),
                match=f"at {address}.* no other program uses it",
            )
            stop.set()
    # For process 0, which may be late, and for a slow machine.
    assert time.monotonic() - begin < 1 + 2 + 3


@pytest.mark.parametrize("is_complete", [True, False])
def test_strangers_at_the_port_of_process_0_keep_nobody_waiting(is_complete):
    """Some are silent, and some send a byte now and then."""
    port, stop, begin = harness.free_port(), threading.Event(), time.monotonic()
    with (
        concurrent.futures.ThreadPoolExecutor(1) as thread,
        contextlib.ExitStack() as stack,
    ):
        gathered = thread.submit(
            rendezvous, Launch(f"127.0.0.1:{port}", 2, 0, None), 4.0
        )
        for i in range(8):
            stranger = stack.enter_context(connect_to(port))
            if i % 2:
                threading.Thread(
                    target=drip, args=(stranger, stop), daemon=True
                ).start()
        if is_complete:
            member = Member(1, 2, "name 1", socket.gethostname(), "10.0.0.1")
            process = stack.enter_context(connect_to(port))
            process.sendall(framed(member)[:9])
            time.sleep(0.1)  # a slow network
            process.sendall(framed(member)[9:])
            names, _ = gathered.result(30)
            assert names[1] == "name 1"
            assert time.monotonic() - begin < 3
        else:
            raised(
                TimeoutError,
                lambda: gathered.result(30),
                match="1 of 2 processes did not reach",
            )
            assert time.monotonic() - begin < 4 + 3
        stop.set()


def connect_to(port):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            return socket.create_connection(("127.0.0.1", port))
        time.sleep(0.05)
    raise AssertionError("process 0 does not listen")


def test_names_of_hosts_that_others_cannot_reach():
    good = Member(0, 2, "process 0", "a", "10.0.0.1")
    bad = Member(1, 2, "process 1", "myhost", "127.0.1.1")
    with pytest.raises(
        RuntimeError, match=r"process 1: .* resolves to 127\.0\.1\.1.*/etc/hosts"
    ):
        check_addresses([good, bad])
    check_addresses([good, bad._replace(address="")])
    check_addresses([bad, bad._replace(process_id=0)])  # all on this host


# The launch files of Kubernetes and SkyPilot: short, and with what
# `initialize_distributed` needs.

LAUNCH = pathlib.Path(__file__).parents[2] / "examples" / "launch"
VARIABLES = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}


def read(name: str) -> Any:
    text = (LAUNCH / name).read_text()
    assert len(text.splitlines()) <= 30
    return yaml.safe_load(text)


def test_each_pod_of_the_jobset_is_one_process() -> None:
    found = read("jobset.yaml")
    assert (found["apiVersion"], found["kind"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
    )
    [job] = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    variables = {one["name"]: one for one in container["env"]}
    assert set(variables) == VARIABLES
    assert (
        spec["parallelism"]
        == spec["completions"]
        == int(variables["JAX_NUM_PROCESSES"]["value"])
    )
    # The DNS name of a pod: <set>-<job>-<replica>-<index>.<set>
    name = f"{found['metadata']['name']}-{job['name']}-0-0.{found['metadata']['name']}"
    assert variables["JAX_COORDINATOR_ADDRESS"]["value"].partition(":")[0] == name
    assert (LAUNCH.parents[1] / container["command"][1]).exists()


def test_the_variables_of_skypilot_are_those_of_initialize_distributed() -> None:
    found = read("skypilot.yaml")
    assert set(found) <= {
        "name",
        "num_nodes",
        "resources",
        "workdir",
        "setup",
        "run",
        "envs",
        "file_mounts",
    }
    assert all(variable in found["run"] for variable in VARIABLES)
    assert (LAUNCH.parents[1] / found["run"].split()[-1]).exists()
