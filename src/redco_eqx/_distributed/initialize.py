"""Join the processes of a run on many hosts, or fail soon and with a reason.

JAX's service cannot refuse a process. If a process is missing, it aborts the
interpreters that wait for it, without naming it. A process that expects a different
number of processes aborts alone, while the others continue. So process 0 first listens
on the coordinator's port itself, receives a message from each of the others, and then
frees the port for JAX. The connections stay open, so that the processes can end
together.
"""

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import jax

from redco_eqx._distributed.cluster import Launch, find_launch
from redco_eqx._distributed.process_group import ProcessGroup

_ANSWER_SECONDS = 5
_LATE_SECONDS = 2  # for the answer of a process 0 that has waited as long as it may
# Bytes.
_MAX_INTRODUCTION = 1 << 12
_MAX_NAMES = 1 << 24
_HEADER = struct.Struct("!i")


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
    """Join the processes of a run. Each process calls this before it uses JAX in any
    other way.

    You do not need to change anything else in a script. Under SLURM (`srun`), Open MPI
    and Kubernetes, and on TPU pods, you need no arguments, because JAX detects the
    values. Elsewhere, pass arguments to each process, or set the environment variables
    `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`. Arguments take
    precedence over these variables, and the variables over detected values. With one
    process, or without any sign of more, this function does nothing.

    ```python
    rx.initialize_distributed()      # on one machine it does nothing
    mesh = rx.make_mesh(fsdp=8)      # of the devices of all processes
    ```

    **Main arguments:**

    - `coordinator_address`: `"host:port"` of process 0, which opens that port.
    - `num_processes`: the number of processes.
    - `process_id`: the number of this process, from 0.

    **Other arguments:**

    - `local_device_ids`: the numbers of the host's devices that this process uses; also
        `JAX_LOCAL_DEVICE_IDS`. By default, a process uses all devices. If the launcher
        starts several tasks on a node, each task uses some of them.
    - `timeout_seconds`: the time to wait for the other processes to join.
    - `heartbeat_timeout_seconds`: the time after which a process counts as lost if it
        is frozen or its host is gone. JAX then ends the others, and names the process
        by its number, unless it is process 0.
    - `shutdown_timeout_seconds`: the time that a finished process waits for the others
        to finish.
    - `leave_seconds`: after an uncaught exception in any process, or the loss of one,
        all processes end within this time and three seconds.

    Each process then names the failed process on standard error, and flushes its files.
    Functions that you registered with `atexit` before this call are not called. A
    process that ends without an exception (`sys.exit`) counts as finished, not as
    failed. But if another process still waits for it in a call of the library, all end.

    A process that waits for another one for 10 s in a call of the library says so on
    standard error, with the place of both. If the two can never meet, because the other
    one has ended or waits for this one in another call, all processes end within 30 s.
    A process that is only late ends nobody.

    **Raises:**

    - `ValueError`: the arguments do not fit together, or (on process 0) those of two
        processes do not.
    - `RuntimeError`: called twice, or after JAX was used; a SLURM batch script without
        `srun`; a host whose name resolves to a loopback address there, so that the
        others could not reach it; an error on process 0, with its message.
    - `TimeoutError`: process 0 does not answer, or (on process 0) other processes,
        which it names, did not join.
    - `OSError`: the port is in use (on process 0).
    """
    if jax.distributed.is_initialized():
        raise RuntimeError(
            "initialize_distributed: the processes have joined already. Call it once."
        )
    launch = find_launch(
        coordinator_address,
        num_processes,
        process_id,
        local_device_ids,
        timeout_seconds,
    )
    if launch is None:
        return
    names, connections = rendezvous(launch, timeout_seconds)
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
    ProcessGroup(launch.process_id, names, connections, leave_seconds).start()


