"""The course of a run: what is due at a step, what a function of the user's may change in it, and how it ends
before its time: by a step that is not finite, or by a signal, with the state in hand."""

import dataclasses
import signal
import sys
import threading
from collections.abc import Mapping
from signal import Signals
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from redco_eqx._base.protocols import check_positive
from redco_eqx._checkpoint.runs import RunRecord
from redco_eqx._distributed.consensus import from_first
from redco_eqx._sharding.mesh import put_global
from redco_eqx._step.state import TrainState, check_is_state, first_change
from redco_eqx._training.loggers import History

# What is due at a step, as a pure function of where a run stands and what was planned.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The length of a run, and what it does on the way.

    - `num_epochs`, `num_steps`: how long; exactly one of them.
    - `log_every`: the number of steps that a row of the log covers.
    - `evaluate`, `save`: after how many steps, 0 for after each epoch, `None` for never. What is done at all is
        done at the end, too.

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
                f"fit: num_epochs={self.num_epochs}, num_steps={self.num_steps}, but exactly one of them must "
                "be given."
            )
        check_positive("fit", num_epochs=self.num_epochs, num_steps=self.num_steps, log_every=self.log_every)


@dataclasses.dataclass(frozen=True)
class Due:
    """The things that are due after a step, in this order.

    - `log`: a row with the metrics since the last one.
    - `evaluate`: an evaluation, on a state that is known to be finite.
    - `save`: a checkpoint, which holds the results of the evaluation.
    - `finish`: nothing more; the run is at its end.
    """

    log: bool
    evaluate: bool
    save: bool
    finish: bool


def due(plan: Plan, run: RunRecord, *, stop: bool = False, is_end: bool = False) -> Due:
    """List what is due where a run stands, after its last step or where it goes on.

    **Arguments:**

    - `plan`: of the run.
    - `run`: where it stands, with its evaluations so far: none is made twice at one step.
    - `stop`: whether the run has been asked to stop: it saves and evaluates no more. What it saves holds the
        metrics that are not logged yet; without a save they are logged.
    - `is_end`: whether there are no more batches.
    """
    is_end = is_end or run.stopped or (plan.num_steps is not None and run.num_steps >= plan.num_steps)
    is_end = is_end or (plan.num_epochs is not None and run.epoch >= plan.num_epochs)
    evaluate = plan.evaluate is not None and (is_end or _is_due(plan.evaluate, run))
    evaluate = evaluate and not stop and not run.is_evaluated
    save = plan.save is not None and (is_end or stop or _is_due(plan.save, run))
    log = not save if stop else is_end or evaluate or run.num_steps % plan.log_every == 0
    return Due(log=log, evaluate=evaluate, save=save, finish=is_end or stop)


def _is_due(every: int, run: RunRecord) -> bool:
    return run.num_steps % every == 0 if every else run.batch == 0


