"""Noticing at once that a process is gone: an open connection between process 0 and each other one.

The kernel closes it when the process ends in whatever way, and its probes fail when the host vanishes.
Process 0 also asks now and then for an answer. A process that gives none is only spoken of, because
Python's threads wait while an extension computes: whether it is frozen, JAX's heartbeats decide.
"""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable

from redco_eqx._distributed import store

_KEY = "presence"
_DONE = b"."
_DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)  # where a peer is frozen, buffers fill up


def watch_processes(
    on_lost: Callable[[int, str], None],
    on_silent: Callable[[int, float], None],
    *,
    probe_seconds: float,
) -> Callable[[], None]:
    """On process 0, from a thread: calls `on_lost(process, how)` when the connection to one ends.

    And `on_silent(process, seconds)`, once, when one has not answered for `probe_seconds`. Returns a function
    by which this process says that it is done: the end of its connections is then no loss to the others.
    """
    server = _listen()
    token = secrets.token_hex(8)
    store.put(_KEY, f"{server.getsockname()[1]} {token}")
    names: dict[socket.socket, int] = {}
    finished: set[socket.socket] = set()

    def run() -> None:
        ready = selectors.DefaultSelector()
        ready.register(server, selectors.EVENT_READ)
        answered: dict[socket.socket, float] = {}
        asked = time.monotonic()
        while True:
            for key, _ in ready.select(probe_seconds / 4):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    _probe(connection, probe_seconds)
                    ready.register(connection, selectors.EVENT_READ)
                    continue
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                data, how = _receive(connection)
                words = data.decode(errors="replace").split()
                if connection not in names and len(words) == 2 and words[0] == token and words[1].isdigit():
                    names[connection] = int(words[1])
                elif not data or connection not in names:  # gone, or a stranger
                    ready.unregister(connection)
                    connection.close()
                    answered.pop(connection, None)
                    if connection in names:
                        process = names.pop(connection)
                        if connection not in finished:
                            on_lost(process, how)
                    continue
                if _DONE in data:
                    finished.add(connection)
                answered[connection] = time.monotonic()
            now = time.monotonic()
            if now - asked < probe_seconds / 4:
                continue
            asked = now
            for connection, since in list(answered.items()):
                with contextlib.suppress(OSError):  # its end is about to be read
                    connection.send(b"?", _DONT_WAIT)
                if now - since > probe_seconds:
                    del answered[connection]  # until it answers again
                    on_silent(names[connection], now - since)

    threading.Thread(target=run, name="redco_eqx.presence", daemon=True).start()
    return lambda: _say_done(list(names))


def watch_coordinator(
    host: str,
    process: int,
    on_lost: Callable[[int, str], None],
    on_silent: Callable[[int, float], None],
    *,
    probe_seconds: float,
    timeout_seconds: float,
) -> Callable[[], None]:
    """On another process, from a thread: calls `on_lost(0, how)` when the connection to process 0 ends.

    And `on_silent(0, seconds)` each time that it has not asked anything for `probe_seconds`. Returns a function
    by which this process says that it is done.

    Raises `OSError` or `jax.errors.JaxRuntimeError` if there is no connection within `timeout_seconds`.
    """
    port, token = store.wait(_KEY, timeout_seconds).split()
    connection = socket.create_connection((host, int(port)), timeout=timeout_seconds)
    _probe(connection, probe_seconds)
    connection.sendall(f"{token} {process}\n".encode())
    connection.settimeout(probe_seconds)

    def run() -> None:
        is_finished = False
        while True:
            try:
                data, how = _receive(connection)
            except TimeoutError:
                on_silent(0, probe_seconds)
                continue
            if not data:
                if not is_finished:
                    on_lost(0, how)
                return
            is_finished = is_finished or _DONE in data
            with contextlib.suppress(OSError):
                connection.send(b"!", _DONT_WAIT)

    threading.Thread(target=run, name="redco_eqx.presence", daemon=True).start()
    return lambda: _say_done([connection])


def _say_done(connections: list[socket.socket]) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(_DONE, _DONT_WAIT)


def _listen() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", 0), backlog=1024)


def _receive(connection: socket.socket) -> tuple[bytes, str]:
    """What was sent, or nothing and how the connection ended."""
    try:
        return connection.recv(256), "its connection was closed"
    except TimeoutError as error:
        if error.errno is None:  # our own, not the kernel's ETIMEDOUT
            raise
        return b"", "its host does not answer"
    except OSError as error:
        return b"", f"its connection ended: {error.strerror or error}"


def _probe(connection: socket.socket, seconds: float) -> None:
    """Has the kernel find out in about `seconds` that the other host does not answer any more."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    quarter = max(1, round(seconds / 4))
    for option, value in (("TCP_KEEPIDLE", quarter), ("TCP_KEEPINTVL", quarter), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # the same for what was sent and not acknowledged
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
