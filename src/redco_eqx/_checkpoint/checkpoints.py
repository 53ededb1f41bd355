"""`Checkpoints`: where and when to save, and which checkpoints to keep; and their
writer.

A checkpoint is a state on disk, by Orbax: complete or not there, read onto any mesh,
verified. It is a directory `<step>` (or `<step>-2`, if there is one of this step
already) with

    arrays/                 a flat dictionary of arrays, as Orbax and tensorstore
                            (`manifest.ocdbt`, `ocdbt.process_0`) write it
    record/record.json      the rest: see `CheckpointInfo`
    _CHECKPOINT_METADATA    Orbax's own

Orbax writes it as `<step>.orbax-checkpoint-tmp...` and renames it when it is complete,
so a directory with this name is complete, unless it was damaged later. The checksums
detect such damage; the directory becomes `<step>.damaged` when `fit` continues from
another one. A checkpoint that is not kept becomes `<step>.deleting` before it is
removed. Beside them are `owner.json` (the process that writes here) and `history.jsonl`
(the rows of the log). No pickle anywhere.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax

from redco_eqx._base.protocols import check_positive
from redco_eqx._base.tree import first_few, lack_of_value
from redco_eqx._checkpoint.arrays import as_saved, info_of, to_names
from redco_eqx._checkpoint.checkpoint_info import (
    CheckpointInfo,
    encode,
    entries,
    local,
    orbax_checkpoint,
    read_record,
)
from redco_eqx._checkpoint.owner import Owner, this_process, wait_for
from redco_eqx._checkpoint.restore import read_back
from redco_eqx._checkpoint.run_record import (
    CheckpointError,
    CheckpointFormatError,
    Json,
    LogRow,
    RunRecord,
)
from redco_eqx._distributed.consensus import from_all, from_first, together
from redco_eqx._sharding.mesh import in_own_context
from redco_eqx._sharding.pieces import array_checksums
from redco_eqx._step.state import TrainState, check_is_one_state, step_of


class CheckpointWriter(contextlib.AbstractContextManager["CheckpointWriter"]):
    """Writes checkpoints into a directory, in the background. `Checkpoints.open`
    returns it."""

    def __init__(self, config: "Checkpoints"):
        self._config = config
        self._directory = local(config.directory)
        self._pid = os.getpid()
        self._ocp = orbax_checkpoint()
        # Imported here, because it imports Orbax, which takes a second.
        from redco_eqx._checkpoint import handlers

        self._handlers = handlers
        self.owner: Owner | None = None
        process = from_first(self._prepare)
        together(lambda: wait_for(self._directory, process), CheckpointError)
        self._checkpointer = self._make_checkpointer()
        self._cleaner = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="redco_eqx.checkpoint"
        )
        self._in_flight: CheckpointInfo | None = None
        self._is_read_back = False

    @in_own_context
    def save(
        self,
        state: TrainState,
        *,
        metrics: LogRow | None = None,
        extras: Json | None = None,
        run: RunRecord | None = None,
    ) -> pathlib.Path:
        """Copy the state to the host, and return. The files are written while training
        continues.

        You may donate the state as soon as this returns. If the previous save is still
        being written, this call waits for it. All processes must call this, with the
        same step.

        **Arguments:**

        - `state`: the state to save, under its `step` number.
        - `metrics`: results of an evaluation at this step.
        - `extras`: anything that JSON can represent.
        - `run`: the record of a run of `fit`.

        **Returns:** The directory that the checkpoint will have.

        **Raises:**

        - `ValueError`: `extras` are not plain JSON, the state is abstract or has been
            donated, or a parameter is not finite.
        - `CheckpointError`: this save or the previous one could not be written, or the
            first one could not be read back. Earlier checkpoints are not affected.
        """
        check_is_one_state(state, "save: state")
        if os.getpid() != self._pid:
            raise CheckpointError(
                f"save: {self._directory} belongs to process {self._pid}, and this is "
                "its forked child. Save in the process that opened the writer."
            )
        arrays = to_names(state)
        for name, x in arrays.items():
            if lack := lack_of_value(x):
                raise ValueError(
                    f"save: {name} of the state {lack}. Save what the step returned."
                )
        step = step_of(state)
        saved = as_saved(arrays)
        steps = from_all(step)
        if len(set(steps)) > 1:
            raise ValueError(
                f"save: the processes are at the steps {steps}, but must save the same "
                "step."
            )
        checksums, nonfinite = array_checksums(saved)
        trained = [f"model/{path}" for path in state.params]
        if bad := [name for name in trained if name in nonfinite]:
            listed = first_few(bad, most=1)
            raise ValueError(
                f"save: step {step} is not saved, because {listed} hold NaN or "
                "infinity."
            )
        infos = {
            name: info_of(x, checksums.get(name, "")) for name, x in arrays.items()
        }
        if run is not None and run.positions is not None:
            run = _with_all_positions(run, run.positions)
        together(self.wait, CheckpointError)
        path = self._directory / from_first(lambda: self._name_for(step))
        numbers = {name: float(x) for name, x in (metrics or {}).items()}
        info = CheckpointInfo(step, path, numbers, dict(extras or {}), run, infos)
        record = encode(info)
        args = self._ocp.args
        with self._as_checkpoint_error(path):
            arguments = args.Composite(
                arrays=self._handlers.ArraysSave(saved), record=args.JsonSave(record)
            )
            self._checkpointer.save(os.fspath(path), args=arguments)
        self._in_flight = info
        return path

    def _name_for(self, step: int) -> str:
        """Choose a name that no checkpoint in the directory has."""
        attempts = [attempt for s, attempt, _ in entries(self._directory) if s == step]
        if not attempts:
            return str(step)
        return f"{step}-{max(attempts) + 1}"

    def wait(self) -> None:
        """Wait until the last save is complete. Raises `CheckpointError` if it failed,
        or if the first one cannot be read back."""
        newest = self._in_flight
        self._in_flight = None
        with self._as_checkpoint_error(newest and newest.path):
            self._checkpointer.wait_until_finished()
        if newest is not None and jax.process_index() == 0:
            self._read_back(newest)
            with contextlib.suppress(OSError):
                # The next save reports a disk that fails.
                self._prune(newest)

    def check(self) -> None:
        """Raise `CheckpointError` if a save has already failed. Does not wait."""
        newest = self._in_flight
        with self._as_checkpoint_error(newest and newest.path):
            self._checkpointer.check_for_errors()
        if newest is None or jax.process_index() > 0:
            return
        if not self._is_read_back and newest.path.is_dir():
            # It has its name when it is complete.
            self._read_back(newest)

    def close(self) -> None:
        """Wait as `wait` does, and end the threads. You may call it twice. Does nothing
        in a forked child."""
        if os.getpid() != self._pid:
            # The threads and the directory are those of the parent.
            return
        try:
            self.wait()
        finally:
            self._cleaner.shutdown(wait=True)
            self._checkpointer.close()
            self.release()

    def release(self) -> None:
        """Release the directory to other writers."""
        if self.owner is not None:
            self.owner.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self) -> dict[str, Any]:
        """Take the directory on process 0, and return its owner. Remove anything
        half-written there, because the process that wrote it is dead."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self.owner = Owner(self._directory)
        # For a writer that is dropped without `close`. The method belongs to the owner,
        # so it does not hold the writer.
        weakref.finalize(self, self.owner.release)
        for pattern in ("[0-9]*.orbax-checkpoint-tmp*", "[0-9]*.deleting"):
            for path in list(self._directory.glob(pattern)):
                shutil.rmtree(path, ignore_errors=True)
        return this_process()

    def _make_checkpointer(self) -> Any:
        # `save` itself makes the directories. Background threads would wait for
        # directories that cannot be made, and delay the end of the process by minutes.
        options = self._ocp.AsyncOptions(create_directories_asynchronously=False)
        handler = self._ocp.CompositeCheckpointHandler(
            composite_options=self._ocp.CompositeOptions(async_options=options),
            arrays=self._handlers.ArraysHandler(),
            record=self._ocp.JsonCheckpointHandler(filename="record.json"),
        )
        return self._ocp.AsyncCheckpointer(handler, async_options=options)

    @contextlib.contextmanager
    def _as_checkpoint_error(self, path: pathlib.Path | None) -> Iterator[None]:
        """Turn an error that Orbax raises in the block into a `CheckpointError`."""
        try:
            yield
        except Exception as error:
            # One failure leaves several errors behind, and each later call would raise
            # another of them.
            with contextlib.suppress(Exception):
                self._checkpointer.close()
            self._checkpointer = self._make_checkpointer()
            self._in_flight = None
            raise CheckpointError(
                f"the checkpoint {path} could not be written: {error}"
            ) from error

    def _read_back(self, newest: CheckpointInfo) -> None:
        """Read the first checkpoint back, so that a way of writing that silently fails
        is found at once."""
        if not self._is_read_back:
            self._is_read_back = True
            read_back(newest)

    def _prune(self, newest: CheckpointInfo) -> None:
        """Remove the checkpoints of the same run that are no longer needed after
        `newest`: other attempts at its step, and those that `keep_last` and `keep_best`
        do not keep."""
        last = self._config.keep_last
        infos = []
        for step, _, path in entries(self._directory):
            is_other_attempt = step == newest.step and path != newest.path
            is_older = step < newest.step and last is not None
            if is_other_attempt or is_older:
                with contextlib.suppress(CheckpointError, CheckpointFormatError):
                    # Records that cannot be read are left alone.
                    infos.append(read_record(path))
        infos = [info for info in infos if _run_of(info) == _run_of(newest)]
        one_per_step = [*(info for info in infos if info.step < newest.step), newest]
        # If all are kept, `-0` takes the whole list.
        kept = one_per_step[-(last or 0) :]
        rows = [info.metrics for info in one_per_step]
        for metric, mode in self._config.keep_best.items():
            best = best_of(rows, metric, mode)
            if best is not None:
                kept.append(one_per_step[best])
        for info in infos:
            if info not in kept:
                self._remove(info.path)

    def _remove(self, path: pathlib.Path) -> None:
        # Renamed at once, so that half of a checkpoint never looks like one.
        hidden = path.with_name(path.name + ".deleting")
        with contextlib.suppress(OSError):
            # The next save reports a disk that fails.
            path.rename(hidden)
            self._cleaner.submit(shutil.rmtree, hidden, ignore_errors=True)


