"""The rows of a run: handed to its loggers, and kept as its history."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from redco_eqx._checkpoint.record import CheckpointError, Row, RunRecord
from redco_eqx._distributed.consensus import from_first
from redco_eqx._step.window import Window, window_row
from redco_eqx._training.loggers import ConsoleLogger, JSONLLogger, Progress
from redco_eqx._types import Logger

FILE = "history.jsonl"
"""In a directory of checkpoints: the rows of its runs, each marked with the id of its run."""


@dataclasses.dataclass(frozen=True)
class History:
    """The numbers of a run of [`fit`][], from its first step on, whichever calls have made them.

    ```python
    state, history = rx.fit(state, examples, **pipeline, num_epochs=2, evaluation=rx.Evaluation(held_out))
    print(history["train/loss"][-1], history["eval/loss"])
    print([evaluation["step"] for evaluation in history.evaluations])
    ```

    `history["eval/loss"]` is a column: the numbers of that name in order, as a list. For a name that is in no
    row it raises `KeyError`.

    - `rows`: `{"step": 50, "train/loss": 2.3, ..., "train/epoch": 0.5}` for each row of the training, as the
        loggers get it, but for the rates: all that is here is the same on every process, and the same in a
        resumed run as in an uninterrupted one.
    - `evaluations`: `{"step": 100, "eval/loss": 2.1, ...}` for each evaluation.

    The rows of a run with checkpoints are kept beside these, in the file `history.jsonl` of their directory.
    """

    rows: tuple[Row, ...] = ()
    evaluations: tuple[Row, ...] = ()

    def __getitem__(self, name: str) -> list[float]:
        for table in (self.rows, self.evaluations):
            if column := [row[name] for row in table if name in row]:
                return column
        names = dict.fromkeys(name for row in (*self.rows, *self.evaluations) for name in row)
        raise KeyError(f"{name!r} is in no row of the history; there are: {', '.join(names) or 'none'}.")


@dataclasses.dataclass
class _Pending:
    """A window that was handed over and not fetched yet.

    - `step`: of the state, after the window's last step.
    - `epoch`: how many epochs of this run are done by then.
    - `finished_at`: when it was seen that the devices are done with it.
    """

    step: int
    epoch: float
    window: Window
    finished_at: float | None = None


class Reporter:
    """Keeps the rows of one run; feeds its loggers, its file and its progress bar, on process 0 only.

    A window is fetched when the next one is pushed, by when the devices have long finished it: reading
    metrics does not stall the loop.

    - `rows`: of the training, since the run began.
    - `metrics`: of the window that was fetched last, without rates.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        run: RunRecord,
        *,
        directory: pathlib.Path | None,
        num_steps: int | None,
        is_again: bool,
    ):
        """Marks the rows that come as those of `run`, for loggers that have a method `set_run`. A collective
        call.

        **Arguments:**

        - `loggers`: if a [`ConsoleLogger`][] is among them, it says whether there is a bar and messages.
        - `directory`: of the run's checkpoints, if it has any.
        - `num_steps`: of the whole run, if it is known.
        - `is_again`: whether the run began before. Its rows after `run` come again: they are cut off, also
            those of loggers that have a method `rewind`.
        """
        self._loggers = list(loggers) if jax.process_index() == 0 else []
        self._console = next((x for x in self._loggers if isinstance(x, ConsoleLogger)), None)
        show = False if self._console is None else self._console.progress
        self._bar = Progress(num_steps, initial=run.num_steps, description="train", show=show)
        self._batch_size = run.batch_size
        self._pending: _Pending | None = None
        self._since = time.perf_counter()
        self._num_untimed = 0
        self.metrics: dict[str, float] = {}
        self.rows: list[Row] = []
        is_first = jax.process_index() == 0
        self._file = JSONLLogger(directory / FILE) if directory is not None and is_first else None
        for logger in [*self._loggers, *filter(None, [self._file])]:
            if set_run := getattr(logger, "set_run", None):
                set_run(run.id)
        if is_again:
            for logger in self._loggers:
                if rewind := getattr(logger, "rewind", None):
                    rewind(run.step)
            self.rows = from_first(lambda: self._kept_rows(run))

    def _kept_rows(self, run: RunRecord) -> list[Row]:
        if self._file is None:
            return []
        # With metrics saved that are not in a row yet, the row of this very step comes again, too.
        self._file.rewind(run.step if run.window is None else run.step - 1)
        return self._file.rows()

    @property
    def has_console(self) -> bool:
        """True if `say` is heard."""
        return self._console is not None

    def say(self, message: str) -> None:
        """A line on the console, above the bar."""
        if self._console is not None:
            self._console.say(message)

    def start_clock(self, num_untimed: int = 1) -> None:
        """Leaves the first steps of a window, of which the last one compiled, out of the rates."""
        self._since, self._num_untimed = time.perf_counter(), num_untimed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what happens inside (an evaluation) out of the rates."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def advance(self) -> None:
        """Counts a dispatched step."""
        self._bar.advance()
        pending = self._pending
        # A look, not a wait: the time of a window is not that of its fetch, which is a window later.
        if pending is not None and pending.finished_at is None:
            ok: Any = pending.window.ok
            if ok.is_ready():
                pending.finished_at = time.perf_counter()

    def push(self, step: int, epoch: float, window: Window) -> bool:
        """Takes the window that ends at `step`, after so many epochs, and reports the one before.

        Returns whether the window before was finite throughout.
        """
        ok = self.flush()
        self._pending = _Pending(step, epoch, window)
        return ok

    def flush(self) -> bool:
        """Waits for the window that was pushed last, and reports it. Returns whether it was finite."""
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        window = jax.device_get(pending.window)
        finished = pending.finished_at or time.perf_counter()
        elapsed, self._since = finished - self._since, finished
        num_timed, self._num_untimed = int(window.num_steps) - self._num_untimed, 0
        if not window.ok:
            return False
        row = window_row(window)
        self.metrics = dict(row)
        self._keep(pending.step, {**row, "train/epoch": pending.epoch})
        if num_timed and elapsed > 0:
            rate = num_timed / elapsed
            row["train/examples_per_second"] = rate * self._batch_size
            num_steps, weight = int(window.num_steps), float(window.metrics["loss"].weight)
            if weight > num_steps * self._batch_size:  # a Mean over tokens, not over examples
                row["train/tokens_per_second"] = rate * weight / num_steps
        row["train/epoch"] = pending.epoch
        self._bar.set_metrics({name: row[name] for name in ("train/loss",) if name in row})
        self.row(pending.step, row)
        return True

    def _keep(self, step: int, row: Mapping[str, float]) -> None:
        self.rows.append({"step": step, **row})
        if self._file is None:
            return
        try:
            with self._file:  # closed after each row: a file system that is to be unmounted is not held up
                self._file(step, row)
        except OSError as error:
            raise CheckpointError(
                f"the row of step {step} could not be written beside the checkpoints: {error}"
            ) from error

    def row(self, step: int, row: Mapping[str, float]) -> None:
        """Hands a row to every logger."""
        for logger in self._loggers:
            logger(step, row)

    def close(self) -> None:
        """Ends the progress bar. The loggers belong to the caller, or to `fit`."""
        self._bar.close()
