"""When `fit` saves, what it keeps, and where it goes on."""

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax

from redco_eqx._checkpoint.directory import complete, orbax_checkpoint, read_record
from redco_eqx._checkpoint.record import CheckpointError, CheckpointInfo, RunRecord
from redco_eqx._checkpoint.restore import first_good, read, select
from redco_eqx._checkpoint.writer import CheckpointWriter
from redco_eqx._distributed.consensus import Vote, from_first, on_first, together
from redco_eqx._step.state import TrainState, step_of
from redco_eqx._training.interrupt import TrainingInterrupted


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Where and when [`fit`][] saves, and what it keeps.

    It saves in the background at the steps asked for, at its end, and when a signal ends it. Without any
    `every_...` it does so after each epoch. An evaluation that is due comes before, and its results are part of
    the checkpoint.

    - `directory`: of this run. If there are checkpoints of it already, `fit` goes on from the newest.
    - `every_steps`, `every_epochs`, `every_minutes`: how often; several can be given.
    - `keep_last`: how many to keep; `None` keeps all. With 2 there is another one should the newest be damaged.
    - `keep_best`: a metric of the evaluations, such as `"eval/loss"`: the checkpoint where it is best is kept
        besides, and an evaluation that gives a better one is followed by a save.
    - `best_mode`: whether `"min"` or `"max"` is best.
    - `extras`: further plain JSON for each checkpoint, or a function that returns it.
    - `allow_changes`: whether to go on although `batch_size` or the number of examples have changed; otherwise
        that is refused, because the examples of an epoch would not be the same.
    """

    directory: str | os.PathLike[str]
    every_steps: int | None = None
    every_epochs: int | None = None
    every_minutes: float | int | None = None
    keep_last: int | None = 2
    keep_best: str | None = None
    best_mode: Literal["min", "max"] = "min"
    extras: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None
    allow_changes: bool = False

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_epochs", "every_minutes", "keep_last"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"Checkpoints: {name}={value}, but it must be positive.")
        if self.best_mode not in ("min", "max"):
            raise ValueError(f'Checkpoints: best_mode={self.best_mode!r}, but it must be "min" or "max".')


class Saver:
    """The checkpoints of one run of `fit`."""

    def __init__(self, config: Checkpoints):
        """Raises `ImportError` if Orbax is not installed, and `OSError` if the directory cannot be written."""
        self._config = config
        self._writer = CheckpointWriter(
            config.directory,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            best_mode=config.best_mode,
        )
        self._saved: tuple[int, int, bool] | None = None
        self._path: pathlib.Path | None = None
        self._since = time.monotonic()

    def resume(
        self, state: TrainState, *, batch_size: int, num_examples: int, release: bool
    ) -> tuple[TrainState, RunRecord, pathlib.Path] | None:
        """The newest state of the run that began with `state`, laid out like it; its place; its checkpoint.

        `None` if that run has no checkpoint. With `release` the arrays of `state` are deleted before those of
        the checkpoint are read, so that there is no need of memory for both.

        **Raises:** `ValueError` if the checkpoints are of another model, of another run, or if the numbers
        have changed; `CheckpointError` if all are damaged.
        """
        begin, names = from_first(lambda: _candidates(self._config.directory, step_of(state))) or (None, [])
        if begin is None:
            return None
        paths = [pathlib.Path(self._config.directory).absolute() / name for name in names]
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

        def load(path: pathlib.Path) -> tuple[TrainState, CheckpointInfo]:
            info = together(lambda: read_record(path), CheckpointError)
            chosen = select(info, like)
            if not self._config.allow_changes:
                _check_same(info, batch_size, num_examples)
            if release:
                jax.tree.map(lambda x: x.delete(), state)
            return read(info, like, chosen), info

        (restored, info), damaged = first_good(paths, load)
        on_first(lambda: [path.rename(path.with_name(path.name + ".damaged")) for path in damaged])
        assert info.run is not None
        self._path, self._saved = info.path, _saved(info.run)
        return restored, info.run, info.path

    @property
    def is_time(self) -> bool:
        """Whether so many minutes have passed since the last save: process 0 decides."""
        minutes = self._config.every_minutes if jax.process_index() == 0 else None
        return minutes is not None and time.monotonic() - self._since >= 60 * minutes

    def is_due(self, run: RunRecord, is_time: bool) -> bool:
        """Whether to save, by time or by the numbers of steps and epochs."""
        steps, epochs = self._config.every_steps, self._config.every_epochs
        if steps is None and epochs is None and self._config.every_minutes is None:
            epochs = 1
        by_step = steps is not None and run.num_steps % steps == 0
        # That it is time was said a few steps ago, perhaps before the last save.
        by_time = is_time and (self._saved is None or run.num_steps - self._saved[0] > Vote.NUM_BEHIND)
        return by_step or by_time or (epochs is not None and run.batch == 0 and run.epoch % epochs == 0)

    def is_best(self, evaluations: tuple[dict[str, Any], ...]) -> bool:
        """Whether the last of the evaluations is better than all before, as process 0 sees it."""
        name = self._config.keep_best
        if name is None or not evaluations:
            return False
        sign = 1 if self._config.best_mode == "min" else -1
        *before, last = (sign * row.get(name, math.nan) for row in evaluations)
        best = min((x for x in before if not math.isnan(x)), default=math.inf)
        return bool(from_first(lambda: bool(last < best)))

    def is_saved(self, run: RunRecord) -> bool:
        """Whether there is a checkpoint of this very moment already, with as much in it."""
        return self._saved == _saved(run)

    def save(self, state: TrainState, run: RunRecord) -> None:
        """Saves in the background. Raises as `CheckpointWriter.save`."""
        extras = self._config.extras() if callable(self._config.extras) else self._config.extras
        last = dict(run.evaluations[-1]) if run.evaluations else {}
        metrics = last if last.pop("step", None) == run.step else {}
        self._path = self._writer.save(state, metrics=metrics, extras=extras, run=run)
        self._saved = _saved(run)
        self._since = time.monotonic()

    def check(self) -> None:
        """Raises `CheckpointError` if a save has failed. On many processes the next save tells."""
        if jax.process_count() == 1:
            self._writer.check()

    def wait(self) -> pathlib.Path | None:
        """Waits for the last save, and returns its directory."""
        together(self._writer.wait, CheckpointError)
        return self._path

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A second Ctrl-C waits for nothing. Nor does an error on one of many processes: a save is complete when
        # all have written, and the others may never do so.
        is_alone = jax.process_count() == 1
        if (
            kind is None
            or issubclass(kind, TrainingInterrupted)
            or (is_alone and kind is not KeyboardInterrupt)
        ):
            self._writer.close()


def as_checkpoints(checkpoints: Checkpoints | str | os.PathLike[str] | None) -> Checkpoints | None:
    """A directory alone stands for all defaults. Raises `ImportError` if Orbax is not installed."""
    if checkpoints is None:
        return None
    orbax_checkpoint()
    return checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)


def _saved(run: RunRecord) -> tuple[int, int, bool]:
    return run.num_steps, len(run.evaluations), run.finished


def _candidates(directory: str | os.PathLike[str], step: int) -> tuple[int, list[str]] | None:
    """The step at which the run began that a state at `step` belongs to, and its checkpoints, newest first.

    What cannot be read may belong to it, and is among them.
    """
    infos, unreadable, others = [], [], []
    for path in complete(directory):
        try:
            info = read_record(path)
            (others if info.run is None else infos).append(info)
        except CheckpointError:
            unreadable.append(path)
    unreadable = [path for path in unreadable if _step_of(path) >= step]
    begins = {info.run.begin for info in infos}
    if step in begins:
        begin = step
    else:
        # A state that was saved before its run had ended.
        begin = next((i.run.begin for i in reversed(infos) if i.step == step and not i.run.finished), None)
    if begin is None:
        if unreadable:
            raise CheckpointError(
                f"fit: {unreadable[-1]} is damaged: its record cannot be read, and there is no other "
                f"checkpoint of a run from step {step}. Remove it, or pass another directory, to begin anew."
            )
        later = [info for info in (*infos, *others) if info.step > step]
        if later:
            runs = f"of runs that began at {sorted(begins)}" if begins else "that no run of fit wrote"
            raise ValueError(
                f"fit: the state is at step {step}, but {directory} holds checkpoints {runs}, up to step "
                f"{max(info.step for info in later)}. Pass the state that the run began with, to go on "
                "with it, or another directory."
            )
        return None
    chosen = {*unreadable, *(info.path for info in infos if info.run.begin == begin)}
    return begin, [path.name for path in reversed(complete(directory)) if path in chosen]


def _step_of(path: pathlib.Path) -> int:
    return int(path.name.partition("-")[0])


def _check_same(info: CheckpointInfo, batch_size: int, num_examples: int) -> None:
    assert info.run is not None
    for what, was, now in (
        ("batch_size", info.run.batch_size, batch_size),
        ("the number of train_examples", info.run.num_examples, num_examples),
    ):
        if was != now:
            raise ValueError(
                f"fit: {what} is {now}, but was {was} when {info.path} was saved, so the run would not go on "
                "with the same examples. Checkpoints(..., allow_changes=True) goes on all the same."
            )
