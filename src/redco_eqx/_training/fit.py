"""`fit`: checks its arguments, and puts the parts of a run together."""

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import optax

from redco_eqx._base.protocols import (
    Batch,
    CollateFn,
    Examples,
    Logger,
    LossFn,
    check_functions,
    check_integers,
    check_positive,
    without_options,
)
from redco_eqx._checkpoint.run_record import RunRecord
from redco_eqx._data.batches import Epochs
from redco_eqx._data.data import Data, Place, Stream, check_examples
from redco_eqx._data.placement import check_batch_size
from redco_eqx._distributed.consensus import check_complete, is_shared
from redco_eqx._distributed.process_group import Watchdog
from redco_eqx._sharding.mesh import in_own_context
from redco_eqx._step.compile_cache import (
    CompilerOptions,
    check_compiles,
    checked_options,
)
from redco_eqx._step.optimizer import check_optimizer
from redco_eqx._step.state import (
    TrainState,
    check_is_one_state,
    check_steps,
    order_key,
    state_mesh,
    step_of,
)
from redco_eqx._step.step_functions import TrainStepFn
from redco_eqx._step.steps import JittedStep, train_step
from redco_eqx._training.course import AT_END, Course, Hook, InterruptFlag
from redco_eqx._training.evaluation import Evaluation
from redco_eqx._training.loggers import ConsoleLogger, History, Reporter
from redco_eqx._training.loop import Training

if TYPE_CHECKING:  # imported at run time only for a run with checkpoints
    from redco_eqx._checkpoint.checkpoints import Checkpoints
    from redco_eqx._training.saving import Saver


