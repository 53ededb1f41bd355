"""Ends a process in which no step has finished for a long time: a loader that is stuck, a frozen peer."""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

from redco_eqx._distributed.process_group import end_process

_STDERR = 2  # a C function writes to it, also where `sys.stderr` has been replaced


class Watchdog:
    """While entered, ends the process when there was no `beat` for `timeout_seconds`; `None` never does.

    It prints where each thread stands, tells the other processes, and exits with status 1. Should Python
    itself not get to run any more, the same happens without the telling.
    """

    def __init__(self, timeout_seconds: float | None, about: Callable[[], str] = lambda: ""):
        """`about` says at the end what else there is to know."""
        if timeout_seconds is not None and timeout_seconds <= 0:
            raise ValueError(f"step_timeout_seconds={timeout_seconds}, but it must be positive, or None.")
        self._seconds, self._about = timeout_seconds, about
        self._done = threading.Event()
        self._last_beat = 0.0

    def beat(self) -> None:
        """Says that a step, of training or evaluation, has finished or been handed over."""
        self._last_beat = time.monotonic()

    def __enter__(self) -> "Watchdog":
        if self._seconds is not None:
            self.beat()
            threading.Thread(
                target=self._run, args=(self._seconds,), name="redco_eqx.watchdog", daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._seconds is not None:
            faulthandler.cancel_dump_traceback_later()

    def _run(self, seconds: float) -> None:
        while not self._done.is_set():
            # A thread in C: an extension that does not release the interpreter stops this one.
            faulthandler.dump_traceback_later(seconds + 10, exit=True, file=_STDERR)
            self._done.wait(min(1.0, seconds / 4))
            if time.monotonic() - self._last_beat > seconds and not self._done.is_set():
                sys.stderr.flush()
                faulthandler.dump_traceback(file=_STDERR, all_threads=True)
                end_process(
                    f"no step has finished for {seconds:g} s (step_timeout_seconds). Above is where each of "
                    f"its threads stands.\n{self._about()}".rstrip()
                )
        faulthandler.cancel_dump_traceback_later()
