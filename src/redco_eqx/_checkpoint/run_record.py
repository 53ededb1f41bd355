"""`RunRecord`: how far a run of `fit` has come; and the errors of checkpoints.

It is a value that the loop (`_training/loop.py`) advances. Each checkpoint of the run
holds one, as a part of its `record.json` (`checkpoint_info.py`).
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = Mapping[str, Any]
"""Dicts with strings as keys, lists, strings, finite numbers, booleans, `None`."""

LogRow: TypeAlias = Mapping[str, float | int]
"""Numbers by name."""

Identity: TypeAlias = dict[str, Any]
"""Plain JSON that identifies the state, the functions and the examples of a run: see
`_training/identity.py`."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or cannot be read or written, or its directory has
    another writer."""


class DamagedError(CheckpointError):
    """A checkpoint is damaged: a checksum is wrong, a file is missing, or its content
    cannot be parsed."""


class CheckpointFormatError(RuntimeError):
    """A checkpoint is intact, but a different version wrote it in a format that this
    version cannot read."""


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """The progress of a run of `fit`, as a checkpoint records it.

    - `begin`: the step at which the run began.
    - `num_steps`: the number of steps that it has taken.
    - `epoch`, `batch`: the number of epochs completed, and of batches completed in the
        next epoch.
    - `batch_size`: the number of examples in a training batch.
    - `num_examples`: the number of examples in the first epoch; `None` for a stream.
    - `finished`: true if the run has reached its end.
    - `evaluations`: `{"step": ..., "eval/loss": ..., ...}` for each evaluation so far.
    - `window`: the metrics that have not been logged yet.
    - `stopped`: true if a hook has ended the run.
    - `order`: the name of the method that makes the order of an epoch from its key (see
        `Epochs`); `None` if the examples keep their order.
    - `positions`: the position of each shard of a stream, as the fields of a
        `Position`.
    - `identity`: further facts that distinguish the run from other runs: see
        `Identity`. Empty for a run of one process without checkpoints.
    - `id`: the id that marks the rows of the run in a log. Two runs from the same state
        differ by it. (Whether a call continues a run is decided by `begin`, `identity`
        and, for a state from the middle of the run, its arrays.)
    - `num_rows`: the number of these rows until `logged_until`.
    """

    begin: int
    num_steps: int
    epoch: int
    batch: int
    batch_size: int
    num_examples: int | None
    finished: bool = False
    evaluations: tuple[LogRow, ...] = ()
    window: dict[str, Any] | None = None
    stopped: bool = False
    order: str | None = None
    positions: tuple[tuple[Any, ...], ...] | None = None
    identity: Identity = dataclasses.field(default_factory=dict)
    id: str | None = None
    num_rows: int = 0

    def advanced(self, epoch: int, batch: int, positions: Any = None) -> "RunRecord":
        """Return the record after one more step, which led to this place."""
        place = {"epoch": epoch, "batch": batch, "positions": positions}
        return dataclasses.replace(
            self, num_steps=self.num_steps + 1, window=None, **place
        )

    @property
    def num_shards(self) -> int | None:
        """The number of shards in which a stream is read; `None` if there is no
        stream."""
        return None if self.positions is None else self.positions[0][1]

    def evaluated(self, row: LogRow) -> "RunRecord":
        """Return the record with the results of an evaluation at this step."""
        return dataclasses.replace(
            self, evaluations=(*self.evaluations, {"step": self.step, **row})
        )

    @property
    def step(self) -> int:
        """The step of the state."""
        return self.begin + self.num_steps

    @property
    def logged_until(self) -> int:
        """The last step whose row does not come again when the run continues. Metrics
        that are not logged yet can belong to the row of this very step."""
        return self.step if self.window is None else self.step - 1

    @property
    def is_evaluated(self) -> bool:
        """True if there was an evaluation at this step."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.step


# Numbers that JSON cannot represent become strings that `float` reads.


def to_json(x: Any) -> Any:
    """Turn NaN and infinities into strings, and tuples into lists; leave everything
    else as it is.

    Raises `TypeError` or `ValueError` for an object that JSON cannot represent.
    """
    return json.loads(json.dumps(x), parse_constant=str)


def from_json(x: Any) -> Any:
    """Invert `to_json`, except that tuples stay lists."""
    if isinstance(x, dict):
        return {name: from_json(value) for name, value in x.items()}
    if isinstance(x, list):
        return [from_json(value) for value in x]
    return float(x) if x in ("NaN", "Infinity", "-Infinity") else x
