"""All processes meet before JAX joins them: one that is missing, or told wrongly, is named in Python.

JAX's own service would abort the interpreter of those that wait, after its time-out, with no name. So process
0 first listens on the coordinator's port itself, hears from each of the others, and then makes room.
"""

import contextlib
import errno
import json
import socket
import time
from typing import Any

from redco_eqx._distributed.cluster import Launch
from redco_eqx._distributed.failure import say

# After this time one line says who is waited for.
_QUIET_SECONDS = 10


def meet(launch: Launch, timeout_seconds: float) -> None:
    """Returns on each process when all are there.

    **Raises:** `TimeoutError` naming who did not come; `ValueError` if two processes were told the same, or
    different numbers of processes; `OSError` on process 0 if its port is taken.
    """
    if launch.process_id == 0:
        _gather(launch, timeout_seconds)
    else:
        _report(launch, timeout_seconds)


def _gather(launch: Launch, timeout_seconds: float) -> None:
    server = _open(launch)
    end, told = time.monotonic() + timeout_seconds, False
    arrived: dict[int, tuple[socket.socket, str]] = {}
    problem: Exception | None = None
    with server:
        while len(arrived) < launch.num_processes - 1 and problem is None:
            absent = sorted(set(range(1, launch.num_processes)) - set(arrived))
            names = _numbers(absent)
            left = end - time.monotonic()
            if left <= 0:
                problem = TimeoutError(
                    f"initialize_distributed: {names} of {launch.num_processes} did not come to process 0 at "
                    f"{launch.coordinator_address} within {timeout_seconds:g} s. Were they started, with this "
                    "address, and can they reach it?"
                )
                break
            if not told and left < timeout_seconds - _QUIET_SECONDS:
                told = True
                say(f"process 0 at {launch.coordinator_address} waits for {names}; at most {left:.0f} s more")
            server.settimeout(min(left, 1.0))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            problem = _take_in(launch, connection, arrived)
    answer = {"go": True} if problem is None else {"error": type(problem).__name__, "text": str(problem)}
    for connection, _ in arrived.values():
        _send(connection, answer)
        connection.close()
    if problem is not None:
        raise problem


def _take_in(
    launch: Launch, connection: socket.socket, arrived: dict[int, tuple[socket.socket, str]]
) -> Exception | None:
    """Adds a process to those that are there; what is wrong with it, if anything is."""
    connection.settimeout(5)
    hello = _receive(connection)
    if not isinstance(hello, dict) or not {"process_id", "num_processes", "host"} <= set(hello):
        connection.close()  # somebody who looks which ports are open
        return None
    process, host = int(hello["process_id"]), str(hello["host"])
    problem = None
    if hello["num_processes"] != launch.num_processes:
        problem = (
            f"process {process} on {host} was given num_processes={hello['num_processes']}, but process 0 on "
            f"{socket.gethostname()} {launch.num_processes}. All need the same."
        )
    elif process in arrived and not _is_gone(arrived[process][0]):
        problem = f"process_id={process} was given twice, on {arrived[process][1]} and on {host}."
    elif process == 0:
        problem = f"process_id=0 was given twice, on {socket.gethostname()} and on {host}."
    if problem is not None:
        error = ValueError(f"initialize_distributed: {problem}")
        _send(connection, {"error": "ValueError", "text": str(error)})
        connection.close()
        return error
    arrived[process] = (connection, host)
    return None


def _report(launch: Launch, timeout_seconds: float) -> None:
    end = time.monotonic() + timeout_seconds
    with _connect(launch, end, timeout_seconds) as connection:
        hello = {
            "process_id": launch.process_id,
            "num_processes": launch.num_processes,
            "host": socket.gethostname(),
        }
        _send(connection, hello)
        # Process 0 may have begun to wait later, and knows better who is missing.
        connection.settimeout(timeout_seconds + 5)
        answer = _receive(connection)
    if answer is None:
        raise TimeoutError(
            f"initialize_distributed: process {launch.process_id} of {launch.num_processes} has waited at "
            f"{launch.coordinator_address}, where process 0 has ended, or does not answer."
        )
    if not isinstance(answer, dict) or not {"go", "error"} & set(answer):
        raise ValueError(
            f"initialize_distributed: what answers at {launch.coordinator_address} is not process 0 of this "
            "run, but perhaps another one. Choose another port."
        )
    if "error" in answer:
        kind = TimeoutError if answer["error"] == "TimeoutError" else ValueError
        raise kind(answer["text"])
    _connect(launch, time.monotonic() + timeout_seconds, timeout_seconds).close()  # now JAX's service is there


def _open(launch: Launch) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", launch.port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        reason = (
            "it is in use, perhaps by a run that has not ended yet. Choose another"
            if error.errno == errno.EADDRINUSE
            else error.strerror
        )
        raise OSError(
            error.errno,
            f"initialize_distributed: process 0 cannot open port {launch.port} of coordinator_address="
            f"{launch.coordinator_address!r}: {reason}.",
        ) from error


def _connect(launch: Launch, end: float, timeout_seconds: float) -> socket.socket:
    """A connection to process 0, as soon as somebody listens there."""
    began = time.monotonic()
    pause, told = 0.05, False
    while True:
        try:
            left = end - time.monotonic()
            return socket.create_connection((launch.host, launch.port), timeout=max(0.1, min(5, left)))
        except OSError as error:
            if time.monotonic() + pause > end:
                raise TimeoutError(
                    f"initialize_distributed: process {launch.process_id} of {launch.num_processes} found "
                    f"nobody at {launch.coordinator_address}, where process 0 should be, for "
                    f"{timeout_seconds:g} s ({error}). Is process 0 running, is this its address as seen from "
                    f"{socket.gethostname()}, and is the port open?"
                ) from error
            if not told and time.monotonic() > began + _QUIET_SECONDS:
                told = True
                say(
                    f"process {launch.process_id} waits for process 0 at {launch.coordinator_address} "
                    f"({error}); at most {timeout_seconds:g} s"
                )
            time.sleep(pause)
            pause = min(1.0, 1.5 * pause)


def _send(connection: socket.socket, value: Any) -> None:
    with contextlib.suppress(OSError):  # gone; who waits for it will say so
        connection.sendall(json.dumps(value).encode() + b"\n")


def _receive(connection: socket.socket) -> Any:
    """One line of JSON; `None` if nothing comes, and an empty string for anything else."""
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < 65536:
            more = connection.recv(4096)
            if not more:
                break
            data += more
            if not data.startswith(b"{"):
                break
    except OSError:
        pass
    if not data:
        return None
    try:
        return json.loads(data)
    except ValueError:
        return ""


def _is_gone(connection: socket.socket) -> bool:
    """Whether a process that waits has ended, so that another one may take its place."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(5)


def _numbers(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:20]))
    more = f" and {len(processes) - 20} more" if len(processes) > 20 else ""
    return f"process{'es' if len(processes) > 1 else ''} {shown}{more}"
