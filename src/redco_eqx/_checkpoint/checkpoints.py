"""`Checkpoints`: where and when a run is saved, and what of it is kept."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Literal

import jax

from redco_eqx._base.protocols import check_positive
from redco_eqx._base.tree import first_few, lack_of_value
from redco_eqx._checkpoint.arrays import digests, info_of, storable, to_names
from redco_eqx._checkpoint.owner import Owner, wait_for
from redco_eqx._checkpoint.record import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointInfo,
    Json,
    Row,
    RunRecord,
    best_of,
    decode,
    encode,
    entries,
    half_written,
    local,
    orbax_checkpoint,
    read_record,
)
from redco_eqx._distributed.consensus import from_all, from_first, together
from redco_eqx._sharding.mesh import in_own_context
from redco_eqx._step.state import TrainState, check_is_state, step_of

# A state on disk, by Orbax: written whole or not at all, read onto any mesh, verified.
#
# A checkpoint is a directory `<step>` (or `<step>-2`, where one of this step was there already) with
#
#     arrays/                 a flat dictionary of arrays, as Orbax and tensorstore read it
#     record/record.json      the rest: see `CheckpointInfo`
#
# Orbax writes it under another name and renames it when it is complete, so whatever has this name is whole,
# unless it was damaged later: that is what the checksums are for. No pickle anywhere.


class CheckpointWriter(contextlib.AbstractContextManager["CheckpointWriter"]):
    """Writes checkpoints into a directory, in the background. Made by `Checkpoints.open`, which says how."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_best: Mapping[str, str] = MappingProxyType({}),
        is_guest: bool = False,
    ):
        """**Arguments:** as for `Checkpoints`; and

        - `is_guest`: writes into the directory of another writer, too, if there is one.
        """
        self._directory = local(directory)
        self._keep_last, self._keep_best = keep_last, keep_best
        self._ocp = orbax_checkpoint()
        self.owner: Owner | None = None
        mark = from_first(lambda: self._prepare(is_guest))
        if mark is not None:
            together(lambda: wait_for(self._directory, mark), CheckpointError)
        self._checkpointer = self._make_checkpointer()
        self._cleaner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="redco_eqx.checkpoint")
        self._in_flight: CheckpointInfo | None = None
        self._closed = False

    @in_own_context
    def save(
        self,
        state: TrainState,
        *,
        metrics: Row | None = None,
        extras: Json | None = None,
        run: RunRecord | None = None,
    ) -> pathlib.Path:
        """Copies the state to the host and returns; it is written while training goes on.

        The state may be donated as soon as this returns. A save that is still being written is waited for.
        On several processes all must call this, with the same step.

        **Arguments:**

        - `state`: what to save, under the number of its `step`.
        - `metrics`: results of an evaluation at this step.
        - `extras`: anything that JSON holds.
        - `run`: where a run of `fit` stands.

        **Returns:** The directory that the checkpoint will have.

        **Raises:**

        - `ValueError`: `extras` are not plain JSON, the state is abstract or has been donated, or a
            parameter is not finite.
        - `CheckpointError`: this or the save before could not be written. Earlier checkpoints are unharmed.
        """
        check_is_state(state, "save: state")
        arrays = to_names(state)
        for name, x in arrays.items():
            if lack_of_value(x):
                what = "is abstract" if isinstance(x, jax.ShapeDtypeStruct) else "has been donated or deleted"
                raise ValueError(f"save: {name} of the state {what}. Save what the step returned.")
        step, stored = step_of(state), storable(arrays)
        checksums, nonfinite = digests(stored)
        bad = [f"model/{path}" for path in state.params if f"model/{path}" in nonfinite]
        if bad:
            raise ValueError(
                f"save: the state at step {step} is not saved, because {first_few(bad, most=1)} hold NaN or "
                "infinity."
            )
        infos = {name: info_of(x, checksums.get(name, "")) for name, x in arrays.items()}
        if run is not None and run.positions is not None:
            shards = {shard[0]: tuple(shard) for of_process in from_all(run.positions) for shard in of_process}
            run = dataclasses.replace(run, positions=tuple(shards.values()))
        record = encode(step, infos, metrics, extras, run)
        together(self.wait, CheckpointError)
        attempt = from_first(
            lambda: 1 + max((a for s, a, _ in entries(self._directory) if s == step), default=0)
        )
        path = self._directory / (str(step) if attempt == 1 else f"{step}-{attempt}")
        args = self._ocp.args
        with self._naming(path):
            what = args.Composite(arrays=args.PyTreeSave(stored), record=args.JsonSave(record))
            self._checkpointer.save(os.fspath(path), args=what)
        self._in_flight = decode(path, json.dumps(record))
        return path

    def wait(self) -> None:
        """Waits until the last save is complete. Raises `CheckpointError` if it failed."""
        newest, self._in_flight = self._in_flight, None
        with self._naming(newest and newest.path):
            self._checkpointer.wait_until_finished()
        if newest is not None and jax.process_index() == 0:
            self._prune(newest)

    def check(self) -> None:
        """Raises `CheckpointError` if a save has failed by now; does not wait."""
        with self._naming(self._in_flight and self._in_flight.path):
            self._checkpointer.check_for_errors()

    def close(self) -> None:
        """Waits as `wait` does, and ends the threads. May be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._cleaner.shutdown(wait=True)
            self._checkpointer.close()
            self.release()

    def release(self) -> None:
        """Leaves the directory to other writers."""
        if self.owner is not None:
            self.owner.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(self, is_guest: bool) -> str | None:
        """On process 0: takes the directory, and returns its mark. Who left something half-written in it is
        dead."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            self.owner = Owner(self._directory, waits=not is_guest)
        except CheckpointError:
            if not is_guest:
                raise
            return None
        weakref.finalize(self, self.owner.release)  # of a writer that is dropped
        for path in half_written(self._directory):
            shutil.rmtree(path, ignore_errors=True)
        return self.owner.mark

    def _make_checkpointer(self) -> Any:
        # Directories are made by `save` itself: in the background, threads would wait for those that cannot be
        # made, and hold up the end of the process until a time-out of minutes.
        options = self._ocp.AsyncOptions(create_directories_asynchronously=False)
        handler = self._ocp.CompositeCheckpointHandler(
            composite_options=self._ocp.CompositeOptions(async_options=options),
            arrays=self._ocp.PyTreeCheckpointHandler(),
            record=self._ocp.JsonCheckpointHandler(filename="record.json"),
        )
        return self._ocp.AsyncCheckpointer(handler, async_options=options)

    @contextlib.contextmanager
    def _naming(self, path: pathlib.Path | None) -> Iterator[None]:
        """Raises `CheckpointError` for what Orbax raises inside."""
        try:
            yield
        except Exception as error:
            # One failure leaves several errors behind, of which each later call would raise another.
            with contextlib.suppress(Exception):
                self._checkpointer.close()
            self._checkpointer, self._in_flight = self._make_checkpointer(), None
            raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error

    def _prune(self, newest: CheckpointInfo) -> None:
        """Removes what `newest` makes superfluous, of the same run: other attempts at its step, and what is not
        to be kept."""
        infos = []
        for step, _, path in entries(self._directory):
            is_older = step < newest.step and self._keep_last is not None
            if (is_older or step == newest.step) and path != newest.path:
                with contextlib.suppress(CheckpointError, CheckpointFormatError):  # not ours to judge
                    infos.append(read_record(path))
        infos = [info for info in infos if _run_of(info) == _run_of(newest)]
        superfluous = [info.path for info in infos if info.step == newest.step]
        if self._keep_last is not None:
            infos = [*(info for info in infos if info.step < newest.step), newest]
            best = [best_of(infos, metric, mode) for metric, mode in self._keep_best.items()]
            superfluous += [info.path for info in infos[: -self._keep_last] if info not in best]
        for path in superfluous:
            hidden = path.with_name(path.name + ".deleting")
            with contextlib.suppress(OSError):  # a disk that fails is told by the next save
                path.rename(hidden)  # at once, so that no half of it is ever taken for a checkpoint
            self._cleaner.submit(shutil.rmtree, hidden, ignore_errors=True)


