"""When `fit` saves, what it keeps, and where it goes on."""

import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Sequence

import jax

from redco_eqx._checkpoint.checkpoints import Checkpoints
from redco_eqx._checkpoint.directory import complete, local, read_record
from redco_eqx._checkpoint.origin import begun, new_id, origin_of, what_differs
from redco_eqx._checkpoint.record import CheckpointError, CheckpointInfo, RunRecord
from redco_eqx._checkpoint.restore import first_good, read, select
from redco_eqx._distributed.consensus import Vote, from_first, on_first, together
from redco_eqx._step.state import TrainState, step_of
from redco_eqx._training.interrupt import TrainingInterrupted
from redco_eqx._training.plan import Every


class Saver:
    """The checkpoints of one run of `fit`. Of a run without any it does nothing."""

    def __init__(self, checkpoints: Checkpoints | None):
        """Raises `ImportError` if Orbax is not installed, and `OSError` if the directory cannot be written."""
        self._config = checkpoints
        self._writer = None if checkpoints is None else checkpoints.open()
        self._saved: tuple[int, int, bool] | None = None
        self._path: pathlib.Path | None = None
        self._since = time.monotonic()
        self.began_before = False

    def resume(
        self, state: TrainState, run: RunRecord, *, release: bool
    ) -> tuple[TrainState, RunRecord, pathlib.Path | None]:
        """The newest state of the run that began with `state`, laid out like it; its place; its checkpoint.

        `state` itself, at the run's beginning, if that run has no checkpoint; `began_before` says whether there
        is one, or an attempt that ended without. With `release` the arrays of `state` are deleted before those
        of the checkpoint are read, so that there is no need of memory for both.

        **Raises:** `ValueError` if the checkpoints are of another model, of another run, or if the numbers
        of examples have changed; `CheckpointError` if all are damaged.
        """
        config = self._config
        if config is None:
            return state, run, None
        directory, origin = local(config.directory), origin_of(state)
        run = dataclasses.replace(run, origin=origin)
        found = from_first(lambda: _candidates(directory, step_of(state)))
        if not found:
            run_id, self.began_before = from_first(lambda: begun(directory, run.begin, origin))
            return state, dataclasses.replace(run, id=run_id), None
        self.began_before = True
        paths = [directory / name for name in found]
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)

        def load(path: pathlib.Path) -> tuple[TrainState, CheckpointInfo]:
            info = together(lambda: read_record(path), CheckpointError)
            chosen = select(info, like)
            _check_shards(info, run)
            if not config.allow_changes:
                _check_same(info, run)
            if release:
                jax.tree.map(lambda x: x.delete(), state)
            return read(info, like, chosen), info

        (restored, info), damaged = first_good(paths, load)
        on_first(lambda: [path.rename(path.with_name(path.name + ".damaged")) for path in damaged])
        assert info.run is not None
        self._path, self._saved = info.path, _saved(info.run)
        # With other numbers the same part of the epoch counts as done.
        batch = -(-info.run.batch * info.run.batch_size // run.batch_size)
        changed = {"batch": batch, "batch_size": run.batch_size, "num_examples": run.num_examples}
        run_id = info.run.id or from_first(new_id)  # an older version wrote none
        changed = dataclasses.replace(info.run, id=run_id, order=run.order, **changed)
        return restored, changed, info.path

    @property
    def is_on(self) -> bool:
        """Whether the run has checkpoints."""
        return self._writer is not None

    @property
    def is_time(self) -> bool:
        """Whether so many minutes have passed since the last save: process 0 decides."""
        minutes = self._config and self._config.every_minutes
        if minutes is None or jax.process_index() != 0:
            return False
        return time.monotonic() - self._since >= 60 * minutes

    def is_stale(self, run: RunRecord) -> bool:
        """Whether there was no save in the last few steps, of which a vote about `is_time` may still come."""
        return self._saved is None or run.num_steps - self._saved[0] > Vote.NUM_BEHIND

    def is_best(self, run: RunRecord) -> bool:
        """Whether the last evaluation is better than all before, by one of the metrics; process 0 decides."""
        config = self._config
        if config is None or not config.keep_best or not run.is_evaluated:
            return False
        return from_first(
            lambda: any(
                improves([row.get(name, math.nan) for row in run.evaluations], mode)
                for name, mode in config.keep_best.items()
            )
        )

    def is_saved(self, run: RunRecord) -> bool:
        """Whether there is a checkpoint of this very moment already, with as much in it."""
        return self._saved == _saved(run)

    def save(self, state: TrainState, run: RunRecord) -> None:
        """Saves in the background. Raises as `CheckpointWriter.save`."""
        if self._config is None or self._writer is None:
            return
        extras = self._config.extras() if callable(self._config.extras) else self._config.extras
        last = dict(run.evaluations[-1]) if run.evaluations else {}
        metrics = last if last.pop("step", None) == run.step else {}
        self._path = self._writer.save(state, metrics=metrics, extras=extras, run=run)
        self._saved = _saved(run)
        self._since = time.monotonic()

    def check(self) -> None:
        """Raises `CheckpointError` if a save has failed. On many processes the next save tells."""
        if self._writer is not None and jax.process_count() == 1:
            self._writer.check()

    def wait(self) -> pathlib.Path | None:
        """Waits for the last save, and returns its directory."""
        if self._writer is not None:
            together(self._writer.wait, CheckpointError)
        return self._path

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # A second Ctrl-C waits for nothing. Nor does an error on one of many processes: a save is complete when
        # all have written, and the others may never do so.
        waits = kind is None or issubclass(kind, TrainingInterrupted)
        waits = waits or (jax.process_count() == 1 and kind is not KeyboardInterrupt)
        if self._writer is not None and waits:
            self._writer.close()


def as_checkpoints(checkpoints: Checkpoints | str | os.PathLike[str] | None) -> Checkpoints | None:
    """A directory alone stands for all defaults."""
    if checkpoints is None or isinstance(checkpoints, Checkpoints):
        return checkpoints
    return Checkpoints(checkpoints)


def save_every(checkpoints: Checkpoints) -> Every:
    """How often by number: each epoch if nothing else was said, not even minutes."""
    said = (checkpoints.every_steps, checkpoints.every_epochs, checkpoints.every_minutes)
    epochs = 1 if said == (None, None, None) else checkpoints.every_epochs
    return Every(checkpoints.every_steps, epochs)


def improves(values: Sequence[float], mode: str) -> bool:
    """Whether the last value is better than all before; NaN never is."""
    sign = 1 if mode == "min" else -1
    *before, last = (sign * value for value in values)
    return last < min((x for x in before if not math.isnan(x)), default=math.inf)


def _saved(run: RunRecord) -> tuple[int, int, bool]:
    return run.num_steps, len(run.evaluations), run.finished


def _candidates(directory: pathlib.Path, step: int) -> list[str]:
    """The checkpoints of the run that a state at `step` belongs to, newest first.

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
        return []
    chosen = {*unreadable, *(info.path for info in infos if info.run.begin == begin)}
    return [path.name for path in reversed(complete(directory)) if path in chosen]


def _step_of(path: pathlib.Path) -> int:
    return int(path.name.partition("-")[0])


def _check_shards(info: CheckpointInfo, run: RunRecord) -> None:
    assert info.run is not None
    was, now = info.run.num_shards, run.num_shards
    if None not in (was, now) and was != now:
        raise ValueError(
            f"fit: the stream is read in {now} shards, but was in {was} when {info.path} was saved, so that no "
            "process could go on where one was. Go on with as many processes; a stream that is read whole, "
            "Stream(sharded=False), goes on with any number."
        )


def _check_same(info: CheckpointInfo, run: RunRecord) -> None:
    assert info.run is not None
    for what, was, now in (
        ("batch_size", info.run.batch_size, run.batch_size),
        ("the number of train_examples", info.run.num_examples, run.num_examples),
        ("the order of the examples", info.run.order, run.order),
    ):
        if was != now:
            raise ValueError(
                f"fit: {what} is {now}, but was {was} when {info.path} was saved, so the run would not go on "
                "with the same examples. Checkpoints(..., allow_changes=True) goes on all the same."
            )
    if info.run.begin == run.begin and (what := what_differs(info.run.origin, run.origin)):
        raise ValueError(
            f"fit: the run in {info.path.parent} did not begin with this state: other "
            f"{' and other '.join(what)}. Pass another directory to begin a run with this state, or the model "
            "and the key that the run began with to go on with it. Checkpoints(..., allow_changes=True) goes "
            "on from its checkpoint all the same."
        )
