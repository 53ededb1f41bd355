"""A barrier before JAX joins the processes: one that is missing, or told wrongly, is named in Python.

JAX's own service would abort the interpreter of those that wait, after its time-out, with no name. So process 0
first listens on the coordinator's port itself, hears from each of the others, and then makes room. The
connections stay open: by them the processes end together.
"""

import dataclasses
import errno
import socket
import time

from redco_eqx._distributed.cluster import Launch
from redco_eqx._distributed.connection import Connection
from redco_eqx._distributed.log import log
from redco_eqx._distributed.members import Member, check_addresses, this_process

# After this time one line says who is waited for.
_QUIET_SECONDS = 10

_ERRORS = {kind.__name__: kind for kind in (TimeoutError, ValueError, RuntimeError)}


def rendezvous(
    launch: Launch, timeout_seconds: float, platform: str = ""
) -> tuple[list[str], dict[int, Connection]]:
    """Returns on each process when all are there.

    **Arguments:**

    - `launch`, `timeout_seconds`: how to join, and how long to wait.
    - `platform`: what JAX will run on; empty if that is not known.

    **Returns:**

    The names of all processes; and connections, on process 0 to each other one, on those to process 0.

    **Raises:** `TimeoutError` naming who did not come; `ValueError` if two processes were told the same, or
    different numbers of processes; `RuntimeError` as `check_addresses`; `OSError` on process 0 if its port is
    taken.
    """
    me = this_process(launch.process_id, launch.num_processes)
    if launch.process_id != 0:
        return _register(launch, me, timeout_seconds)
    members, connections = {0: me}, {}
    try:
        with _listen(launch) as server:
            _gather(launch, server, timeout_seconds, members, connections)
        ordered = [members[process] for process in range(launch.num_processes)]
        check_addresses(ordered, platform)
    except tuple(_ERRORS.values()) as error:
        for connection in connections.values():
            _refuse(connection, error)
        raise
    names = list(map(str, ordered))
    for connection in connections.values():
        connection.send({"names": names}, 5.0)
    return names, connections


def _gather(
    launch: Launch,
    server: socket.socket,
    timeout_seconds: float,
    members: dict[int, Member],
    connections: dict[int, Connection],
) -> None:
    """Adds all other processes to `members` and `connections`."""
    begin, is_logged = time.monotonic(), False
    while absent := sorted(set(range(launch.num_processes)) - set(members)):
        left = begin + timeout_seconds - time.monotonic()
        who = f"process{'es' if len(absent) > 1 else ''} {', '.join(map(str, absent[:20]))}"
        if len(absent) > 20:
            who += f" and {len(absent) - 20} more"
        if left <= 0:
            raise TimeoutError(
                f"initialize_distributed: {who} of {launch.num_processes} did not come to process 0 at "
                f"{launch.coordinator_address} within {timeout_seconds:g} s. Were they started, with this "
                "address, and can they reach it?"
            )
        if not is_logged and timeout_seconds - left > _QUIET_SECONDS:
            is_logged = True
            log(f"process 0 at {launch.coordinator_address} waits for {who}; at most {left:.0f} s more")
        server.settimeout(min(left, 1.0))
        try:
            connection = Connection(server.accept()[0])
        except TimeoutError:
            continue
        try:
            member = Member(**(connection.receive(5.0) or {}))
        except (OSError, ValueError, TypeError):  # somebody who looks which ports are open
            connection.close()
            continue
        process, problem = member.process_id, None
        if member.num_processes != launch.num_processes:
            problem = (
                f"{member} was given num_processes={member.num_processes}, but {members[0]} "
                f"{launch.num_processes}. All need the same"
            )
        elif process in members and (process == 0 or not connections[process].has_ended()):
            problem = f"process_id={process} was given twice, to {members[process]} and to {member}"
        if problem is not None:
            error = ValueError(f"initialize_distributed: {problem}.")
            _refuse(connection, error)
            raise error
        members[process], connections[process] = member, connection


def _refuse(connection: Connection, error: Exception) -> None:
    connection.send({"error": type(error).__name__, "text": str(error)}, 1.0)
    connection.close()


def _register(launch: Launch, me: Member, timeout_seconds: float) -> tuple[list[str], dict[int, Connection]]:
    connection = Connection(_connect(launch, timeout_seconds))
    connection.send(dataclasses.asdict(me), 5.0)
    try:
        # Process 0 may have begun to wait later, and knows better who is missing.
        answer = connection.receive(timeout_seconds + 5)
    except OSError:
        answer = None
    except ValueError:
        answer = {}
    if answer is not None and "names" in answer:
        return answer["names"], {0: connection}
    connection.close()
    if answer is None:
        raise TimeoutError(
            f"initialize_distributed: process {me.process_id} of {me.num_processes} has waited at "
            f"{launch.coordinator_address}, where process 0 has ended, or does not answer."
        )
    if answer.get("error") in _ERRORS:
        raise _ERRORS[answer["error"]](answer["text"])
    raise ValueError(
        f"initialize_distributed: what answers at {launch.coordinator_address} is not process 0 of this run, "
        "but perhaps another one. Choose another port."
    )


def _connect(launch: Launch, timeout_seconds: float) -> socket.socket:
    """A connection to process 0, as soon as it listens."""
    begin, pause = time.monotonic(), 0.05
    while True:
        left = begin + timeout_seconds - time.monotonic()
        try:
            return socket.create_connection((launch.host, launch.port), timeout=max(0.1, min(5, left)))
        except OSError as error:
            if left <= pause:
                raise TimeoutError(
                    f"initialize_distributed: process {launch.process_id} of {launch.num_processes} found "
                    f"nobody at {launch.coordinator_address}, where process 0 should be, for "
                    f"{timeout_seconds:g} s ({error}). Is process 0 running, is this its address as seen from "
                    f"{socket.gethostname()}, and is the port open?"
                ) from error
        time.sleep(pause)
        pause = min(1.0, 1.5 * pause)


def _listen(launch: Launch) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", launch.port), family=family, dualstack_ipv6=both, backlog=1024)
    except OSError as error:
        in_use = "it is in use, perhaps by a run that has not ended yet. Choose another"
        raise OSError(
            error.errno,
            f"initialize_distributed: process 0 cannot open port {launch.port} of coordinator_address="
            f"{launch.coordinator_address!r}: {in_use if error.errno == errno.EADDRINUSE else error.strerror}.",
        ) from error
