"""Loggers take the numbers of a run: console, JSON lines, TensorBoard, and a progress bar.

A logger is anything that takes `logger(step, row)`; these are the ones that come along. They know nothing of
processes: the caller uses them on one.
"""

import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

from redco_eqx._checkpoint.record import Row, from_json, to_json

C = TypeVar("C")

_num_event_files = itertools.count()


@runtime_checkable
class TextStream(Protocol):
    """A stream to print to: `sys.stderr`, an open file."""

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
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=[rx.ConsoleLogger(progress=False)])
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
        from tqdm import tqdm  # here and below: importing it takes as long as a third of this package

        tqdm.write(message, file=self._stream or sys.stderr)


class JSONLLogger(_Closing):
    """Appends each row to a file as one line of JSON: `{"step": 10, "time": 1.7e9, "train/loss": 2.3}`.

    `time` is in seconds since 1970. In a run of `fit` with checkpoints there is also `run`, by which `fit`
    finds the rows of that run again, should it be killed: several runs can have one file, one at a time. Each
    line is handed to the operating system at once, so that a crash loses none. JSON has no NaN or infinities:
    they are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`, which `float` reads back.

    ```python
    loggers = [rx.ConsoleLogger(), rx.JSONLLogger("log.jsonl")]
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=loggers)
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

    def rows(self) -> list[Row]:
        """The run's rows, `step` first: what it was called with."""
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        rows = [row for row in map(json.loads, lines) if isinstance(row, dict) and row.get("run") == self._run]
        return [{name: from_json(x) for name, x in row.items() if name not in ("time", "run")} for row in rows]

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
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=loggers)
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
        from tqdm import tqdm

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
