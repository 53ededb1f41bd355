"""The processes of a run: if one fails, all of them end soon, and name the failed
process.

Without this, a run would hang: when Python exits, JAX waits for all processes, and
these wait in a collective for the one that failed. JAX's service notices only when its
heartbeats time out. So each process keeps the connection to process 0 that it made when
it joined. A process that fails sends a message, process 0 passes it to the others, and
all leave with `os._exit`. If a process is killed, the kernel closes its connection. If
a process is frozen or out of reach, JAX's heartbeats end the others.
"""

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import jax

from redco_eqx._distributed.whereabouts import Judge, Lookout, Status

_FLUSH_SECONDS = 1.0
_MAX_BYTES = 16_000  # the longest message that any thread can send in one piece
_MAX_LETTERS = 2_000  # of a text in a message
# Between two looks at all processes, which begin if one waits.
_LOOK_SECONDS = 1.0
_WAIT_SECONDS = 5.0
# For a C function, which writes here even if `sys.stderr` has been replaced.
_STDERR = 2

_group: "ProcessGroup | None" = None


def process_names() -> Sequence[str]:
    """Return a name for each process: its number, host and pid, or only its number if
    another function joined the processes."""
    if _group is not None:
        return _group.names
    return [f"process {i}" for i in range(jax.process_count())]


def end_process(reason: str) -> NoReturn:
    """End this process now, and the others, if there are any. Any thread may call
    this."""
    if _group is not None:
        _group.fail(reason)
        _group.leave()
    log(f"this process ends: {reason}")
    flush_all()
    os._exit(1)


def leave_call(error: SystemExit) -> None:
    """Note that a `SystemExit` leaves a function of the library that all processes
    call. If this process then ends, and another one is still in such a function, all
    end."""
    if _group is not None:
        _group.note_exit(error)


@contextlib.contextmanager
def noting_exits() -> Iterator[None]:
    """Note a `SystemExit` that leaves the block, as `leave_call` does."""
    try:
        yield
    except SystemExit as error:
        leave_call(error)
        raise


def _is_ending() -> bool:
    return _group is not None and _group.leave_at < math.inf


