"""Steps that change nothing unless they are finite.

A guarded step reads and returns a flag, `ok`, on the devices. The loop of `fit` looks
at it some steps later (`_training/loop.py`), and `nonfinite.py` finds the cause.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool

from redco_eqx._base.protocols import Batch, Metrics, as_mean
from redco_eqx._step.state import TrainState, check_unchanged
from redco_eqx._step.step_functions import StepFn

GuardedStep: TypeAlias = Callable[
    [TrainState, Batch, Any], tuple[TrainState, Metrics, Any]
]
"""A function `(state, batch, ok) -> (state, metrics, ok)`, as [`guarded`][] makes
it."""


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
        new_state, metrics, ok = guarded(step_fn)(state, batch, np.ones((), bool))
        # A skipped step counts, so that the next one draws other random numbers.
        number = jnp.where(ok, new_state.step, optax.safe_increment(state.step))
        new_state = dataclasses.replace(new_state, step=number)
        return new_state, {**metrics, "skipped": as_mean(1.0 - ok, 1.0, "skipped")}

    return step


@jax.jit
def all_finite(params: dict[str, Array]) -> Bool[Array, ""]:
    """Tell if all floating-point arrays are finite."""
    floats = [x for x in params.values() if jnp.issubdtype(x.dtype, jnp.inexact)]
    return jnp.all(jnp.asarray([jnp.isfinite(x).all() for x in floats]))
