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

from redco_eqx import _store

_KEY = "presence"
_DONT_WAIT = getattr(socket, "MSG_DONTWAIT", 0)  # where a peer is frozen, buffers fill up


def watch_processes(
    on_lost: Callable[[int, str], None],
    on_silent: Callable[[int, float], None],
    *,
    probe_seconds: float,
) -> None:
    """On process 0, from a thread: calls `on_lost(process, how)` when the connection to one ends.

    And `on_silent(process, seconds)`, once, when one has not answered for `probe_seconds`.
    """
    server = _listen()
    token = secrets.token_hex(8)
    _store.put(_KEY, f"{server.getsockname()[1]} {token}")

    def run() -> None:
        ready = selectors.DefaultSelector()
        ready.register(server, selectors.EVENT_READ)
        names: dict[socket.socket, int] = {}
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
                        on_lost(names.pop(connection), how)
                    continue
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


def watch_coordinator(
    host: str,
    process: int,
    on_lost: Callable[[int, str], None],
    on_silent: Callable[[int, float], None],
    *,
    probe_seconds: float,
    timeout_seconds: float,
) -> None:
    """On another process, from a thread: calls `on_lost(0, how)` when the connection to process 0 ends.

    And `on_silent(0, seconds)` each time that it has not asked anything for `probe_seconds`.

    Raises `OSError` or `jax.errors.JaxRuntimeError` if there is no connection within `timeout_seconds`.
    """
    port, token = _store.wait(_KEY, timeout_seconds).split()
    connection = socket.create_connection((host, int(port)), timeout=timeout_seconds)
    _probe(connection, probe_seconds)
    connection.sendall(f"{token} {process}\n".encode())
    connection.settimeout(probe_seconds)

    def run() -> None:
        while True:
            try:
                data, how = _receive(connection)
            except TimeoutError:
                on_silent(0, probe_seconds)
                continue
            if not data:
                on_lost(0, how)
                return
            with contextlib.suppress(OSError):
                connection.send(b"!", _DONT_WAIT)

    threading.Thread(target=run, name="redco_eqx.presence", daemon=True).start()


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
