"""`fit`: the training loop, with its evaluations, logs and signals around the pure steps."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import optax

from redco_eqx._checkpoint.checkpoints import Checkpoints
from redco_eqx._checkpoint.record import RunRecord, local
from redco_eqx._data.batches import Epochs, Place
from redco_eqx._data.data import Data, Stream, check_examples
from redco_eqx._data.workers import work_in_hand
from redco_eqx._distributed.consensus import Vote, is_shared
from redco_eqx._distributed.process_group import Watchdog
from redco_eqx._sharding.mesh import in_own_context, num_batch_shards
from redco_eqx._step.optimizer import check_optimizer
from redco_eqx._step.state import TrainState, check_is_state, order_key, state_mesh, step_of
from redco_eqx._training.checks import check_batch_sizes, check_keep_best, check_positive, check_whole
from redco_eqx._training.compile import train_programs
from redco_eqx._training.evaluation import Evaluation
from redco_eqx._training.history import History, Reporter
from redco_eqx._training.hook import Hook
from redco_eqx._training.identity import identify
from redco_eqx._training.interrupt import InterruptFlag, interruption
from redco_eqx._training.loggers import ConsoleLogger
from redco_eqx._training.run import Training
from redco_eqx._training.saving import Saver, as_checkpoints, save_every
from redco_eqx._training.schedule import Plan, due
from redco_eqx._types import Batch, CollateFn, Examples, Logger, LossFn, check_function

# The arguments of `fit`, looked at together before anything is compiled.


def check_fit(
    state: Any,
    train_examples: object,
    *,
    collate_fn: object,
    loss_fn: object,
    optimizer: Any,
    evaluation: object | None,
    hook: object | None,
    checkpoints: object | None,
    loggers: object | None,
) -> None:
    """Raises `TypeError` for what is of another kind than it must be, and `ValueError` for what does not fit
    together. How long a run is, and the sizes of batches, are checked where they are used."""
    check_is_state(state, "fit: state")
    check_examples("fit: train_examples", train_examples)
    if callable(train_examples):
        check_function("fit", "train_examples", train_examples, "epoch")
    check_function("fit", "collate_fn", collate_fn, "examples")
    check_function("fit", "loss_fn", loss_fn, "model", "batch", "key")
    if hook is not None:
        check_function("fit", "hook", hook, "run", "row", "state")
    _check_loggers(loggers)
    _check_kind("evaluation", evaluation, Evaluation, "rx.Evaluation(examples) makes one of examples.")
    _check_kind("checkpoints", checkpoints, (Checkpoints, str, os.PathLike), "A directory, or rx.Checkpoints.")
    if not state.params:
        raise ValueError(
            "fit: the state has no trainable leaf. Check `trainable` of init_state (NumPy arrays are "
            "constants; jnp.asarray makes a parameter)."
        )
    check_optimizer("fit", state, optimizer)


def _check_loggers(loggers: object | None) -> None:
    if loggers is None:
        return
    if not isinstance(loggers, Sequence) or isinstance(loggers, str):
        raise TypeError(
            f"fit: loggers must be a list of functions, but is a {type(loggers).__name__}. One alone is "
            "loggers=[logger]."
        )
    for logger in loggers:
        check_function("fit", "a logger", logger, "step", "row")


def _check_kind(name: str, x: object, kind: type | tuple[type, ...], remedy: str) -> None:
    if x is not None and not isinstance(x, kind):
        raise TypeError(f"fit: {name} is a {type(x).__name__}. {remedy}")


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
    evaluation: Evaluation | None = None,
    hook: Hook | None = None,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    log_every: int = 50,
    loggers: Sequence[Logger] | None = None,
    step_timeout_seconds: float | None = None,
) -> tuple[TrainState, History]:
    """Trains, and returns the new state and the numbers of the run.

    Mesh and layout are read from the arrays of `state`. Each call starts its own epochs, whose order
    depends on the key of `state` and on the step at which the call begins. Training drops the ragged tail
    of an epoch (other examples each time). The compiled step is kept: a next call with the same functions,
    which close over the same values, and the same shapes compiles nothing.

    ```python
    state, history = rx.fit(state, examples, collate_fn=collate_fn, loss_fn=loss_fn, optimizer=optimizer,
                            batch_size=64, num_epochs=2, evaluation=rx.Evaluation(held_out), checkpoints="run")
    ```

    **Main arguments:**

    - `state`: from `init_state`. It is taken over: its arrays (and so the model's) are deleted, and only the
        returned state lives on. To keep it, pass a copy: `jax.tree.map(jnp.copy, state)`.
    - `train_examples`: a sequence of examples (see `batches`), or a function from the epoch to one; [`Data`][]
        also says how they are read. A [`Stream`][] has examples that come one after the other.
    - `collate_fn`, `loss_fn`: see [`CollateFn`][], [`LossFn`][].
    - `optimizer`: the one that `init_state` was given.
    - `batch_size`: number of examples in a step, over all devices.
    - `num_epochs`, `num_steps`: how long; exactly one of them, and `num_steps` for a stream.

    **Other arguments:**

    - `num_microbatches`: see `train_step`.
    - `evaluation`: an [`Evaluation`][] of other examples, after each epoch or every so many steps, and at the
        end. Before anything is compiled for training, a batch of them goes through it.
    - `hook`: a [`Hook`][], called with the run, the row and the state after each row and each evaluation. It
        may end the run, change the state, or do what it likes; each call waits for the devices.
    - `checkpoints`: a directory, or [`Checkpoints`][], which also says when to save and what to keep. If a run
        that began with `state` has left checkpoints there, it continues exactly: its state is read, and the
        rows that `loggers` have of later steps are dropped (by their method `rewind`, if they have one). A run
        that ended before its first checkpoint begins anew, its rows dropped likewise.
    - `log_every`: number of steps that a row of training metrics covers; fewer where an evaluation or the
        end comes first.
    - `loggers`: called on process 0 with `(step, row)`; by default one [`ConsoleLogger`][], which also shows a
        bar on a terminal. `()` prints nothing at all. Names in a row are such as `train/loss` and `eval/loss`.
    - `step_timeout_seconds`: ends the process, and with it the others, when no step has finished for so
        long, be it of training, of evaluation, or the compilation of one; prints where each thread stands, and
        which worker is at which batch. Going on with a stream counts, which may have to be read again.

    **Returns:**

    The state after the last step, and the [`History`][] of the whole run: its rows and its evaluations, with
    those of earlier calls that this one goes on from.

    **Raises:**

    - `ValueError`, `TypeError` before anything is compiled: an argument that cannot be used.
    - `NonFiniteError` for a loss or a gradient norm that is not finite, with the last good state. Under
        `jax_debug_nans` or `jax_debug_infs` it comes from the line of `loss_fn` that made it.
    - `TrainingInterrupted` at the step boundary after a SIGINT (Ctrl-C) or SIGTERM, with the state, which is
        saved first if there are `checkpoints`; a second signal leaves at once.
    - `ImportError` if `checkpoints` are wanted and Orbax is not installed.
    - `CheckpointError`: all checkpoints are damaged, or one could not be written.

    An error that ends a run which has begun has the state after its last step as its attribute `state`, and
    the `history`; the state is saved too if there are `checkpoints`.
    """
    check_fit(
        state,
        train_examples,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        optimizer=optimizer,
        evaluation=evaluation,
        hook=hook,
        checkpoints=checkpoints,
        loggers=loggers,
    )
    mesh, checkpoints = state_mesh(state), as_checkpoints(checkpoints)
    plan = Plan(
        num_epochs=num_epochs,
        num_steps=num_steps,
        log_every=log_every,
        evaluate=evaluation and evaluation.every,
        save=checkpoints and save_every(checkpoints),
    )
    functions: Any = {"collate_fn": collate_fn, "loss_fn": loss_fn}
    evaluation = evaluation and evaluation.or_else(**functions, batch_size=batch_size)
    eval_batch_size = evaluation and evaluation.batch_size
    check_batch_sizes(batch_size, num_microbatches, eval_batch_size, num_batch_shards(mesh))
    epochs = Epochs(train_examples, collate_fn, batch_size=batch_size, mesh=mesh)
    total = num_steps if num_epochs is None else epochs.num_steps(num_epochs)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(step_timeout_seconds, work_in_hand))
        interrupt = stack.enter_context(InterruptFlag())
        facts = {
            "batch_size": batch_size,
            "num_microbatches": num_microbatches,
            "how long, and what is due": plan,
            "len(train_examples)": epochs.num_examples,
            "evaluation's batch_size": eval_batch_size,
            "a hook": hook is not None,
        }
        needs_identity = checkpoints is not None or is_shared(mesh)
        begin = _begin(state, epochs, facts if needs_identity else None, **functions, optimizer=optimizer)
        row = {} if evaluation is None else evaluation.rehearse(state)
        check_keep_best(checkpoints.keep_best if checkpoints else (), row)
        watchdog.beat()
        saver = stack.enter_context(Saver(checkpoints))
        state, run, source = saver.resume(state, begin)
        run = dataclasses.replace(run, stopped=run.stopped and hook is not None)
        reporter = Reporter(
            [ConsoleLogger()] if loggers is None else loggers,
            run,
            directory=checkpoints and local(checkpoints.directory),
            num_steps=total,
            is_again=saver.began_before,
        )
        stack.enter_context(contextlib.closing(reporter))
        _announce(reporter, epochs, run, source)
        places: Iterator[tuple[Batch | None, Place]] = epochs.after(
            run.epoch, run.batch, key=order_key(state, run.begin), positions=run.positions,
            verify=checkpoints is None or not checkpoints.allow_changes,
            say=lambda how: reporter.say(f"fit: {how}"),
        )  # fmt: skip
        stack.enter_context(contextlib.closing(places))
        if source is not None:  # what is due there may not have been done
            places = itertools.chain([(None, epochs.place(run.epoch, run.batch))], places)
        training = Training(
            state,
            run,
            programs=train_programs(state, loss_fn, optimizer, num_microbatches=num_microbatches),
            loss_fn=loss_fn,
            optimizer=optimizer,
            reporter=reporter,
            saver=saver,
            watchdog=watchdog,
        )
        del state  # `training` has it; a second name would keep the first one's memory
        with training:
            stop = _loop(training, places, plan, evaluation, hook, interrupt, Vote(mesh))
            path = saver.wait()
        if stop:
            error = interruption(training.state, training.run.step, stop, path, training.history)
            reporter.say(f"fit: {error}")
            raise error
        return training.state, training.history


def _begin(state: TrainState, epochs: Epochs, facts: dict[str, Any] | None, **functions: Any) -> RunRecord:
    """The run that begins with `state`. Its identity is found out only for `facts`: see `identify`."""
    identity = None
    if facts is not None:
        facts = {name: str(x) for name, x in facts.items()}
        identity = identify(state, epochs.first_examples, facts, **functions)
    more: Any = {"order": epochs.order, "positions": epochs.positions, "identity": identity}
    return RunRecord(step_of(state), 0, 0, 0, epochs.batch_size, epochs.num_examples, **more)


def _announce(reporter: Reporter, epochs: Epochs, run: RunRecord, source: pathlib.Path | None) -> None:
    """Says what a run reads, what of it is not compared, and from which checkpoint it goes on."""
    reporter.say(f"fit: {epochs}")
    if run.identity is not None and run.identity.get("changing"):
        changing = " and ".join(run.identity["changing"])
        reporter.say(f"fit: {changing} change from one reading to the next, so they are not compared")
    if source is not None:
        stopped = ", where its hook ended it" if run.stopped else ""
        reporter.say(f"fit: going on from {source}, after {run.num_steps} steps of this run{stopped}")


def _loop(
    training: Training,
    places: Iterator[tuple[Batch | None, Place]],
    plan: Plan,
    evaluation: Evaluation | None,
    hook: Hook | None,
    interrupt: InterruptFlag,
    vote: Vote,
) -> int:
    """Steps, and what is due after each, until the plan is fulfilled or a signal comes, which is returned."""
    saver, is_alone = training.saver, jax.process_count() == 1
    stop = 0
    for batch, place in places:
        if batch is not None:
            training.step(batch, place)
        stop, is_time = vote(interrupt.signal, int(saver.is_time))
        is_time = bool(is_time) and saver.is_stale(training.run)
        what = due(plan, training.run, stop=stop != 0, is_time=is_time, is_end=place.is_end)
        if what.log and training.log(place) and hook is not None and not stop:
            training.after_row(hook)
            what = due(plan, training.run, is_time=is_time, is_end=place.is_end)  # it may have ended the run
        saves = what.save
        if what.finish:
            training.check()
        if evaluation is not None and what.evaluate:
            # Of many processes none stops within an evaluation: the others would wait for it.
            finished = training.evaluate(evaluation, stops=lambda: is_alone and interrupt.is_set)
            stop = stop if finished else interrupt.signal
            if finished and hook is not None:
                training.after_evaluation(hook)
                what = due(plan, training.run, is_time=is_time)
            saves = what.save or (stop != 0 and saver.is_on) or saver.is_best(training.run)
        if saves:
            training.save(finished=what.finish and not stop)
        else:
            saver.check()
        if what.finish or stop:
            break
    return stop or vote.now(interrupt.signal)[0]  # perhaps in the last evaluation


def num_train_steps(num_examples: int, *, batch_size: int, num_epochs: int) -> int:
    """Count the steps that `fit` takes, for learning-rate schedules.

    ```python
    num_steps = rx.num_train_steps(len(examples), batch_size=64, num_epochs=3)
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, num_steps))
    ```

    Raises `ValueError` if there are fewer examples than one batch, or a number is not positive.
    """
    check_whole("num_train_steps", num_examples=num_examples)
    check_positive("num_train_steps", batch_size=batch_size, num_epochs=num_epochs)
    if num_examples < batch_size:
        raise ValueError(
            f"num_train_steps: {num_examples} examples do not fill a batch of {batch_size}. Use a smaller "
            "batch_size."
        )
    return num_examples // batch_size * num_epochs
