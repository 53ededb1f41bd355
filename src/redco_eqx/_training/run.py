"""A run of `fit` in progress: its state, where it stands, and the metrics that are not logged yet."""

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from redco_eqx._checkpoint.checksum import unlike_replicas
from redco_eqx._checkpoint.names import storable, to_names
from redco_eqx._checkpoint.record import CheckpointError, RunRecord
from redco_eqx._data.epochs import Place
from redco_eqx._distributed.agreement import agree, is_shared
from redco_eqx._distributed.process_group import Watchdog
from redco_eqx._sharding.mesh import put_global, replicated
from redco_eqx._step.nonfinite import find_nonfinite, find_outside
from redco_eqx._step.state import TrainState, first_change, state_mesh, step_of
from redco_eqx._step.window import Window, next_window, window_from_json, window_to_json
from redco_eqx._training.checks import BatchShapes
from redco_eqx._training.compile import NUM_AHEAD, PerShape, TrainProgram
from redco_eqx._training.evaluation import Evaluation
from redco_eqx._training.history import History, Reporter
from redco_eqx._training.hook import Hook, apply_hook
from redco_eqx._training.identity import programs_of, refuse_unlike
from redco_eqx._training.saving import Saver
from redco_eqx._tree import lack_of_value
from redco_eqx._types import Batch, LossFn


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


