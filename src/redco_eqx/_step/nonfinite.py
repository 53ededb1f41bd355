"""Find the source of values that are not finite: the batch, an index outside a table, or one operation."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jax.extend.core import JaxprEqn
from jax.lax import GatherScatterMode
from jaxtyping import Array

from redco_eqx._base.jaxprs import rewrite, source_line, trace
from redco_eqx._base.protocols import Batch, Key, LossFn, Metrics
from redco_eqx._base.tree import leaves_with_paths
from redco_eqx._step.layout import on_arrays
from redco_eqx._step.state import TRAIN, TrainState, stream
from redco_eqx._step.steps import unpack_loss

# Values of the batch: a NaN, or an index outside a table.


def find_nan(batch: Batch) -> str | None:
    """Describe the first NaN in the batch; `None` if there is none on this process."""
    for path, x in leaves_with_paths(jax.tree.map(_rows_here, batch)):
        if jnp.issubdtype(x.dtype, jnp.inexact) and np.isnan(x).any():
            row = np.argwhere(np.isnan(x))[0, 0] if x.ndim else 0
            return f"the batch's {path or 'array'} has NaN in row {row}"
    return None


def find_outside(state: TrainState, batch: Batch, *, loss_fn: LossFn) -> str | None:
    """Describe an out-of-range index and the leaf of the batch that contains it; return `None` if there is
    none.

    Compute only the indices of the lookups in `loss_fn`, on one device, with zeros for the model's arrays. The
    function therefore misses an out-of-range index that depends on these arrays. Rows on other processes are
    also replaced by zeros, so nothing is communicated.
    """
    # Take the copies of the key and the step on one device. Every device has them whole.
    state = dataclasses.replace(state, key=state.key.addressable_data(0), step=state.step.addressable_data(0))
    inputs = state.params, state.frozen, state.model_state, batch, stream(state, TRAIN)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)  # on no mesh
    program = trace(on_arrays(state, loss_fn), *shapes)
    jaxpr = program.closed.jaxpr
    # Go one by one. The line of the outermost operation matters, because JAX caches traces of inner ones.
    parts = [rewrite(jaxpr.replace(eqns=[e]), partial(_checked, source_line(e))) for e in jaxpr.eqns]
    # Under `jit`, the compiler computes only the indices, because nothing uses the result.
    checked = checkify.checkify(program.replace(jaxpr.replace(eqns=[part.eqns[0] for part in parts])))

    def error_of(batch: Batch, key: Key) -> checkify.Error:
        return checked(*jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:3]), batch, key)[0]

    rows = jax.tree.map(_rows_here, batch)
    message = jax.jit(error_of)(rows, inputs[-1]).get()
    if message is None:
        return None
    index, where = int(message.split()[0]), message.partition(" ")[2].partition(" (`check` failed)")[0]
    size = int(where.split()[0])
    for value in (index - size, index) if index < 0 else (index,):  # `jnp.take` has added the size
        for path, x in leaves_with_paths(rows):
            if np.issubdtype(x.dtype, np.integer) and x.ndim and value in x:
                row = np.argwhere(x == value)[0, 0]
                return (
                    f"the batch's {path or 'array'} has {value} in row {row}, an index outside a dim of {where}"
                )
    return f"{index} is an index outside a dim of {where}"


def _checked(line: str, equation: JaxprEqn) -> Callable[..., Array] | None:
    """A lookup that gives NaN outside the table, with a check of the indices that names this line."""
    params = equation.params
    if equation.primitive.name != "gather" or params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return None

    def lookup(table: Array, indices: Array) -> Array:
        for place, dim in enumerate(params["dimension_numbers"].start_index_map):
            own = indices[..., place].ravel()
            wrong = (own < 0) | (own > table.shape[dim] - params["slice_sizes"][dim])
            checkify.check(~wrong.any(), f"{{}} {table.shape[dim]} at {line}", own[jnp.argmax(wrong)])
        return equation.primitive.bind(table, indices, **params)

    return lookup


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
    """Describe the first metric that is not finite, or else the first parameter with such a gradient.

    Operations run one at a time, and are not compiled as a whole. So under `jax_debug_nans` or
    `jax_debug_infs`, the operation that produces the first such value raises `FloatingPointError` from its line
    of `loss_fn`. Microbatches are treated as one batch.
    """
    key = stream(state, TRAIN)

    def loss_of(params: dict[str, Array]) -> tuple[Array, Metrics]:
        output = loss_fn(state.build(params, state.model_state), batch, key)
        loss, metrics, _ = unpack_loss(state, output, 1.0)
        return loss.value, {"loss": loss, **metrics}

    with jax.disable_jit():
        (_, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    values = {name: mean.value for name, mean in metrics.items()}
    for name, x in {**values, **{f"the gradient of {path}": x for path, x in grads.items()}}.items():
        if not jnp.isfinite(x).all():
            return f"{name} has {int((~jnp.isfinite(x)).sum())} such numbers out of {x.size}"
    return "evaluated one operation at a time, everything is finite"