@dataclasses.dataclass
class ProcessGroup:
    """This process among the others, with a thread that listens to them.

    - `process`: the number of this process.
    - `names`, `connections`: the results of `rendezvous`.
    - `leave_seconds`: how long the main thread may continue after a failure anywhere.
    - `leave_at`: the time at which this process ends; infinite if nothing has failed.
    """

    process: int
    names: Sequence[str]
    connections: dict[int, Connection]
    leave_seconds: float
    leave_at: float = math.inf

    def start(self) -> None:
        """Take over uncaught exceptions and the exit of the interpreter, and begin to
        listen."""
        global _group
        _group = self
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._unfinished = set(self.connections)
        self._lookout = Lookout()
        self._judge = Judge(self.names)
        self._statuses: dict[int, Status] = {}  # of the other processes, on process 0
        self._next_look = 0.0
        self._look_until = 0.0
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._leave_to_parent)
        with contextlib.suppress(AttributeError, OSError, ValueError):
            # If JAX aborts in one of its threads, nothing is flushed. Another kind of
            # stream than a text file may not know this.
            sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
        # Start the thread now, because Python starts none when the interpreter is about
        # to exit.
        threading.Thread(
            target=self._watch, name="redco_eqx.process_group", daemon=True
        ).start()

    def fail(self, reason: str) -> None:
        """Tell every process why this one ends. All end soon after `leave_seconds`."""
        if self._leave_within(self.leave_seconds):
            name = self.names[self.process]
            self._send("failed", f"{name} failed: {reason}")
            log(f"{name} of {len(self.names)} ends: {reason}")

    def note_exit(self, error: SystemExit) -> None:
        """See `leave_call`."""
        self._lookout.left = f"SystemExit: {error.code}"

    def leave(self) -> NoReturn:
        """Flush files, and end the process. Process 0 is the last one to end."""
        self._leave_within(0.0)
        while True:
            time.sleep(1.0)  # the watchdog thread ends the process

    def _leave_within(self, seconds: float) -> bool:
        """Make the watchdog thread end this process within `seconds`. Return True only
        on the first call."""
        with self._lock:
            is_new = not _is_ending()
            if is_new:
                # This starts a thread in C, because a full pipe, a dead network or a
                # stuck file may block the other thread. Process 0 ends last, because
                # JAX aborts the remaining processes without it.
                num_flushes = 2 if self.process == 0 else 1
                left = self.leave_seconds + num_flushes * _FLUSH_SECONDS
                faulthandler.dump_traceback_later(
                    left, exit=True, file=os.open(os.devnull, os.O_WRONLY)
                )
            self.leave_at = min(self.leave_at, time.monotonic() + seconds)
        return is_new

    def _leave_to_parent(self) -> None:
        """In a forked child: give up the place of the parent among the processes.

        The child has copies of the connections. While one of them is open, the other
        processes would not see that the parent has been killed.
        """
        global _group
        _group = None
        for connection in self.connections.values():
            connection.close()

    def _on_exception(self, kind: Any, error: BaseException, traceback: Any) -> None:
        self._previous_hook(kind, error, traceback)
        self._fail_with(error)

    def _fail_with(self, error: BaseException) -> None:
        # Do nothing at the prompt, where the session continues, or in a forked child.
        if hasattr(sys, "ps1") or os.getpid() != self._pid:
            return
        first_line, *_ = str(error).split("\n")
        self.fail(f"{type(error).__name__}: {first_line[:1000]}")
        if isinstance(error, jax.errors.JaxRuntimeError):
            # Another process may be the cause, and report it.
            time.sleep(min(1.0, self.leave_seconds / 2))

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        # Python sets this for an uncaught exception, even if another hook has replaced
        # `_on_exception`.
        error = getattr(sys, "last_value", None)
        if error is not None and not _is_ending():
            self._fail_with(error)
        if _is_ending():
            self.leave()
        self._lookout.has_ended = True
        self._send("finished")  # from here on JAX waits for the others

    def _send(self, kind: str, content: Any = None, besides: int | None = None) -> None:
        """Send a message: `failed` with a line that names the failed process,
        `finished`, `waits`, `look`, `status`, or `say` with a line."""
        if isinstance(content, str):
            content = content[:_MAX_LETTERS]
        for process, connection in list(self.connections.items()):
            if process != besides:
                with contextlib.suppress(OSError):  # that process is gone, or frozen
                    connection.send_bytes(json.dumps([kind, content]).encode())

    def _watch(self) -> None:
        while time.monotonic() < self.leave_at:
            self._listen(0.1)
            if time.monotonic() >= self._next_look and not _is_ending():
                self._next_look = time.monotonic() + _LOOK_SECONDS
                self._look()
        flush_all()
        while self.process == 0 and self.connections:
            self._listen(0.1)
        self._send("finished")
        os._exit(1)

    def _look(self) -> None:
        """If this process waits for others, have process 0 look at all of them. Process
        0 ends all of them if two can never meet, and tells all of them who is late."""
        now = time.monotonic()
        mine = self._lookout.look(_WAIT_SECONDS)
        # Small computations on CPU run in the call that starts them, and such a wait
        # looks like any other work.
        is_waiting = mine.seconds >= _WAIT_SECONDS and (mine.waits or mine.call)
        if self.process != 0:
            if is_waiting:
                self._send("waits")
            return
        if is_waiting:
            self._look_until = now + 2 * _WAIT_SECONDS
        if now > self._look_until:
            return
        statuses = {0: self._lookout.look(), **self._statuses}
        for line in self._judge.reports(statuses, now):
            self._send("say", line)
            log(line)
        reason = self._judge.verdict(statuses, now)
        if reason and not hasattr(sys, "ps1"):  # at the prompt, the session continues
            self._on_failure(reason)
        self._statuses = {}
        self._send("look")

    def _listen(self, seconds: float) -> None:
        """Wait up to `seconds` for messages, and handle one from each process that has
        sent any."""
        processes = {
            connection: process for process, connection in self.connections.items()
        }
        for connection in wait(list(processes), seconds):
            process = processes[connection]  # pyright: ignore[reportArgumentType]
            try:
                kind, content = json.loads(
                    self.connections[process].recv_bytes(_MAX_BYTES)
                )
            except (EOFError, OSError, ValueError) as error:
                self.connections.pop(process).close()
                if process in self._unfinished:
                    why = str(error) or "its connection was closed"
                    self._on_failure(f"{self.names[process]} is lost: {why}.", process)
                continue
            if kind == "failed":
                self._on_failure(content, process)
            elif kind == "finished":
                self._unfinished.discard(process)
            elif kind == "waits":
                self._look_until = time.monotonic() + 2 * _WAIT_SECONDS
            elif kind == "look":
                self._send("status", self._lookout.look())
            elif kind == "status":
                self._statuses[process] = Status(*content)
            elif kind == "say":
                log(content)

    def _on_failure(self, line: str, source: int | None = None) -> None:
        """End this process soon, because another process is ending, or is gone."""
        if not jax.distributed.is_initialized():
            # JAX has left the others, and does not wait for them.
            return
        # Without the coordinator, JAX aborts.
        has_coordinator = 0 in (self.process, *self.connections)
        self._leave_within(self.leave_seconds if has_coordinator else 0.0)
        # On process 0 this passes the line to the others.
        self._send("failed", line, besides=source)
        log(line)


