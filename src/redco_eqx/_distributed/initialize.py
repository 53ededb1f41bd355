"""Joining the processes of a run on many hosts, or failing soon and with a reason.

JAX's service cannot refuse: where a process is missing it aborts the interpreter of those that wait, with no
name, and one that was told another number of processes aborts alone, while the others go on. So process 0 first
listens on the coordinator's port itself, hears from each of the others, and then makes room for JAX. The
connections stay open: by them the processes end together.
"""

import contextlib
import errno
import ipaddress
import json
import os
import socket
import struct
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple

import jax

from redco_eqx._distributed.cluster import Launch, find_launch, has_devices
from redco_eqx._distributed.process_group import ProcessGroup, log

_ANSWER_SECONDS = 5
_QUIET_SECONDS = 10  # after this time one line says who is waited for
_ERRORS = {kind.__name__: kind for kind in (TimeoutError, ValueError, RuntimeError)}


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    timeout_seconds: int = 120,
    heartbeat_timeout_seconds: int = 30,
    shutdown_timeout_seconds: int = 300,
    leave_seconds: float = 5.0,
) -> None:
    """Joins the processes of a run, each of which calls this before it uses JAX otherwise.

    Nothing else in a script changes. Under SLURM (`srun`), Open MPI, Kubernetes and on TPU pods no
    argument is needed: JAX finds them. Elsewhere each process is told by arguments or by the environment
    variables `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES`, `JAX_PROCESS_ID`, which come after arguments
    and before what is found. With one process, or where nothing says that there are more, it does nothing.

    ```python
    rx.initialize_distributed()      # on one machine it does nothing
    mesh = rx.make_mesh(fsdp=8)      # of the devices of all processes
    ```

    **Main arguments:**

    - `coordinator_address`: `"host:port"` of process 0, which opens that port.
    - `num_processes`: how many there are.
    - `process_id`: which one this is, from 0.

    **Other arguments:**

    - `local_device_ids`: the numbers of the host's devices that this process uses; also
        `JAX_LOCAL_DEVICE_IDS`. By default all, and where the launcher starts several tasks on a node, each
        its part.
    - `timeout_seconds`: how long to wait for the others to come.
    - `heartbeat_timeout_seconds`: after how long a process that is frozen, or whose host is gone, counts
        as lost.
    - `shutdown_timeout_seconds`: how long a process that is done waits for the others to be done.
    - `leave_seconds`: after an uncaught exception in any process, or the loss of one, all have ended
        after this time and three seconds.

    The process that fails is named on the standard error of each. Files are flushed; functions that were
    registered with `atexit` before this call are not called then. What ends without an exception
    (`sys.exit`) counts as done, not as failed.

    **Raises:**

    - `ValueError`, `TypeError`: the arguments do not fit together, or those of two processes do not.
    - `RuntimeError`: called twice, or after JAX was used; a SLURM batch script without `srun`; a host that
        takes its own name for a loopback address, so that the others could not reach it.
    - `TimeoutError`: process 0 does not answer, or others did not come to it; it says which.
    - `OSError`: on process 0, the port is taken.
    """
    for name, value in (
        ("timeout_seconds", timeout_seconds),
        ("heartbeat_timeout_seconds", heartbeat_timeout_seconds),
        ("shutdown_timeout_seconds", shutdown_timeout_seconds),
        ("leave_seconds", leave_seconds),
    ):
        if value <= 0:
            raise ValueError(f"initialize_distributed: {name}={value}, but it must be positive.")
    if jax.distributed.is_initialized():
        raise RuntimeError("initialize_distributed: the processes have joined already. Call it once.")
    launch = find_launch(coordinator_address, num_processes, process_id, local_device_ids, timeout_seconds)
    if launch is None:
        return
    if has_devices():
        raise RuntimeError(
            "initialize_distributed: JAX has been used already (an array, jax.devices(), ...), and its "
            f"devices are those of one process, not of {launch.num_processes}. Call it first of all."
        )
    # The platform that was asked for; empty where the choice is JAX's.
    platform = (jax.config.jax_platforms or "").split(",")[0]  # pyright: ignore[reportAttributeAccessIssue]
    names, connections = rendezvous(launch, timeout_seconds, platform)
    jax.distributed.initialize(
        launch.coordinator_address,
        launch.num_processes,
        launch.process_id,
        local_device_ids=launch.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_seconds,
        heartbeat_timeout_seconds=heartbeat_timeout_seconds,
        shutdown_timeout_seconds=shutdown_timeout_seconds,
    )
    # A process is named before JAX aborts for the same reason, with a message that names no host.
    group = ProcessGroup(
        launch.process_id,
        names,
        connections,
        leave_seconds=leave_seconds,
        silent_seconds=0.5 * heartbeat_timeout_seconds,
    )
    group.start()


