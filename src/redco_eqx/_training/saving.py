"""The checkpoints of `fit`: saves that the clock or an evaluation asks for, and the
checkpoint from which a run continues."""

import dataclasses
import os
import pathlib
import secrets
import time
from typing import Any

import jax
import optax

from redco_eqx._base.tree import first_few, is_key
from redco_eqx._checkpoint.arrays import as_saved, to_names
from redco_eqx._checkpoint.checkpoint_info import (
    CheckpointInfo,
    entries,
    local,
    read_record,
    versions,
)
from redco_eqx._checkpoint.checkpoints import Checkpoints, best_of
from redco_eqx._checkpoint.restore import first_good, load_alike, read, select
from redco_eqx._checkpoint.run_record import (
    CheckpointError,
    CheckpointFormatError,
    DamagedError,
    LogRow,
    RunRecord,
)
from redco_eqx._data.data import Position
from redco_eqx._distributed.consensus import from_first, together
from redco_eqx._sharding.pieces import array_checksums
from redco_eqx._step.state import TrainState, step_of
from redco_eqx._step.window import Window
from redco_eqx._training.course import Course, TrainingInterrupted
from redco_eqx._training.hyperparameters import (
    given_by,
    hyperparameters_in,
    warn_of_others,
    with_hyperparameters,
)
from redco_eqx._training.identity import compare_states, what_differs
from redco_eqx._training.loggers import HISTORY, check_is_file


class Saver:
    """The checkpoints of one run of `fit`.

    - `path`: the checkpoint from which the run continues; after a save, the last saved
        one.
    """

    def __init__(self, checkpoints: Checkpoints | str | os.PathLike[str]):
        """Raise `TypeError` or `ValueError` for an argument that is not a directory."""
        self.config = (
            checkpoints
            if isinstance(checkpoints, Checkpoints)
            else Checkpoints(checkpoints)
        )
        self.directory = local(self.config.directory)
        check_is_file("fit: the history of the run", self.directory / HISTORY)
        self._saved: tuple[int, int, bool] | None = None
        self._time_of_last = time.monotonic()
        self.path: pathlib.Path | None = None

    def __enter__(self) -> "Saver":
        """Raise `ImportError` if Orbax is not installed, and `OSError` if the directory
        cannot be written."""
        self._writer = self.config.open()
        return self

    def check_metrics(self, row: LogRow) -> None:
        """Raise `ValueError` if the evaluations lack a metric that decides which
        checkpoint is best."""
        for name in self.config.keep_best:
            if name not in row:
                raise ValueError(
                    f"fit: Checkpoints(keep_best={{{name!r}: ...}}), but evaluations "
                    "give "
                    f"{', '.join(map(repr, row)) or 'nothing, without an evaluation='}."
                )

    def resume(
        self,
        state: TrainState,
        run: RunRecord,
        course: Course,
        optimizer: optax.GradientTransformation,
    ) -> tuple[TrainState, RunRecord]:
        """Return the newest state of the run that began with `state`, in the same
        layout, and the record of the run at that state.

        If that run has no checkpoint, return `state` itself, and the record of the
        beginning. The arrays of `state`, but for frozen ones that are those of the
        checkpoint, are deleted before those of the checkpoint are read, so that the two
        need not fit in memory together.

        Warn if the optimizer keeps hyperparameters in its state that are not those of
        `state`. Those of the checkpoint count; with `allow_changes`, those of `state`.

        **Raises:** `ValueError` if the checkpoints are of a different model or run, if
        the run is longer than the course, or if the examples have changed;
        `CheckpointError` if all checkpoints are damaged.
        """
        found, same_step = from_first(
            lambda: _candidates(self.directory, step_of(state))
        )
        if not found:
            new_id = from_first(lambda: secrets.token_hex(4))
            return state, dataclasses.replace(run, id=new_id)
        if same_step is not None and not self.config.allow_changes:
            _check_state(read_record(self.directory / same_step), state)
        # Before the arrays of the state are deleted:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
        )
        given = hyperparameters_in(state.opt_state)
        asked = given
        if given and same_step is not None:
            # A state from the middle of the run has the numbers of the run. The
            # optimizer may ask for others.
            asked = given_by(optimizer, state)

        def load(path: pathlib.Path) -> tuple[TrainState, CheckpointInfo]:
            info = load_alike(lambda: read_record(path))
            names = select(info, like)
            self._check_continues(info, run, course)
            return _replaced(state, like, info, names), info

        (restored, info), damaged = first_good(
            [self.directory / name for name in found], load
        )
        from_first(lambda: [_set_aside(path) for path in damaged])
        counting = hyperparameters_in(restored.opt_state)
        if self.config.allow_changes:
            restored = with_hyperparameters(restored, given, info.path)
            counting = given
        warn_of_others(counting, asked, info.path)
        before = _run_in(info)
        self.path = info.path
        self._saved = _saved(before)
        is_same_version = info.versions == versions()
        return restored, _continued(before, run, is_same_version=is_same_version)

    def _check_continues(
        self, info: CheckpointInfo, run: RunRecord, course: Course
    ) -> None:
        """Raise an error unless the run of a checkpoint is `run`, and no longer than
        the course."""
        before = _run_in(info)
        _check_form(info.path, before)
        _check_same(info.path, before, run, allow_changes=self.config.allow_changes)
        course.check_length(before, info.path)

    def is_best(self, run: RunRecord) -> bool:
        """Return true if the last evaluation is better than all earlier ones by one of
        the metrics. Process 0 decides."""
        metrics = self.config.keep_best.items()
        rows = run.evaluations
        if not metrics or not run.is_evaluated:
            return False
        return from_first(
            lambda: any(best_of(rows, *metric) == len(rows) - 1 for metric in metrics)
        )

    def save(self, state: TrainState, run: RunRecord) -> None:
        """Save in the background, unless a checkpoint of this step with the same
        evaluations already exists.

        Raises as `CheckpointWriter.save` does.
        """
        # A checkpoint of differing states would replace one that can be read.
        compare_states(state, f"This happened at step {run.step}")
        if self._saved == _saved(run):
            return
        last = run.evaluations[-1] if run.is_evaluated else {}
        metrics = {name: x for name, x in last.items() if name != "step"}
        self.path = self._writer.save(state, metrics=metrics, run=run)
        self._time_of_last = time.monotonic()
        self._saved = _saved(run)

    def is_late(self) -> bool:
        """Return true on process 0 if `every_minutes` have passed since the last save,
        or since this was last true. The other processes follow it."""
        minutes = self.config.every_minutes
        if minutes is None or jax.process_index() != 0:
            return False
        now = time.monotonic()
        if now - self._time_of_last < 60 * minutes:
            return False
        # The save follows a few steps later. Until then, it is not asked for again.
        self._time_of_last = now
        return True

    def check(self) -> None:
        """Raise `CheckpointError` if a save has failed. With multiple processes, the
        next save raises it."""
        if jax.process_count() == 1:
            self._writer.check()

    def wait(self) -> pathlib.Path | None:
        """Wait for the last save, and return its directory."""
        together(self._writer.wait, CheckpointError)
        return self.path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        # Do not wait after a second Ctrl-C, or after an error on one of many processes:
        # a save is complete when all have written, and the others may never do so.
        waits = kind is None or issubclass(kind, TrainingInterrupted)
        waits = waits or (jax.process_count() == 1 and kind is not KeyboardInterrupt)
        try:
            (self._writer.close if waits else self._writer.release)()
        except CheckpointError as problem:
            if error is None:
                raise
            # If it were raised, it would hide the error that has the state.
            error.add_note(f"fit: {problem}")