class Watchdog:
    """A context that ends the process if there is no `beat` for `timeout_seconds`.
    `None` means no limit.

    It prints the stack of each thread, notifies the other processes, and exits with
    status 1. If Python itself can no longer run, it skips the notification.
    """

    def __init__(self, timeout_seconds: float | None):
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(
                f"step_timeout_seconds={timeout_seconds}, but it must be positive, or "
                "None."
            )
        self._seconds = timeout_seconds
        self._done = threading.Event()
        self._last_beat = 0.0

    def beat(self) -> None:
        """Restart the timeout after a step of training or evaluation has finished or
        been dispatched."""
        self._last_beat = time.monotonic()

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            self.beat()
            threading.Thread(
                target=self._run, args=(self._seconds,), daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _run(self, seconds: float) -> None:
        while not self._done.wait(min(1.0, seconds / 4)):
            if _is_ending():  # the end of the process uses the same thread in C
                return
            # This starts a thread in C: an extension that does not release the
            # interpreter stops this one.
            faulthandler.dump_traceback_later(seconds + 10, exit=True, file=_STDERR)
            if time.monotonic() - self._last_beat > seconds:
                faulthandler.dump_traceback(file=_STDERR, all_threads=True)
                end_process(
                    f"no step has finished for {seconds:g} s (step_timeout_seconds). "
                    "The lines above show where each of its threads is."
                )
        if not _is_ending():
            faulthandler.cancel_dump_traceback_later()


def log(message: str) -> None:
    """Write a line to standard error, on any process."""
    with contextlib.suppress(OSError, ValueError):  # closed
        print(f"redco_eqx: {message}", file=sys.stderr, flush=True)


def flush_all() -> None:
    """Flush every open file, which `os._exit` does not do.

    Python keeps no list of open files, so this goes through all objects. Threads cannot
    flush their own files, because one of them may be stuck.
    """
    # Check the type, because reading `__class__` can run any code of an object.
    # Checking for `io.IOBase` is slow.
    base = io.IOBase.__mro__[1]
    for file in [thing for thing in gc.get_objects() if issubclass(type(thing), base)]:
        with contextlib.suppress(Exception):
            if not file.closed:
                file.flush()
