"""Where the numbers of a run go: console, JSON lines, TensorBoard, a progress bar; and the rows they get."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
from tqdm import tqdm

from redco_eqx._checkpoint.record import to_json
from redco_eqx._step.window import Window, window_row
from redco_eqx._types import Logger

# Where the numbers of a run go: console, JSON lines, TensorBoard, and a progress bar.
#
# A logger is anything that takes `logger(step, row)`; these are the ones that come along. They know
# nothing of processes: the caller uses them on one.


C = TypeVar("C")

_num_event_files = itertools.count()


@runtime_checkable
class TextStream(Protocol):
    """What is printed to: `sys.stderr`, an open file."""

    def write(self, text: str, /) -> object:
        """Takes some text."""
        ...

    def flush(self) -> object:
        """Hands it on."""
        ...


class _Closing:
    """`with` for what has a `close`."""

    def close(self) -> None:
        """Releases what is held. May be called twice."""

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _format_row(row: Mapping[str, float]) -> str:
    """`loss 2.345  grad_norm 0.1`: names without their group, four digits."""
    return "  ".join(f"{name.rpartition('/')[2]} {float(value):.4g}" for name, value in row.items())


class ConsoleLogger(_Closing):
    """Prints one line per row, its columns aligned; in `fit` also a progress bar, and what it goes on from.

    ```python
    state = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=[rx.ConsoleLogger(progress=False)])
    ```
    """

    def __init__(self, stream: TextStream | None = None, *, progress: bool | None = None):
        """**Arguments:**

        - `stream`: the text stream to print to, `sys.stderr` by default.
        - `progress`: whether `fit` shows a bar; `None` does so on a terminal.
        """
        self._stream = stream
        self.progress = progress

    def __call__(self, step: int, row: Mapping[str, float], /) -> None:
        columns = [f"{name} {float(value):<10.4g}" for name, value in row.items()]
        self.say("  ".join([f"step {step:>8}", *columns]).rstrip())

    def say(self, message: str) -> None:
        """Prints a line, above a bar if there is one."""
        tqdm.write(message, file=self._stream or sys.stderr)


class JSONLLogger(_Closing):
    """Appends each row to a file as one line of JSON: `{"step": 10, "time": 1.7e9, "train/loss": 2.3}`.

    `time` is in seconds since 1970. In a run of `fit` with checkpoints there is also `run`, by which `fit`
    finds the rows of that run again, should it be killed: several runs can have one file, one at a time. Each
    line is handed to the operating system at once, so that a crash loses none. JSON has no NaN or infinities:
    they are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float` reads back.

    ```python
    loggers = [rx.ConsoleLogger(), rx.JSONLLogger("log.jsonl")]
    state = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=loggers)
    rows = [json.loads(line) for line in open("log.jsonl")]
    ```
    """

    def __init__(self, path: str | os.PathLike[str]):
        """**Arguments:** `path`: the file; made, with its directories, at the first row. `~` is expanded."""
        self._path = pathlib.Path(path).expanduser()
        self._file = None
        self._run: str | None = None

    def __call__(self, step: int, row: Mapping[str, float], /) -> None:
        values = {name: to_json(float(value)) for name, value in row.items()}
        about = {"step": int(step), "time": time.time()}
        if self._run is not None:
            about["run"] = self._run
        line = json.dumps({**about, **values}, allow_nan=False)
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+b", buffering=0)
            if self._file.tell() > 0:  # a machine that went down can leave half a line
                self._file.seek(-1, os.SEEK_END)
                line = line if self._file.read(1) == b"\n" else "\n" + line
        self._file.write((line + "\n").encode())

    def set_run(self, run: str | None) -> None:
        """Marks the rows that come as those of a run, or of none."""
        self._run = run

    def rewind(self, step: int) -> None:
        """Drops the run's rows after `step`, and half a line: for a run that goes on from there. Rows of other
        runs stay."""
        self.close()
        if not self._path.exists():
            return
        lines = self._path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if self._stays(step, line)]
        if kept != lines:
            partial = self._path.with_name(self._path.name + ".tmp")
            partial.write_bytes(b"".join(kept))
            partial.replace(self._path)

    def _stays(self, step: int, line: bytes) -> bool:
        try:
            row = json.loads(line)
        except ValueError:
            return False
        if not line.endswith(b"\n") or not isinstance(row, dict) or "step" not in row:
            return line.endswith(b"\n")
        return row.get("run") != self._run or row["step"] <= step

    def close(self) -> None:
        """Closes the file. A later row opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLogger(_Closing):
    """Writes rows as TensorBoard scalars, by tensorboardX (`pip install "redco_eqx[log]"`).

    ```python
    loggers = [rx.ConsoleLogger(), rx.TensorBoardLogger("logs")]   # tensorboard --logdir logs
    state = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=loggers)
    ```
    """

    def __init__(self, directory: str | os.PathLike[str], *, purge_step: int | None = None):
        """**Arguments:**

        - `directory`: the run's directory; made at the first row. `~` is expanded.
        - `purge_step`: TensorBoard hides what earlier processes logged at this step and after. For a
            run restored at step `n` it is `n + 1`.

        Raises `ImportError` if tensorboardX is not installed.
        """
        try:
            import tensorboardX
        except ImportError as error:
            raise ImportError('TensorBoardLogger needs tensorboardX: pip install "redco_eqx[log]"') from error
        self._make_writer = tensorboardX.SummaryWriter
        self._arguments = {"logdir": os.path.expanduser(directory), "purge_step": purge_step}
        self._writer: Any = None

    def __call__(self, step: int, row: Mapping[str, float], /) -> None:
        if self._writer is None:
            # tensorboardX names files by the second, and one of the same name would be overwritten.
            suffix = f".{os.getpid()}.{next(_num_event_files):04d}"
            self._writer = self._make_writer(**self._arguments, filename_suffix=suffix)
        for name, value in row.items():
            self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Has TensorBoard hide the rows after `step`: for a run that goes on from there."""
        self.close()
        self._arguments["purge_step"] = step + 1

    def close(self) -> None:
        """Closes the event file. A later row opens another."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._arguments["purge_step"] = None  # what this process wrote itself stays


class Progress(_Closing):
    """A progress bar over the steps of a run."""

    def __init__(
        self,
        total: int | None,
        *,
        initial: int = 0,
        description: str = "",
        show: bool | None = None,
        stream: TextStream | None = None,
    ):
        """**Arguments:**

        - `total`: number of steps, those of `initial` included; `None` if it is not known.
        - `initial`: steps done before, in a resumed run.
        - `description`: what stands before the bar.
        - `show`: `None` shows the bar if the stream is a terminal, `True` and `False` do so always and
            never.
        - `stream`: the text stream to draw on, `sys.stderr` by default.
        """
        self._bar = tqdm(
            total=total,
            initial=initial,
            desc=description or None,
            disable=None if show is None else not show,
            file=stream or sys.stderr,
            dynamic_ncols=True,
        )

    def advance(self, num_steps: int = 1) -> None:
        """Counts steps as done."""
        self._bar.update(num_steps)

    def set_metrics(self, row: Mapping[str, float]) -> None:
        """Puts a few numbers after the bar, shown when it is next drawn."""
        self._bar.set_postfix_str(_format_row(row), refresh=False)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._bar.close()


# Rows for the loggers: windows of the training loop, fetched one window late, and evaluations.


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