# What a hook changes.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A change that a [`Hook`][] makes in a run.

    ```python
    def patient(run, row, state):
        losses = [evaluation["eval/loss"] for evaluation in run.evaluations]
        return rx.Change(stop=len(losses) > 3 and losses[-1] > losses[-4])

    evaluation = rx.Evaluation(held_out)
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=2, hook=patient, evaluation=evaluation)
    ```

    - `stop`: whether the run ends here, as at its last step: with an evaluation if one is wanted, and a save.
    - `state`: the state to go on with, of the same structure, shapes and dtypes. It is laid out as the one
        that the hook was given, whose `key` and `step` it keeps.
    """

    stop: bool = False
    state: TrainState | None = None


@runtime_checkable
class Hook(Protocol):
    """`(run, row, state) -> None`, or a [`Change`][]: called by `fit` after each row and each evaluation.

    - `run`: where the run stands ([`RunRecord`][]), with all its `evaluations`.
    - `row`: the metrics that were just logged: `train/...` of the steps since the last row, or `eval/...`.
    - `state`: after the last step. The next step deletes its arrays: `jax.device_get` what is to be kept.

    It is called on every process at the same steps. All of them must change the state alike; whether to stop
    is what process 0 says. A resumed run is exact if the hook decides by its arguments alone:
    what it keeps elsewhere is lost when the run ends.
    """

    def __call__(self, run: RunRecord, row: Mapping[str, float], state: TrainState, /) -> Change | None: ...


def apply_hook(
    hook: Hook, run: RunRecord, row: Mapping[str, float], state: TrainState
) -> tuple[RunRecord, TrainState]:
    """The run and the state after the hook.

    Raises `TypeError` or `ValueError` for a change that cannot be made.
    """
    change = hook(run, row, state)
    change = Change() if change is None else change
    if not isinstance(change, Change):
        raise TypeError(f"hook must return None or an rx.Change, but returned a {type(change).__name__}.")
    has_state = change.state is not None
    stop, is_changed = from_first(lambda: [bool(change.stop), has_state])
    if has_state != is_changed:
        raise ValueError(
            f"hook: on process {jax.process_index()} it returned {'a' if has_state else 'no'} state, unlike on "
            "process 0. All processes must change the state alike."
        )
    run = dataclasses.replace(run, stopped=run.stopped or stop)
    return run, state if change.state is None else _changed(state, change.state)


def _changed(old: TrainState, new: TrainState) -> TrainState:
    """`new`, laid out as `old`, and sharing no array with it or with anything else but where both have it."""
    check_is_state(new, "hook: Change's state")
    change = first_change(old, new)
    if change is not None:
        path, was, became = change
        raise ValueError(f"hook: it changes the state: {path} was {was} and became {became}.")
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise ValueError(
            "hook: the returned state is of another model. dataclasses.replace(state, params=...)."
        )
    for name in ("key", "step"):
        a, b = getattr(old, name), getattr(new, name)
        if a is not b and not bool(jnp.all(a == b)):
            raise ValueError(
                f"hook: the returned state has another {name}. The run goes on with its own: "
                "dataclasses.replace(state, params=...) keeps it."
            )

    def one(before: Any, after: jax.Array) -> jax.Array:
        # The next step takes over the memory, so what stands twice, or is held elsewhere, must be a copy.
        return before if after is before else jnp.copy(put_global(after, before.sharding))

    return jax.tree.map(one, old, new)


# How it ends before its time.


@dataclasses.dataclass(eq=False, repr=False)
class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm was not finite. `state` is the last good one, before `step`; `history` has
    the rows until then.

    It says which id or label of the batch was outside of what it is looked up in (on many processes, the one
    that holds the row does); under `jax_debug_nans`, which metric, or the gradient of which parameter.
    """

    state: TrainState
    step: int
    where: str | None = None
    history: History = dataclasses.field(default_factory=History)

    def __str__(self) -> str:
        where = self.where or 'jax.config.update("jax_debug_nans", True) says where'
        return (
            f"the loss or the gradient norm was not finite at step {self.step} (counted from 0): {where}. The "
            "last good state is in this error's `state`."
        )


@dataclasses.dataclass(eq=False, repr=False)
class TrainingInterrupted(KeyboardInterrupt):
    """`fit` was ended by SIGINT (Ctrl-C) or SIGTERM (preemption). Uncaught, it ends the program with the exit
    code 128 + `signal`: 130 or 143.

    In IPython and Jupyter Ctrl-C only ends the cell, and `sys.last_value` is this error.

    - `state`: that after the last whole step.
    - `step`: its number.
    - `signal`: which signal it was.
    - `checkpoint`: the directory where the state was saved, if `fit` was given one for checkpoints.
    - `history`: the rows and evaluations until then.
    """

    state: Any
    step: int
    signal: Signals = Signals.SIGINT
    checkpoint: Any = None
    history: Any = None

    @property
    def code(self) -> int:
        """The status with which the program ends."""
        return 128 + self.signal

    def __str__(self) -> str:
        where = "" if self.checkpoint is None else f", and was saved as {self.checkpoint}"
        return (
            f"fit was interrupted by {self.signal.name} after step {self.step}; the state is in this error's "
            f"`state`{where}."
        )

    def _render_traceback_(self) -> list[str]:
        """Show this in IPython."""
        return [f"{type(self).__name__}: {self}", "    import sys; state = sys.last_value.state"]


class _Exiting(TrainingInterrupted, SystemExit):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The same as an exit: Python ends by its `code`, and prints no traceback."""


def interruption(state: Any, step: int, signum: int, checkpoint: Any, history: Any) -> TrainingInterrupted:
    """The error to raise: one that ends the program, but for Ctrl-C in IPython, which would say how to exit."""
    ipython = sys.modules.get("IPython")
    is_interactive = ipython is not None and ipython.get_ipython() is not None
    kind = TrainingInterrupted if is_interactive and signum == signal.SIGINT else _Exiting
    return kind(state, step, Signals(signum), checkpoint, history)


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
