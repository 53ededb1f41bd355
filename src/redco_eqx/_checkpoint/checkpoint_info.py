"""`CheckpointInfo`: a checkpoint without its arrays, as its `record.json` holds it.

It describes one state on disk. The progress of the run that saved it, a `RunRecord`
(`run_record.py`), is one of its fields. Nothing here reads an array: `restore.py` does.
This file also lists the checkpoints of a directory.
"""

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

from redco_eqx._base.tree import describe
from redco_eqx._base.warn import warn
from redco_eqx._checkpoint.run_record import (
    CheckpointError,
    CheckpointFormatError,
    DamagedError,
    RunRecord,
    from_json,
    to_json,
)
from redco_eqx._paths import local_path

# The small JSON file of a checkpoint: its content, its run, and the user's extras.


FORMAT = 2


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Shape, dtype and checksum of an array that is not read.

    - `dtype`, `shape`: those of the array; for a typed PRNG key, those of the key,
        although its `jax.random.key_data` is saved.
    - `checksum`: that of `array_checksums` (`_sharding/pieces.py`).
    - `key_impl`: the implementation of a typed PRNG key; `None` for other arrays.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str = ""
    key_impl: str | None = None

    def __str__(self) -> str:
        return describe(self)


def versions() -> dict[str, str]:
    """Return the versions of Python, of this package and of its main dependencies."""
    names = ("redco_eqx", "jax", "equinox", "optax", "orbax-checkpoint")
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in names},
    }


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """The content of a checkpoint, without its arrays.

    - `step`: the number of steps taken.
    - `path`: the directory of the checkpoint.
    - `metrics`: results of an evaluation at this step, if there was one.
    - `extras`: the data that the user added.
    - `run`: the run of `fit` that wrote the checkpoint; `None` for another writer.
    - `arrays`: `{name: ArrayInfo}`, with names such as `model/layers.0.weight`.
    - `versions`: the versions of the packages that wrote the checkpoint.
    """

    step: int
    path: pathlib.Path
    metrics: dict[str, float]
    extras: dict[str, Any]
    run: RunRecord | None
    arrays: dict[str, ArrayInfo]
    versions: dict[str, str] = dataclasses.field(default_factory=versions)


def encode(info: CheckpointInfo) -> dict[str, object]:
    """Return the JSON for a checkpoint: the content, and the SHA-256 of the content.

    Raises `ValueError` if `extras` is not plain JSON.
    """
    try:
        is_plain = to_json(info.extras) == info.extras
    except (TypeError, ValueError, RecursionError):
        is_plain = False
    if not is_plain:
        raise ValueError(
            "extras must be plain JSON: dicts with strings as keys, lists (not "
            f"tuples), strings, finite numbers, booleans, None. {info.extras!r} would "
            "change when it is read back."
        )
    fields = {"format": FORMAT, **dataclasses.asdict(info)}
    del fields["path"]
    content = to_json(fields)
    return {"sha256": _sha256(content), "content": content}


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# The complete checkpoints in a directory, and their records. No array is read.


_NAME = re.compile(r"(\d+)(?:-(\d+))?")

_SCHEMES = ("gs", "s3", "az", "hf")
"""The schemes of addresses that Orbax opens."""
_WITH_COLONS = tuple(f"{scheme}:" for scheme in _SCHEMES)


def list_checkpoints(directory: str | os.PathLike[str]) -> list[CheckpointInfo]:
    """List the complete checkpoints in a directory, in ascending order of their steps.
    No arrays are read.

    A checkpoint is left out, with a warning, if its record is damaged or if this
    version cannot read it.

    Raises `CheckpointError` if the operating system cannot read a record, which may be
    whole.

    ```python
    rx.save("run", state, metrics={"eval/loss": 0.5})
    newest = rx.list_checkpoints("run")[-1]
    print(newest.step, newest.metrics)
    ```

    **Arguments:**

    - `directory`: as for `save`. It does not need to exist.
    """
    infos = []
    for _, _, path in entries(local(directory)):
        try:
            infos.append(read_record(path))
        except (DamagedError, CheckpointFormatError) as error:
            warn(f"{error}. It is left out.")
    return infos


