"""The processes of a run: the failure of one ends all of them, soon and by name.

Python alone would hang: at its exit JAX waits for all processes to arrive, and those wait in a collective for
the one that failed. So a failing process tells process 0, which tells the others, and all leave by `os._exit`.
One that is killed tells nobody: its connection ends. One that is frozen or out of reach is only named here,
because Python's threads wait while an extension computes: JAX's heartbeats decide, and end the others.
"""

import atexit
import contextlib
import faulthandler
import math
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import NoReturn, TypeVar, cast

import jax

from redco_eqx._distributed.connection import Connection, Message
from redco_eqx._distributed.log import flush_all, log

T = TypeVar("T")

_FLUSH_SECONDS = 1.0

_group: "ProcessGroup | None" = None


def process_group() -> "ProcessGroup | None":
    """The group that this process has joined; `None` if it is alone."""
    global _group
    if _group is None and jax.distributed.is_initialized():  # not by us
        _group = ProcessGroup(jax.process_index(), [f"process {i}" for i in range(jax.process_count())])
    return _group


def end_process(reason: str) -> NoReturn:
    """Ends this process now, and with it the others, if there are any. For use by any thread."""
    if _group is not None and _group.ends_together:
        _group.fail(reason)
        _group.leave()
    log(f"this process ends: {reason}")
    flush_all()
    os._exit(1)


