"""`StepFn` and `TrainStepFn`: the form of the steps that you may write."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import optax

from redco_eqx._base.protocols import Batch, LossFn
from redco_eqx._step.state import TrainState

StepFn: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Any]]
"""A pure function `(state, batch) -> (state, metrics)`. `metrics` is a dict of scalars
or `Mean`s with a `"loss"`."""


@runtime_checkable
class TrainStepFn(Protocol):
    """A training step for [`fit`][], a pure function
    `(state, batch, *, loss_fn, optimizer, num_microbatches, shardings) -> (state,
    metrics)`.

    [`train_step`][] is one, and so is
    `partial(train_step, reshard_after_forward=False)`. Write your own around
    `train_step`, or around gradients of your own. `fit` passes all four keywords. Take
    those that your step does not use as `**_`.

    - The step returns a state like the one that it was given: the same structure,
        shapes and dtypes.
    - Its metrics are a dict of scalars and [`Mean`][]s, with at least a `"loss"`. A
        `"grad_norm"` is watched like the loss: if it is not finite, the run ends with
        the last good state.
    - The state has a place for whatever else your step has to remember: arrays of a
        teacher are a part of the model that is not trained (`frozen`), counters and
        second optimizers are in the optimizer's state.
    """

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        /,
        *,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        num_microbatches: int,
        shardings: Any,
    ) -> tuple[TrainState, Any]: ...