def read_record(path: pathlib.Path) -> CheckpointInfo:
    """Read the record of one checkpoint.

    **Raises:** each error names the checkpoint.

    - `DamagedError`: the record is missing or damaged.
    - `CheckpointError`: the operating system cannot read it.
    - `CheckpointFormatError`: a different version wrote it.
    """
    try:
        # Orbax makes a folder for each item, and writes plain JSON into this one. To
        # read it needs no Orbax.
        outer = json.loads((path / "record" / "record.json").read_bytes())
        content = outer["content"]
        if _sha256(content) != outer["sha256"]:
            raise ValueError("its SHA-256 is not the one that was written")
    except OSError as error:
        if not is_damage(error):
            raise unreadable(path, error) from error
        raise DamagedError(
            f"{path} is damaged: its record.json is missing ({error!r})"
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedError(
            f"{path} is damaged: its record.json cannot be read ({error!r})"
        ) from error
    try:
        return _decode(path, content)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        written_by = content.get("versions") if isinstance(content, dict) else None
        raise CheckpointFormatError(
            f"{path} was written by another version of redco_eqx ({written_by}): "
            f"{error}. It is unchanged. Read it with that version, or pass another "
            "directory"
        ) from error


def _decode(path: pathlib.Path, content: Any) -> CheckpointInfo:
    """Invert `encode`. Raises `TypeError`, `ValueError`, `KeyError` or `AttributeError`
    if the content has another form."""
    number = content.pop("format")
    if number != FORMAT:
        raise ValueError(f"its format is {number}, but this version reads {FORMAT}")
    fields = from_json(content.pop("run"))
    metrics = from_json(content.pop("metrics"))
    arrays = {
        name: ArrayInfo(**{**x, "shape": _to_tuple(x["shape"])})
        for name, x in content.pop("arrays").items()
    }
    run = None if fields is None else _decode_run(fields)
    for name, x in arrays.items():
        _check_kinds(f"arrays[{name!r}]", vars(x), _OF_ARRAY)
    info = CheckpointInfo(path=path, run=run, metrics=metrics, arrays=arrays, **content)
    _check_kinds("record", vars(info), _OF_RECORD)
    return info


def _decode_run(fields: Any) -> RunRecord:
    """Make the record of a run from JSON, which has lists in place of tuples. Raises as
    `_decode` does."""
    positions = fields.get("positions")
    if positions is not None:
        positions = tuple(map(_to_tuple, _to_tuple(positions)))
    evaluations = _to_tuple(fields["evaluations"])
    run = RunRecord(**{**fields, "evaluations": evaluations, "positions": positions})
    _check_kinds("run", vars(run), _OF_RUN)
    return run


def _to_tuple(x: object) -> tuple[Any, ...]:
    if not isinstance(x, list):
        raise TypeError(f"{repr(x)[:80]} must be a list")
    return tuple(x)


# The kinds of the fields of a record. A field of another kind is refused, because it
# would raise an error of its own later, or count for something else.


def _is_count(x: object) -> bool:
    # In Python, `True` is an `int`.
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _is_row(x: object) -> bool:
    if not isinstance(x, dict):
        return False
    return all(type(number) in (int, float) for number in x.values())


def _is_text_or_none(x: object) -> bool:
    return x is None or isinstance(x, str)


def _has_step(row: Any) -> bool:
    return _is_row(row) and _is_count(row.get("step"))


def _is_position(fields: Any) -> bool:
    """Return true for the fields of a `Position`, which begin with `shard` and
    `num_shards`."""
    return len(fields) > 1 and all(map(_is_count, fields[:2]))


def _are_positions_or_none(x: Any) -> bool:
    if x is None:
        return True
    return len(x) > 0 and all(map(_is_position, x))


_Kinds: TypeAlias = Mapping[str, tuple[str, Callable[[Any], bool]]]
"""For each field, the expected kind in words, and the check."""

_COUNT = ("a number from 0", _is_count)
_BOOL = ("true or false", lambda x: isinstance(x, bool))
_TEXT_OR_NONE = ("text or null", _is_text_or_none)
_DICT = ("an object", lambda x: isinstance(x, dict))

_OF_RECORD: _Kinds = {
    "step": _COUNT,
    "metrics": ("numbers by name", _is_row),
    "extras": _DICT,
    "versions": _DICT,
}
_OF_ARRAY: _Kinds = {
    "dtype": ("text", lambda x: isinstance(x, str)),
    "shape": ("a list of sizes", lambda x: all(map(_is_count, x))),
    "checksum": ("text", lambda x: isinstance(x, str)),
    "key_impl": _TEXT_OR_NONE,
}
_OF_RUN: _Kinds = {
    **dict.fromkeys(("begin", "num_steps", "epoch", "batch", "num_rows"), _COUNT),
    "batch_size": ("a number from 1", lambda x: _is_count(x) and x > 0),
    "num_examples": ("a number from 0, or null", lambda x: x is None or _is_count(x)),
    **dict.fromkeys(("finished", "stopped"), _BOOL),
    "evaluations": (
        "a list of rows with their steps",
        lambda x: all(map(_has_step, x)),
    ),
    "window": ("an object or null", lambda x: x is None or isinstance(x, dict)),
    **dict.fromkeys(("order", "id"), _TEXT_OR_NONE),
    "positions": ("a list of shards, or null", _are_positions_or_none),
    "identity": _DICT,
}


def _check_kinds(where: str, fields: Mapping[str, Any], kinds: _Kinds) -> None:
    """Raise `ValueError` for the first field of another kind."""
    for name, (expected, is_of_kind) in kinds.items():
        value = fields[name]
        if not is_of_kind(value):
            raise ValueError(
                f"{where}: {name} is {repr(value)[:80]}, but must be {expected}"
            )


# One failed read is no damage. Too many open files, a stale mount or a missing
# permission say nothing about the checkpoint, which must not be renamed or passed over
# for them.


_OF_DAMAGE = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    # A damaged index leads to names and places that no file has.
    errno.ENAMETOOLONG,
    errno.EINVAL,
}
"""The errors of the operating system that mean a missing file."""