def rendezvous(
    launch: Launch, timeout_seconds: float
) -> tuple[list[str], dict[int, Connection]]:
    """Wait until all processes have joined.

    **Returns:**

    The names of all processes, and connections: process 0 has one to each other
    process, and each other process has one to process 0.

    **Raises:** on process 0 `TimeoutError` naming the processes that did not join;
    `ValueError` if two processes have the same number, or different numbers of
    processes; `RuntimeError` as `check_addresses`; `OSError` if the port is in use. On
    the others `RuntimeError` with the same message, or `TimeoutError` if process 0 does
    not answer.
    """
    host = socket.gethostname()
    address = ""
    with contextlib.suppress(OSError):  # the host has no address
        address = socket.gethostbyname(host)
    name = f"process {launch.process_id} (host {host}, pid {os.getpid()})"
    me = Member(launch.process_id, launch.num_processes, name, host, address)
    if launch.process_id != 0:
        return _register(launch, me, timeout_seconds)
    members = {0: me}
    connections = {}
    answer: dict[str, Any] = {}
    try:
        _gather(launch, timeout_seconds, members, connections)
        if jax.config.jax_platforms == "cpu":  # pyright: ignore[reportAttributeAccessIssue]
            check_addresses(list(members.values()))
        answer = {
            "names": [members[process].name for process in range(launch.num_processes)]
        }
    except Exception as error:
        answer = {"problem": str(error)}
        raise
    finally:
        for connection in connections.values():
            with contextlib.suppress(OSError):
                # That process is gone, which the kernel will report.
                connection.send_bytes(json.dumps(answer).encode())
    return answer["names"], connections


class Member(NamedTuple):
    """A process of a run, as it introduces itself to process 0. `address` is the
    address to which the host name resolves on that host."""

    process_id: int
    num_processes: int
    name: str
    host: str
    address: str


def check_addresses(members: Sequence[Member]) -> None:
    """Raise `RuntimeError` if there are several hosts, and the name of one resolves to
    a loopback address there.

    On CPU, each process tells the others to connect to the address to which its host
    name resolves. With a line such as `127.0.1.1 myhost`, which Debian writes, the
    others would wait for themselves.
    """
    hosts = {member.host for member in members}
    for member in members:
        if member.address.startswith("127.") and hosts != {member.host}:
            raise RuntimeError(
                f"initialize_distributed: {member.name}: the name of this host "
                f"resolves to {member.address}, where other hosts cannot reach it, so "
                "on CPU they would wait forever. In /etc/hosts, give the name the "
                "address of this host in the network (Debian writes `127.0.1.1 "
                f"{member.host}` there)."
            )


def _gather(
    launch: Launch,
    timeout_seconds: float,
    members: dict[int, Member],
    connections: dict[int, Connection],
) -> None:
    """Add all other processes to `members` and `connections`. Add a process that does
    not fit only to `connections`."""
    both = socket.has_dualstack_ipv6()
    port = launch.place[1]
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        server = socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=1024
        )
    except OSError as error:
        problem = (
            f"{error.strerror}. Use another port for coordinator_address, or end the "
            "run that uses it."
        )
        raise OSError(error.errno, f"initialize_distributed: {problem}") from error
    end = time.monotonic() + timeout_seconds
    introductions: dict[socket.socket, _Message] = {}
    with server, contextlib.ExitStack() as strangers:
        while absent := [
            str(process)
            for process in range(launch.num_processes)
            if process not in members
        ]:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"initialize_distributed: in {timeout_seconds:g} s {len(absent)} "
                    f"of {launch.num_processes} processes did not reach process 0, "
                    f"among them {', '.join(absent[:20])}. Check that they start with "
                    f"coordinator_address={launch.coordinator_address!r}, and can "
                    "reach it."
                )
            # Read from all at once: a stranger that is silent or slow must not keep a
            # process waiting.
            for ready in wait(
                [server, *introductions], max(0.0, end - time.monotonic())
            ):
                if ready is server:
                    with contextlib.suppress(OSError):  # it has gone already
                        connected = strangers.enter_context(server.accept()[0])
                        connected.settimeout(_ANSWER_SECONDS)
                        introductions[connected] = _Message(
                            connected, _MAX_INTRODUCTION
                        )
                    continue
                connected: Any = ready
                try:
                    text = introductions[connected].receive()
                    member = None if text is None else Member(*json.loads(text))
                except (OSError, EOFError, ValueError, TypeError):
                    # No process, or a scan for open ports.
                    introductions.pop(connected)
                    connected.close()
                    continue
                if member is not None:
                    introductions.pop(connected)
                    _admit(launch, member, _connection(connected), members, connections)


