"""Rows for the loggers: windows of the training loop, fetched one window late, and evaluations."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
from tqdm import tqdm

from redco_eqx._logging.loggers import Progress
from redco_eqx._step.window import Window
from redco_eqx._types import Logger, Mean


@dataclasses.dataclass
class _Pending:
    """A window that was handed over and not fetched yet.

    - `step`: of the state, after the window's last step.
    - `epoch`: how many epochs of this run are done by then.
    - `num_steps`: that the window covers.
    - `finished_at`: when it was seen that the devices are done with it.
    """

    step: int
    epoch: float
    num_steps: int
    window: Window
    finished_at: float | None = None


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
        show: bool | None,
        initial: int = 0,
    ):
        is_first = jax.process_index() == 0
        self._loggers = list(loggers) if is_first else []
        self._bar = Progress(num_steps, initial=initial, description="train", show=show if is_first else False)
        self._batch_size = batch_size
        self._pending: _Pending | None = None
        self._since = time.perf_counter()
        self._num_untimed = 0

    def rewind(self, step: int) -> None:
        """Has the loggers that can (by a method `rewind`) drop their rows after `step`."""
        for logger in self._loggers:
            rewind = getattr(logger, "rewind", None)
            if rewind is not None:
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
        if pending is not None and pending.finished_at is None and pending.window.ok.is_ready():
            pending.finished_at = time.perf_counter()

    def push(self, step: int, epoch: float, num_steps: int, window: Window) -> bool:
        """Takes the window of the last `num_steps` steps, and reports the one before.

        `epoch` is the number of epochs done. Returns whether the window before was finite throughout.
        """
        ok = self.flush()
        self._pending = _Pending(step, epoch, num_steps, window)
        return ok

    def flush(self) -> bool:
        """Waits for the window that was pushed last, and reports it. Returns whether it was finite."""
        pending, self._pending = self._pending, None
        if pending is None:
            return True
        window = jax.device_get(pending.window)
        finished = pending.finished_at or time.perf_counter()
        elapsed, self._since = finished - self._since, finished
        num_timed, self._num_untimed = pending.num_steps - self._num_untimed, 0
        if not window.ok:
            return False
        num_taken = pending.num_steps - int(window.num_skipped)
        # jit sorts the names of metrics; the loss comes first for a reader.
        names = sorted(window.metrics, key=lambda name: name != "loss") if num_taken else []
        row = {f"train/{name}": _value(window.metrics[name]) for name in names}
        if num_timed and elapsed > 0:
            rate = num_timed / elapsed
            row["train/examples_per_second"] = rate * self._batch_size
            weight = float(window.metrics["loss"].weight)
            if weight > num_taken * self._batch_size:  # a Mean over tokens, not over examples
                row["train/tokens_per_second"] = rate * weight / num_taken
        if window.num_skipped:
            row["train/skipped_steps"] = float(window.num_skipped)
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


def _value(mean: Mean) -> float:
    """`mean.value` by NumPy: an operation of JAX would wait behind the steps that were dispatched since."""
    return float(mean.total / mean.weight) if mean.weight else 0.0


def say(message: str) -> None:
    """Prints a line to standard error on process 0, above a progress bar if there is one."""
    if jax.process_index() == 0:
        tqdm.write(message, file=sys.stderr)
