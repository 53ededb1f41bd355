"""`fit`: the training loop, with its evaluations, logs and signals around the pure steps."""

import contextlib
import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from redco_eqx._checkpoint.record import RunRecord
from redco_eqx._data.batches import batches
from redco_eqx._data.epochs import epochs
from redco_eqx._distributed.consensus import Vote
from redco_eqx._distributed.watchdog import Watchdog
from redco_eqx._logging.loggers import ConsoleLogger
from redco_eqx._logging.report import Reporter, say
from redco_eqx._program.trace import traced_once
from redco_eqx._sharding.mesh import num_batch_shards
from redco_eqx._step.jit import on_its_mesh
from redco_eqx._step.state import ORDER, TrainState, layout_of, step_of
from redco_eqx._step.steps import train_step
from redco_eqx._step.window import StepFn, Window, empty_window, loop_body
from redco_eqx._training.checks import (
    check_arguments,
    check_batch_sizes,
    check_keep_best,
    check_no_evaluation,
    check_positive,
    check_state,
)
from redco_eqx._training.evaluate import mesh_of
from redco_eqx._training.evaluation import Evaluation, MetricFn
from redco_eqx._training.interrupt import InterruptFlag, TrainingInterrupted
from redco_eqx._training.run import Training
from redco_eqx._training.saving import Checkpoints, Saver, as_checkpoints
from redco_eqx._training.throttle import Throttle
from redco_eqx._types import Batch, CollateFn, Logger, LossFn, PredictFn


