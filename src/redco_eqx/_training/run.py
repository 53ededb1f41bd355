"""A run of `fit` in progress: its state, where it stands, and the metrics that are not logged yet."""

import dataclasses
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from redco_eqx._checkpoint.names import has_value
from redco_eqx._checkpoint.record import CheckpointError, RunRecord
from redco_eqx._data.epochs import Position
from redco_eqx._logging.report import Reporter
from redco_eqx._sharding.mesh import put, replicated
from redco_eqx._step.state import TrainState, step_of
from redco_eqx._step.window import Window, is_like, next_window, window_from_json, window_to_json
from redco_eqx._training.checks import BatchShapes
from redco_eqx._training.saving import Saver
from redco_eqx._training.throttle import Throttle
from redco_eqx._types import Batch


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm was not finite. `state` is the last good one, before `step`."""

    def __init__(self, state: TrainState, step: int):
        super().__init__(
            f"the loss or the gradient norm was not finite at step {step} (counted from 0). The last good "
            'state is in this error\'s `state`. fit(..., on_nonfinite="skip") leaves such steps out.'
        )
        self.state = state
        self.step = step


class Training:
    """The state of a run and its record, moved on together.

    - `state`: after the last step that was dispatched.
    - `run`: where that is.
    """

    def __init__(
        self,
        state: TrainState,
        run: RunRecord,
        *,
        body: Callable[[TrainState, Window, Batch], tuple[TrainState, Window]],
        begin_window: Callable[[TrainState, Batch], Window],
        reporter: Reporter,
        mesh: Mesh,
        throttle: Throttle,
    ):
        """**Arguments:**

        - `body`: the compiled step; it may take over the state that it is given.
        - `begin_window`: makes an empty window when the first batch is there.
        """
        self.state, self.run = state, run
        self._body, self._begin_window = body, begin_window
        self._reporter, self._mesh = reporter, mesh
        self._shapes, self._throttle = BatchShapes(), throttle
        self._empty: Window | None = None
        self._window, self._num_in_window = None, 0
        if run.window is not None:
            self._window, self._num_in_window = window_from_json(run.window, mesh), run.window["num_steps"]

    def step(self, batch: Batch, at: Position) -> None:
        """Dispatches a step, which leads to `at`. Waits for the first one, which compiles."""
        self._shapes.check(batch)
        is_first, empty = self._empty is None, self._empty
        if empty is None:
            window = self._begin_window(self.state, batch)
            empty = self._empty = jax.tree.map(lambda x: put(x, replicated(self._mesh)), window)
            if self._window is not None and not is_like(self._window, empty):
                self._window, self._num_in_window = None, 0  # saved by another program
        self.state, self._window = self._body(self.state, self._window or empty, batch)
        self._num_in_window += 1
        self.run = dataclasses.replace(
            self.run, num_steps=self.run.num_steps + 1, epoch=at.epoch, batch=at.batch, window=None
        )
        self._throttle(self._window)
        if is_first:
            jax.block_until_ready(self._window)
            self._reporter.start_clock(self._num_in_window)
        self._reporter.advance()

    def log(self, at: Position) -> None:
        """Ends the window. Its row comes with the next one, or with `check`."""
        if self._num_in_window == 0 or self._window is None:
            return
        ok = self._reporter.push(self.run.step, at.epochs_done, self._num_in_window, self._window)
        self._window = None if self._empty is None else next_window(self._empty, self._window)
        self._num_in_window = 0
        self._require(ok)

    def check(self) -> None:
        """Waits for the row of the window that ended last. Raises `NonFiniteError` instead of it."""
        self._require(self._reporter.flush())

    def add_evaluation(self, row: dict[str, float]) -> None:
        """Logs the results of an evaluation, and remembers them."""
        self._reporter.row(self.run.step, row)
        found = {"step": self.run.step, **row}
        self.run = dataclasses.replace(self.run, evaluations=(*self.run.evaluations, found))

    def save(self, saver: Saver, *, finished: bool) -> None:
        """Saves, unless just this is saved already.

        Raises `NonFiniteError` if a step since the last row was not finite, and what `saver.save` does.
        """
        self.check()
        window = self.run.window
        if self._num_in_window > 0 and window is None:
            fetched = jax.device_get(self._window)
            self._require(bool(fetched.ok))
            window = window_to_json(fetched, self._num_in_window)
        run = dataclasses.replace(self.run, finished=finished, window=window)
        if saver.is_saved(run):
            return
        if step_of(self.state) != run.step:
            raise ValueError(
                f"step_fn must count: the step of the state is {step_of(self.state)} after {run.num_steps} "
                f"steps from {run.begin}. Checkpoints are numbered by it."
            )
        saver.save(self.state, run)

    def end_by(self, error: Exception, saver: Saver | None) -> None:
        """Saves the state if an error has ended the run, and gives it to the error."""
        if isinstance(error, NonFiniteError):
            return
        state = self.state
        if not all(map(has_value, jax.tree.leaves(state))):
            return
        where = ""
        # Not on many processes: the others know nothing of the error, and would not take part.
        if saver is not None and jax.process_count() == 1 and not isinstance(error, CheckpointError):
            try:
                self.save(saver, finished=False)
                where = f", and was saved as {saver.wait()}"
            except Exception as problem:
                where = f", and could not be saved: {problem}"
        try:
            error.state = state  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError:
            return
        error.add_note(f"fit: the state after step {self.run.step} is in this error's `state`{where}.")

    def _require(self, ok: bool) -> None:
        if not ok:
            raise NonFiniteError(self.state, step_of(self.state))
