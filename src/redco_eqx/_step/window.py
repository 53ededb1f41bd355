"""`Window`: the metrics since the last row of the log, added up on the devices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int

from redco_eqx._base.protocols import Batch, Mean, Metrics
from redco_eqx._base.tree import AnyArray
from redco_eqx._step.guard import GuardedStep


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
        new_state, metrics, ok = step(tree.unflatten(arrays), batch, window.ok)
        totals = jax.tree.map(
            lambda total, x: total + jnp.where(ok, x, 0), window.metrics, metrics
        )
        return jax.tree.leaves(new_state), Window(totals, window.num_steps + 1, ok)

    return body