@in_own_context
def fit(
    state: TrainState,
    train_examples: Examples | Callable[[int], Examples] | Data | Stream,
    *,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    num_microbatches: int = 1,
    step_fn: TrainStepFn = train_step,
    evaluation: Evaluation | None = None,
    hook: Hook | None = None,
    checkpoints: "Checkpoints | str | os.PathLike[str] | None" = None,
    log_every: int = 50,
    loggers: Sequence[Logger] | None = None,
    step_timeout_seconds: float | None = None,
    compiler_options: CompilerOptions | None = None,
) -> tuple[TrainState, History]:
    """Train a model, and return the new state and the history of the run.

    `fit` reads the mesh and the layout from the arrays of `state`. Each call starts new
    epochs. The order of their examples depends on the key of `state` and on the step at
    which the call begins. At the end of an epoch, training drops the examples that do
    not fill a batch (different ones each time). Each call traces the functions anew. If
    their program is that of an earlier call, nothing is compiled again, unless the
    program calls back into Python.

    ```python
    state, history = rx.fit(
        state,
        examples,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=64,
        num_epochs=2,
        evaluation=rx.Evaluation(held_out),
        checkpoints="run",
    )
    ```

    **Main arguments:**

    - `state`: from `init_state`. `fit` deletes its arrays (and so those of the model),
        except the frozen ones, so use only the returned state afterwards. To keep
        `state`, pass a copy: `jax.tree.map(jnp.copy, state)`.
    - `train_examples`: a sequence of examples (see `batches`), or a function from the
        epoch to one. Pass [`Data`][] to set how they are read, or a [`Stream`][] for
        examples that come one after the other.
    - `collate_fn`, `loss_fn`: see [`CollateFn`][], [`LossFn`][].
    - `optimizer`: the same one as for `init_state`.
    - `batch_size`: the number of examples in a step, over all devices.
    - `num_epochs`, `num_steps`: the length of the run. Pass exactly one of them; for a
        stream, pass `num_steps`.

    **Other arguments:**

    - `num_microbatches`: see `train_step`.
    - `step_fn`: a training step of your own, a [`TrainStepFn`][], such as
        `partial(train_step, reshard_after_forward=False)`. It gets `loss_fn`,
        `optimizer`, `num_microbatches` and `shardings` by name. All that `fit` does
        around a step stays the same.
    - `evaluation`: an [`Evaluation`][] on other examples, after each epoch or a given
        number of steps, and at the end. `fit` tries it on one batch before it compiles
        anything for training.
    - `hook`: a [`Hook`][], called with the run, the row and the state after each row
        and each evaluation. It may end the run, or do anything else. Each call waits
        for the devices.
    - `checkpoints`: a directory, or [`Checkpoints`][], which also says when to save and
        which checkpoints to keep. If a run that began with `state` has left checkpoints
        there, that run continues exactly: `fit` reads its state, and drops the rows of
        later steps from `loggers` (with their method `rewind`, if they have one).
    - `log_every`: the number of steps that a row of training metrics covers. A row
        covers fewer if an evaluation or the end comes first.
    - `loggers`: functions that are called on process 0 with `(step, row)`. By default,
        a [`ConsoleLogger`][], which also shows a progress bar on a terminal. `()`
        prints nothing at all. Names in a row are `train/loss`, `eval/loss` and others.
    - `step_timeout_seconds`: if no step of training or evaluation finishes within this
        time, `fit` prints the stack of each thread and ends all processes. The time to
        compile a step counts, and so does the time to return to a place in a stream,
        which may have to be read again.
    - `compiler_options`: options for XLA, as of `jax.jit`, by name, to compile the step
        with. Evaluations are compiled without them.

    **Returns:**

    The state after the last step, and the [`History`][] of the whole run: its rows and
    its evaluations, including those of earlier calls that this call continues.

    **Raises:**

    - `ValueError`, `TypeError`: an argument cannot be used. `fit` raises them before it
        compiles anything.
    - `NonFiniteError`, with the last good state: a loss or gradient norm is not finite.
        Under `jax_debug_nans` or `jax_debug_infs`, it comes from the line of `loss_fn`
        that produced the value.
    - `TrainingInterrupted`, with the state: a SIGINT (Ctrl-C) or SIGTERM came. The
        current step ends first, and the state is saved if there are `checkpoints`. The
        same signal again within 2 seconds is part of the same request, because a
        launcher and a batch script may each send one. A later signal, or another one,
        ends the program at once. If the next batch does not come within 3 seconds of
        the signal, the run ends without it, so that a reader that hangs cannot prevent
        the save. (Several processes wait for the batch.)
    - `ImportError`: you passed `checkpoints`, but Orbax is not installed.
    - `CheckpointError`: all checkpoints are damaged, or one could not be written.

    An error that ends the run after it has begun has two attributes: `state`, the state
    after the last step, and `history`. Except after a `NonFiniteError`, the state is
    also saved if there are `checkpoints`.
    """
    functions: dict[str, Any] = {"collate_fn": collate_fn, "loss_fn": loss_fn}
    check_is_one_state(state, "fit: state")
    check_compiles("fit")
    check_examples("fit: train_examples", train_examples)
    if callable(train_examples):
        check_functions("fit", train_examples=train_examples)
    check_functions("fit", **functions, **({} if hook is None else {"hook": hook}))
    _check_step("fit", step_fn)
    _check_kind(
        "loggers",
        loggers,
        Sequence,
        "Pass a list of functions, even for one: loggers=[logger].",
    )
    for logger in loggers or ():
        check_functions("fit", logger=logger)
    _check_kind(
        "evaluation",
        evaluation,
        Evaluation,
        "To evaluate on examples, pass rx.Evaluation(examples).",
    )
    if not state.params:
        raise ValueError(
            "fit: the state has no trainable leaf. Check `trainable` of init_state "
            "(NumPy arrays are constants; jnp.asarray makes a parameter)."
        )
    check_optimizer("fit", state, optimizer)
    options = checked_options("fit", compiler_options)
    mesh = state_mesh(state)
    saver = None if checkpoints is None else _saver(checkpoints)
    course = Course(
        num_epochs=num_epochs,
        num_steps=num_steps,
        log_every=log_every,
        evaluate=evaluation and (evaluation.every_steps or 0),
        save=None if saver is None else _save_interval(saver.config),
    )
    evaluation = evaluation and evaluation.or_else(**functions, batch_size=batch_size)
    check_integers("fit", batch_size=batch_size)
    check_positive("fit", num_microbatches=num_microbatches)
    check_batch_size("fit", batch_size, mesh, num_microbatches)
    making = collate_fn
    if saver is not None:
        # Imported here, because only a run that can be resumed needs it.
        from redco_eqx._data.collation import CollatedTwice

        making = CollatedTwice(collate_fn)
    epochs = Epochs(train_examples, making, batch_size=batch_size, mesh=mesh)
    total = num_steps if num_epochs is None else epochs.num_steps(num_epochs)
    check_steps("fit", state, total)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(step_timeout_seconds))
        interrupt = stack.enter_context(InterruptFlag())
        facts = {
            "batch_size": batch_size,
            "num_microbatches": num_microbatches,
            "how long, and what is due": course,
            "len(train_examples)": epochs.num_examples,
            "evaluation's batch_size, num_batches": evaluation
            and (evaluation.batch_size, evaluation.num_batches),
            "a hook, checkpoints": (hook is not None, saver and saver.config),
            "compiler_options": options,
        }
        run = _begin(
            state,
            epochs,
            facts if saver is not None or is_shared(mesh) else None,
            collate_fn,
        )
        row = {} if evaluation is None else evaluation.rehearse(state)
        watchdog.beat()
        if saver is not None:
            saver.check_metrics(row)
            stack.enter_context(saver)
            state, run = saver.resume(state, run, course, optimizer)
        source = saver and saver.path
        # A run that its hook ended goes on if this call has no hook.
        run = dataclasses.replace(run, stopped=run.stopped and hook is not None)
        reporter = Reporter(
            [ConsoleLogger()] if loggers is None else loggers,
            run,
            directory=saver and saver.directory,
            num_steps=total,
            is_again=source is not None,
        )
        stack.enter_context(contextlib.closing(reporter.bar))
        _announce(reporter, epochs, run, source)
        place = epochs.place(run.epoch, run.batch)._replace(positions=run.positions)
        places: Iterator[tuple[Batch | None, Place]] = epochs.after(
            place,
            key=order_key(state, run.begin),
            verify=saver is None or not saver.config.allow_changes,
            say=lambda how: reporter.say(f"fit: {how}"),
        )
        stack.enter_context(contextlib.closing(places))
        if source is not None:
            # The earlier call may not have done everything that was due here.
            places = itertools.chain([(None, place)], places)
        training = Training(
            arrays=jax.tree.leaves(state),
            tree=jax.tree.structure(state),
            run=run,
            step_fn=step_fn,
            loss_fn=loss_fn,
            optimizer=optimizer,
            num_microbatches=num_microbatches,
            compiler_options=options,
            course=course,
            evaluation=evaluation,
            hook=hook,
            reporter=reporter,
            saver=saver,
            watchdog=watchdog,
            interrupt=interrupt,
        )
        # `training` has the state; this name would keep the memory of the initial one.
        del state
        with training:
            return training.loop(places, place)


