"""Rows for the loggers: windows of the training loop, fetched one window late, and evaluations."""

import sys
import time
from collections.abc import Mapping, Sequence

import jax
from tqdm import tqdm

from redco_eqx._log import Progress
from redco_eqx._loop import Window
from redco_eqx._types import Logger


class Reporter:
    """Feeds the loggers and the progress bar of one run, on process 0 only.

    A window is fetched when the next one is pushed, by when the devices have long finished it: reading
    metrics does not stall the loop.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        *,
        num_steps: int | None,
        batch_size: int,
        steps_per_epoch: int | None,
        show: bool | None,
    ):
        is_first = jax.process_index() == 0
        self._loggers = list(loggers) if is_first else []
        self._bar = Progress(num_steps, description="train", show=show if is_first else False)
        self._batch_size, self._steps_per_epoch = batch_size, steps_per_epoch
        self._pending: tuple[int, int, int, Window] | None = None
        self._since = time.perf_counter()

    def restart_clock(self) -> None:
        """Leaves out of the rates what happened until now (compilation, an evaluation)."""
        self._since = time.perf_counter()

    def advance(self) -> None:
        """Counts a dispatched step."""
        self._bar.advance()

    def push(self, step: int, done: int, num_steps: int, window: Window) -> bool:
        """Takes the window of the last `num_steps` steps, and reports the one before.

        `done` counts the steps of this run. Returns whether the one before was finite throughout.
        """
        ok = self.flush()
        self._pending = (step, done, num_steps, window)
        return ok

    def flush(self) -> bool:
        """Waits for the window that was pushed last, and reports it. Returns whether it was finite."""
        if self._pending is None:
            return True
        step, done, num_steps, window = self._pending
        self._pending = None
        window = jax.device_get(window)
        elapsed, self._since = time.perf_counter() - self._since, time.perf_counter()
        num_taken = num_steps - int(window.num_skipped)
        if not window.ok:
            return False
        # jit sorts the names of metrics; the loss comes first for a reader.
        names = sorted(window.metrics, key=lambda name: name != "loss") if num_taken else []
        row = {f"train/{name}": float(window.metrics[name]) for name in names}
        row["train/examples_per_second"] = num_steps * self._batch_size / elapsed
        weight = float(window.metrics["loss"].weight)
        if weight > num_steps * self._batch_size:  # a Mean over tokens, not over examples
            row["train/tokens_per_second"] = weight / elapsed
        if window.num_skipped:
            row["train/skipped_steps"] = float(window.num_skipped)
        if self._steps_per_epoch:
            row["train/epoch"] = done / self._steps_per_epoch
        self._bar.set_metrics({name: row[name] for name in ("train/loss",) if name in row})
        self.row(step, row)
        return True

    def row(self, step: int, row: Mapping[str, float]) -> None:
        """Hands a row to every logger."""
        for logger in self._loggers:
            logger(step, row)

    def close(self) -> None:
        """Ends the progress bar. The loggers belong to the caller, or to `fit`."""
        self._bar.close()


def say(message: str) -> None:
    """Prints a line to standard error on process 0, above a progress bar if there is one."""
    if jax.process_index() == 0:
        tqdm.write(message, file=sys.stderr)
