"""Where what is not finite comes from: a step's loss and gradient, one operation at a time."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from redco_eqx._step.loss import unpack_loss
from redco_eqx._step.state import TRAIN, TrainState, stream
from redco_eqx._types import Batch, LossFn, Metrics


def find_nonfinite(state: TrainState, batch: Batch, *, loss_fn: LossFn) -> str:
    """The first metric, or else the first parameter by its gradient, that is not finite, in words.

    Nothing is compiled as a whole, so that under `jax_debug_nans` or `jax_debug_infs` the operation that makes
    the first such number raises `FloatingPointError`, from the line of `loss_fn` where it stands. Microbatches
    are taken as one.
    """
    key = stream(state, TRAIN)

    def loss_of(params: dict[str, Array]) -> tuple[Array, Metrics]:
        output = loss_fn(state.build(params, state.model_state), batch, key)
        loss, metrics, _ = unpack_loss(state, output, 1.0)
        return loss.value, {"loss": loss, **metrics}

    with jax.disable_jit():
        (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    for name, mean in metrics.items():
        if not jnp.isfinite(mean.value):
            return f"{name} is {float(mean)}"
    for path, x in grads.items():
        if not jnp.isfinite(x).all():
            return f"the gradient of {path} has {int((~jnp.isfinite(x)).sum())} such numbers of {x.size}"
    return "evaluated one operation at a time, all of it is finite"
