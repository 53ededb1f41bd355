"""Rows for the loggers: windows of the training loop, fetched one window late, and evaluations."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from redco_eqx._logging.loggers import ConsoleLogger, Progress
from redco_eqx._step.window import Window, window_row
from redco_eqx._types import Logger


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
    """Feeds the loggers and the progress bar of one run, on process 0 only.

    A window is fetched when the next one is pushed, by when the devices have long finished it: reading
    metrics does not stall the loop.

    - `metrics`: of the window that was fetched last, without rates.
    """

    def __init__(self, loggers: Sequence[Logger], *, num_steps: int | None, batch_size: int, initial: int = 0):
        """**Arguments:**

        - `loggers`: if a [`ConsoleLogger`][] is among them, it says whether there is a bar and messages.
        - `num_steps`: of the whole run, if it is known; `initial` of them are done.
        """
        self._loggers = list(loggers) if jax.process_index() == 0 else []
        self._console = next((x for x in self._loggers if isinstance(x, ConsoleLogger)), None)
        show = False if self._console is None else self._console.progress
        self._bar = Progress(num_steps, initial=initial, description="train", show=show)
        self._batch_size = batch_size
        self._pending: _Pending | None = None
        self._since = time.perf_counter()
        self._num_untimed = 0
        self.metrics: dict[str, float] = {}

    def say(self, message: str) -> None:
        """A line on the console, above the bar."""
        if self._console is not None:
            self._console.say(message)

    def begin(self, run: str | None) -> None:
        """Tells the loggers that can (by a method `set_run`) whose rows come now."""
        for logger in self._loggers:
            if set_run := getattr(logger, "set_run", None):
                set_run(run)

    def rewind(self, step: int) -> None:
        """Has the loggers that can (by a method `rewind`) drop the run's rows after `step`."""
        for logger in self._loggers:
            if rewind := getattr(logger, "rewind", None):
                rewind(step)

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
        if num_timed and elapsed > 0:
            rate = num_timed / elapsed
            row["train/examples_per_second"] = rate * self._batch_size
            num_taken = int(window.num_steps - window.num_skipped)
            weight = float(window.metrics["loss"].weight)
            if weight > num_taken * self._batch_size:  # a Mean over tokens, not over examples
                row["train/tokens_per_second"] = rate * weight / num_taken
        row["train/epoch"] = pending.epoch
        self._bar.set_metrics({name: row[name] for name in ("train/loss",) if name in row})
        self.row(pending.step, row)
        return True

    def row(self, step: int, row: Mapping[str, float]) -> None:
        """Hands a row to every logger."""
        for logger in self._loggers:
            logger(step, row)

    def close(self) -> None:
        """Ends the progress bar. The loggers belong to the caller, or to `fit`."""
        self._bar.close()
