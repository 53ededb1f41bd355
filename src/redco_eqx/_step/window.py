"""The compiled body of the training loop: a step, its metrics added up on the devices, a guard."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from redco_eqx._sharding.mesh import put_global, replicated
from redco_eqx._step.state import TrainState
from redco_eqx._tree import describe, path_of
from redco_eqx._types import Batch, Mean, Metrics, as_mean

StepFn: TypeAlias = Callable[[TrainState, Batch], tuple[TrainState, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
    """What happened since the last log row, still on the devices.

    - `metrics`: added up over the steps that were taken.
    - `num_skipped`: number of steps whose loss or gradient was not finite, int32.
    - `ok`: false once such a step ended the run; the state is kept as it was before it.
    """

    metrics: Metrics
    num_skipped: Any
    ok: Any


def as_metrics(metrics: Any) -> Metrics:
    """What a user's `step_fn` reports, as `Mean`s; a scalar has weight 1. Raises `ValueError`."""
    if not isinstance(metrics, dict) or "loss" not in metrics:
        raise ValueError(
            "step_fn must return (state, metrics) with metrics a dict that has a 'loss', but the metrics are "
            f"{sorted(metrics) if isinstance(metrics, dict) else type(metrics).__name__}."
        )
    return {name: as_mean(x, 1.0, f"the metric {name!r}") for name, x in metrics.items()}


def loop_body(
    step: StepFn, *, skip_nonfinite: bool
) -> Callable[[TrainState, Window, Batch], tuple[TrainState, Window]]:
    """`(state, window, batch) -> (state, window)`, not jitted.

    A step whose loss or gradient norm is not finite changes nothing. Either only its number is counted
    (`skip_nonfinite`), or no later step changes anything either, so that metrics that are read late still
    find the last good state.
    """

    def body(state: TrainState, window: Window, batch: Batch) -> tuple[TrainState, Window]:
        new_state, metrics = step(state, batch)
        metrics = as_metrics(metrics)
        values = [metrics[name].value for name in ("loss", "grad_norm") if name in metrics]
        finite = jnp.all(jnp.isfinite(jnp.stack(values)))
        ok = window.ok if skip_nonfinite else window.ok & finite
        take = ok & finite
        kept = jax.tree.map(lambda new, old: jnp.where(take, new, old), new_state, state)
        if skip_nonfinite:  # the number still advances: the next batch draws its own randomness
            kept = dataclasses.replace(kept, step=new_state.step)
        totals = jax.tree.map(lambda total, x: total + jnp.where(take, x, 0), window.metrics, metrics)
        return kept, Window(totals, window.num_skipped + ~take, ok)

    return body


def empty_window(step: StepFn, state: TrainState, batch: Batch) -> Window:
    """A window with nothing in it. Traces `step`, which raises its errors before anything is compiled.

    Raises `ValueError` also if the step changes the structure, a shape or a dtype of the state.
    """
    new_state, metrics = jax.eval_shape(step, state, batch)
    if not isinstance(new_state, TrainState):
        raise ValueError(
            f"step_fn must return (state, metrics), but the state is a {type(new_state).__name__}."
        )
    before, after = (
        {path_of(keypath): describe(x) for keypath, x in jax.tree_util.tree_flatten_with_path(tree)[0]}
        for tree in (state, new_state)
    )
    for path in {**before, **after}:
        was, became = before.get(path, "missing"), after.get(path, "missing")
        if was != became:
            raise ValueError(
                f"the step changes the state: {path} was {was} and became {became}. A step returns a state "
                "like the one that it was given."
            )
    metrics = jax.eval_shape(as_metrics, metrics)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)
    return Window(zeros, jnp.zeros((), jnp.int32), jnp.ones((), bool))


def window_to_json(window: Window, num_steps: int) -> dict[str, Any]:
    """A fetched window over so many steps, as plain numbers that give it back exactly."""
    metrics = {
        name: [str(np.asarray(mean.total).dtype), float(mean.total), float(mean.weight)]
        for name, mean in window.metrics.items()
    }
    return {"num_steps": num_steps, "num_skipped": int(window.num_skipped), "metrics": metrics}


def window_from_json(saved: dict[str, Any], mesh: Mesh) -> Window:
    """The inverse of `window_to_json`, on every device."""
    metrics = {
        name: Mean(np.asarray(total, dtype), np.asarray(weight, dtype))
        for name, (dtype, total, weight) in saved["metrics"].items()
    }
    window = Window(metrics, np.asarray(saved["num_skipped"], np.int32), np.ones((), bool))
    return jax.tree.map(lambda x: put_global(x, replicated(mesh)), window)


def is_like(window: Window, other: Window) -> bool:
    """Whether both hold the same metrics."""
    return jax.tree.map(jnp.shape, window) == jax.tree.map(jnp.shape, other) and (
        [x.dtype for x in jax.tree.leaves(window)] == [x.dtype for x in jax.tree.leaves(other)]
    )


def next_window(empty: Window, window: Window) -> Window:
    """An empty window after `window`."""
    return dataclasses.replace(empty, ok=window.ok)