def save(
    directory: str | os.PathLike[str],
    state: TrainState,
    *,
    metrics: Row | None = None,
    extras: Json | None = None,
) -> pathlib.Path:
    """Writes one checkpoint and returns when it is complete. In a loop, use `Checkpoints(...).open()`.

    ```python
    path = rx.save("run", state, extras={"note": "before the long run"})
    ```

    **Arguments:**

    - `directory`: of the run; the checkpoint becomes a directory in it, named after `state.step`.
    - `state`, `metrics`, `extras`: as for `CheckpointWriter.save`.

    **Returns:** The directory of the checkpoint.

    **Raises:** as `Checkpoints.open` and `CheckpointWriter.save` do.
    """
    local(directory)
    check_is_state(state, "save: state")
    with CheckpointWriter(directory, is_guest=True) as writer:
        return writer.save(state, metrics=metrics, extras=extras)


def _run_of(info: CheckpointInfo) -> tuple[int, str | None] | None:
    return None if info.run is None else (info.run.begin, info.run.id)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The times and the place at which [`fit`][] saves, and what it keeps; `open` gives the same to your own
    loop.

    `fit` saves in the background at the steps asked for, at its end, and when a signal ends it. Without any
    `every_...` it does so after each epoch. An evaluation that is due comes before, and its results are part of
    the checkpoint.

    ```python
    checkpoints = rx.Checkpoints("run", every_steps=500, keep_last=2, keep_best={"eval/loss": "min"})
    state, _ = rx.fit(state, examples, **pipeline, num_epochs=2, checkpoints=checkpoints,
                      evaluation=rx.Evaluation(held_out))
    ```

    - `directory`: of this run, which all processes see. If there are checkpoints of it already, `fit` goes on
        from the newest, provided that they are of a run that began with the same key, parameters and examples.
        `~` is the home directory.
    - `every_steps`, `every_epochs`: how often; both can be given.
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
    keep_last: int | None = 2
    keep_best: Mapping[str, Literal["min", "max"]] = dataclasses.field(default_factory=dict)
    extras: Json | Callable[[], Json] | None = None
    allow_changes: bool = False

    def __post_init__(self) -> None:
        local(self.directory)
        counts = {name: getattr(self, name) for name in ("every_steps", "every_epochs", "keep_last")}
        check_positive("Checkpoints", **counts)
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
