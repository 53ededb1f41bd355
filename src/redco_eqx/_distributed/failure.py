"""Leaving a run of many processes: the failure of one ends all of them, soon and by name.

Python alone would hang: at its exit JAX waits for all processes to arrive, and those wait in a collective
for the one that failed. So a failing process tells the others through the store and leaves by `os._exit`;
a thread of each process looks there twice a second. One that is killed tells nobody: its connection ends.
"""

import atexit
import contextlib
import faulthandler
import gc
import io
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

import jax

from redco_eqx._distributed import store
from redco_eqx._distributed.jax_internals import coordination_client

# How long a process with an error that may be another's fault waits for signs of life.
ROLL_CALL_SECONDS = 3.0

_checks: list[Callable[[], str | None]] = []
_started: list["Leaving"] = []


def end(reason: str) -> None:
    """Ends this process now, and with it the others, if there are any. For use by any thread."""
    if _started:
        _started[0].fail(reason, may_be_others=True)
        _started[0].leave()
    say(f"this process ends: {reason}")
    flush_all()
    os._exit(1)


def add_check(check: Callable[[], str | None]) -> None:
    """Has the watching thread call `check`, which returns what is wrong, or `None`."""
    if check not in _checks:
        _checks.append(check)


class Standby:
    """A thread that is there before it is needed: Python starts none when the interpreter is about to end."""

    def __init__(self, act: Callable[[], None], name: str):
        self._act, self._go, self._done = act, threading.Event(), threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self) -> None:
        """Has the thread call `act`, once."""
        self._go.set()

    def wait(self, seconds: float) -> None:
        """Waits until `act` is over, for so long at most."""
        self._done.wait(seconds)

    def _run(self) -> None:
        self._go.wait()
        with contextlib.suppress(Exception):
            self._act()
        self._done.set()