_IN_TEXT = re.compile(r"os_error_code='(\d+)'")
"""The way in which tensorstore names an error of the operating system, which it raises
as a `ValueError`."""


def is_damage(error: BaseException) -> bool:
    """Return false if the operating system could not read a file that exists."""
    cause: BaseException | None = error
    # The libraries raise errors of their own from those of the operating system.
    while cause is not None:
        numbers = [int(number) for number in _IN_TEXT.findall(str(cause))]
        if isinstance(cause, OSError) and cause.errno is not None:
            numbers.append(cause.errno)
        if not _OF_DAMAGE.issuperset(numbers):
            return False
        cause = cause.__cause__ or cause.__context__
    return True


def unreadable(path: pathlib.Path, error: BaseException) -> CheckpointError:
    """Make the error for a checkpoint that the operating system cannot read."""
    return CheckpointError(
        f"{path} cannot be read: {in_brief(error)}. The checkpoint may be whole, so "
        "nothing was renamed or changed. Fix the cause (too many open files, a "
        "permission, a mount), and try again"
    )


def in_brief(error: BaseException) -> str:
    """Describe an error, without the page of JSON that tensorstore appends."""
    return f"{type(error).__name__}: {str(error).partition(' [tensorstore_spec')[0]}"


def entries(directory: pathlib.Path) -> list[tuple[int, int, pathlib.Path]]:
    """List `(step, attempt, path)` of each directory with the name of a complete
    checkpoint, ascending.

    Raises `OSError` for a directory that cannot be read: it may have checkpoints.
    """
    found = []
    try:
        for path in directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), int(match[2] or 1), path))
    except (FileNotFoundError, NotADirectoryError):  # it does not exist yet
        return []
    return sorted(found)


def local(directory: str | os.PathLike[str]) -> pathlib.Path:
    """Return the absolute path of a directory of checkpoints.

    Raises as `local_path` does, and `ValueError` for a file.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            "the directory of checkpoints must be a path, but is a "
            f"{type(directory).__name__}. It comes first: save(directory, state), "
            "restore(directory, like=state)."
        )
    path = local_path("the directory of checkpoints", directory)
    if reason := _unsuitable(path):
        raise ValueError(
            f"the directory of checkpoints is {os.fspath(path)!r}, but {reason}. Pass "
            "another path."
        )
    return path


def _unsuitable(path: pathlib.Path) -> str:
    """Explain why no checkpoint can be written to a path; `""` if one can."""
    if path.is_file():
        return "it is a file, and checkpoints need a directory"
    if path.is_symlink() and not path.exists():
        return f"it is a link to {os.fspath(path.readlink())!r}, which does not exist"
    # The libraries that read and write checkpoints take these paths for others.
    top_folder = "".join(path.parts[1:2])
    if top_folder in _SCHEMES:
        return (
            f"Orbax takes /{top_folder} for the buckets of a cloud, even if it is a "
            "folder or a mount"
        )
    if any(part in _WITH_COLONS for part in path.parts):
        return "Orbax takes a folder with this name for the address of a bucket"
    if "\\" in str(path):
        return (
            "tensorstore takes a backslash for a slash, and would write to another "
            "folder"
        )
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "tensorstore needs names in UTF-8"
    return ""


def orbax_checkpoint() -> ModuleType:
    """Import the package when it is first used. Raises `ImportError` with the command
    that installs it."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            'checkpoints need Orbax: pip install "redco_eqx[checkpoint]"'
        ) from error
    return orbax.checkpoint