def fit(
    state: TrainState,
    train_examples: Any,
    *,
    collate_fn: CollateFn,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    batch_size: int,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    num_microbatches: int = 1,
    step_fn: StepFn | None = None,
    eval_examples: Any = None,
    eval_batch_size: int | None = None,
    eval_every_steps: int | None = None,
    predict_fn: PredictFn | None = None,
    metric_fn: MetricFn | None = None,
    predictions_directory: str | os.PathLike[str] | None = None,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    log_every: int = 50,
    loggers: Sequence[Logger] | None = None,
    progress: bool | None = None,
    on_nonfinite: Literal["raise", "skip"] = "raise",
    donate: bool = True,
    prefetch: int = 2,
    step_timeout_seconds: float | None = None,
) -> TrainState:
    """Trains, and returns the new state.

    Mesh and layout are read from the arrays of `state`. Each call starts its own epochs, whose order
    depends on the key of `state` and on the step at which the call begins. Training drops the ragged tail
    of an epoch (other examples each time).

    **Main arguments:**

    - `state`: from `init_state`. With `donate=True` it is taken over: its arrays (and so the model's) are
        deleted, and only the returned state lives on.
    - `train_examples`: a sequence of examples (see `batches`), or a function from the epoch to one.
    - `collate_fn`, `loss_fn`: see [`CollateFn`][], [`LossFn`][].
    - `optimizer`: the one that `init_state` was given.
    - `batch_size`: number of examples in a step, over all devices.
    - `num_epochs`, `num_steps`: how long; exactly one of them.

    **Other arguments:**

    - `num_microbatches`: see `train_step`.
    - `step_fn`: `(state, batch) -> (state, metrics)` in place of `train_step`; `metrics` has a `"loss"`.
    - `eval_examples`: evaluated by `loss_fn` after each epoch and at the end (see `evaluate`).
    - `eval_batch_size`: `batch_size` by default.
    - `eval_every_steps`: evaluates every so many steps in place of each epoch.
    - `predict_fn`, `metric_fn`: predictions for `eval_examples` (see `predict`), and what
        `metric_fn(examples, predictions)` makes of them: a dict of numbers.
    - `predictions_directory`: where predictions are written beside their examples, as
        `step-<step>.jsonl`.
    - `checkpoints`: a directory, or [`Checkpoints`][], which also says when to save and what to keep. If a run
        that began with `state` has left checkpoints there, it is gone on with, exactly: its state is read, and
        the rows that `loggers` have of later steps are dropped (by their method `rewind`, if they have one).
    - `log_every`: number of steps that a row of training metrics covers; fewer where an evaluation or the
        end comes first.
    - `loggers`: called on process 0 with `(step, row)`; by default one [`ConsoleLogger`][]. Names in a row
        are such as `train/loss` and `eval/loss`.
    - `progress`: whether to show a bar; `None` does on a terminal. `False` prints nothing at all, unless
        `loggers` do.
    - `on_nonfinite`: what a loss or gradient norm that is not finite does: end the run, or be left out.
    - `donate`: whether to take over the memory of `state`; otherwise it is copied once.
    - `prefetch`: how many batches a thread makes ahead, in evaluation too; 0 for no thread.
    - `step_timeout_seconds`: ends the process, and with it the others, when no step has finished for so
        long, be it of training, of evaluation, or the compilation of one; prints where each thread stands.

    **Returns:**

    The state after the last step.

    **Raises:**

    - `ValueError`, `TypeError` before anything is compiled: an argument that cannot be used. If there are
        `eval_examples`, a batch of them goes through evaluation, prediction and `metric_fn` first.
    - `NonFiniteError`, with the last good state.
    - `TrainingInterrupted` at the step boundary after a SIGINT (Ctrl-C) or SIGTERM, with the state, which is
        saved first if there are `checkpoints`; a second signal leaves at once.
    - `ImportError` if `checkpoints` are wanted and Orbax is not installed.
    - `CheckpointError`: all checkpoints are damaged, or one could not be written.

    An error that ends a run which has begun has the state after its last step as its attribute `state`; it is
    saved too if there are `checkpoints`.
    """
    mesh = mesh_of(state)
    num_shards = num_batch_shards(mesh)
    check_arguments(num_epochs, num_steps, log_every, eval_batch_size, eval_every_steps, on_nonfinite)
    check_state(state, optimizer, num_microbatches, step_fn)
    check_batch_sizes(batch_size, num_microbatches, eval_batch_size, num_shards)
    watchdog = Watchdog(step_timeout_seconds)
    config = as_checkpoints(checkpoints)
    evaluation = None
    if eval_examples is None:
        check_no_evaluation(
            eval_batch_size=eval_batch_size,
            eval_every_steps=eval_every_steps,
            predict_fn=predict_fn,
            metric_fn=metric_fn,
            predictions_directory=predictions_directory,
            keep_best=None if config is None else config.keep_best,
        )
    else:
        evaluation = Evaluation(
            collate_fn,
            loss_fn,
            predict_fn,
            metric_fn,
            eval_batch_size or batch_size,
            predictions_directory,
            prefetch,
            watchdog,
        )
    examples_of: Callable[[int], Any] = train_examples if callable(train_examples) else lambda _: train_examples
    first = examples_of(0)
    stream_of = functools.partial(
        batches, collate_fn=collate_fn, batch_size=batch_size, mesh=mesh, prefetch=prefetch
    )
    stream_of(first, key=state.key)  # refuses bad arguments
    per_epoch = len(first) // batch_size
    if step_fn is not None:
        step = on_its_mesh(step_fn)
    else:
        step = functools.partial(
            train_step,
            loss_fn=loss_fn,
            optimizer=optimizer,
            num_microbatches=num_microbatches,
            shardings=layout_of(state),
        )
    step = traced_once(step)
    body = jax.jit(loop_body(step, skip_nonfinite=on_nonfinite == "skip"), donate_argnums=0)
    total = num_steps
    if num_epochs is not None and not callable(train_examples):
        total = per_epoch * num_epochs

    with contextlib.ExitStack() as stack:
        stack.enter_context(watchdog)
        interrupt = stack.enter_context(InterruptFlag())
        saver = None if config is None else stack.enter_context(Saver(config))
        state, run, source = _begin(state, saver, batch_size, len(first), donate)
        if evaluation is not None:
            check_keep_best(config and config.keep_best, evaluation.rehearse(state, eval_examples))
        if progress is not False:
            say(f"fit: {len(first)} examples, {per_epoch} steps of {batch_size} per epoch, "
                f"{len(first) - per_epoch * batch_size} dropped from each")  # fmt: skip
            if source is not None:
                say(f"fit: going on from {source}, after {run.num_steps} steps of this run")
        default_loggers = () if progress is False else (ConsoleLogger(),)
        reporter = Reporter(
            default_loggers if loggers is None else loggers,
            num_steps=total,
            initial=run.num_steps,
            batch_size=batch_size,
            show=progress,
        )
        stack.enter_context(contextlib.closing(reporter))
        if source is not None:
            reporter.rewind(run.step)
        order_key = jax.random.fold_in(jax.random.fold_in(state.key, ORDER), run.begin)
        stream = epochs(
            examples_of,
            first,
            batch_size,
            functools.partial(stream_of, key=order_key),
            epoch=run.epoch,
            batch=run.batch,
            resumed=source is not None,
        )
        stack.enter_context(contextlib.closing(stream))

        def begin_window(state: TrainState, batch: Batch) -> Window:
            return empty_window(step, state, batch)

        training = Training(
            state,
            run,
            body=body,
            begin_window=begin_window,
            reporter=reporter,
            mesh=mesh,
            throttle=Throttle(watchdog),
        )
        del state  # `training` has it; a second name would keep the first one's memory
        vote, alone = Vote(mesh), jax.process_count() == 1
        stop = 0
        try:
            for batch, at in stream:
                if batch is not None:
                    training.step(batch, at)
                run = training.run
                stop, is_time = vote(interrupt.signal, int(saver is not None and saver.is_time))
                is_last = at.epoch >= num_epochs if num_epochs else run.num_steps >= (num_steps or 0)
                is_due = run.num_steps % eval_every_steps == 0 if eval_every_steps else at.batch == 0
                evaluates = evaluation is not None and (is_due or is_last) and not (stop or run.is_evaluated)
                saves = saver is not None and bool(is_last or stop or saver.is_due(run, bool(is_time)))

                if run.num_steps % log_every == 0 or evaluates or is_last or stop:
                    training.log(at)
                if evaluates or is_last or stop:
                    training.check()
                if evaluation is not None and evaluates:
                    with reporter.paused():
                        row = evaluation(
                            training.state, eval_examples, run.step, stops=lambda: alone and interrupt.is_set
                        )
                    if row is None:
                        stop = interrupt.signal
                    else:
                        training.add_evaluation(row)
                    saves = saver is not None and (saves or stop or saver.is_best(training.run.evaluations))
                if saver is not None and saves:
                    with reporter.paused():
                        training.save(saver, finished=bool(is_last and not stop))
                elif saver is not None:
                    saver.check()
                if is_last or stop:
                    break
            stop = stop or vote.now(interrupt.signal)[0]  # perhaps in the last evaluation
            path = None if saver is None else saver.wait()
        except Exception as error:
            training.end_by(error, saver)
            raise
        if stop:
            interruption = TrainingInterrupted(training.state, training.run.step, stop, path)
            if progress is not False:
                say(f"fit: {interruption}")
            raise interruption
        return training.state


def num_train_steps(num_examples: int, *, batch_size: int, num_epochs: int) -> int:
    """How many steps `fit` takes, for learning-rate schedules.

    Raises `ValueError` if there are fewer examples than one batch, or a number is not positive.
    """
    check_positive("num_train_steps", batch_size=batch_size, num_epochs=num_epochs)
    if num_examples < batch_size:
        raise ValueError(
            f"num_train_steps: {num_examples} examples do not fill a batch of {batch_size}. Use a smaller "
            "batch_size."
        )
    return num_examples // batch_size * num_epochs


def _begin(
    state: TrainState, saver: Saver | None, batch_size: int, num_examples: int, donate: bool
) -> tuple[TrainState, RunRecord, pathlib.Path | None]:
    """The state and the place to begin at, and the checkpoint that they come from, if they do."""
    resumed = saver and saver.resume(state, batch_size=batch_size, num_examples=num_examples, release=donate)
    if resumed:
        state, run, path = resumed
        # With other numbers the same part of the epoch counts as done.
        batch = -(-run.batch * run.batch_size // batch_size)
        return (
            state,
            dataclasses.replace(run, batch=batch, batch_size=batch_size, num_examples=num_examples),
            path,
        )
    run = RunRecord(step_of(state), 0, 0, 0, batch_size, num_examples)
    return state if donate else jax.tree.map(jnp.copy, state), run, None
