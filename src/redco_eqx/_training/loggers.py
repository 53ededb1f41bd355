"""The history of a run, and the loggers that receive its rows: console with a bar, JSON
lines.

A logger is any callable `logger(step, row)`. This module has the loggers of this
package. They need not know about processes, because the `Reporter` of a run calls them
on only one process.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax

from redco_eqx._base.protocols import Logger
from redco_eqx._base.warn import warn
from redco_eqx._checkpoint.run_record import (
    CheckpointError,
    LogRow,
    RunRecord,
    from_json,
    to_json,
)
from redco_eqx._distributed.consensus import from_first
from redco_eqx._paths import local_path
from redco_eqx._step.window import Window


class _Console:
    """A text stream that falls silent, where others fail, once it can no longer be
    written.

    A pipe is closed, a terminal vanishes, a daemon has no standard error: none of these
    ends a training.
    """

    def __init__(self, stream: Any):
        self._wrapped = stream  # the name that tqdm looks for, to compare streams
        self._is_gone = False

    def write(self, text: str) -> None:
        try:
            self._attempt("write", text)
        except UnicodeEncodeError:
            self._attempt("write", text.encode("ascii", "backslashreplace").decode())

    def flush(self) -> None:
        self._attempt("flush")

    def isatty(self) -> bool:
        return bool(self._attempt("isatty"))

    def _attempt(self, method: str, *arguments: Any) -> Any:
        if self._is_gone or not hasattr(self._wrapped, method):
            return None
        try:
            return getattr(self._wrapped, method)(*arguments)
        except UnicodeEncodeError:
            raise
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._is_gone = True
            with contextlib.suppress(OSError, ValueError, AttributeError):
                last_word = (
                    "fit: the console can no longer be written, and says nothing more: "
                    f"{error!r}"
                )
                print(last_word, file=sys.__stderr__, flush=True)
            return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __eq__(self, other: object) -> bool:
        return self._wrapped == getattr(other, "_wrapped", other)

    def __hash__(self) -> int:
        return hash(self._wrapped)


class ConsoleLogger:
    """Prints one line per row, with aligned columns. In `fit`, it also shows a progress
    bar, and prints messages, such as the checkpoint from which a run continues. If its
    stream can no longer be written (a pipe that is closed, a terminal that is gone), it
    falls silent, and the training goes on.

    ```python
    console = rx.ConsoleLogger(progress=False)
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=[console])
    ```
    """

    def __init__(self, stream: Any = None, *, progress: bool | None = None):
        """**Arguments:**

        - `stream`: the text stream to print to, `sys.stderr` by default.
        - `progress`: true to let `fit` show a bar; `None` shows it only on a terminal.
        """
        self._stream = stream
        self.progress = progress
        self._console = _Console(stream)

    def __call__(self, step: int, row: Mapping[str, float], /) -> None:
        columns = [f"{name} {float(value):<10.4g}" for name, value in row.items()]
        self.say("  ".join([f"step {step:>8}", *columns]).rstrip())

    def say(self, message: str) -> None:
        """Print a line, above the progress bar if there is one."""
        # Here and below: importing it takes a third as long as importing this package.
        from tqdm import tqdm

        stream = self._stream or sys.stderr
        if self._console != stream:  # a program may replace `sys.stderr`
            self._console = _Console(stream)
        tqdm.write(message, file=cast(Any, self._console))


class JSONLLogger:
    """Appends each row to a file as one line of JSON:
    `{"step": 10, "time": 1.7e9, "train/loss": 2.3}`.

    `time` is in seconds since 1970. In a run of `fit` with checkpoints, a row also has
    `run`. With it, `fit` finds the rows of a run again after the run was killed, so
    that several runs can use one file, one at a time. Each line goes to the operating
    system at once, so that a crash loses none. JSON has no NaN or infinities, so they
    are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float`
    reads back.

    ```python
    loggers = [rx.ConsoleLogger(), rx.JSONLLogger("log.jsonl")]
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=loggers)
    rows = [json.loads(line) for line in open("log.jsonl")]
    ```
    """

    def __init__(self, path: str | os.PathLike[str]):
        """**Arguments:** `path`: the file; the first row creates it and its
        directories. `~` is expanded.

        Raises `ValueError` for the address of a bucket, and for a directory.
        """
        self._path = local_path("JSONLLogger: path", path)
        check_is_file("JSONLLogger: path", self._path)
        self._run: str | None = None

    def __call__(self, step: int, row: Mapping[str, float], /) -> None:
        values = {name: to_json(float(value)) for name, value in row.items()}
        about = {
            "step": int(step),
            "time": time.time(),
            **({"run": self._run} if self._run else {}),
        }
        line = json.dumps({**about, **values}, allow_nan=False)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Close the file after each row, so that its file system can be unmounted.
        with self._path.open("a+b", buffering=0) as file:
            if file.tell() > 0:  # a crash of the machine can leave half a line
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            left = (line + "\n").encode()
            while left:
                # A disk that becomes full takes a part, and raises at the next one.
                left = left[file.write(left) :]

    def set_run(self, run: str | None) -> None:
        """Mark later rows as those of a run, or of none."""
        self._run = run

    def rewind(self, step: int) -> list[LogRow]:
        """Drop the run's rows after `step`, and any line that is no JSON, so that the
        run can continue from there. Rows of other runs stay, and so do lines of JSON
        that are no rows.

        Return the remaining rows of the run, as the logger received them, with `step`
        first.
        """
        lines = (
            self._path.read_bytes().splitlines(keepends=True)
            if self._path.exists()
            else []
        )
        kept = []
        rows = []
        for line in lines:
            try:
                found = json.loads(line)
            except RecursionError:  # of another program
                kept.append(line)
                continue
            except ValueError:  # half a line
                continue
            row = self._row_in(found)
            if line.endswith(b"\n") and not (row and row["step"] > step):
                kept.append(line)
                rows += [row] if row else []
        if kept != lines:
            write_atomically(self._path, b"".join(kept))
        return rows

    def _row_in(self, found: Any) -> dict[str, Any] | None:
        """Return a row of the run; `None` for anything else."""
        if not isinstance(found, dict) or found.get("run") != self._run:
            return None
        row = {
            name: from_json(x)
            for name, x in found.items()
            if name not in ("time", "run")
        }
        is_row = type(row.get("step")) is int and all(
            type(x) in (int, float) for x in row.values()
        )
        return row if is_row else None


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Write a file so that a kill leaves either the file as it was before or the whole
    new one."""
    path = path.resolve()  # replace the file, not a link to it
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


HISTORY = "history.jsonl"
"""The name of the file, beside the checkpoints, with the rows of all runs in the
directory."""


def check_is_file(argument: str, path: pathlib.Path) -> None:
    """Raise `ValueError` unless a path is that of a file, or of one that can be
    made."""
    if path.is_dir():
        raise ValueError(
            f"{argument} is the file {path}, but that is a directory. Rename it, or "
            "pass another path."
        )


def progress_bar(
    total: int | None, *, initial: int = 0, show: bool | None = None, stream: Any = None
) -> Any:
    """Make a tqdm bar for a run of `total` steps (`None` if unknown), with `initial`
    steps done.

    `show` is the `progress` of a `ConsoleLogger`; the stream is `sys.stderr` by
    default.
    """
    from tqdm import tqdm

    options: Any = {
        "desc": "train",
        "total": total,
        "initial": initial,
        "dynamic_ncols": True,
    }
    disable = None if show is None else not show
    try:
        return tqdm(
            **options, file=cast(Any, _Console(stream or sys.stderr)), disable=disable
        )
    except (OSError, ValueError):
        # Tqdm itself flushes the standard streams, which may be closed.
        return tqdm(**options, disable=True)


@dataclasses.dataclass(frozen=True)
class History:
    """The numbers of a run of [`fit`][] since its first step, even if the run took
    several calls.

    ```python
    evaluation = rx.Evaluation(held_out)
    state, history = rx.fit(
        state, examples, **pipeline, num_epochs=2, evaluation=evaluation
    )
    print(history["train/loss"][-1], history["eval/loss"])
    print([evaluation["step"] for evaluation in history.evaluations])
    ```

    `history["eval/loss"]` is a list of the numbers with that name, in order. It raises
    `KeyError` if no row has the name.

    - `rows`: `{"step": 50, "train/loss": 2.3, ..., "train/epoch": 0.5}` for each row of
        the training. It is the row that the loggers receive, without the rates. Every
        number is the same on every process, and the same whether or not the run was
        interrupted.
    - `evaluations`: `{"step": 100, "eval/loss": 2.1, ...}` for each evaluation.

    If a run has checkpoints, its rows are written beside them, in the file
    `history.jsonl` in their directory.
    """

    rows: tuple[LogRow, ...] = ()
    evaluations: tuple[LogRow, ...] = ()

    def __getitem__(self, name: str) -> list[float]:
        for table in (self.rows, self.evaluations):
            if column := [row[name] for row in table if name in row]:
                return column
        names = dict.fromkeys(
            name for row in (*self.rows, *self.evaluations) for name in row
        )
        raise KeyError(
            f"{name!r} is in no row of the history. The rows have: "
            f"{', '.join(names) or 'none'}."
        )


class Reporter:
    """Keeps the rows of one run. Updates the loggers, the file and the progress bar of
    the run, only on process 0.

    - `rows`: the training rows since the run began.
    - `metrics`: the metrics of the last of these rows, without rates.
    - `console`: the first console among the loggers, or `None`.
    - `bar`: the progress bar, which is hidden if there is no console.
    - `peak_seconds`: that of the current [`TrainProgram`][].
    """

    peak_seconds = 0.0

    def __init__(
        self,
        loggers: Sequence[Logger],
        run: RunRecord,
        *,
        directory: pathlib.Path | None,
        num_steps: int | None,
        is_again: bool,
    ):
        """Mark later rows as those of `run`, for loggers with a method `set_run`. All
        processes must call it.

        **Arguments:**

        - `loggers`: the bar and the messages appear only if one of them is a
            [`ConsoleLogger`][].
        - `directory`: the directory of the run's checkpoints, if it has any.
        - `num_steps`: the number of steps of the whole run, if it is known.
        - `is_again`: true if the run began in an earlier call. Its rows after `run`
            will come again, so they are removed from the file, and from loggers with a
            method `rewind`.
        """
        self._loggers: list[Any] = list(loggers) if jax.process_index() == 0 else []
        self.console = next(
            (x for x in self._loggers if isinstance(x, ConsoleLogger)), None
        )
        show = False if self.console is None else self.console.progress
        self.bar = progress_bar(num_steps, initial=run.num_steps, show=show)
        self._batch_size = run.batch_size
        self._since = time.perf_counter()
        self._num_untimed = 0
        self.metrics: dict[str, float] = {}
        self.rows: list[LogRow] = []
        # The file has the rows of all runs in the directory, each marked with the id of
        # its run.
        path = directory and directory / HISTORY
        self._file = file = path and JSONLLogger(path)
        for logger in [*self._loggers, file]:
            if hasattr(logger, "set_run"):
                logger.set_run(run.id)
        if is_again:
            for logger in self._loggers:
                if hasattr(logger, "rewind"):
                    logger.rewind(run.logged_until)
            found = from_first(lambda: file.rewind(run.logged_until) if file else [])
            # A copy of the file, or two programs, can leave a row twice. The last one
            # counts.
            by_step = {row["step"]: row for row in found}
            self.rows = rows = [by_step[step] for step in sorted(by_step)]
            if len(rows) < run.num_rows:
                lack = (
                    f"{len(rows)} of the {run.num_rows} rows of the run are left in "
                    f"{path}"
                )
                warn(f"fit: {lack}, so the history lacks the others.")

    def say(self, message: str) -> None:
        """Print a line on the console, above the progress bar."""
        if self.console is not None:
            self.console.say(message)

    def start_clock(self, num_untimed: int) -> None:
        """Exclude the first steps of a window, the last of which compiled, from the
        rates."""
        self._since = time.perf_counter()
        self._num_untimed = num_untimed

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time spent in the `with` block (such as an evaluation) from the
        rates."""
        began = time.perf_counter()
        yield
        self._since += time.perf_counter() - began

    def report(
        self,
        step: int,
        epochs_done: float,
        window: Window,
        done_at: float,
        clocks: LogRow,
    ) -> None:
        """Make the row of a fetched window, and report it. `step` is the last step of
        the window, `done_at` the time of `time.perf_counter` at which the devices were
        done with it, and `clocks` go to the loggers alone."""
        elapsed = done_at - self._since
        self._since = done_at
        num_timed = int(window.num_steps) - self._num_untimed
        self._num_untimed = 0
        self.metrics = window.row()
        epoch = {"train/epoch": epochs_done}
        rates = {}
        self.rows.append({"step": step, **self.metrics, **epoch})
        if self._file is not None and jax.process_index() == 0:
            try:
                self._file(step, {**self.metrics, **epoch})
            except OSError as error:
                message = (
                    f"the row of step {step} could not be written beside the "
                    f"checkpoints: {error}"
                )
                raise CheckpointError(message) from error
        self.bar.set_postfix_str(
            f"loss {self.metrics['train/loss']:.4g}", refresh=False
        )
        if num_timed and elapsed > 0:
            rates = {
                "train/examples_per_second": num_timed / elapsed * self._batch_size
            }
            num_steps = int(window.num_steps)
            weight = float(window.metrics["loss"].weight)
            if weight > num_steps * self._batch_size:
                # A Mean over tokens, not over examples.
                rates["train/tokens_per_second"] = (
                    num_timed / elapsed * weight / num_steps
                )
            if self.peak_seconds:
                rates["train/mfu"] = num_timed / elapsed * self.peak_seconds
        self.row(step, {**self.metrics, **rates, **clocks, **epoch})

    def row(self, step: int, row: Mapping[str, float]) -> None:
        """Pass a row to every logger."""
        for logger in self._loggers:
            logger(step, dict(row))  # a copy of its own, which it may change
