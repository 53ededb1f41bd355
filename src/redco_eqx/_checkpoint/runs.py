"""The place of a run, as checkpoints and logs record it, and the errors of checkpoints."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

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

    def advanced(self, epoch: int, batch: int, positions: Any = None) -> "RunRecord":
        """One step later, which has led to this place."""
        place = {"epoch": epoch, "batch": batch, "positions": positions}
        return dataclasses.replace(self, num_steps=self.num_steps + 1, window=None, **place)

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


# Numbers that JSON has no form for, as the strings that `float` reads.


def to_json(x: Any) -> Any:
    """Strings for NaN and infinities, lists for tuples; all else as it is.

    Raises `TypeError` or `ValueError` for what JSON does not hold.
    """
    return json.loads(json.dumps(x), parse_constant=str)


def from_json(x: Any) -> Any:
    """The inverse of `to_json`, but for tuples."""
    if isinstance(x, dict):
        return {name: from_json(value) for name, value in x.items()}
    if isinstance(x, list):
        return [from_json(value) for value in x]
    return float(x) if x in ("NaN", "Infinity", "-Infinity") else x
