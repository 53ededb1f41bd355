"""`Checkpoints`: where and when a run is saved, and what of it is kept."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Literal

from redco_eqx._checkpoint.directory import local
from redco_eqx._checkpoint.record import Json
from redco_eqx._checkpoint.writer import CheckpointWriter


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where and when [`fit`][] saves, and what it keeps; `open` gives the same to a loop of one's own.

    `fit` saves in the background at the steps asked for, at its end, and when a signal ends it. Without any
    `every_...` it does so after each epoch. An evaluation that is due comes before, and its results are part of
    the checkpoint.

    ```python
    checkpoints = rx.Checkpoints("run", every_steps=500, keep_last=2, keep_best={"eval/loss": "min"})
    state = rx.fit(state, examples, **pipeline, num_epochs=2, checkpoints=checkpoints,
                   evaluation=rx.Evaluation(held_out))
    ```

    - `directory`: of this run, which all processes see. If there are checkpoints of it already, `fit` goes on
        from the newest, provided that they are of a run that began with the same key, parameters and examples.
        `~` is the home directory.
    - `every_steps`, `every_epochs`, `every_minutes`: how often; several can be given.
    - `keep_last`: how many to keep; `None` keeps all. With 2 there is another one should the newest be damaged.
        Those of other runs (see `RunRecord.begin`), and of later steps than the newest, are left alone.
    - `keep_best`: metrics of the evaluations with what is best, such as `{"eval/loss": "min"}`: the checkpoint
        where one of them is best is kept besides, and an evaluation that gives a better one is followed by a
        save.
    - `extras`: further plain JSON for each checkpoint that `fit` writes, or a function that returns it.
    - `allow_changes`: goes on although `batch_size` or the examples have changed, or the key or the parameters
        that the run begins with; otherwise that is refused, because the run would not be the same.

    Raises `ValueError` for a value that cannot be used.
    """

    directory: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every_steps: int | None = None
    every_epochs: int | None = None
    every_minutes: float | int | None = None
    keep_last: int | None = 2
    keep_best: Mapping[str, Literal["min", "max"]] = dataclasses.field(default_factory=dict)
    extras: Json | Callable[[], Json] | None = None
    allow_changes: bool = False

    def __post_init__(self) -> None:
        local(self.directory)
        for name in ("every_steps", "every_epochs", "every_minutes", "keep_last"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"Checkpoints: {name}={value}, but it must be positive.")
        best = self.keep_best
        if not isinstance(best, Mapping) or any(mode not in ("min", "max") for mode in best.values()):
            raise ValueError(
                f"Checkpoints: keep_best={best!r}, but it must say of each metric whether it is best at its "
                '"min" or "max", as in {"eval/loss": "min"}.'
            )

    def open(self) -> CheckpointWriter:
        """A writer into the directory, to be closed or used by `with`. The caller decides when to save.

        ```python
        with rx.Checkpoints("run", keep_last=2).open() as writer:
            for i, batch in enumerate(batches, start=1):
                state, metrics = step(state, batch)
                if i % 100 == 0:
                    writer.save(state, extras={"note": "mine"})
        ```

        The directory is made if it is not there. On several processes it is one that all of them see, and all
        call this. What an earlier process left half-written in it is removed.

        **Raises:** `ImportError` if Orbax is not installed; `OSError` if the directory cannot be written;
        `CheckpointError` if another live writer has it, on this host or (found out in 12 seconds) on another.
        """
        return CheckpointWriter(self.directory, keep_last=self.keep_last, keep_best=self.keep_best)
