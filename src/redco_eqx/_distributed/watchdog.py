"""Ends a process in which no step has finished for a long time: a loader that is stuck, a frozen peer."""

import faulthandler
import os
import sys
import threading
import time

from redco_eqx._distributed import failure

_active: list["Watchdog"] = []


def beat() -> None:
    """Says that a step, of training or evaluation, has finished or been handed over."""
    for watchdog in _active:
        watchdog.since = time.monotonic()


class Watchdog:
    """While entered, ends the process when there was no `beat` for `timeout_seconds`; `None` never does.

    It prints where each thread stands, tells the other processes, and exits with status 1. Should Python
    itself not get to run any more, the same happens without the telling.
    """

    def __init__(self, timeout_seconds: float | None):
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(f"step_timeout_seconds={timeout_seconds}, but it must be positive, or None.")
        self._seconds = timeout_seconds
        self._done = threading.Event()
        self.since = 0.0

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            self.since = time.monotonic()
            _active.append(self)
            threading.Thread(target=self._run, name="redco_eqx.watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._seconds is not None:
            _active.remove(self)
            self._done.set()
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        seconds = self._seconds
        assert seconds is not None
        while not self._done.is_set():
            # A thread in C: an extension that does not release the interpreter stops this one.
            faulthandler.dump_traceback_later(seconds + 10, exit=True, file=_stderr())
            self._done.wait(min(1.0, seconds / 4))
            if time.monotonic() - self.since > seconds and not self._done.is_set():
                self._end(seconds)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, seconds: float) -> None:
        sys.stderr.flush()
        faulthandler.dump_traceback(file=_stderr(), all_threads=True)
        failure.end(
            f"no step has finished for {seconds:g} s (step_timeout_seconds). Above is where each of its "
            "threads stands."
        )


def _stderr() -> int:
    """A file that a C function can write to, also where `sys.stderr` has been replaced."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return os.dup(2)
