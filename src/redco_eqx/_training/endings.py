"""The ends of a run before its time: by a step that is not finite, or by a signal, with the state in hand."""

import signal
import sys
import threading
from types import FrameType
from typing import Any

from redco_eqx._step.state import TrainState
from redco_eqx._training.loggers import History


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm was not finite. `state` is the last good one, before `step`; `history` has
    the rows until then.

    It says which id or label of the batch was outside of what it is looked up in (on many processes, the one
    that holds the row does); under `jax_debug_nans`, which metric, or the gradient of which parameter.
    """

    def __init__(
        self, state: TrainState, step: int, where: str = 'jax.config.update("jax_debug_nans", True) says where'
    ):
        super().__init__(
            f"the loss or the gradient norm was not finite at step {step} (counted from 0): {where}. The last "
            "good state is in this error's `state`."
        )
        self.state = state
        self.step = step
        self.history = History()
        self._where = where

    def __reduce__(self) -> tuple[type["NonFiniteError"], tuple[TrainState, int, str], dict[str, History]]:
        """By its arguments, of which the message is none: how it goes from one process to another."""
        return type(self), (self.state, self.step, self._where), {"history": self.history}


class TrainingInterrupted(KeyboardInterrupt):
    """`fit` was ended by SIGINT (Ctrl-C) or SIGTERM (preemption). Uncaught, it ends the program with the exit
    code 128 + `signal`: 130 or 143.

    In IPython and Jupyter Ctrl-C only ends the cell, and `sys.last_value` is this error.

    - `state`: that after the last whole step.
    - `step`: its number.
    - `history`: the rows and evaluations until then.
    - `signal`: which signal it was.
    - `checkpoint`: the directory where the state was saved, if `fit` was given one for checkpoints.
    """

    def __init__(
        self, state: Any, step: int, signum: int = signal.SIGINT, checkpoint: Any = None, history: Any = None
    ):
        where = "" if checkpoint is None else f", and was saved as {checkpoint}"
        super().__init__(
            f"fit was interrupted by {signal.Signals(signum).name} after step {step}; the state is in this "
            f"error's `state`{where}."
        )
        self.state = state
        self.step = step
        self.signal = signal.Signals(signum)
        self.checkpoint = checkpoint
        self.history = history
        self.code = 128 + signum

    def __reduce__(self) -> tuple[type["TrainingInterrupted"], tuple[Any, int, int, Any, Any]]:
        """By its arguments, of which the message is none: how it goes from one process to another."""
        return type(self), (self.state, self.step, self.signal, self.checkpoint, self.history)

    def _render_traceback_(self) -> list[str]:
        """Show this in IPython."""
        return [f"{type(self).__name__}: {self}", "    import sys; state = sys.last_value.state"]


class _Exiting(TrainingInterrupted, SystemExit):
    """The same as an exit: Python ends by its `code`, and prints no traceback."""


def interruption(state: Any, step: int, signum: int, checkpoint: Any, history: Any) -> TrainingInterrupted:
    """The error to raise: one that ends the program, but for Ctrl-C in IPython, which would say how to exit."""
    ipython = sys.modules.get("IPython")
    is_interactive = ipython is not None and ipython.get_ipython() is not None
    kind = TrainingInterrupted if is_interactive and signum == signal.SIGINT else _Exiting
    return kind(state, step, signum, checkpoint, history)


class InterruptFlag:
    """While entered, a first SIGINT or SIGTERM only sets `signal`; a second one does what it always does.

    Does nothing outside the main thread, nor for a signal that the program handles itself.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "InterruptFlag":
        if threading.current_thread() is threading.main_thread():
            defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
            for number, default in defaults.items():
                if signal.getsignal(number) is default:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signal = signum
        # Already now: the second one then also ends a program that is stuck outside Python.
        self.__exit__()
