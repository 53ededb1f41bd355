"""Steps that guard against values that are not finite, and metrics that are added up on
the devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int

from redco_eqx._base.protocols import Batch, LossFn, Mean, Metrics, as_mean
from redco_eqx._base.tree import AnyArray
from redco_eqx._step.state import TrainState, check_unchanged

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


def skip_nonfinite(step_fn: StepFn) -> StepFn:
    """Make a step that skips updates that are not finite. When it skips one, only
    `step` in the state advances.

    The metrics get an additional entry, `"skipped"`, which is a mean of 0s and 1s. The
    step is pure, and needs no synchronisation. Use it in your own loop. [`fit`][], by
    contrast, ends the run with a `NonFiniteError`.

    ```python
    arguments = dict(loss_fn=loss_fn, optimizer=optimizer, shardings=state.shardings)
    train_step = partial(rx.train_step, **arguments)
    step = rx.jit_step(rx.skip_nonfinite(train_step))
    state, metrics = step(state, batch)
    print(float(metrics["skipped"]))
    ```

    **Arguments:** `step_fn`: `(state, batch) -> (state, metrics)`, such as
    `partial(train_step, ...)`.

    **Returns:** A function like `step_fn`. If `loss` or `grad_norm` in the metrics is
    NaN or infinite, only the `step` of the state changes.

    Raises `ValueError` while tracing if the metrics are not a dict of scalars with a
    `"loss"`, or if the step changes the structure, a shape or a dtype of the state.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        kept, metrics, ok = guarded(step_fn)(state, batch, np.ones((), bool))
        # A skipped step counts, so that the next one draws other random numbers.
        number = jnp.where(ok, kept.step, optax.safe_increment(state.step))
        kept = dataclasses.replace(kept, step=number)
        return kept, {**metrics, "skipped": as_mean(1.0 - ok, 1.0, "skipped")}

    return step


class Window(NamedTuple):
    """The metrics since the last row of the log, still on the devices.

    - `metrics`: the metrics, added up over the steps that were taken.
    - `num_steps`: the number of steps.
    - `ok`: false if a step was not finite. The state then stays as it was before that
        step.
    """

    metrics: Metrics
    num_steps: Int[AnyArray | np.ndarray, ""]
    ok: Bool[AnyArray | np.ndarray, ""]

    @classmethod
    def empty(cls, metrics: Metrics) -> "Window":
        """An empty window of NumPy arrays, for metrics like these, which may be
        abstract."""
        zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), metrics)
        return cls(zeros, np.zeros((), np.int32), np.ones((), bool))

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "Window":
        """The inverse of `to_json`."""
        metrics = {
            name: Mean(np.asarray(total, dtype), np.asarray(weight, dtype))
            for name, (dtype, total, weight) in saved["metrics"].items()
        }
        return cls(metrics, np.asarray(np.int32(saved["num_steps"])), np.ones((), bool))

    def to_json(self) -> dict[str, Any]:
        """Turn a fetched window into plain numbers from which `from_json` restores it
        exactly."""
        metrics = {
            name: [
                str(np.asarray(mean.total).dtype),
                float(mean.total),
                float(mean.weight),
            ]
            for name, mean in self.metrics.items()
        }
        return {"num_steps": int(self.num_steps), "metrics": metrics}

    def row(self) -> dict[str, float]:
        """The row of a log for a fetched window: `train/loss`, and the other metrics by
        name."""
        # Jit has sorted them; put the loss first.
        names = sorted(self.metrics, key=lambda name: name != "loss")
        return {f"train/{name}": float(self.metrics[name]) for name in names}


GuardedStep: TypeAlias = Callable[
    [TrainState, Batch, Any], tuple[TrainState, Metrics, Any]
]
"""A function `(state, batch, ok) -> (state, metrics, ok)`, as [`guarded`][] makes
it."""


def accumulated(
    step: GuardedStep, tree: Any
) -> Callable[[list[Any], Window, Batch], tuple[list[Any], Window]]:
    """Turn a guarded step into the body of `fit`'s loop, a pure function
    `(arrays, window, batch) -> (arrays, window)`, where `arrays` are the leaves of a
    state with the structure `tree`. JAX passes a flat list to a program in less time
    than a state.

    If the `loss` or `grad_norm` of a step is not finite, neither that step nor a later
    one changes the state or the metrics. The last good state is therefore still
    available, even if the metrics are read later.
    """

    def body(
        arrays: list[Any], window: Window, batch: Batch
    ) -> tuple[list[Any], Window]:
        kept, metrics, ok = step(tree.unflatten(arrays), batch, window.ok)
        totals = jax.tree.map(
            lambda total, x: total + jnp.where(ok, x, 0), window.metrics, metrics
        )
        return jax.tree.leaves(kept), Window(totals, window.num_steps + 1, ok)

    return body


@jax.jit
def all_finite(params: dict[str, Array]) -> Bool[Array, ""]:
    """Tell if all floating-point arrays are finite."""
    floats = [x for x in params.values() if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.asarray([jnp.isfinite(x).all() for x in floats]))


def guarded(step_fn: StepFn) -> GuardedStep:
    """Make a step that changes nothing unless it is finite and `ok` was true before.

    It returns the state, the metrics, and the new `ok`. Raises `ValueError` while
    tracing if the metrics are not those of a `StepFn`, or if the step changes the
    structure, a shape or a dtype of the state.
    """

    def step(
        state: TrainState, batch: Batch, ok: Any
    ) -> tuple[TrainState, Metrics, Bool[Array, ""]]:
        result = step_fn(state, batch)
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                "step_fn must return (state, metrics), but returned a "
                f"{type(result).__name__}."
            )
        new_state, metrics = result
        if not isinstance(new_state, TrainState):
            raise ValueError(
                "step_fn must return (state, metrics), but the state is a "
                f"{type(new_state).__name__}."
            )
        check_unchanged(state, new_state)
        if not isinstance(metrics, dict) or "loss" not in metrics:
            is_dict = isinstance(metrics, dict)
            found = sorted(metrics) if is_dict else type(metrics).__name__
            raise ValueError(
                "step_fn must return (state, metrics) with metrics a dict that has a "
                f"'loss', but the metrics are {found}."
            )
        means = {
            name: as_mean(x, 1.0, f"the metric {name!r}") for name, x in metrics.items()
        }
        values = [means[name].value for name in ("loss", "grad_norm") if name in means]
        ok = jnp.logical_and(ok, jnp.all(jnp.isfinite(jnp.stack(values))))
        return (
            jax.tree.map(lambda new, old: jnp.where(ok, new, old), new_state, state),
            means,
            ok,
        )

    return step
