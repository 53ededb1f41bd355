"""The record of a checkpoint, a small JSON file, and the checkpoints of a directory. No array is read."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import types
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from redco_eqx._base.tree import describe

# Numbers that JSON has no form for, as the strings that `float` reads.


_STRINGS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(x: Any) -> Any:
    """The string for NaN or an infinity; all else as it is."""
    if not isinstance(x, float) or math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def from_json(x: Any) -> Any:
    """The inverse of `to_json`."""
    return _STRINGS.get(x, x) if isinstance(x, str) else x


# The small JSON file of a checkpoint: what it holds, of which run, and what the user added.


FORMAT = 2
"""Format 1 is read too: it has an `origin` in place of an `identity`, and positions without a checksum."""

Json: TypeAlias = Mapping[str, Any]
"""Dicts with strings as keys, lists, strings, finite numbers, booleans, `None`."""

Row: TypeAlias = Mapping[str, float | int]
"""Numbers by name."""

Identity: TypeAlias = dict[str, Any]
"""Of the state, the functions and the examples of a run: see `_training/identity.py`. Plain JSON."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read, is damaged, or cannot be written; or its directory has another writer."""


class CheckpointFormatError(RuntimeError):
    """A checkpoint was written by another version, in a format that this one cannot read. It is not damaged."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The place of a run of `fit`, as a checkpoint records it.

    - `begin`: the step at which it began.
    - `num_steps`: how many it has taken.
    - `epoch`, `batch`: whole epochs done, and batches of the next one done.
    - `batch_size`, `num_examples`: of the training; the examples of the first epoch, `None` of a stream.
    - `finished`: whether it has come to its end.
    - `evaluations`: `{"step": ..., "eval/loss": ..., ...}` of each evaluation so far.
    - `window`: metrics that were not logged yet.
    - `stopped`: whether a hook has ended it.
    - `order`: how the order of an epoch follows from its key, see `Epochs`; `None` for that of the examples
        themselves. Records without one are of version 0.1, which sorted random numbers.
    - `positions`: where each shard of a stream was left: the fields of its `Position`.
    - `identity`: what the run is besides, by which another one is told from it: see `Identity`.
    - `id`: what its rows in a log are marked with.
    """

    begin: int
    num_steps: int
    epoch: int
    batch: int
    batch_size: int
    num_examples: int | None
    finished: bool = False
    evaluations: tuple[Row, ...] = ()
    window: dict[str, Any] | None = None
    stopped: bool = False
    order: str | None = "sorted"
    positions: tuple[tuple[Any, ...], ...] | None = None
    identity: Identity | None = None
    id: str | None = None

    def advanced(
        self, epoch: int, batch: int, positions: tuple[tuple[Any, ...], ...] | None = None
    ) -> "RunRecord":
        """One step later, which has led to this place."""
        return dataclasses.replace(
            self, num_steps=self.num_steps + 1, epoch=epoch, batch=batch, window=None, positions=positions
        )

    @property
    def num_shards(self) -> int | None:
        """In how many shards a stream is read; `None` without a stream."""
        return None if self.positions is None else self.positions[0][1]

    def evaluated(self, row: Row) -> "RunRecord":
        """With the results of an evaluation at this step."""
        return dataclasses.replace(self, evaluations=(*self.evaluations, {"step": self.step, **row}))

    @property
    def step(self) -> int:
        """The step of the state."""
        return self.begin + self.num_steps

    @property
    def is_evaluated(self) -> bool:
        """True if there was an evaluation at this step."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.step


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """Shape, dtype and checksum of an array that is not read.

    - `dtype`, `shape`: of a typed PRNG key, those of the key; it is stored as its `jax.random.key_data`.
    - `checksum`: that of `arrays.digest`, in hexadecimal digits.
    - `key_impl`: of a typed PRNG key.
    """

    dtype: str
    shape: tuple[int, ...]
    checksum: str = ""
    key_impl: str | None = None

    def __str__(self) -> str:
        return describe(self)


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """The content of a checkpoint besides its arrays.

    - `step`: number of steps taken.
    - `path`: its directory.
    - `metrics`: results of an evaluation at this step, if there was one.
    - `extras`: what the user added.
    - `run`: the run of `fit` that wrote it.
    - `versions`: of the packages that wrote it.
    - `arrays`: `{name: ArrayInfo}`, with names such as `model/layers.0.weight`.
    """

    step: int
    path: pathlib.Path
    metrics: dict[str, float]
    extras: Json
    run: RunRecord | None
    versions: dict[str, str]
    arrays: dict[str, ArrayInfo]


def encode(
    step: int,
    arrays: Mapping[str, ArrayInfo],
    metrics: Row | None,
    extras: Json | None,
    run: RunRecord | None,
) -> dict[str, object]:
    """The JSON of a checkpoint: its content, and the SHA-256 of that.

    Raises `ValueError` if `extras` is not plain JSON.
    """
    extras = dict(extras or {})
    try:
        same = json.loads(json.dumps(extras, allow_nan=False)) == extras
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"extras must be plain JSON, but {error}.") from error
    if not same:
        raise ValueError(
            "extras must be plain JSON: dicts with strings as keys, lists (not tuples), strings, finite "
            f"numbers, booleans, None. {extras!r} would not come back as it is."
        )
    content = {
        "format": FORMAT,
        "step": step,
        "versions": versions(),
        "metrics": {name: to_json(float(x)) for name, x in (metrics or {}).items()},
        "extras": extras,
        "run": None if run is None else _map_leaves(to_json, dataclasses.asdict(run)),
        "arrays": {name: dataclasses.asdict(info) for name, info in arrays.items()},
    }
    return {"sha256": _sha256(content), "content": content}


def decode(path: pathlib.Path, text: str) -> CheckpointInfo:
    """The inverse of `encode`.

    Raises `CheckpointError` if the text is damaged, `CheckpointFormatError` if it is of another version.
    """
    try:
        outer = json.loads(text)
        content, sha256 = outer["content"], _sha256(outer["content"])
        if sha256 != outer["sha256"]:
            raise CheckpointError(
                f"its record.json is damaged: SHA-256 is {sha256}, but {outer['sha256']} was written"
            )
        number = content.pop("format")
        if number not in (1, FORMAT):
            raise CheckpointFormatError(
                f"its format is {number}, but this version of redco_eqx reads 1 to {FORMAT}; it was written by "
                f"{content.get('versions')}. Nothing was changed: read it with that version, or pass another "
                "directory"
            )
        arrays = {
            name: _made(ArrayInfo, {**info, "shape": tuple(info["shape"])}, f"arrays.{name}.")
            for name, info in content["arrays"].items()
        }
        fields = {name: _map_leaves(from_json, content[name]) for name in ("metrics", "run")}
        if fields["run"] is not None:
            fields["run"] = _run(fields["run"])
        return _made(CheckpointInfo, {**content, **fields, "arrays": arrays, "path": path}, "")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"its record.json is damaged: {error!r}") from error


def _run(fields: dict[str, Any]) -> RunRecord:
    if "origin" in fields:  # format 1
        fields["identity"] = fields.pop("origin")
    if fields.get("memory", 0) is None:  # of the hook, in records of earlier days
        del fields["memory"]
    positions, evaluations = fields.get("positions"), fields["evaluations"]
    if isinstance(positions, list):
        fields["positions"] = tuple(map(tuple, positions))
    if isinstance(evaluations, list):
        fields["evaluations"] = tuple(evaluations)
    return _made(RunRecord, fields, "run.")


def _made(kind: Any, fields: dict[str, Any], where: str) -> Any:
    """Make a dataclass of what is stored.

    Raises `CheckpointError` for a field that is missing or of another type, and `CheckpointFormatError` for one
    that this version does not know, and would lose.
    """
    hints = typing.get_type_hints(kind)
    unknown = sorted(fields.keys() - hints.keys())
    if unknown:
        raise CheckpointFormatError(
            f"its record has the unknown field {where}{unknown[0]}: it was written by another version of "
            "redco_eqx. Nothing was changed: read it with that version, or pass another directory"
        )
    for field in dataclasses.fields(kind):
        value, kinds = fields.get(field.name, field.default), _classes(hints[field.name])
        if not isinstance(value, kinds) or (isinstance(value, bool) and int in kinds):
            what = "missing" if value is dataclasses.MISSING else f"{value!r:.80}"
            raise CheckpointError(
                f"its record.json is damaged: {where}{field.name} is {what}, but must be of type "
                f"{hints[field.name]}"
            )
    return kind(**fields)


def _classes(hint: Any) -> tuple[type, ...]:
    """The classes of a type: `(tuple, NoneType)` of `tuple[str, ...] | None`."""
    if isinstance(hint, types.UnionType):
        return tuple(kind for part in typing.get_args(hint) for kind in _classes(part))
    return (object if hint is Any else typing.get_origin(hint) or hint,)


def _sha256(content: Json) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Those of Python, this package and what it is built on."""
    names = ("redco_eqx", "jax", "equinox", "optax", "orbax-checkpoint")
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in names}}


def _map_leaves(function: Callable[[Any], Any], x: Any) -> Any:
    """`function` of all that is no dict, list or tuple; tuples become lists."""
    if isinstance(x, dict):
        return {key: _map_leaves(function, value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_map_leaves(function, item) for item in x]
    return function(x)


# The checkpoints in a directory: which are complete, and what their records say. No array is read.


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
    """List what killed writers have left half-written or half-removed."""
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
