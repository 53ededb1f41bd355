"""The barrier before JAX joins the processes: who is missing, or told wrongly, is named on all."""

import concurrent.futures
import contextlib
import json
import re
import socket
import struct
import time
from typing import Any

import pytest
from hosts import harness

from redco_eqx._distributed.cluster import Launch
from redco_eqx._distributed.initialize import Member, check_addresses, rendezvous


def test_an_absent_coordinator_and_a_taken_port_are_named():
    address = f"127.0.0.1:{harness.free_port()}"
    with pytest.raises(TimeoutError, match=f"process 3 .* of 4 has no answer .* at {address}.*refused"):
        rendezvous(Launch(address, 4, 3, None), 0.3)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(OSError, match=f"in use.*{port}.*another port for coordinator_address"):
            rendezvous(Launch(f"127.0.0.1:{port}", 2, 0, None), 1.0)


def rendezvous_of(places, timeout_seconds) -> tuple[int, list[Any]]:
    """A port, and what it returns or raises for each of `(num_processes, process_id)`, all at once."""
    address = f"127.0.0.1:{harness.free_port()}"

    def run(place):
        try:
            return rendezvous(Launch(address, place[0], place[1], None), timeout_seconds)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(places)) as threads:
        return int(address.partition(":")[2]), list(threads.map(run, places))


def test_all_are_connected_by_name_and_leave_the_port_to_jax():
    port, outcomes = rendezvous_of([(3, 2), (3, 0), (3, 1)], 60.0)
    with socket.create_server(("", port)):  # as JAX's service does
        found = {process: connections for process, (_, connections) in zip((2, 0, 1), outcomes)}
        assert {process: sorted(x) for process, x in found.items()} == {0: [1, 2], 1: [0], 2: [0]}
        for names, _ in outcomes:
            short = [re.sub(r" \(host .*, pid \d+\)", "", name) for name in names]
            assert short == [f"process {i}" for i in range(3)]
        for process in (1, 2):
            found[process][0].send_bytes(f"from {process}".encode())
            assert found[0][process].recv_bytes() == f"from {process}".encode()
            found[process][0].close()
            with pytest.raises(EOFError):
                found[0][process].recv_bytes()


@pytest.mark.parametrize(
    ("places", "seconds", "kind", "message"),
    [
        ([(4, 0), (4, 2)], 0.5, TimeoutError, r"in 0\.5 s 2 of 4 processes did not reach .* 1, 3\."),
        ([(3, 0), (2, 1)], 60.0, ValueError, r"process 1 \(host .* has num_processes=2, not 3"),
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


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"\x00\x00\x12\x04",
        b"\x00\x00\x00\x02{!",
        framed({"error": "bad request"}),
        b"",
    ],
)
def test_another_service_at_the_address(answer):
    with socket.create_server(("127.0.0.1", 0)) as server, concurrent.futures.ThreadPoolExecutor(1) as thread:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        joined = thread.submit(rendezvous, Launch(address, 2, 1, None), 60.0)
        connection, _ = server.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(answer)
            connection.shutdown(socket.SHUT_WR)
            with pytest.raises(TimeoutError, match=f"at {address}.* no other program uses it"):
                joined.result()


def test_strangers_are_ignored_and_a_restarted_process_is_taken():
    port = harness.free_port()

    def connect(text):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port))
                connection.sendall(text)
                return connection
        raise AssertionError("process 0 does not listen")

    def member(process):
        return framed(Member(process, 3, f"name {process}", socket.gethostname(), "10.0.0.1"))

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        gathered = thread.submit(rendezvous, Launch(f"127.0.0.1:{port}", 3, 0, None), 60.0)
        for text in (b"", b"GET / HTTP/1.1\r\n", framed({"user": 1}), member(1)):
            connect(text).close()
        waiting = [connect(member(process)) for process in (1, 2)]
        names, _ = gathered.result()
        assert names[1:] == ["name 1", "name 2"]
        for connection in waiting:
            assert connection.recv(10_000) == framed({"names": names})
            connection.close()


def test_names_of_hosts_that_others_cannot_reach():
    good, bad = Member(0, 2, "process 0", "a", "10.0.0.1"), Member(1, 2, "process 1", "myhost", "127.0.1.1")
    with pytest.raises(RuntimeError, match=r"process 1: .* resolves to 127\.0\.1\.1.*/etc/hosts"):
        check_addresses([good, bad])
    check_addresses([good, bad._replace(address="")])
    check_addresses([bad, bad._replace(process_id=0)])  # all on this host
