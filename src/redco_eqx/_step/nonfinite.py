"""Find the source of values that are not finite: the batch, or one operation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from redco_eqx._base.protocols import Batch, LossFn, Metrics
from redco_eqx._base.tree import leaves_with_paths
from redco_eqx._step.state import TRAIN, TrainState, stream
from redco_eqx._step.steps import unpack_loss

# A NaN in the batch.


def find_nan(batch: Batch) -> str | None:
    """Describe the first NaN in the batch; `None` if there is none on this process."""
    for path, x in leaves_with_paths(jax.tree.map(_rows_here, batch)):
        if jnp.issubdtype(x.dtype, jnp.inexact) and np.isnan(x).any():
            row = np.argwhere(np.isnan(x))[0, 0] if x.ndim else 0
            return f"the batch's {path or 'array'} has NaN in row {row}"
    return None


def _rows_here(x: Any) -> np.ndarray:
    """The array, with zeros for the parts on other processes."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    whole = np.zeros(x.shape, x.dtype)
    for shard in x.addressable_shards:
        whole[shard.index] = shard.data
    return whole


# One operation at a time.


def find_nonfinite(state: TrainState, batch: Batch, *, loss_fn: LossFn) -> str:
    """Describe the first metric that is not finite, or else the first parameter with
    such a gradient.

    Operations run one at a time, and are not compiled as a whole. So under
    `jax_debug_nans` or `jax_debug_infs`, the operation that produces the first such
    value raises `FloatingPointError` from its line of `loss_fn`. Microbatches are
    treated as one batch.
    """
    key = stream(state, TRAIN)

    def loss_of(params: dict[str, Array]) -> tuple[Array, Metrics]:
        output = loss_fn(state.build(params, state.model_state), batch, key)
        loss, metrics, _ = unpack_loss(state, output, 1.0)
        return loss.value, {"loss": loss, **metrics}

    with jax.disable_jit():
        (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    values = {name: mean.value for name, mean in metrics.items()}
    for name, x in {
        **values,
        **{f"the gradient of {path}": x for path, x in grads.items()},
    }.items():
        if not jnp.isfinite(x).all():
            return (
                f"{name} has {int((~jnp.isfinite(x)).sum())} such numbers out of "
                f"{x.size}"
            )
    return "evaluated one operation at a time, everything is finite"
