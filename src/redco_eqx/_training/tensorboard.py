"""A logger for TensorBoard."""

import os
import time
from collections.abc import Mapping
from typing import Any

from redco_eqx._paths import local_path


class TensorBoardLogger:
    """Writes each row as TensorBoard scalars, with tensorboardX
    (`pip install "redco_eqx[tensorboard]"`).

    If a run of `fit` continues after a crash, TensorBoard hides the rows that come
    again. Each row goes to the file at once.

    ```python
    loggers = [rx.ConsoleLogger(), rx.TensorBoardLogger("logs")]
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=1, loggers=loggers)
    ```

    Run `tensorboard --logdir logs` to see the curves.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        """**Arguments:** `directory`: the directory of the run; the first row creates
        it. `~` is expanded.

        Raises `ImportError` if tensorboardX is not installed, and `ValueError` for the
        address of a bucket, and for a file.
        """
        try:
            import tensorboardX.event_file_writer  # noqa: F401
        except ImportError as error:
            raise ImportError(
                "TensorBoardLogger needs tensorboardX: pip install "
                '"redco_eqx[tensorboard]"'
            ) from error
        self._directory = local_path("TensorBoardLogger: directory", directory)
        if self._directory.exists() and not self._directory.is_dir():
            raise ValueError(
                f"TensorBoardLogger: directory {self._directory} is a file. Pass a "
                "directory."
            )
        self._file: Any = None
        self._hidden_from: int | None = None

    def __call__(self, step: int, row: Mapping[str, float], /) -> None:
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        if self._file is None:
            self._file = self._open()
        values = [
            Summary.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
        ]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.write_event(event)
        self._file.flush()

    def _open(self) -> Any:
        """A new file. Its first event says which rows of earlier files to hide."""
        # Not `SummaryWriter`: it writes in a thread for which its `flush` does not
        # wait, so that a killed process loses rows.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )

        self._directory.mkdir(parents=True, exist_ok=True)
        # tensorboardX names a file by the second, and would overwrite one of the same
        # name.
        suffix = f".{os.getpid()}.{time.time_ns()}"
        file = EventsWriter(str(self._directory / "events"), suffix)
        if self._hidden_from is not None:
            start = SessionLog(status=SessionLog.START)
            file.write_event(Event(step=self._hidden_from, session_log=start))
            # A later file of this process must not hide its rows.
            self._hidden_from = None
        return file

    def rewind(self, step: int) -> None:
        """Make TensorBoard hide the rows after `step`, so that the run can continue
        from there."""
        self.close()
        self._hidden_from = step + 1

    def close(self) -> None:
        """Close the file. A later row opens another one."""
        if self._file is not None:
            self._file.close()
            self._file = None