def _run_in(info: CheckpointInfo) -> RunRecord:
    """The run that saved a checkpoint, which `_candidates` has found by it."""
    assert info.run is not None
    return info.run


def _replaced(
    state: TrainState, like: TrainState, info: CheckpointInfo, names: dict[str, str]
) -> TrainState:
    """Read a checkpoint in place of `state`, whose arrays are deleted first. `like` is
    the abstract state, and `names` is the result of `select`."""
    # The frozen arrays are the caller's. If they are those of the checkpoint, as in a
    # run that trains a small part of a large model, they are not read again, and memory
    # does not hold them twice.
    own = _unchanged(state, info)
    others = dataclasses.replace(state, frozen={})
    jax.tree.map(lambda x: x.delete(), others)
    to_read = {
        name: saved_name for name, saved_name in names.items() if name not in own
    }
    restored = read(info, like, to_read)
    frozen = {path: own.get(f"model/{path}", x) for path, x in restored.frozen.items()}
    return dataclasses.replace(restored, frozen=frozen)


def _continued(
    before: RunRecord, run: RunRecord, *, is_same_version: bool
) -> RunRecord:
    """The record with which a run goes on: that of its checkpoint, `before`, with the
    arguments of this call, which are those of `run`."""
    names = ["key", "parameters"]
    # Other versions may trace the same functions differently.
    if is_same_version:
        names += ["loss_fn", "optimizer", "step_fn"]
    began = {name: x for name, x in before.identity.items() if name in names}
    # If the batch size has changed, the same fraction of the epoch still counts as
    # done, rounded up to whole batches.
    batch = -(-before.batch * before.batch_size // run.batch_size)
    return dataclasses.replace(
        before,
        batch_size=run.batch_size,
        num_examples=run.num_examples,
        order=run.order,
        batch=batch,
        identity={**run.identity, **began},
    )


def _unchanged(state: TrainState, info: CheckpointInfo) -> dict[str, Any]:
    """The frozen arrays of a state that are those of a checkpoint, by their names
    there. All processes must call it."""
    frozen = {
        f"model/{path}": x
        for path, x in state.frozen.items()
        if x.size > 0 and not is_key(x)
    }
    if not frozen:
        return {}
    checksums, _ = array_checksums(frozen)
    return {
        name: x
        for name, x in frozen.items()
        if name in info.arrays and info.arrays[name].checksum == checksums[name]
    }


def _saved(run: RunRecord) -> tuple[int, int, bool]:
    return run.num_steps, len(run.evaluations), run.finished


def _set_aside(path: pathlib.Path) -> str:
    """Rename a damaged checkpoint, so that no later run reads it. Return its new
    path."""
    aside = path.with_name(f"{path.name}.damaged")
    number = 1
    while aside.exists():  # this step was damaged before
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{number}")
    return str(path.rename(aside))


def _candidates(directory: pathlib.Path, step: int) -> tuple[list[str], str | None]:
    """Return the checkpoints of the run that a state at `step` belongs to, newest
    first. Also return the checkpoint of exactly this step, if the run began before it.

    Include checkpoints whose record cannot be read, because they may belong to the run.
    Raises their error if nothing else tells to which run the state belongs.
    """
    infos = []
    unknown: dict[pathlib.Path, CheckpointError] = {}
    found = entries(directory)
    for at, _, path in found:
        try:
            infos.append(read_record(path))
        except CheckpointError as error:
            if at >= step:
                unknown[path] = error
    runs = {info.path: info.run for info in infos if info.run is not None}
    begins = {run.begin for run in runs.values()}
    begin = None
    same_step = None
    if step in begins:
        begin = step
    else:
        # The state may come from a checkpoint of an unfinished run: from the last one
        # in the order of `entries`.
        for path, run in runs.items():
            if run.step == step and not run.finished:
                begin = run.begin
                same_step = path.name
    if begin is None:
        if unknown:
            path, error = unknown.popitem()
            if not isinstance(error, DamagedError):
                raise error
            raise CheckpointError(
                f"fit: {path} is damaged: its record cannot be read, and there is no "
                f"other checkpoint of a run from step {step}. Remove it, or pass "
                "another directory, to start again."
            )
        last = max((info.step for info in infos), default=step)
        if last > step:
            what = (
                f"of runs that began at {sorted(begins)}"
                if begins
                else "that no run of fit wrote"
            )
            raise ValueError(
                f"fit: the state is at step {step}, but {directory} holds checkpoints "
                f"{what}, up to step {last}. To continue a run, pass the state that it "
                "began with, or pass another directory."
            )
        return [], None
    chosen = {*unknown, *(path for path, run in runs.items() if run.begin == begin)}
    newest_first = [path.name for *_, path in reversed(found) if path in chosen]
    return newest_first, same_step


def _check_state(info: CheckpointInfo, state: TrainState) -> None:
    """Raise `ValueError` if a checkpoint of the same step holds a different state. All
    processes must call it."""
    checksums, _ = array_checksums(as_saved(to_names(state)))
    other = [
        name
        for name, x in info.arrays.items()
        if name in checksums and checksums[name] != x.checksum
    ]
    if other:
        raise ValueError(
            f"fit: the state is at step {info.step}, but is not the one that "
            f"{info.path} holds: {first_few(other, most=2)} differ. To continue that "
            "run, pass the state that it began with or one of its checkpoints. To "
            "begin a new run, pass another directory. To continue anyway, pass "
            "Checkpoints(..., allow_changes=True)."
        )


def _check_form(path: pathlib.Path, run: RunRecord) -> None:
    """Raise `CheckpointFormatError` if a run's own parts do not have the form that this
    version writes."""
    try:
        if run.window is not None:
            Window.from_json(run.window)
        what_differs(run.identity, run.identity)
        for shard in run.positions or ():
            Position(*shard)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise CheckpointFormatError(
            f"{path} was written by another version of redco_eqx: the record of its "
            f"run gives {type(error).__name__}: {error}. It is unchanged. Read it with "
            "that version, or pass another directory"
        ) from error


def _check_same(
    path: pathlib.Path, before: RunRecord, run: RunRecord, *, allow_changes: bool
) -> None:
    """Raise `ValueError` if the run of a checkpoint is not the run to continue."""
    if (
        None not in (before.num_shards, run.num_shards)
        and before.num_shards != run.num_shards
    ):
        raise ValueError(
            f"fit: the stream is read in {run.num_shards} shards, but was in "
            f"{before.num_shards} when {path} was saved, so no process can continue "
            "where another stopped. Use as many processes as before. With a stream "
            "that is read whole, Stream(sharded=False), use any number."
        )
    if allow_changes:
        return
    for what, was, now in (
        ("batch_size", before.batch_size, run.batch_size),
        ("the number of train_examples", before.num_examples, run.num_examples),
        ("the order of the examples", before.order, run.order),
    ):
        if was != now:
            raise ValueError(
                f"fit: {what} is {now}, but was {was} when {path} was saved, so the "
                "run would not continue with the same examples. To continue anyway, "
                "pass Checkpoints(..., allow_changes=True)."
            )
    others = what_differs(before.identity, run.identity)
    if before.begin != run.begin:
        # A state from the middle of the run, see `_check_state`
        others = [what for what in others if "example" in what]
    if others:
        raise ValueError(
            f"fit: the run in {path.parent} is a different one: it has "
            f"{' and '.join(others)}. To begin a new run, pass another directory. To "
            "continue that run, pass the model, the key and the examples that it began "
            "with. To continue it anyway, pass Checkpoints(..., allow_changes=True)."
        )
