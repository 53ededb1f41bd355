"""The checkpoints in a directory: which are complete, and what their records say. No array is read."""

import os
import pathlib
import re
import warnings
from collections.abc import Iterable
from types import ModuleType

import numpy as np

from redco_eqx._checkpoint.record import CheckpointError, CheckpointFormatError, CheckpointInfo, decode

_NAME = re.compile(r"(\d+)(?:-(\d+))?")
_HALF_WRITTEN = re.compile(r"\d+(-\d+)?(\.orbax-checkpoint-tmp.*|\.deleting)")


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """The complete checkpoints of a directory, ascending by step. No array is read.

    One whose record is damaged, or of a version that this one cannot read, is left out with a warning.

    ```python
    rx.save("run", state, metrics={"eval/loss": 0.5})
    newest = rx.list_checkpoints("run")[-1]
    print(newest.step, newest.metrics)
    ```

    **Arguments:**

    - `directory`: as for `save`; it need not exist.
    """
    infos = []
    for _, _, path in entries(local(directory)):
        try:
            infos.append(read_record(path))
        except (CheckpointError, CheckpointFormatError) as error:
            warnings.warn(f"{error}. It is left out.", stacklevel=2)
    return infos


def best_of(infos: Iterable[CheckpointInfo], metric: str, mode: str) -> CheckpointInfo | None:
    """The one whose `metric` is least or greatest, the first of equals; `None` if none has a number there."""
    sign = 1 if mode == "min" else -1
    scored = [(sign * info.metrics[metric], info) for info in infos if metric in info.metrics]
    numbers = [pair for pair in scored if not np.isnan(pair[0])]
    return min(numbers, key=lambda pair: pair[0])[1] if numbers else None


def read_record(path: pathlib.Path) -> CheckpointInfo:
    """The record of one checkpoint.

    Raises `CheckpointError`, naming it, if it is missing or damaged, and `CheckpointFormatError` if it is of
    another version.
    """
    try:
        return decode(path, (path / "record" / "record.json").read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged: its record cannot be read ({error})") from error
    except (CheckpointError, CheckpointFormatError) as error:
        raise type(error)(f"{path}: {error}") from error


def entries(directory: pathlib.Path) -> list[tuple[int, int, pathlib.Path]]:
    """`(step, attempt, path)` of what has the name of a complete checkpoint, ascending."""
    if not directory.is_dir():
        return []
    found = ((_NAME.fullmatch(path.name), path) for path in directory.iterdir() if path.is_dir())
    return sorted((int(m[1]), int(m[2] or 1), path) for m, path in found if m)


def complete(directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The directories of the complete checkpoints, ascending by step. Nothing is read."""
    return [path for _, _, path in entries(local(directory))]


def half_written(directory: pathlib.Path) -> list[pathlib.Path]:
    """What writers that were killed have left half-written or half-removed."""
    return [path for path in directory.iterdir() if _HALF_WRITTEN.fullmatch(path.name)]


def local(directory: str | os.PathLike[str]) -> pathlib.Path:
    """An absolute path, `~` expanded. Raises `ValueError` for a bucket or a file, `TypeError` for no path."""
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            f"the directory of checkpoints must be a path, but is a {type(directory).__name__}. It comes "
            "first: save(directory, state), restore(directory, like=state)."
        )
    if "://" in os.fspath(directory):
        raise ValueError(
            f"{directory} is not a path of a file system. Mount the bucket, or save to a disk and copy."
        )
    path = pathlib.Path(directory).expanduser().absolute()
    if path.is_file():
        raise ValueError(f"{path} is a file, but checkpoints need a directory. Pass another path.")
    return path


def orbax_checkpoint() -> ModuleType:
    """The package, imported at its first use. Raises `ImportError` with the line that installs it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError('checkpoints need Orbax: pip install "redco_eqx[checkpoint]"') from error
    return orbax.checkpoint