class Member(NamedTuple):
    """A process of a run, as it introduces itself to process 0.

    - `process_id`, `num_processes`: told by its launcher.
    - `host`, `pid`: the name of its host, and its number there.
    - `address`: what this name resolves to on the host itself; empty if it does not.
    """

    process_id: int
    num_processes: int
    host: str
    pid: int
    address: str

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


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
    host = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        address = ""
    me = Member(launch.process_id, launch.num_processes, host, os.getpid(), address)
    if launch.process_id != 0:
        return _register(launch, me, timeout_seconds)
    members, connections, answer = {0: me}, {}, {}
    try:
        with _listen(launch) as server:
            _gather(launch, server, timeout_seconds, members, connections)
        check_addresses(list(members.values()), platform)
        names = [str(members[process]) for process in range(launch.num_processes)]
        answer = {"names": names}
    except tuple(_ERRORS.values()) as error:
        answer = {"error": type(error).__name__, "text": str(error)}
        raise
    finally:
        for connection in connections.values():
            with contextlib.suppress(OSError):  # it is gone, and the kernel will say so
                connection.send_bytes(json.dumps(answer).encode())
    return names, connections


def check_addresses(members: Sequence[Member], platform: str) -> None:
    """Refuses a hosts file that gives a host's name a loopback address, where there are other hosts.

    On CPU each process tells the others to connect to what its own host name resolves to; a line such as
    `127.0.1.1 myhost`, which Debian writes, has them wait for themselves. Raises `RuntimeError` if `platform`
    is `"cpu"`; warns if it is empty, because asking JAX would use its devices.
    """
    if platform not in ("", "cpu") or len({member.host for member in members}) == 1:
        return
    for member in members:
        if member.address and not ipaddress.ip_address(member.address).is_loopback:
            continue
        found = f"resolves to {member.address}, which other hosts cannot reach"
        message = (
            f"initialize_distributed: {member}: the name of this host, {member.host!r}, "
            f"{found if member.address else 'does not resolve'}. On CPU the processes would wait for each "
            f"other in vain. Give {member.host} its address in the network in /etc/hosts (Debian writes "
            f"`127.0.1.1 {member.host}` there)."
        )
        if platform == "cpu":
            raise RuntimeError(message)
        warnings.warn(f"{message} On GPU and TPU this does not matter.", stacklevel=2)


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


def _gather(
    launch: Launch,
    server: socket.socket,
    timeout_seconds: float,
    members: dict[int, Member],
    connections: dict[int, Connection],
) -> None:
    """Adds all other processes to `members` and `connections`, one that does not fit to the latter alone."""
    end, is_logged = time.monotonic() + timeout_seconds, False
    while absent := [str(process) for process in range(launch.num_processes) if process not in members]:
        left = end - time.monotonic()
        more = f" and {len(absent) - 20} more" if len(absent) > 20 else ""
        who = f"process{'es' if len(absent) > 1 else ''} {', '.join(absent[:20])}{more}"
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
            connection = _connection(server.accept()[0])
            member = Member(*json.loads(connection.recv_bytes(1 << 12)))
        except (OSError, EOFError, ValueError, TypeError):  # nobody yet, or one that looks which ports are open
            continue
        process, problem = member.process_id, None
        if member.num_processes != launch.num_processes:
            problem = (
                f"{member} was given num_processes={member.num_processes}, but {members[0]} "
                f"{launch.num_processes}. All need the same"
            )
        elif process in members and (process == 0 or not connections[process].poll()):  # it has not ended
            problem = f"process_id={process} was given twice, to {members[process]} and to {member}"
        if problem is not None:
            connections[-1] = connection
            raise ValueError(f"initialize_distributed: {problem}.")
        members[process], connections[process] = member, connection


def _register(launch: Launch, me: Member, timeout_seconds: float) -> tuple[list[str], dict[int, Connection]]:
    connection, answer = _connect(launch, timeout_seconds), {}
    # Where there is no answer, process 0 has ended, or what sends something else is another program.
    with contextlib.suppress(OSError, EOFError, ValueError):
        connection.send_bytes(json.dumps(me).encode())
        # Process 0 may have begun to wait later, and knows better who is missing.
        if connection.poll(timeout_seconds + _ANSWER_SECONDS):
            answer = json.loads(connection.recv_bytes())
    if "names" in answer:
        return answer["names"], {0: connection}
    connection.close()
    if answer.get("error") in _ERRORS:
        raise _ERRORS[answer["error"]](answer["text"])
    raise TimeoutError(
        f"initialize_distributed: process {me.process_id} of {me.num_processes} has waited at "
        f"{launch.coordinator_address}, where process 0 has ended, or does not answer, or what answers is not "
        "process 0 of this run, but perhaps another one: then choose another port."
    )


def _connect(launch: Launch, timeout_seconds: float) -> Connection:
    """A connection to process 0, as soon as it listens."""
    end = time.monotonic() + timeout_seconds
    while True:
        left = end - time.monotonic()
        try:
            place = launch.host, launch.port
            return _connection(socket.create_connection(place, timeout=max(0.1, min(5, left))))
        except OSError as error:
            if left <= 0:
                raise TimeoutError(
                    f"initialize_distributed: process {launch.process_id} of {launch.num_processes} found "
                    f"nobody at {launch.coordinator_address}, where process 0 should be, for "
                    f"{timeout_seconds:g} s ({error}). Is process 0 running, is this its address as seen from "
                    f"{socket.gethostname()}, and is the port open?"
                ) from error
        time.sleep(max(0.0, min(0.25, left)))


def _connection(connected: socket.socket) -> Connection:
    """Messages over a socket, which raise `OSError` where the other side is stuck for a few seconds."""
    connected.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _ANSWER_SECONDS, 0))
    return Connection(connected.detach())
