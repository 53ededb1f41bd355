"""The body of a training loop: a step, its metrics added up on the devices, a guard."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from redco_eqx._step.state import TrainState, first_change
from redco_eqx._types import AnyArray, Batch, Mean, Metrics, as_mean, pytree_dataclass

StepFn: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Any]]
"""`(state, batch) -> (state, metrics)`, pure; `metrics` is a dict of scalars or `Mean`s that has a `"loss"`."""


@pytree_dataclass
class Window:
    """What happened since the last row of the log, still on the devices.

    - `metrics`: added up over the steps that were taken.
    - `num_steps`: number of steps.
    - `num_skipped`: number of those whose loss or gradient was not finite, which were not taken.
    - `ok`: false once such a step ended the run; the state is kept as it was before it.
    """

    metrics: Metrics
    num_steps: Int[AnyArray | np.ndarray, ""]
    num_skipped: Int[AnyArray | np.ndarray, ""]
    ok: Bool[AnyArray | np.ndarray, ""]


def guarded(
    step_fn: StepFn, *, skip_nonfinite: bool = False
) -> Callable[[TrainState, Window, Batch], tuple[TrainState, Window]]:
    """A step as the body of a loop: `(state, window, batch) -> (state, window)`, pure, not jitted.

    A step whose `loss` or `grad_norm` is not finite changes nothing. Either only its number is counted
    (`skip_nonfinite`), or no later step changes anything either, so that metrics that are read late still
    find the last good state.

    Raises `ValueError` while tracing if the metrics are not what a `StepFn` returns.
    """

    def body(state: TrainState, window: Window, batch: Batch) -> tuple[TrainState, Window]:
        new_state, metrics = step_fn(state, batch)
        metrics = _as_metrics(metrics)
        values = [metrics[name].value for name in ("loss", "grad_norm") if name in metrics]
        finite = jnp.all(jnp.isfinite(jnp.stack(values)))
        ok = window.ok if skip_nonfinite else window.ok & finite
        take = ok & finite
        kept = jax.tree.map(lambda new, old: jnp.where(take, new, old), new_state, state)
        if skip_nonfinite:  # the number still advances: the next batch draws its own randomness
            kept = dataclasses.replace(kept, step=new_state.step)
        totals = jax.tree.map(lambda total, x: total + jnp.where(take, x, 0), window.metrics, metrics)
        return kept, Window(totals, window.num_steps + 1, window.num_skipped + ~take, ok)

    return body


def empty_window(step_fn: StepFn, state: TrainState, batch: Batch) -> Window:
    """A window with nothing in it, of NumPy arrays. Traces `step_fn` once; the arguments may be abstract.

    Raises `ValueError` if the step changes the structure, a shape or a dtype of the state.
    """
    new_state, metrics = jax.eval_shape(step_fn, state, batch)
    if not isinstance(new_state, TrainState):
        raise ValueError(
            f"step_fn must return (state, metrics), but the state is a {type(new_state).__name__}."
        )
    change = first_change(state, new_state)
    if change is not None:
        path, was, became = change
        raise ValueError(
            f"the step changes the state: {path} was {was} and became {became}. A step returns a state "
            "like the one that it was given."
        )
    metrics = jax.eval_shape(_as_metrics, metrics)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), metrics)
    return Window(zeros, np.zeros((), np.int32), np.zeros((), np.int32), np.ones((), bool))


def next_window(empty: Window, window: Window) -> Window:
    """An empty window after `window`, whose flag it keeps."""
    return dataclasses.replace(empty, ok=window.ok)


def window_row(window: Window) -> dict[str, float]:
    """The row of a log: `train/loss`, the other metrics by name, and `train/skipped_steps` if there are any.

    The window is one that was fetched (`jax.device_get`).
    """
    names = sorted(window.metrics, key=lambda name: name != "loss")  # jit sorted them; the loss comes first
    row = {f"train/{name}": _number(window.metrics[name]) for name in names}
    if window.num_skipped == window.num_steps:
        row = {}
    if window.num_skipped:
        row["train/skipped_steps"] = float(window.num_skipped)
    return row


def window_to_json(window: Window) -> dict[str, Any]:
    """A fetched window as plain numbers that give it back exactly."""
    metrics = {
        name: [str(np.asarray(mean.total).dtype), float(mean.total), float(mean.weight)]
        for name, mean in window.metrics.items()
    }
    return {"num_steps": int(window.num_steps), "num_skipped": int(window.num_skipped), "metrics": metrics}


def window_from_json(saved: dict[str, Any]) -> Window:
    """The inverse of `window_to_json`."""
    metrics = {
        name: Mean(np.asarray(total, dtype), np.asarray(weight, dtype))
        for name, (dtype, total, weight) in saved["metrics"].items()
    }
    num_steps, num_skipped = np.int32(saved["num_steps"]), np.int32(saved["num_skipped"])
    return Window(metrics, np.asarray(num_steps), np.asarray(num_skipped), np.ones((), bool))


def is_like(window: Window, other: Window) -> bool:
    """True if both hold the same metrics."""
    return jax.tree.structure(window) == jax.tree.structure(other) and (
        [x.dtype for x in jax.tree.leaves(window)] == [x.dtype for x in jax.tree.leaves(other)]
    )


def _as_metrics(metrics: Any) -> Metrics:
    """Turn what a step reports into `Mean`s; a scalar has weight 1."""
    if not isinstance(metrics, dict) or "loss" not in metrics:
        raise ValueError(
            "step_fn must return (state, metrics) with metrics a dict that has a 'loss', but the metrics are "
            f"{sorted(metrics) if isinstance(metrics, dict) else type(metrics).__name__}."
        )
    return {name: as_mean(x, 1.0, f"the metric {name!r}") for name, x in metrics.items()}


def _number(mean: Mean) -> float:
    """`mean.value` by NumPy: an operation of JAX would wait behind the steps that were dispatched since."""
    return float(mean.total / mean.weight) if mean.weight else 0.0