def save(
    directory: str | os.PathLike[str],
    state: TrainState,
    *,
    metrics: LogRow | None = None,
    extras: Json | None = None,
) -> pathlib.Path:
    """Write one checkpoint and return when it is complete. In a loop, use
    `Checkpoints(...).open()`.

    ```python
    path = rx.save("run", state, extras={"note": "before the long run"})
    ```

    **Arguments:**

    - `directory`: the directory of the run. The checkpoint becomes a directory in it,
        named after `state.step`.
    - `state`, `metrics`, `extras`: as for `CheckpointWriter.save`.

    **Returns:** The directory of the checkpoint.

    **Raises:** as `Checkpoints.open` and `CheckpointWriter.save` do.
    """
    config = Checkpoints(directory, keep_last=None)
    check_is_one_state(state, "save: state")
    with config.open() as writer:
        return writer.save(state, metrics=metrics, extras=extras)


def best_of(rows: Sequence[LogRow], metric: str, mode: str) -> int | None:
    """Return the index of the row with the lowest or highest `metric`, the first one if
    several are equal, or `None` if no row has a number for it."""
    sign = 1 if mode == "min" else -1
    scores = [row.get(metric, math.nan) for row in rows]
    # A NaN would make the order depend on its place.
    known = [i for i, score in enumerate(scores) if not math.isnan(score)]
    return min(known, key=lambda i: sign * scores[i], default=None)