class ProcessGroup:
    """This process among the others.

    - `process`: which one this is.
    - `names`: for each process its number, host and pid.
    - `ends_together`: whether the failure of one process ends all.
    """

    def __init__(
        self,
        process: int,
        names: Sequence[str],
        connections: Mapping[int, Connection] | None = None,
        *,
        leave_seconds: float = 5.0,
        silent_seconds: float = 15.0,
    ):
        """**Arguments:**

        - `names`, `connections`: as `rendezvous` has returned them.
        - `leave_seconds`: after a failure anywhere, how long the main thread may go on.
        - `silent_seconds`: after how long a process that says nothing is named.
        """
        self.process, self.names, self.ends_together = process, names, connections is not None
        self._connections = dict(connections or {})
        self._leave_seconds, self._silent_seconds = leave_seconds, silent_seconds
        self._last_seen = dict.fromkeys(self._connections, time.monotonic())
        self._finished: set[int] = set()
        self._code: int | None = None
        self._leave_at = self._last_moment = math.inf
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._flushed = threading.Event()
        self._lock = threading.RLock()
        self._parts: dict[object, object] = {}
        self._pid = os.getpid()

    def part(self, make: Callable[["ProcessGroup"], T]) -> T:
        """What `make` gives for this group, made when first asked for."""
        with self._lock:
            if make not in self._parts:
                self._parts[make] = make(self)
            return cast(T, self._parts[make])

    def start(self) -> None:
        """Takes over uncaught exceptions and the end of the interpreter, and begins to watch."""
        global _group
        _group = self
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception
        atexit.register(self._at_exit)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # not a text file of the usual kind
            # What aborts in JAX's own threads does not flush.
            sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
            if not faulthandler.is_enabled():
                faulthandler.enable()
        # Now, because Python starts no thread when the interpreter is about to end; and two, because a full
        # pipe or a dead network may hold up what is written.
        for run in (self._watch, self._write):
            threading.Thread(target=run, name=f"redco_eqx.{run.__name__}", daemon=True).start()

    def fail(self, reason: str, code: int = 1) -> None:
        """Tells every process why this one ends. All are gone soon after `leave_seconds`."""
        if self._leave_within(self._leave_seconds, code):
            self._send({"failed": self.process, "how": f"failed: {reason}"})
            self._lines.put(f"{self.names[self.process]} of {len(self.names)} ends: {reason}")

    def leave(self) -> NoReturn:
        """Flushes what Python has not written yet, and ends the process, process 0 as the last one."""
        self._leave_within(0.0)
        while time.monotonic() < self._last_moment:
            time.sleep(0.1)  # the watching thread does it
        os._exit(1)

    def _leave_within(self, seconds: float, code: int = 1) -> bool:
        """Has the watching thread end this process. Whether that is new."""
        now = time.monotonic()
        with self._lock:
            is_new = self._code is None
            if is_new:
                self._code = code
                # JAX aborts those that are there without process 0.
                grace = 2 * _FLUSH_SECONDS if self.process == 0 else _FLUSH_SECONDS
                self._last_moment = now + self._leave_seconds + grace
            self._leave_at = min(self._leave_at, now + seconds)
        return is_new

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, traceback)
        self._fail_with(error)

    def _fail_with(self, error: BaseException) -> None:
        # Neither at the prompt, where the session goes on, nor in a child that was forked off.
        if hasattr(sys, "ps1") or os.getpid() != self._pid:
            return
        text = next(iter(str(error).splitlines()), "")
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        self.fail(f"{type(error).__name__}: {text[:1000]}", code)
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(min(1.0, self._leave_seconds / 2))  # until it is known whose fault it may be

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # Set by Python for what was not caught, whoever has replaced our hook since.
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None and self._code is None:
            self._fail_with(error)
        if self._code is not None:
            self.leave()
        self._send({"finished": True})  # from here on JAX waits for the others

    def _send(self, message: Message) -> None:
        for connection in list(self._connections.values()):
            connection.send(message)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            log(line)
        flush_all()
        self._flushed.set()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, process)
            next_beat = 0.0
            while not self._is_time_to_leave():
                for key, _ in selector.select(0.1):
                    how = self._receive(key.data)
                    if how is not None:
                        selector.unregister(key.fileobj)
                        self._connections.pop(key.data).close()
                        del self._last_seen[key.data]
                        if key.data not in self._finished:
                            self._on_failure(key.data, f"is lost: {how}.")
                if time.monotonic() > next_beat:
                    next_beat = time.monotonic() + self._silent_seconds / 4
                    self._send({})
                    self._report_silent()
        self._send({"finished": True})
        os._exit(self._code or 0)

    def _receive(self, process: int) -> str | None:
        """Takes in what another process has sent; how its connection has ended, if it has."""
        try:
            while (message := self._connections[process].receive()) is not None:
                self._last_seen[process] = time.monotonic()
                if "finished" in message:
                    self._finished.add(process)
                if "failed" in message:
                    self._on_failure(message["failed"], message["how"])
        except (OSError, ValueError) as error:
            return getattr(error, "strerror", None) or str(error)
        return None

    def _on_failure(self, process: int, how: str) -> None:
        """Ends this process soon, because another one is about to, or is gone."""
        if process == self.process or not jax.distributed.is_initialized():  # JAX has left
            return
        if self.process == 0:
            self._send({"failed": process, "how": how})
        self._lines.put(f"{self.names[process]} {how}")
        has_coordinator = 0 in (self.process, *self._connections)  # without it JAX aborts
        self._leave_within(self._leave_seconds if has_coordinator else 0.0)

    def _report_silent(self) -> None:
        """Says once which processes have not answered. If one is frozen, JAX ends the others soon."""
        for process, last_seen in self._last_seen.items():
            seconds = time.monotonic() - last_seen
            if seconds > self._silent_seconds and self._code is None:
                self._last_seen[process] = math.inf
                how = f"has not answered for {seconds:.0f} s: it is frozen, or out of reach, or busy"
                self._lines.put(f"{self.names[process]} {how}.")

    def _is_time_to_leave(self) -> bool:
        now = time.monotonic()
        if now < self._leave_at:
            return False
        self._lines.put(None)
        is_flushed = self._flushed.is_set() or now > self._leave_at + _FLUSH_SECONDS
        is_last = self.process != 0 or not self._connections
        return (is_flushed and is_last) or now > self._last_moment