class Training:
    """The state of a run and its record, moved on together.

    - `state`: after the last step that was dispatched.
    - `run`: where that is.
    - `saver`: the checkpoints of the run.
    """

    def __init__(
        self,
        state: TrainState,
        run: RunRecord,
        *,
        programs: PerShape[TrainProgram],
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        reporter: Reporter,
        saver: Saver,
        watchdog: Watchdog,
    ):
        """**Arguments:**

        - `programs`: the compiled step for a state and a batch, made of `loss_fn` and `optimizer`.
        - `watchdog`: is told of each step, of evaluations too.
        """
        self.state, self.run = state, run
        self._programs, self._loss_fn, self._optimizer = programs, loss_fn, optimizer
        self._reporter, self.saver, self._watchdog = reporter, saver, watchdog
        self._shapes = BatchShapes()
        self._ahead: deque[tuple[Batch, Window]] = deque()  # steps that may not be done yet
        self._empty: Window | None = None  # not before the first step
        self._window: Window | None = None
        self._num_in_window = 0
        self._unlike: Callable[[], list[str]] = list
        self._compared_at = run.step
        if run.window is not None:
            everywhere = replicated(state_mesh(state))
            self._window = jax.tree.map(lambda x: put_global(x, everywhere), window_from_json(run.window))
            self._num_in_window = run.window["num_steps"]

    @property
    def history(self) -> History:
        """The numbers of the run so far."""
        return History(tuple(self._reporter.rows), self.run.evaluations)

    def step(self, batch: Batch, place: Place) -> None:
        """Dispatches a step, which leads to `place`. Waits for the first one, which may compile."""
        self._shapes.check(batch)
        is_first = self._empty is None
        if is_first and self.saver.is_on:
            programs = programs_of(self.state, batch, loss_fn=self._loss_fn, optimizer=self._optimizer)
            self.run = self.saver.identified(self.run, programs)
        program = self._programs(self.state, batch)
        if self._empty is not program.window:
            agree(
                state_mesh(self.state), "fit: step", {"the checksum of the program of the step": program.digest}
            )
            self._empty = program.window
            if self._window is None or first_change(self._window, program.window):  # saved by another program
                self._window, self._num_in_window = program.window, 0
        self.state, window = program.compiled(self.state, self._window, batch)
        self._window = window
        self._num_in_window += 1
        self.run = self.run.advanced(place.epoch, place.batch, place.positions)
        self._ahead.append((batch, window))
        # With JAX's own debugging each step is waited for, so that it can be told where it went wrong.
        num_ahead = 0 if _is_debugging() else NUM_AHEAD
        if len(self._ahead) > num_ahead:
            is_ok = bool(jax.device_get(self._ahead[0][1].ok))
            if not is_ok:  # said while its batch is at hand
                self.check()
            self._require(is_ok)
            self._ahead.popleft()
        self._watchdog.beat()
        if is_first:
            if self._reporter.has_console:
                # Not at the head: the reader of compiled text is wanted only where it is heard.
                from redco_eqx._compiled.communication import cost

                self._reporter.say(f"fit: {cost(program.compiled, state_mesh(self.state))}")
            jax.block_until_ready(self._window)
            self._reporter.start_clock(self._num_in_window)
        self._reporter.advance()

    def log(self, place: Place) -> bool:
        """Ends the window, unless it is empty, which is returned as false. Its row comes with the next one, or
        with `check`."""
        if self._num_in_window == 0 or self._window is None:
            return False
        ok = self._reporter.push(self.run.step, place.epochs_done, self._window)
        if is_shared(state_mesh(self.state)):
            refuse_unlike(self._unlike(), f"That was so at step {self._compared_at}")
            self._unlike, self._compared_at = unlike_replicas(self.state.params), self.run.step
        self._window = None if self._empty is None else next_window(self._empty, self._window)
        self._num_in_window = 0
        self.run = dataclasses.replace(self.run, window=None)
        self._require(ok)
        return True

    def after_row(self, hook: Hook) -> None:
        """Calls the hook with the row of the window that ended last."""
        self.check()
        self._call(hook, self._reporter.metrics)

    def after_evaluation(self, hook: Hook) -> None:
        """Calls the hook with the results of the evaluation at this step."""
        self._call(hook, {name: x for name, x in self.run.evaluations[-1].items() if name != "step"})

    def _call(self, hook: Hook, row: Mapping[str, float]) -> None:
        before = self.state
        with self._reporter.paused():
            self.run, self.state = apply_hook(hook, self.run, row, self.state)
        if self.state is not before and is_shared(state_mesh(self.state)):
            unlike = unlike_replicas(storable(to_names(self.state)))
            refuse_unlike(unlike(), "The hook has changed the state otherwise on another process")
        self._watchdog.beat()

    def check(self) -> None:
        """Waits for the row of the window that ended last. Raises `NonFiniteError` instead of it."""
        self._require(self._reporter.flush())

    def evaluate(self, evaluation: Evaluation, *, stops: Callable[[], bool]) -> bool:
        """Evaluates the state, which must be finite; logs and remembers the results, unless `stops()`.

        Returns whether it came to its end.
        """
        self.check()

        def asked() -> bool:
            self._watchdog.beat()
            return stops()

        with self._reporter.paused():
            row = evaluation.unless(asked, self.state)
        if row is None:
            return False
        self._reporter.row(self.run.step, row)
        self.run = self.run.evaluated(row)
        return True

    def save(self, *, finished: bool) -> None:
        """Saves, unless just this is saved already.

        Raises `NonFiniteError` if a step since the last row was not finite, and what `Saver.save` does.
        """
        self.check()
        window = self.run.window
        if self._num_in_window > 0 and window is None:
            fetched = jax.device_get(self._window)
            self._require(bool(fetched.ok))
            window = window_to_json(fetched)
        run = dataclasses.replace(self.run, finished=finished, window=window)
        if self.saver.is_saved(run):
            return
        with self._reporter.paused():
            self.saver.save(self.state, run)

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Saves the state if an error ends the run, and gives it to the error, and the history."""
        if not isinstance(error, Exception):
            return
        with contextlib.suppress(AttributeError):
            error.history = self.history  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(error, NonFiniteError):
            return
        state = self.state
        if any(map(lack_of_value, jax.tree.leaves(state))):
            return
        where = ""
        # Not on many processes: the others know nothing of the error, and would not take part.
        if self.saver.is_on and jax.process_count() == 1 and not isinstance(error, CheckpointError):
            try:
                self.save(finished=False)
                where = f", and was saved as {self.saver.wait()}"
            except Exception as problem:
                where = f", and could not be saved: {problem}"
        try:
            error.state = state  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError:
            return
        error.add_note(f"fit: the state after step {self.run.step} is in this error's `state`{where}.")

    def _require(self, ok: bool) -> None:
        if ok:
            return
        step = step_of(self.state)
        behind = self.run.step - step
        where = None
        if 0 < behind <= len(self._ahead):
            batch, _ = self._ahead[-behind]
            with contextlib.suppress(Exception):  # it explains an error; one of its own would hide that
                where = find_outside(self.state, batch, loss_fn=self._loss_fn)
            if where is None and _is_debugging():
                where = find_nonfinite(self.state, batch, loss_fn=self._loss_fn)
        raise NonFiniteError(self.state, step, *([where] if where else []))


def _is_debugging() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs
