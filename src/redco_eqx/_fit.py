"""`fit`: the training loop, with its evaluations, logs and signals around the pure steps."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from redco_eqx._checks import (
    BatchShapes,
    check_arguments,
    check_batch_sizes,
    check_no_evaluation,
    check_state,
    warn_unused,
)
from redco_eqx._data import batches
from redco_eqx._evaluate import mesh_of
from redco_eqx._evaluation import Evaluation, MetricFn
from redco_eqx._interrupt import InterruptFlag, TrainingInterrupted
from redco_eqx._log import ConsoleLogger
from redco_eqx._loop import StepFn, empty_window, loop_body, next_window
from redco_eqx._mesh import num_batch_shards, put, replicated
from redco_eqx._report import Reporter, say
from redco_eqx._state import ORDER, TrainState
from redco_eqx._steps import train_step
from redco_eqx._throttle import Throttle
from redco_eqx._types import Batch, CollateFn, Logger, LossFn, PredictFn
from redco_eqx._watchdog import Watchdog


class NonFiniteError(ArithmeticError):
    """The loss or the gradient norm was not finite. `state` is the last good one, before `step`."""

    def __init__(self, state: TrainState, step: int):
        super().__init__(
            f"the loss or the gradient norm was not finite at step {step} (counted from 0). The last good "
            'state is in this error\'s `state`. fit(..., on_nonfinite="skip") leaves such steps out.'
        )
        self.state = state
        self.step = step


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
    - `TrainingInterrupted` at the step boundary after a SIGINT (Ctrl-C), with the state; a second SIGINT
        leaves at once.
    """
    mesh = mesh_of(state)
    num_shards = num_batch_shards(mesh)
    check_arguments(num_epochs, num_steps, log_every, eval_batch_size, eval_every_steps, on_nonfinite)
    check_state(state, optimizer, num_microbatches, step_fn)
    check_batch_sizes(batch_size, num_microbatches, eval_batch_size, num_shards)
    watchdog = Watchdog(step_timeout_seconds)
    evaluation = None
    if eval_examples is None:
        check_no_evaluation(
            eval_batch_size=eval_batch_size,
            eval_every_steps=eval_every_steps,
            predict_fn=predict_fn,
            metric_fn=metric_fn,
            predictions_directory=predictions_directory,
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
        )

    begin = int(state.step)
    examples_of: Callable[[int], Any] = train_examples if callable(train_examples) else lambda _: train_examples
    order_key = jax.random.fold_in(jax.random.fold_in(state.key, ORDER), begin)
    stream_of = functools.partial(
        batches,
        collate_fn=collate_fn,
        batch_size=batch_size,
        mesh=mesh,
        key=order_key,
        prefetch=prefetch,
    )
    first = examples_of(0)
    stream_of(first)  # refuses bad arguments
    per_epoch = len(first) // batch_size
    if evaluation is not None:
        evaluation.rehearse(state, eval_examples)
    if progress is not False:
        say(f"fit: {len(first)} examples, {per_epoch} steps of {batch_size} per epoch, "
            f"{len(first) - per_epoch * batch_size} dropped from each")  # fmt: skip

    step = step_fn or functools.partial(
        train_step,
        loss_fn=loss_fn,
        optimizer=optimizer,
        num_microbatches=num_microbatches,
        shardings=_layout(state),
    )
    body = jax.jit(loop_body(step, skip_nonfinite=on_nonfinite == "skip"), donate_argnums=0)
    state = state if donate else jax.tree.map(jnp.copy, state)
    total = num_steps
    if num_epochs is not None and not callable(train_examples):
        total = per_epoch * num_epochs
    default_loggers = () if progress is False else (ConsoleLogger(),)
    reporter = Reporter(
        default_loggers if loggers is None else loggers,
        num_steps=total,
        batch_size=batch_size,
        show=progress,
    )
    shapes, throttle = BatchShapes(), Throttle()
    window = empty = None
    done = logged = 0

    epochs = _epochs(examples_of, first, batch_size, stream_of)
    with watchdog, InterruptFlag() as interrupt, contextlib.closing(reporter), contextlib.closing(epochs):
        for batch, epoch in epochs:
            shapes.check(batch)
            if window is None or empty is None:
                empty = window = jax.tree.map(
                    lambda x: put(x, replicated(mesh)), empty_window(step, state, batch)
                )
                if step_fn is None:
                    warn_unused(state, batch, loss_fn)
            state, window = body(state, window, batch)
            throttle(window)
            done += 1
            if done == 1:
                jax.block_until_ready(window)
                reporter.start_clock()
            reporter.advance()

            interrupted = interrupt.is_set
            is_last = done == num_steps or epoch == num_epochs
            stops = is_last or interrupted
            is_due = done % eval_every_steps == 0 if eval_every_steps else epoch.is_integer()
            evaluates = evaluation is not None and (is_due or is_last) and not interrupted
            ok = True
            if done % log_every == 0 or evaluates or stops:
                ok = reporter.push(begin + done, epoch, done - logged, window)
                window, logged = next_window(empty, window), done
            if evaluates or stops:
                ok = reporter.flush()
            if not ok:
                raise NonFiniteError(state, int(state.step))
            if evaluation is not None and evaluates:
                with reporter.paused():
                    reporter.row(begin + done, evaluation(state, eval_examples, begin + done))
            if stops:
                break
        if interrupt.is_set:  # perhaps in the last evaluation
            raise TrainingInterrupted(state, begin + done)
    return state


def num_train_steps(num_examples: int, *, batch_size: int, num_epochs: int) -> int:
    """How many steps `fit` takes, for learning-rate schedules.

    Raises `ValueError` if there are fewer examples than one batch.
    """
    if num_examples < batch_size:
        raise ValueError(
            f"num_train_steps: {num_examples} examples do not fill a batch of {batch_size}. Use a smaller "
            "batch_size."
        )
    return num_examples // batch_size * num_epochs


def _layout(state: TrainState) -> dict[str, Any] | None:
    layout = {path: x.sharding for path, x in state.params.items()}
    return layout if all(isinstance(s, NamedSharding) for s in layout.values()) else None


def _epochs(
    examples_of: Callable[[int], Any],
    first: Any,
    batch_size: int,
    stream_of: Callable[..., Generator[Batch]],
) -> Generator[tuple[Batch, float]]:
    """The batches of epoch after epoch, without end, each with the number of epochs done by then."""
    for epoch in itertools.count():
        examples = first if epoch == 0 else examples_of(epoch)
        with contextlib.closing(stream_of(examples, epoch=epoch)) as stream:
            for index, batch in enumerate(stream, start=1):
                yield batch, epoch + index / (len(examples) // batch_size)