def _admit(
    launch: Launch,
    member: Member,
    connection: Connection,
    members: dict[int, Member],
    connections: dict[int, Connection],
) -> None:
    """Add one process as `_gather` does. Raises `ValueError` if it does not fit to the
    others."""
    process = member.process_id
    if member.num_processes != launch.num_processes:
        problem = (
            f"{member.name} has num_processes={member.num_processes}, not "
            f"{launch.num_processes}"
        )
    elif process in members and (process == 0 or not connections[process].poll()):
        # Its connection shows that the other one has not ended.
        problem = (
            f"process_id={process} was given twice, to {members[process].name} and "
            f"{member.name}"
        )
    else:
        members[process], connections[process] = member, connection
        return
    connections[-1] = connection
    raise ValueError(f"initialize_distributed: {problem}.")


def _register(
    launch: Launch, me: Member, timeout_seconds: float
) -> tuple[list[str], dict[int, Connection]]:
    try:
        connected = _connect(launch.place, timeout_seconds)
        # Process 0 may have begun to wait later, and knows which processes are missing.
        end = time.monotonic() + timeout_seconds + _LATE_SECONDS
        try:
            connected.settimeout(_ANSWER_SECONDS)  # for all of the message
            connected.sendall(_framed(me))
            answer = json.loads(_Message(connected, _MAX_NAMES).receive_until(end))
            if "names" in answer:
                return answer["names"], {0: _connection(connected)}
        finally:
            # Does nothing to a connection, which has taken over the descriptor.
            connected.close()
        problem = answer["problem"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TimeoutError(
            f"initialize_distributed: {me.name} of {me.num_processes} has no answer "
            f"from process 0 at {launch.coordinator_address} ({error!r}). Check that "
            "process 0 has not ended, that this is its address as seen from here, that "
            "the port is open, and that no other program uses it."
        ) from error
    raise RuntimeError(f"on process 0: {problem}")


def _connect(place: tuple[str, int], timeout_seconds: float) -> socket.socket:
    """Connect to process 0 as soon as it listens."""
    end = time.monotonic() + timeout_seconds
    while True:
        left = max(0.1, end - time.monotonic())
        try:
            return socket.create_connection(place, timeout=min(_ANSWER_SECONDS, left))
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(min(0.25, left))


class _Message:
    """A message that arrives in pieces, in the format of `multiprocessing.connection`:
    its length in four bytes, and its text.

    `Connection.recv_bytes` has no limit of time: each byte that arrives restarts the
    limit of the socket.
    """

    def __init__(self, connected: socket.socket, max_bytes: int):
        self._connected = connected
        self._max_bytes = max_bytes
        self._received = bytearray()

    def receive(self) -> bytes | None:
        """Take bytes that have arrived. Return the text when it is complete, and `None`
        before.

        Raises `ValueError` for another format, and `EOFError` if the other side has
        closed the connection.
        """
        lacking = _HEADER.size - len(self._received)
        if lacking <= 0:
            lacking = self._length + _HEADER.size - len(self._received)
        piece = self._connected.recv(lacking)
        if not piece:
            raise EOFError("the connection was closed")
        self._received += piece
        if len(self._received) < _HEADER.size:
            return None
        if len(self._received) < self._length + _HEADER.size:
            return None
        return bytes(self._received[_HEADER.size :])

    def receive_until(self, end: float) -> bytes:
        """Wait for the text. Raises as `receive` does, and `TimeoutError` if it is not
        complete at `end`."""
        while (left := end - time.monotonic()) > 0:
            self._connected.settimeout(left)
            text = self.receive()
            if text is not None:
                return text
        raise TimeoutError("its message was not complete in time")

    @property
    def _length(self) -> int:
        (length,) = _HEADER.unpack_from(self._received)
        if not 0 < length <= self._max_bytes:
            raise ValueError(f"a message of {length} bytes")
        return length


def _framed(message: object) -> bytes:
    text = json.dumps(message).encode()
    return _HEADER.pack(len(text)) + text


def _connection(connected: socket.socket) -> Connection:
    """Turn a socket into a connection that raises `OSError` if the other side is stuck
    for a few seconds."""
    connected.settimeout(None)
    # The kernel keeps these limits. Those of `settimeout` belong to the object of
    # Python, which a connection does not have. The format is that of a `timeval`.
    limit = struct.pack("ll", _ANSWER_SECONDS, 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, limit)
    # Some firewalls drop idle connections.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # not on macOS
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    return Connection(connected.detach())