def _saver(checkpoints: Any) -> "Saver":
    from redco_eqx._training.saving import Saver

    return Saver(checkpoints)


def _save_interval(config: "Checkpoints") -> int:
    """The number of steps between two saves, as in `Course`."""
    if config.every_steps is not None:
        return config.every_steps
    return 0 if config.every_minutes is None else AT_END


def _check_kind(
    name: str, x: object, kind: type | tuple[type, ...], remedy: str
) -> None:
    if x is not None and (
        not isinstance(x, kind) or (kind is Sequence and isinstance(x, str))
    ):
        raise TypeError(f"fit: {name} is a {type(x).__name__}. {remedy}")


def _check_step(where: str, step_fn: object) -> None:
    """Raise `TypeError` if `step_fn` is not called as a `TrainStepFn`, or is compiled
    already."""
    if isinstance(without_options(step_fn), JittedStep | jax.stages.Wrapped):
        raise TypeError(
            f"{where}: step_fn is compiled by jax.jit or jit_step, which take no "
            "functions such as loss_fn. Pass the function itself: fit compiles it."
        )
    check_functions(where, step_fn=step_fn)


def _begin(
    state: TrainState,
    epochs: Epochs,
    facts: dict[str, Any] | None,
    collate_fn: CollateFn,
) -> RunRecord:
    """Make the record of the run that begins with `state`. Compute its identity only if
    there are `facts` (see `identify`)."""
    check_complete("fit", state_mesh(state))
    identity = {}
    if facts is not None:
        from redco_eqx._training.identity import identify

        facts = {name: str(x) for name, x in facts.items()}
        identity = identify(state, epochs.examples_of(0), facts, collate_fn=collate_fn)
    more: Any = {
        "order": epochs.order,
        "positions": epochs.positions,
        "identity": identity,
    }
    return RunRecord(
        step_of(state), 0, 0, 0, epochs.batch_size, epochs.num_examples, **more
    )


def _announce(
    reporter: Reporter, epochs: Epochs, run: RunRecord, source: object
) -> None:
    """Report the examples of a run, what is not compared about them, and the checkpoint
    from which the run continues."""
    reporter.say(f"fit: {epochs}")
    if run.identity.get("changing"):
        changing = " and ".join(run.identity["changing"])
        reporter.say(
            f"fit: {changing} change from one reading to the next, so they are not "
            "compared"
        )
    if source is not None:
        stopped = ", where its hook ended it" if run.stopped else ""
        reporter.say(
            f"fit: continuing from {source}, after {run.num_steps} steps of this "
            f"run{stopped}"
        )


def num_train_steps(num_examples: int, *, batch_size: int, num_epochs: int) -> int:
    """Return the number of steps that `fit` takes, for learning-rate schedules.

    ```python
    num_steps = rx.num_train_steps(len(examples), batch_size=64, num_epochs=3)
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, num_steps))
    ```

    Raises `ValueError` if there are fewer examples than one batch, or a number is not
    positive.
    """
    check_positive(
        "num_train_steps",
        num_examples=num_examples,
        batch_size=batch_size,
        num_epochs=num_epochs,
    )
    if num_examples < batch_size:
        raise ValueError(
            f"num_train_steps: {num_examples} examples do not fill a batch of "
            f"{batch_size}. Reduce batch_size."
        )
    return num_examples // batch_size * num_epochs
