"""Ctrl-C during a run: noticed at the next step boundary, with the state in hand."""

import signal
import threading
from types import FrameType
from typing import Any


class TrainingInterrupted(KeyboardInterrupt):
    """`fit` was interrupted by SIGINT. `state` is that after the last whole step."""

    def __init__(self, state: Any, step: int):
        super().__init__(f"fit was interrupted after step {step}; the state is in this error's `state`.")
        self.state = state
        self.step = step


class InterruptFlag:
    """While entered, a first SIGINT only sets `is_set`; a second one raises `KeyboardInterrupt` at once.

    Does nothing outside the main thread, or where the program handles SIGINT itself.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._previous: Any = None

    def __enter__(self) -> "InterruptFlag":
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.is_set:
            signal.default_int_handler(signum, frame)
        self.is_set = True
