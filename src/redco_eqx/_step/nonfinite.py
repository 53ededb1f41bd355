"""The source of values that are not finite: an index outside of a table, or one operation of the step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from redco_eqx._jaxprs.program import trace
from redco_eqx._step.lookups import Known, outside
from redco_eqx._step.state import TRAIN, TrainState, stream
from redco_eqx._step.steps import unpack_loss
from redco_eqx._step.traced import on_arrays
from redco_eqx._tree import leaves_with_paths
from redco_eqx._types import Batch, LossFn, Metrics


def find_outside(state: TrainState, batch: Batch, *, loss_fn: LossFn) -> str | None:
    """An id or label of the batch that is outside of what it is looked up in, in words; or `None`.

    `loss_fn` is traced, and of it only the indices are computed that follow from the batch. Rows that another
    process holds are not looked at, and nothing is communicated.
    """
    state = dataclasses.replace(state, key=_own(state.key), step=_own(state.step))
    inputs = state.params, state.frozen, state.model_state, batch, stream(state, TRAIN)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)  # on no mesh
    program = trace(on_arrays(state, loss_fn), *shapes).closed
    leaves = [(path or "array", _rows_here(x)) for path, x in leaves_with_paths(batch)]
    arrays = sum(len(jax.tree.leaves(x)) for x in inputs[:3])
    known: list[Known | None] = [None] * arrays
    known += [(frozenset([i]), lambda x=x: x) for i, (_, x) in enumerate(leaves)]
    known.append((frozenset(), lambda: inputs[-1]))
    found = outside(program.jaxpr, known)
    if found is None:
        return None
    sources, row, index, size, line = found
    what = f"looked up among {size} at {line}"
    for value in (index - size, index) if index < 0 else (index,):  # `jnp.take` has added the size
        for path, x in (leaves[i] for i in sorted(sources)):
            if np.issubdtype(x.dtype, np.integer) and len(x) > row and value in x[row]:
                return f"the batch's {path} has {value} in row {row}, which is {what}"
    names = " and ".join(leaves[i][0] for i in sorted(sources))
    return f"the batch's {names} gives the index {index} in row {row}, which is {what}"


def _own(x: Array) -> Array:
    """Return one device's copy of an array that all have whole."""
    return x.addressable_data(0)


def _rows_here(x: Any) -> np.ndarray:
    """The array with zeros for what other processes hold."""
    if not isinstance(x, jax.Array):
        return np.asarray(x)
    whole = np.zeros(x.shape, x.dtype)
    for shard in x.addressable_shards:
        whole[shard.index] = shard.data
    return whole


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