def _with_all_positions(run: RunRecord, own: Sequence[Any]) -> RunRecord:
    """Add the positions of the shards that other processes read. All processes must
    call it."""
    # Processes that read the same shard are at the same position.
    shards = {}
    for of_process in from_all(own):
        shards |= {shard[0]: tuple(shard) for shard in of_process}
    return dataclasses.replace(run, positions=tuple(shards.values()))


def _run_of(info: CheckpointInfo) -> tuple[int, str | None] | None:
    if info.run is None:
        return None
    return info.run.begin, info.run.id


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Settings for checkpoints: their directory, when [`fit`][] saves, and which
    checkpoints it keeps. In your own loop, call `open`.

    `fit` saves in the background every `every_steps` steps, every `every_minutes`
    minutes, at the end of the run, and when a signal or an error ends it. Without both
    intervals, it saves after each epoch. An evaluation at the same step comes before
    the save, and its results are part of the checkpoint.

    ```python
    checkpoints = rx.Checkpoints(
        "run", every_steps=500, keep_last=2, keep_best={"eval/loss": "min"}
    )
    state, _ = rx.fit(
        state,
        examples,
        **pipeline,
        num_epochs=2,
        checkpoints=checkpoints,
        evaluation=rx.Evaluation(held_out),
    )
    ```

    - `directory`: the directory of this run, which all processes must see. If it
        already has checkpoints, `fit` continues from the newest, provided that their
        run began with the same key, parameters and examples. `~` is the home directory.
    - `every_steps`: the number of steps between two saves.
    - `every_minutes`: the number of minutes after which the next step is followed by a
        save, counted from the last save by the clock of process 0. With multiple
        processes, all save two steps later, after the same step. Fractions are allowed.
    - `keep_last`: the number of checkpoints to keep; `None` keeps all. With 2, one is
        left if the newest is damaged. Checkpoints of other runs (see
        `RunRecord.begin`), and of later steps than the newest, are not removed.
    - `keep_best`: metrics of the evaluations, each with `"min"` or `"max"`, such as
        `{"eval/loss": "min"}`. The checkpoint with the best value of each metric is
        also kept, and a save follows each evaluation that is better than all earlier
        ones.
    - `allow_changes`: true to let `fit` continue even if `batch_size`, the examples, or
        the initial key or parameters of the run have changed. Otherwise `fit` refuses,
        because the run would not be the same. The hyperparameters that
        `optax.inject_hyperparams` keeps are then those of the state that `fit` gets,
        not those of the checkpoint.

    Raises `ValueError` for a value that cannot be used.
    """

    # The fields after this one are equal on all processes.
    directory: str | os.PathLike[str] = dataclasses.field(repr=False)
    _: dataclasses.KW_ONLY
    every_steps: int | None = None
    every_minutes: int | float | None = None
    keep_last: int | None = 2
    keep_best: Mapping[str, Literal["min", "max"]] = dataclasses.field(
        default_factory=dict
    )
    allow_changes: bool = False

    def __post_init__(self) -> None:
        local(self.directory)
        check_positive(
            "Checkpoints", every_steps=self.every_steps, keep_last=self.keep_last
        )
        minutes = self.every_minutes
        is_number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
        if minutes is not None and not (is_number and 0 < minutes < math.inf):
            raise ValueError(
                f"Checkpoints: every_minutes={minutes!r}, but it must be a positive "
                "number."
            )
        best = self.keep_best
        are_modes = isinstance(best, Mapping) and all(
            mode in ("min", "max") for mode in best.values()
        )
        if not are_modes:
            raise ValueError(
                f"Checkpoints: keep_best={best!r}, but it must say for each metric "
                "whether the best value "
                'is the "min" or the "max", as in {"eval/loss": "min"}.'
            )

    def open(self) -> CheckpointWriter:
        """Open a writer for the directory. Close it, or use it in a `with`. You decide
        when to save.

        ```python
        with rx.Checkpoints("run", keep_last=2).open() as writer:
            for i, batch in enumerate(batches, start=1):
                state, metrics = step(state, batch)
                if i % 100 == 0:
                    writer.save(state, extras={"note": "mine"})
        ```

        The directory is created if it does not exist. All processes must see the same
        directory, and all must call this method. Anything that an earlier process left
        half-written is removed.

        **Raises:** `ImportError` if Orbax is not installed; `OSError` if the directory
        cannot be written; `CheckpointError` if another live writer uses it, on this
        host or on another (detecting one on another host takes 12 seconds).
        """
        return CheckpointWriter(self)
