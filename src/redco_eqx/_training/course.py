"""The course of a run: what is due at a step, and how a hook, a signal or a NaN ends
it.

The state survives either end.
"""

import ctypes
import dataclasses
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from signal import Signals
from types import FrameType
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import numpy as np

from redco_eqx._base.protocols import check_positive
from redco_eqx._base.tree import first_few, is_array, leaves_with_paths
from redco_eqx._checkpoint.run_record import RunRecord
from redco_eqx._data.workers import note_hang
from redco_eqx._distributed.consensus import from_first
from redco_eqx._step.state import TrainState
from redco_eqx._training.loggers import History

T = TypeVar("T")

AT_END = sys.maxsize
"""An interval that is longer than any run."""


# The things that are due at a step, as a pure function of the course and the run so
# far.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """The length of a run, and the intervals at which it logs, evaluates and saves.

    - `num_epochs`, `num_steps`: the length of the run. Exactly one of them is given.
    - `log_every`: the number of steps that a row of the log covers.
    - `evaluate`, `save`: the number of steps between two evaluations or saves; 0 for
        one after each epoch, `AT_END` for no more than the one at the end, `None` for
        none. Unless it is `None`, there is also one at the end of the run.

    Raises `ValueError` for numbers that cannot be used.
    """

    num_epochs: int | None = None
    num_steps: int | None = None
    log_every: int = 50
    evaluate: int | None = None
    save: int | None = None

    def __post_init__(self) -> None:
        if (self.num_epochs is None) == (self.num_steps is None):
            raise ValueError(
                f"fit: num_epochs={self.num_epochs}, num_steps={self.num_steps}, but "
                "exactly one of them must be given."
            )
        check_positive(
            "fit",
            num_epochs=self.num_epochs,
            num_steps=self.num_steps,
            log_every=self.log_every,
        )

    def check_length(self, run: RunRecord, path: pathlib.Path) -> None:
        """Raise `ValueError` if the run of the checkpoint at `path` is already longer
        than this course."""
        name = "num_steps"
        done = run.num_steps
        wanted = self.num_steps
        if self.num_epochs is not None:
            name = "num_epochs"
            done = run.epoch + (run.batch > 0)
            wanted = self.num_epochs
        if wanted is not None and done > wanted:
            raise ValueError(
                f"fit: {name}={wanted}, but the run in {path.parent} already has "
                f"{done} (its newest checkpoint is {path.name}). Pass {name}={done} or "
                "more. To read an earlier state, use restore(step=). To begin a new "
                "run, pass another directory."
            )


@dataclasses.dataclass(frozen=True)
class Due:
    """The things that are due after a step, in this order.

    - `log`: a row with the metrics since the last row.
    - `evaluate`: an evaluation of a state that is known to be finite.
    - `save`: a checkpoint, which includes the results of the evaluation.
    - `finish`: the end of the run.
    """

    log: bool
    evaluate: bool
    save: bool
    finish: bool


def due(
    course: Course, run: RunRecord, *, stop: bool = False, is_late: bool = False
) -> Due:
    """List the things that are due at the current step of a run: after the step, or
    when the run resumes.

    **Arguments:**

    - `course`: the course of the run.
    - `run`: the run so far, with its evaluations, so that no step is evaluated twice.
    - `stop`: true if a signal ends the run. It then saves, and does not evaluate. The
        checkpoint includes the metrics that are not logged yet. A run that does not
        save logs them instead.
    - `is_late`: true if so much time has passed since the last save that another one is
        due.
    """
    is_end = run.stopped
    if course.num_steps is not None and run.num_steps >= course.num_steps:
        is_end = True
    if course.num_epochs is not None and run.epoch >= course.num_epochs:
        is_end = True
    evaluate = False
    if course.evaluate is not None and not stop and not run.is_evaluated:
        evaluate = is_end or _is_due(course.evaluate, run)
    save = False
    if course.save is not None:
        save = is_end or stop or is_late or _is_due(course.save, run)
    if stop:
        log = not save
    else:
        log = is_end or evaluate or run.num_steps % course.log_every == 0
    return Due(log=log, evaluate=evaluate, save=save, finish=is_end or stop)


def _is_due(every: int, run: RunRecord) -> bool:
    return run.num_steps > 0 and (
        run.num_steps % every == 0 if every else run.batch == 0
    )


# The hook.


@runtime_checkable
class Hook(Protocol):
    """`(run, row, state) -> None`, or `True` to end the run: `fit` calls it after each
    row and each evaluation.

    - `run`: the run so far ([`RunRecord`][]), with all its `evaluations`.
    - `row`: a copy of the metrics that were just logged: `train/...` of the steps since
        the last row, or `eval/...`.
    - `state`: the state after the last step. The next step deletes its arrays, so copy
        those that you want to keep with `jax.device_get`. A hook that deletes them
        itself (it passes the state to a step that donates it) ends the run with an
        error, so pass such a step a copy, `jax.tree.map(jnp.copy, state)`.

    A run that its hook ends is whole: as at its last step, it ends with an evaluation
    (if it has any) and a save. `fit` calls the hook on every process at the same steps,
    and process 0 decides whether the run ends. A resumed run is exact if the hook
    depends only on its arguments. Anything that it stores elsewhere is lost when the
    run ends.
    """

    def __call__(
        self, run: RunRecord, row: Mapping[str, float], state: TrainState, /
    ) -> bool | None: ...


def apply_hook(
    hook: Hook, run: RunRecord, row: Mapping[str, float], state: TrainState
) -> RunRecord:
    """Call the hook, and return the run, which the hook may have ended.

    Raises `TypeError` if the hook returns something else than `None` or a bool, and
    `ValueError` if it deletes arrays of the state.
    """
    # In dicts of its own: what the hook changes in them is not the run's.
    seen = dataclasses.replace(run, evaluations=tuple(dict(x) for x in run.evaluations))
    stop = hook(seen, dict(row), jax.tree.map(lambda x: x, state))
    check_not_donated(state, "hook")
    if stop is not None and not isinstance(stop, bool | np.bool_):
        raise TypeError(
            "hook must return None, or True to end the run, but returned a "
            f"{type(stop).__name__}. It cannot change the state."
        )
    return dataclasses.replace(
        run, stopped=run.stopped or from_first(lambda: bool(stop))
    )


def check_not_donated(state: TrainState, function: str) -> None:
    """Raise `ValueError` if a function of the user has deleted arrays of the state.

    The next step would end the process: jaxlib 0.10.2 reads deleted arguments of a
    compiled program (openxla/xla#22604).
    """
    deleted = [
        path for path, x in leaves_with_paths(state) if is_array(x) and x.is_deleted()
    ]
    if deleted:
        raise ValueError(
            f"{function} deleted {first_few(deleted, most=3)} of the state that fit "
            "passed to it, so the run cannot go on. A step deletes the state that it "
            "is given: pass it a copy, jax.tree.map(jnp.copy, state), or use "
            "jit_step(step, donate=False)."
        )


# Ending a run early.


@dataclasses.dataclass(eq=False, repr=False)
class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm was not finite. `state` is the last good state,
    before `step`. `history` has the rows until then.

    If both were finite, but the optimizer's update was not, the message names the
    parameters. `fit` detects this at the next row of the log. No good state is left
    then, and `state` has these parameters.

    The message names a NaN in the batch, and an id or label that is outside the table
    that it indexes (with many processes, only on the process that has that row). Under
    `jax_debug_nans`, the error comes from a `FloatingPointError` at the line of
    `loss_fn`, or the message names the metric that is not finite, or the parameter with
    such a gradient.
    """

    state: TrainState
    step: int
    where: str | None = None
    parameters: str = ""
    history: History = dataclasses.field(default_factory=History)

    def __str__(self) -> str:
        if self.parameters:
            return (
                f"before step {self.step} (counted from 0), parameters are not finite, "
                f"although the losses and gradient norms were: {self.parameters}. The "
                "optimizer made them so, for example Adam with eps=0, or a learning "
                "rate that is not finite (they are in this error's `state`: go on from "
                "a checkpoint). Or they began so, as the -inf of a mask does: make it "
                "a NumPy array, a constant."
            )
        where = self.where or 'jax.config.update("jax_debug_nans", True) says where'
        return (
            f"the loss or the gradient norm was not finite at step {self.step} "
            f"(counted from 0): {where}. The last good state is in this error's "
            "`state`."
        )


@dataclasses.dataclass(eq=False, repr=False)
class TrainingInterrupted(KeyboardInterrupt):
    """SIGINT (Ctrl-C) or SIGTERM (preemption) ended `fit`. If you do not catch this
    error, it ends the program with the exit code 128 + `signal`: 130 or 143.

    In IPython and Jupyter, Ctrl-C only ends the cell, and `sys.last_value` is this
    error.

    - `state`: the state after the last whole step.
    - `step`: the number of that step.
    - `signal`: the signal.
    - `checkpoint`: the directory of the checkpoint with this state, if `fit` saves
        checkpoints.
    - `history`: the rows and evaluations until then.
    """

    state: Any
    step: int
    signal: Signals = Signals.SIGINT
    checkpoint: Any = None
    history: Any = None

    @property
    def code(self) -> int:
        """The exit code with which the program ends."""
        return 128 + self.signal

    def __str__(self) -> str:
        where = (
            "" if self.checkpoint is None else f", and was saved as {self.checkpoint}"
        )
        return (
            f"fit was interrupted by {self.signal.name} after step {self.step}; the "
            f"state is in this error's `state`{where}."
        )

    def _render_traceback_(self) -> list[str]:
        """Render this error for IPython."""
        return [
            f"{type(self).__name__}: {self}",
            "    import sys; state = sys.last_value.state",
        ]


class _Exiting(TrainingInterrupted, SystemExit):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The same error as an exit: Python ends with its `code` and prints no
    traceback."""


def interruption(
    state: Any, step: int, signum: int, checkpoint: Any, history: Any
) -> TrainingInterrupted:
    """Create the exception to raise. It ends the program, except for Ctrl-C in IPython,
    where an exit would print a hint about how to exit."""
    ipython = sys.modules.get("IPython")
    is_interactive = ipython is not None and ipython.get_ipython() is not None
    kind = (
        TrainingInterrupted if is_interactive and signum == signal.SIGINT else _Exiting
    )
    return kind(state, step, Signals(signum), checkpoint, history)


REPEAT_SECONDS = 2.0
"""The time in which the same signal counts as one request: `srun` and the batch script,
or a container and its group, each send one."""

PATIENCE_SECONDS = 3.0
"""After a signal, the time that a batch may still take. `docker stop` kills a program
after 10 seconds."""


class InterruptFlag:
    """A context in which the first SIGINT or SIGTERM only sets `signal`. The same
    signal is then ignored for `REPEAT_SECONDS`. Any other signal, and any later one,
    has its usual effect.

    Does nothing outside the main thread, or for a signal that the program handles
    itself.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._previous: dict[int, Any] = {}
        self._is_waiting = False
        self._pid = os.getpid()

    def __enter__(self) -> "InterruptFlag":
        if threading.current_thread() is threading.main_thread():
            defaults = {
                signal.SIGINT: signal.default_int_handler,
                signal.SIGTERM: signal.SIG_DFL,
            }
            for number, default in defaults.items():
                if signal.getsignal(number) is default:
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        while self._previous:
            signal.signal(*self._previous.popitem())

    def end_early(self, items: Iterator[T]) -> Iterator[T | None]:
        """Yield the items. If a signal comes, and the next item takes longer than
        `PATIENCE_SECONDS`, yield `None` in its place, and end.

        So a run can be saved although its reader hangs. Several processes must end at
        the same step, so with them this waits for the item.
        """
        can_end_alone = jax.process_count() == 1
        try:
            while True:
                self._is_waiting = can_end_alone
                try:
                    if self.signal:
                        # It came since the last item, perhaps while the state was
                        # saved.
                        self._limit_waiting()
                    item = next(items, None)
                finally:
                    self._is_waiting = False
                    self._cancel_alarm()
                if item is None:
                    return
                yield item
        except _ReaderHangsError:
            note_hang()
        yield None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A worker that was forked during the run, and that its pool wants to end.
            self.__exit__()
            signal.raise_signal(signum)
            return
        self.signal = signum
        # Restore the usual effects at once. A later call of this method could not:
        # Python calls it between two of its own instructions, but a second signal must
        # also end a program that is stuck outside Python.
        self.__exit__()
        _ignore_for(signum, REPEAT_SECONDS)
        self._limit_waiting()

    def _limit_waiting(self) -> None:
        """Give the item that `end_early` waits for, if it does, `PATIENCE_SECONDS`."""
        if self._is_waiting and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.signal(signal.SIGALRM, _raise_reader_hangs)
            signal.setitimer(signal.ITIMER_REAL, PATIENCE_SECONDS)

    def _cancel_alarm(self) -> None:
        if signal.getsignal(signal.SIGALRM) is _raise_reader_hangs:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


class _ReaderHangsError(BaseException):
    """The next batch does not come. No `Exception`, because the user's reader may catch
    those."""


def _raise_reader_hangs(signum: int, frame: FrameType | None) -> None:
    raise _ReaderHangsError


_TIMERS: dict[int, threading.Timer] = {}
"""The timers that restore the usual effect of a signal, by the signal."""


def _ignore_for(signum: int, seconds: float) -> None:
    """Ignore a signal for some seconds."""
    # `signal.signal` works only in the main thread, which may be stuck outside Python
    # when the time is over. So another thread restores the handler, by the functions in
    # C that `signal.signal` itself calls.
    get_handler = ctypes.pythonapi.PyOS_getsig
    get_handler.argtypes = (ctypes.c_int,)
    get_handler.restype = ctypes.c_void_p
    set_handler = ctypes.pythonapi.PyOS_setsig
    set_handler.argtypes = (ctypes.c_int, ctypes.c_void_p)
    set_handler.restype = ctypes.c_void_p
    # Not `SIG_IGN`, which a program that is started meanwhile would inherit. A function
    # of C that does nothing else is replaced by the usual effect there.
    ignore = ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p).value
    usual = set_handler(signum, ignore)

    def restore() -> None:
        # Another call of `fit` may have set its own handler meanwhile.
        if get_handler(signum) == ignore:
            set_handler(signum, usual)

    # The timer of an earlier call of `fit` must not end the time of this one.
    earlier = _TIMERS.pop(signum, None)
    if earlier is not None:
        earlier.cancel()
    timer = threading.Timer(seconds, restore)
    timer.daemon = True
    timer.start()
    _TIMERS[signum] = timer