class Leaving:
    """Ends this process when it or another one fails. One per process, started after joining."""

    def __init__(self, process: int, num_processes: int, leave_seconds: float):
        """**Arguments:**

        - `process`, `num_processes`: which process this is, of how many.
        - `leave_seconds`: after a failure anywhere, how long the main thread may go on.
        """
        self._process = process
        self._num_processes = num_processes
        self._seconds = leave_seconds
        self._interval = max(0.5, num_processes / 200)  # some hundred requests a second for process 0
        self._code: int | None = None
        self._deadline = math.inf
        self._told: set[str] = set()
        self._lost: set[str] = set()
        self._exiting = False
        self._stop = threading.Event()
        self._last_acts: list[Callable[[], None]] = []
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._name = store.name_of(process)
        self._coordinator = store.name_of(0)  # asked for now: when it is lost, nobody answers

    def start(self) -> None:
        """Takes over uncaught exceptions and the end of the interpreter, and begins to watch."""
        _started.append(self)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        with contextlib.suppress(AttributeError, OSError, ValueError):  # not a text file of the usual kind
            # What aborts in JAX's own threads does not flush.
            sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
            if not faulthandler.is_enabled():
                faulthandler.enable()
        # Both may be held up, by a full pipe or a dead network.
        self._last_words = Standby(flush_all, "redco_eqx.flush")
        self._farewell = Standby(self._see_off, "redco_eqx.farewell")
        self._clock = Standby(self._run_down, "redco_eqx.leave")
        self._thread = threading.Thread(target=self._watch, name="redco_eqx.watch", daemon=True)
        self._thread.start()

    def before_exit(self, act: Callable[[], None]) -> None:
        """Has `act` called when this process is done, before JAX waits for the others to be."""
        self._last_acts.append(act)

    def fail(self, reason: str, *, code: int = 1, may_be_others: bool = False) -> None:
        """Tells every process why this one ends. It is gone soon after `leave_seconds`.

        **Arguments:**

        - `reason`: one line.
        - `code`: exit status.
        - `may_be_others`: whether a lost process may be the cause; then the ones that do not answer are
            named.
        """
        with self._lock:
            if self._code is not None:
                return
            self._code = code
        self._end_after(self._seconds)
        say(f"{self._name} of {self._num_processes} ends: {reason}")
        with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError):
            store.put(f"failed/{self._process}", reason)
            if may_be_others:
                self._call_roll()

    def leave(self) -> None:
        """Flushes what Python has not written yet, and ends the process, process 0 as the last one."""
        self._last_words.begin()
        self._last_words.wait(1.0)
        if self._process == 0:
            self._farewell.begin()
            # The others hear of it up to `_interval` later, and flush for a second.
            self._farewell.wait(min(self._deadline - time.monotonic(), self._seconds) + self._interval + 1.5)
        os._exit(1 if self._code is None else self._code)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        self._previous_hook(kind, error, traceback)
        # Neither at the prompt, where the session goes on, nor in a child that was forked off.
        if not (self._exiting or hasattr(sys, "ps1") or os.getpid() != self._pid):
            self._fail_of(error)

    def _fail_of(self, error: BaseException) -> None:
        text = next(iter(str(error).splitlines()), "")
        reason = f"{type(error).__name__}: {text[:1000]}"
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        self.fail(reason, code=code, may_be_others=isinstance(error, jax.errors.JaxRuntimeError))

    def _at_exit(self) -> None:
        # Set by Python for what was not caught, whoever has replaced our hook since.
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if self._code is None and error is not None and not hasattr(sys, "ps1"):
            self._fail_of(error)
        self._exiting = True
        if self._code is None:
            for act in self._last_acts:
                act()
            # A thread that is inside JAX when the interpreter ends would abort it. From here on JAX waits for
            # the others, and connections alone tell of those that are lost.
            self._stop.set()
            self._thread.join(5.0)
        if self._code is not None:
            self.leave()

    def lost(self, process: int, how: str) -> None:
        """Ends this process because another one is gone without a word. Called from a thread."""
        self._lost.add(str(process))
        if coordination_client() is None:
            return
        if process == 0:  # and with it the store; JAX is about to abort, so first of all the message
            if "0" not in self._told:
                say(f"{self._coordinator}, which coordinates, is lost to {self._name}: {how}.")
            with self._lock:
                self._code = 1 if self._code is None else self._code
            flush_all()
            self._end_after(min(1.0, self._seconds))
            return
        if self._code is not None:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError):
            failed = self._failures()
            if str(process) in failed:
                self._hear(failed)
                return
        self.fail(f"{store.name_of(process)} is lost: {how}.")

    def silent(self, process: int, seconds: float) -> None:
        """Says that a process does not answer. If it is frozen, JAX ends the others soon."""
        if not self._exiting and self._code is None:
            name = store.name_of(process) if process else self._coordinator
            say(f"{name} has not answered for {seconds:.0f} s: it is frozen, or out of reach, or busy.")

    def _watch(self) -> None:
        failing_since = None
        while not self._stop.wait(self._interval):
            if coordination_client() is None:  # JAX has left
                return
            try:
                others = self._failures()
                failing_since = None
            except Exception as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > 10 and not self._exiting:
                    self._code = 1 if self._code is None else self._code
                    say(f"process 0, which coordinates, does not answer {self._name}: {error}")
                    self.leave()
                continue
            if others:
                self._hear(others)
            elif self._code is None:
                for check in _checks:
                    if reason := check():
                        self.fail(reason)

    def _hear(self, failed: dict[str, str]) -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError, AttributeError):
            store.put(f"heard/{self._process}", "")
        self._tell(failed)
        if self._code is None:
            self._code = 1
            # Process 0 waits for the others. Elsewhere the main thread may learn of it by itself.
            self._end_after(min(1.0, self._seconds / 2) if "0" in failed else self._seconds)

    def _tell(self, failed: dict[str, str]) -> None:
        with self._lock:
            new = {who: why for who, why in failed.items() if who not in self._told}
            self._told.update(new)
        for who, why in sorted(new.items()):
            say(f"{store.name_of(int(who))} failed: {why}")

    def _others(self) -> set[str]:
        return {str(i) for i in range(self._num_processes) if i != self._process}

    def _failures(self) -> dict[str, str]:
        """Which of the others have failed, and why."""
        return {who: why for who, why in store.entries("failed").items() if who != str(self._process)}

    def _call_roll(self) -> None:
        """Waits for a sign of the other processes, and names those that give none."""
        end = time.monotonic() + min(ROLL_CALL_SECONDS, self._seconds / 2)
        while True:
            failed = self._failures()
            self._tell(failed)
            silent = self._others() - set(store.entries("heard")) - set(failed)
            explained = failed and self._process != 0
            if not silent or explained or time.monotonic() > end:
                break
            time.sleep(0.1)
        if not failed:
            for who in sorted(silent, key=int):
                say(f"{store.name_of(int(who))} does not answer: it was killed, or its host cannot be reached.")

    def _see_off(self) -> None:
        """Waits until the other processes have ended: JAX aborts those that are there without process 0."""
        end = time.monotonic() + ROLL_CALL_SECONDS
        while there := self._others() - self._lost:
            answer = set(store.entries("heard")) | set(self._failures())
            if not there & answer and time.monotonic() > end:
                break
            time.sleep(0.05)

    def _end_after(self, seconds: float) -> None:
        with self._lock:
            self._deadline = min(self._deadline, time.monotonic() + seconds)
        self._clock.begin()

    def _run_down(self) -> None:
        while time.monotonic() < self._deadline:  # which may move closer
            time.sleep(0.05)
        self.leave()


def say(message: str) -> None:
    """A line on standard error, from whichever process."""
    with contextlib.suppress(OSError, ValueError):  # closed
        print(f"redco_eqx: {message}", file=sys.stderr, flush=True)


def flush_all() -> None:
    """Flushes the handlers of `logging` and every open file."""
    with contextlib.suppress(Exception):
        logging.shutdown()
    # By type, as an object can do anything when asked for its class; and `io.IOBase` itself is slow to ask.
    base = io.IOBase.__mro__[1]
    for file in [thing for thing in gc.get_objects() if issubclass(type(thing), base)]:
        with contextlib.suppress(Exception):
            if not file.closed:
                file.flush()
