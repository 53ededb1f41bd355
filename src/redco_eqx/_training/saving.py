"""When `fit` saves, what it keeps, and where it goes on."""

import dataclasses
import math
import pathlib
import warnings
from typing import Any

import jax

from redco_eqx._base.tree import first_few
from redco_eqx._checkpoint.arrays import digests, storable, to_names
from redco_eqx._checkpoint.checkpoints import Checkpoints, CheckpointWriter
from redco_eqx._checkpoint.owner import new_id
from redco_eqx._checkpoint.record import (
    CheckpointError,
    CheckpointInfo,
    RunRecord,
    complete,
    local,
    read_record,
    versions,
)
from redco_eqx._checkpoint.restore import first_good, read, select
from redco_eqx._distributed.consensus import from_first, on_first, together
from redco_eqx._step.state import TrainState, step_of
from redco_eqx._training.endings import TrainingInterrupted
from redco_eqx._training.identity import what_differs


class Saver:
    """The checkpoints of one run of `fit`.

    - `path`: the one that the run goes on from, and then the last save.
    - `began_before`: whether there is one, or an attempt that ended without.
    """

    def __init__(self, checkpoints: Checkpoints):
        """Raises `ImportError` if Orbax is not installed, and `OSError` if the directory cannot be written."""
        self._config = checkpoints
        self._writer = checkpoints.open()
        self._saved: tuple[int, int, bool] | None = None
        self._source: CheckpointInfo | None = None
        self.path: pathlib.Path | None = None
        self.began_before = False

    def resume(self, state: TrainState, run: RunRecord) -> tuple[TrainState, RunRecord]:
        """The newest state of the run that began with `state`, laid out like it, and its place.

        `state` itself, at the run's beginning, if that run has no checkpoint. The arrays of `state` are deleted
        before those of the checkpoint are read, so that there is no need of memory for both.

        **Raises:** `ValueError` if the checkpoints are of another model or of another run, or if its examples
        have changed; `CheckpointError` if all are damaged.
        """
        directory, allow_changes = local(self._config.directory), self._config.allow_changes
        found, same_step = from_first(lambda: _candidates(directory, step_of(state)))
        if not found:
            run_id, self.began_before = from_first(lambda: _begun(self._writer, run))
            return state, dataclasses.replace(run, id=run_id)
        self.began_before = True
        paths = [directory / name for name in found]
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
        if same_step is not None and not allow_changes:
            _check_state(read_record(directory / same_step), state)

        def load(path: pathlib.Path) -> tuple[TrainState, CheckpointInfo]:
            info = together(lambda: read_record(path), CheckpointError)
            chosen = select(info, like)
            _check_same(info, run, allow_changes=allow_changes)
            jax.tree.map(lambda x: x.delete(), state)
            return read(info, like, chosen), info

        (restored, info), damaged = first_good(paths, load)
        on_first(lambda: [path.rename(path.with_name(path.name + ".damaged")) for path in damaged])
        assert info.run is not None
        self._source, self.path, self._saved = info, info.path, _saved(info.run)
        # With other numbers the same part of the epoch counts as done.
        batch = -(-info.run.batch * info.run.batch_size // run.batch_size)
        changed = {"batch": batch, "batch_size": run.batch_size, "num_examples": run.num_examples}
        run_id = info.run.id or from_first(new_id)  # an older version wrote none
        began = {name: x for name, x in (info.run.identity or {}).items() if name in ("key", "parameters")}
        identity = {**(run.identity or {}), **began}
        return restored, dataclasses.replace(info.run, id=run_id, order=run.order, identity=identity, **changed)

    def identified(self, run: RunRecord, programs: dict[str, str]) -> RunRecord:
        """The run with the digests of its functions (see `programs_of`); warns of those that are others."""
        info = self._source
        before: dict[str, Any] = {} if info is None or info.run is None else info.run.identity or {}
        changed = [name for name, x in programs.items() if x and before.get(name, x) not in ("", x)]
        if info is not None and changed and info.versions == versions():  # others trace otherwise
            warnings.warn(
                f"fit: {' and '.join(changed)} of this call compute something else than in the run so far, "
                f"which goes on from {info.path}.",
                stacklevel=7,
            )
        return dataclasses.replace(run, identity={**(run.identity or {}), **programs})

    def is_best(self, run: RunRecord) -> bool:
        """True if the last evaluation is better than all before, by one of the metrics; process 0 decides."""
        best = self._config.keep_best
        if not best or not run.is_evaluated:
            return False

        def improves(name: str, mode: str) -> bool:
            sign = 1 if mode == "min" else -1
            *before, last = (sign * row.get(name, math.nan) for row in run.evaluations)
            return last < min((x for x in before if not math.isnan(x)), default=math.inf)

        return from_first(lambda: any(improves(name, mode) for name, mode in best.items()))

    def save(self, state: TrainState, run: RunRecord) -> None:
        """Saves in the background, unless this very moment is saved already, with as much in it.

        Raises as `CheckpointWriter.save`.
        """
        if self._saved == _saved(run):
            return
        extras = self._config.extras() if callable(self._config.extras) else self._config.extras
        last = run.evaluations[-1] if run.is_evaluated else {}
        metrics = {name: x for name, x in last.items() if name != "step"}
        self.path = self._writer.save(state, metrics=metrics, extras=extras, run=run)
        self._saved = _saved(run)

    def check(self) -> None:
        """Raises `CheckpointError` if a save has failed. On many processes the next save tells."""
        if jax.process_count() == 1:
            self._writer.check()

    def wait(self) -> pathlib.Path | None:
        """Waits for the last save, and returns its directory."""
        together(self._writer.wait, CheckpointError)
        return self.path

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        # A second Ctrl-C waits for nothing. Nor does an error on one of many processes: a save is complete when
        # all have written, and the others may never do so.
        waits = kind is None or issubclass(kind, TrainingInterrupted)
        waits = waits or (jax.process_count() == 1 and kind is not KeyboardInterrupt)
        try:
            (self._writer.close if waits else self._writer.release)()
        except CheckpointError as problem:
            if error is None:
                raise
            error.add_note(f"fit: {problem}")  # in its place it would take the state away


def save_every(checkpoints: Checkpoints) -> tuple[int | None, int | None]:
    """The steps and the epochs between saves: each epoch if nothing else was said."""
    said = checkpoints.every_steps, checkpoints.every_epochs
    return (None, 1) if said == (None, None) else said


def _saved(run: RunRecord) -> tuple[int, int, bool]:
    return run.num_steps, len(run.evaluations), run.finished


def _begun(writer: CheckpointWriter, run: RunRecord) -> tuple[str, bool]:
    """The id of a run without checkpoints, and whether it began before; on process 0."""
    assert writer.owner is not None

    def is_same(before: dict[str, Any]) -> bool:
        return not what_differs(before.get("identity") or before.get("origin"), run.identity or {})

    return writer.owner.begin(run.begin, is_same, identity=run.identity)


def _candidates(directory: pathlib.Path, step: int) -> tuple[list[str], str | None]:
    """The checkpoints of the run that a state at `step` belongs to, newest first; and the one of this very
    step, if the run began before it.

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
    # A state at a step where no run began was saved before its run had ended.
    among = [i for i in infos if i.step == step and not i.run.finished and step not in begins]
    begin = step if step in begins else among[-1].run.begin if among else None
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
        return [], None
    chosen = {*unreadable, *(info.path for info in infos if info.run.begin == begin)}
    names = [path.name for path in reversed(complete(directory)) if path in chosen]
    return names, among[-1].path.name if among else None


def _step_of(path: pathlib.Path) -> int:
    return int(path.name.partition("-")[0])


def _check_state(info: CheckpointInfo, state: TrainState) -> None:
    """Raises `ValueError` if a checkpoint of the same step holds another state. A collective call."""
    checksums, _ = digests(storable(to_names(state)))
    other = [name for name, x in info.arrays.items() if name in checksums and checksums[name] != x.checksum]
    if other:
        raise ValueError(
            f"fit: the state is at step {info.step}, but is not the one that {info.path} holds: "
            f"{first_few(other, most=2)} differ. Pass the state that its run began with, or one of its "
            "checkpoints, to go on with it; or another directory. Checkpoints(..., allow_changes=True) goes on "
            "with that run all the same."
        )


def _check_same(info: CheckpointInfo, run: RunRecord, *, allow_changes: bool) -> None:
    """Raises `ValueError` if the run of a checkpoint is not the one that is to go on."""
    before = info.run
    assert before is not None
    if None not in (before.num_shards, run.num_shards) and before.num_shards != run.num_shards:
        raise ValueError(
            f"fit: the stream is read in {run.num_shards} shards, but was in {before.num_shards} when "
            f"{info.path} was saved, so that no process could go on where one was. Go on with as many "
            "processes; a stream that is read whole, Stream(sharded=False), goes on with any number."
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
                f"fit: {what} is {now}, but was {was} when {info.path} was saved, so the run would not go on "
                "with the same examples. Checkpoints(..., allow_changes=True) goes on all the same."
            )
    others = what_differs(before.identity, run.identity or {})
    if before.begin != run.begin:  # a state of its middle, see `_check_state`
        others = [what for what in others if "example" in what]
    if others:
        raise ValueError(
            f"fit: the run in {info.path.parent} is another one: it has {' and '.join(others)}. Pass another "
            "directory to begin a run, or the model, the key and the examples that this one began with to go "
            "on with it. Checkpoints(..., allow_changes=True) goes on from its checkpoint all the same."
        )
