"""The loop of `fit`, which takes steps and does what is due after each.

It is a run in progress. How far the run has come is a value of its own, `RunRecord`
(`_checkpoint/run_record.py`), which the loop advances and checkpoints hold.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import optax

from redco_eqx._base.compiler import merges
from redco_eqx._base.pairs import noting_pairs
from redco_eqx._base.protocols import Batch, LossFn
from redco_eqx._base.tree import first_few, lack_of_value
from redco_eqx._base.warn import warn
from redco_eqx._checkpoint.run_record import CheckpointError, RunRecord
from redco_eqx._data.data import Place
from redco_eqx._distributed.consensus import Vote, agree, from_all, is_shared
from redco_eqx._distributed.process_group import Watchdog, leave_call
from redco_eqx._sharding.mesh import axis_size, put_global, replicated
from redco_eqx._step.compile_cache import signature
from redco_eqx._step.guard import all_finite
from redco_eqx._step.state import TrainState, first_change, state_mesh, step_of
from redco_eqx._step.step_functions import TrainStepFn
from redco_eqx._step.window import Window
from redco_eqx._training.course import (
    Course,
    Due,
    Hook,
    InterruptFlag,
    NonFiniteError,
    TrainingInterrupted,
    apply_hook,
    check_not_donated,
    due,
    interruption,
)
from redco_eqx._training.evaluation import Evaluation, Programs
from redco_eqx._training.in_flight import NUM_AHEAD, InFlight, PendingRow, StepInFlight
from redco_eqx._training.loggers import History, Reporter
from redco_eqx._training.lost_updates import LostUpdates
from redco_eqx._training.program import (
    TrainProgram,
    is_train_step,
    reduces_once,
    train_program,
)

if TYPE_CHECKING:  # imported where it is used, because few runs need it
    from redco_eqx._training.saving import Saver


class _StoppedError(Exception):
    """The evaluation stops because a signal was received."""


SLOW_COMPILE_SECONDS = 30.0
"""The time to trace and compile a step from which `fit` says how to keep programs."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Training:
    """The state of a run and its record, which advance together.

    - `arrays`, `tree`: the leaves of the state after the last step that was dispatched,
        and their structure.
    - `run`: the record of the run at that step.
    - `evaluation`, `hook`, `saver`: `None` for a run without one.
    - `watchdog`: notified of each step, including those of evaluations.
    - other fields: as in `fit`.
    """

    arrays: list[Any]
    tree: Any
    run: RunRecord
    step_fn: TrainStepFn
    loss_fn: LossFn
    optimizer: optax.GradientTransformation
    num_microbatches: int
    compiler_options: dict[str, Any] | None
    course: Course
    evaluation: Evaluation | None
    hook: Hook | None
    reporter: Reporter
    saver: "Saver | None"
    watchdog: Watchdog
    interrupt: InterruptFlag

    def __post_init__(self) -> None:
        self._mesh = state_mesh(self.state)
        self._pid = os.getpid()
        self._programs: dict[Hashable, TrainProgram] = {}  # by the shapes of batches
        self._evaluated: Programs = {}
        self._program: TrainProgram | None = None  # not before the first step
        self._in_flight = InFlight()
        self._window: Window | None = None  # while it is empty
        self._begin_of_window = self.run.logged_until
        self._waited = 0.0  # seconds spent on batches since the last row
        self._lost_updates = LostUpdates()
        if self.run.window is not None:
            everywhere = replicated(self._mesh)
            saved = Window.from_json(self.run.window)
            self._window = jax.tree.map(lambda x: put_global(x, everywhere), saved)
            self.run = dataclasses.replace(self.run, window=None)

    @property
    def state(self) -> TrainState:
        """The state after the last step that was dispatched."""
        return self.tree.unflatten(self.arrays)

    @property
    def history(self) -> History:
        """The numbers of the run so far."""
        return History(tuple(self.reporter.rows), self.run.evaluations)

    def loop(
        self, places: Iterator[tuple[Batch | None, Place]], place: Place
    ) -> tuple[TrainState, History]:
        """Take steps, and after each do everything that is due, until the course is
        complete.

        `places` are the batches, each with the place after it, that follow `place`.

        Raises `TrainingInterrupted` if a signal comes first.
        """
        stop = 0
        self._place = place  # in the examples, after the steps so far
        vote = Vote(self._mesh)
        began = time.perf_counter()
        for found in self.interrupt.end_early(places):
            # `None` in place of an item: its reader hangs after a signal. `None` in
            # place of a batch: the run was resumed here, and something may still be
            # due.
            batch, place = found or (None, place)
            self._waited += time.perf_counter() - began
            if batch is not None:
                self._step(batch, place)
            self._place = place
            is_late = self.saver is not None and self.saver.is_late()
            # With several processes, the answer is that of two steps ago, the same on
            # all of them, so nobody waits for it.
            stop, late = vote(self.interrupt.signal, int(is_late)) or (0, 0)
            stop, is_end = self._do_what_is_due(stop, is_late=late != 0)
            if is_end:
                break
            began = time.perf_counter()
        self._lost_updates.warn(self.state.params)  # of a run with few rows
        # A signal may have come in the last evaluation.
        stop = stop or max(from_all(self.interrupt.signal))
        path = self.saver and self.saver.wait()
        if stop:
            error = interruption(self.state, self.run.step, stop, path, self.history)
            self.reporter.say(f"fit: {error}")
            raise error
        return self.state, self.history

    def _do_what_is_due(self, stop: int, *, is_late: bool) -> tuple[int, bool]:
        """Log, evaluate and save, as far as it is due.

        `stop` is the signal that ends the run, or 0. Return it again, because a signal
        may come in an evaluation, and true if the run ends here.
        """

        def now_due() -> Due:
            return due(self.course, self.run, stop=stop != 0, is_late=is_late)

        if now_due().log:
            self._log(None if stop else self.hook)
        # Ask again after each part: a hook may have ended the run.
        now = now_due()
        if now.finish:
            self._catch_up()
        if self.evaluation is not None and now.evaluate:
            if not self._evaluate(self.evaluation):
                stop = self.interrupt.signal
            now = now_due()
        if self.saver is not None:
            if now.save or self.saver.is_best(self.run):
                self._save(self.saver, finished=now.finish and not stop)
            else:
                self.saver.check()
        return stop, now.finish

    def _step(self, batch: Batch, place: Place) -> None:
        """Dispatch a step. `place` is the place in the examples after it. Wait for the
        first step, which may compile."""
        is_first = self._program is None
        shapes = signature(batch)
        program = self._programs.get(shapes) or self._compile(batch, shapes)
        if program is not self._program:
            self._program = program
            self.reporter.peak_seconds = program.peak_seconds
            if self._window is not None and first_change(self._window, program.window):
                # The next metrics are others, so those until now get a row.
                self._log(None)
        window = self._window or program.window
        if self._window is None and self._in_flight:
            # A step before it may not have been finite.
            window = window._replace(ok=self._in_flight.newest.window.ok)
        self.arrays, window = program(self.arrays, window, batch)
        self.run = self.run.advanced(place.epoch, place.batch, place.positions)
        self._window = window
        self._in_flight.add(StepInFlight(batch, window))
        # Under JAX's debugging options, wait for each step, so that the error can name
        # the place.
        self._catch_up(0 if _is_debugging() else NUM_AHEAD)
        self.watchdog.beat()
        if is_first:
            if self.reporter.console is not None:
                # Imported here, because only a run with a console needs the reader of
                # compiled text.
                from redco_eqx._compiled.communication import cost

                self.reporter.say(f"fit: {cost(program.compiled, self._mesh)}")
                self._announce_sums()
            jax.block_until_ready(self._window)
            if not is_train_step(self.step_fn):
                self._check_counted(window)
            self.reporter.start_clock(self.run.step - self._begin_of_window)
        self.reporter.bar.update()

    def _check_counted(self, window: Window) -> None:
        """Raise `ValueError` if the user's step does not count itself."""
        found = step_of(self.state)
        if found != self.run.step and jax.device_get(window.ok):
            raise ValueError(
                f"step_fn: after one step, state.step is {found}, but must be "
                f"{self.run.step}. Return a state with state.step + 1, once for each "
                "batch. (train_step adds 1 each time that it is called.)"
            )

    def _compile(self, batch: Batch, shapes: Hashable) -> TrainProgram:
        """Return the program for batches of these shapes."""
        if self._program is None:
            self._first_batch = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch
            )
            self._identify_functions(batch)
        else:
            self._warn_of_other_shapes(batch)
        began = time.perf_counter()
        program = train_program(
            self.state,
            batch,
            step_fn=self.step_fn,
            loss_fn=self.loss_fn,
            optimizer=self.optimizer,
            num_microbatches=self.num_microbatches,
            compiler_options=self.compiler_options,
        )
        self._announce_cache(time.perf_counter() - began)
        self._announce_taken_over(program)
        self._check_same_on_all(program)
        self._programs[shapes] = program
        return program

    def _compared_functions(self) -> dict[str, Any]:
        """Return the functions that are compared between processes, and with those of
        the run that this one continues."""
        functions: dict[str, Any] = {
            "loss_fn": self.loss_fn,
            "optimizer": self.optimizer,
        }
        # `train_step` leaves the record of a run as it is.
        if not is_train_step(self.step_fn) or reduces_once(self.step_fn):
            functions["step_fn"] = self.step_fn
        return functions

    def _identify_functions(self, batch: Batch) -> None:
        """Add the functions to the identity of the run, if it has one."""
        if not self.run.identity:
            return
        from redco_eqx._training.identity import with_programs

        functions = self._compared_functions()
        source = self.saver and self.saver.path
        self.run = with_programs(self.run, source, self.state, batch, functions)
        self._announce_what_is_not_compared(functions)

    def _warn_of_other_shapes(self, batch: Batch) -> None:
        """Warn once that the step is compiled again, because batches have other
        shapes than the first one."""
        if self._first_batch is None:
            return
        change = first_change(self._first_batch, batch)
        if change:
            path, was, became = change
            warn(
                f"collate_fn: {path or 'the batch'} is {became}, but was {was} in the "
                "first batch. Each new shape compiles the step again: pad to a few "
                "fixed sizes."
            )
            self._first_batch = None

    def _check_same_on_all(self, program: TrainProgram) -> None:
        """Raise `ValueError` if processes have different programs."""
        facts = {
            f"the checksum of what {name} computes": self.run.identity.get(name, "")
            for name in self._compared_functions()
        }
        facts["the checksum of the program of the step"] = program.digest
        agree(self._mesh, "fit: step", facts)

    def _announce_cache(self, seconds: float) -> None:
        """Say once how to keep compiled programs, if they take long and are not
        kept."""
        config: Any = jax.config
        if self._programs or seconds < SLOW_COMPILE_SECONDS:
            return
        if config.jax_compilation_cache_dir:
            return
        self.reporter.say(
            f"fit: it took {seconds:.0f} s to trace and compile the step. A program "
            "that starts again compiles it again. To keep compiled programs, set "
            "JAX_COMPILATION_CACHE_DIR to a directory that all processes share"
        )

    def _announce_taken_over(self, program: TrainProgram) -> None:
        """Say once which frozen arrays the step changes."""
        if program.taken_over and not self._programs:
            self.reporter.say(
                "fit: the step does not return the frozen arrays "
                f"{first_few(program.taken_over, most=3)} as they were, so fit takes "
                "them over, and deletes those that it was given"
            )

    def _announce_sums(self) -> None:
        """Say how to sum gradients once, if each microbatch sums them."""
        mesh = self._mesh
        has_option = is_train_step(self.step_fn) and not self.state.model_state
        # Compilers for TPU and GPU sum gradients that are whole on a device once for
        # all microbatches.
        is_summed_each = axis_size(mesh, "fsdp") > 1 or not merges(mesh)
        if (
            has_option
            and not reduces_once(self.step_fn)
            and self.num_microbatches > 1
            and axis_size(mesh, "data") > 1
            and is_summed_each
        ):
            self.reporter.say(
                f"fit: each of the {self.num_microbatches} microbatches sums gradients "
                "over data. To sum them once, pass "
                "step_fn=functools.partial(rx.train_step, reduce_once=True)"
            )

    def _announce_what_is_not_compared(self, functions: Mapping[str, Any]) -> None:
        if "step_fn" in functions and not self.run.identity["step_fn"]:
            self.reporter.say(
                "fit: step_fn cannot be traced on one device without shardings, so it "
                "is not compared with that of a resumed run"
            )

    def _catch_up(self, num_ahead: int = 0) -> None:
        """Wait until at most `num_ahead` steps are unfinished, and report the rows of
        the finished ones.

        Raises `NonFiniteError` for the first step that was not finite, while its batch
        is still available.
        """
        self._in_flight.note_finished_rows()
        while len(self._in_flight) > num_ahead:
            step = self._in_flight.wait_for_oldest()
            # `device_get` is an explicit transfer, which the user's transfer guard
            # allows. `bool(...)` would be an implicit one.
            if not jax.device_get(step.window.ok):
                # It stays in the queue: the state must not be saved as if the step
                # had been taken.
                raise self._nonfinite(step.batch)
            self._in_flight.remove_oldest()
            if step.row is not None:
                self._report(step.row, step.batch)

    def _report(self, row: PendingRow, batch: Batch | None) -> None:
        """Log a row that has finished. `batch` is that of its last step."""
        window, is_finite = jax.device_get((row.window, row.finite))
        if not is_finite:
            raise self._nonfinite(batch)
        self._lost_updates.add(window)
        if self._lost_updates.is_complete:
            self._lost_updates.warn(self.state.params)
        numbers = {"train/data_wait_seconds": row.waited_seconds, **row.compared()}
        self.reporter.report(
            row.step,
            row.epochs_done,
            window,
            row.done_at or time.perf_counter(),
            numbers,
        )

    def _nonfinite(self, batch: Batch | None) -> NonFiniteError:
        from redco_eqx._step.nonfinite import find_nan, find_nonfinite, find_outside

        finite = {path: all_finite({path: x}) for path, x in self.state.params.items()}
        bad = [
            path for path, is_finite in jax.device_get(finite).items() if not is_finite
        ]
        error = NonFiniteError(
            self.state, step_of(self.state), parameters=first_few(bad)
        )
        if bad:
            return error
        nan = None
        with contextlib.suppress(Exception):
            # An error here would hide the one to explain.
            nan = find_nan(batch)
            error.where = nan or find_outside(self.state, batch, loss_fn=self.loss_fn)
        if nan is None and _is_debugging():
            try:
                found = find_nonfinite(self.state, batch, loss_fn=self.loss_fn)
            except FloatingPointError as cause:
                found = str(cause)
                error.__cause__ = cause
            error.where = error.where or found
        return error

    def _log(self, hook: Hook | None) -> None:
        """End the window, unless it is empty. Its row is reported when its last step is
        finished. With a hook, the call waits for that step."""
        if self._window is None:
            return
        row = PendingRow(
            self.run.step,
            self._place.epochs_done,
            self._window,
            all_finite(self.state.params),
            self._waited,
        )
        self._waited = 0.0
        if is_shared(self._mesh):
            from redco_eqx._training.identity import compare_copies

            when = f"This happened at step {self.run.step}"
            row.compared = compare_copies(self.state.params, when, row.waited_seconds)
        if not self._in_flight:
            # The steps of this row were taken in an earlier call, or have finished.
            self._in_flight.add(StepInFlight(None, self._window))
        self._in_flight.newest.row = row
        if hook is not None:
            # If it raises, the window is saved, so that a resumed run calls it for this
            # row.
            self._catch_up()
            self.run = self._call(hook, self.reporter.metrics, self.run)
        self._window = None
        self._begin_of_window = self.run.step

    def _evaluate(self, evaluation: Evaluation) -> bool:
        """Evaluate the state, which must be finite. Log the results, and add them to
        the record of the run.

        Return false if a signal came before the end of the evaluation.
        """
        self._catch_up()

        def watch() -> None:
            self.watchdog.beat()
            # With several processes, none stops during an evaluation, because the
            # others would wait for it.
            if self.interrupt.signal and jax.process_count() == 1:
                raise _StoppedError

        try:
            with self.reporter.paused():
                row = evaluation(self.state, watch=watch, programs=self._evaluated)
        except _StoppedError:
            return False
        check_not_donated(
            self.state, "a function of the evaluation (state_fn, for example)"
        )
        self.reporter.row(self.run.step, row)
        run = self.run.evaluated(row)
        # If it raises, it comes again.
        self.run = run if self.hook is None else self._call(self.hook, row, run)
        return True

    def _call(self, hook: Hook, row: Mapping[str, float], run: RunRecord) -> RunRecord:
        with self.reporter.paused(), noting_pairs(lambda: self.state.model):
            run = apply_hook(hook, run, row, self.state)
        self.watchdog.beat()
        return run

    def _save(self, saver: "Saver", *, finished: bool) -> None:
        """Save the state, with the metrics that have not been logged yet. Raises the
        same exceptions as `_catch_up` and `Saver.save`."""
        self._catch_up()
        window = (
            None if self._window is None else jax.device_get(self._window).to_json()
        )
        run = dataclasses.replace(self.run, finished=finished, window=window)
        num_rows = sum(row["step"] <= run.logged_until for row in self.reporter.rows)
        with self.reporter.paused():
            saver.save(self.state, dataclasses.replace(run, num_rows=num_rows))

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, _: object) -> None:
        """Save the state if an error ends the run, and add the state and the history to
        the error as attributes."""
        if (
            kind is not None
            and issubclass(kind, SystemExit)
            and not issubclass(kind, TrainingInterrupted)
        ):
            leave_call(error)
        # Without the devices' threads, and without the directory.
        is_forked_child = os.getpid() != self._pid
        if kind is None or not issubclass(kind, Exception) or is_forked_child:
            return
        is_good = not isinstance(error, NonFiniteError)
        where = ""
        # Do this only with a single process: other processes know nothing about the
        # error, and would not take part.
        is_alone = jax.process_count() == 1
        if is_good and is_alone:
            with contextlib.suppress(Exception):
                # Reports the rows of steps that were dispatched.
                self._catch_up()
        is_good = is_good and not any(map(lack_of_value, self.arrays))
        if (
            is_good
            and is_alone
            and self.saver is not None
            and not issubclass(kind, CheckpointError)
        ):
            try:
                self._save(self.saver, finished=False)
                where = f", and was saved as {self.saver.wait()}"
            except Exception as problem:
                where = f", and could not be saved: {problem}"
        with contextlib.suppress(AttributeError):  # some errors allow no new attributes
            error.history = self.history
            if is_good:
                error.state = self.state
                error.add_note(
                    f"fit: the state after step {self.run.step} is in this error's "
                    f"`state`{where}."
                )


def _is_debugging() -> bool:
    config: Any = jax.config
    return config.jax_debug_nans or config.jax_debug_infs
