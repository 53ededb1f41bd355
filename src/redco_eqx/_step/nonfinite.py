"""Find the source of values that are not finite: the batch, an index outside a table,
or one operation."""

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

from redco_eqx._base.jaxprs import source_line, trace
from redco_eqx._base.protocols import Batch, Key, LossFn, Metrics
from redco_eqx._base.rewriting import replace_operations
from redco_eqx._base.tree import leaves_with_paths
from redco_eqx._step.passes import on_arrays
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


# An index outside a table, which gives a row of NaN.


def find_outside(state: TrainState, batch: Batch, *, loss_fn: LossFn) -> str | None:
    """Describe an index in the batch that is outside the table that it is looked up in;
    `None` if there is none.

    Only the indices of the lookups in `loss_fn` are computed, on one device, with zeros
    for the model's arrays. So an index that depends on these arrays may be missed. Rows
    on other processes are zeros, too, so nothing is communicated.
    """
    # Every device has the whole key and step. Take those on one device.
    state = dataclasses.replace(
        state, key=state.key.addressable_data(0), step=state.step.addressable_data(0)
    )
    key = stream(state, TRAIN)
    inputs = (state.params, state.frozen, state.model_state, batch, key)
    # On no mesh.
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    program = trace(on_arrays(state, loss_fn), *shapes)
    jaxpr = program.closed.jaxpr
    # The line of the outermost operation counts, because JAX keeps the traces of inner
    # ones, with the lines of their first caller.
    equations = []
    for equation in jaxpr.eqns:
        check = partial(_checked, source_line(equation))
        part = replace_operations(jaxpr.replace(eqns=[equation]), check)
        equations += part.eqns
    checked = checkify.checkify(program.replace(jaxpr.replace(eqns=equations)))

    def error_of(batch: Batch, key: Key) -> checkify.Error:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:3])
        return checked(*zeros, batch, key)[0]

    rows = jax.tree.map(_rows_here, batch)
    # Under `jit`, the compiler computes only the indices, because nothing uses the
    # result.
    message = jax.jit(error_of)(rows, key).get()
    return None if message is None else _described(message, rows)


def _checked(line: str, equation: JaxprEqn) -> Callable[..., Array] | None:
    """A lookup that gives NaN outside the table, with a check of its indices that names
    this line; `None` for other operations."""
    params = equation.params
    if equation.primitive.name != "gather":
        return None
    if params["mode"] != GatherScatterMode.FILL_OR_DROP:
        return None

    def lookup(table: Array, indices: Array) -> Array:
        dims = params["dimension_numbers"].start_index_map
        for place, dim in enumerate(dims):
            own = indices[..., place].ravel()
            size = table.shape[dim]
            is_wrong = (own < 0) | (own > size - params["slice_sizes"][dim])
            found = own[jnp.argmax(is_wrong)]
            checkify.check(~is_wrong.any(), f"{{}} {size} at {line}", found)
        return equation.primitive.bind(table, indices, **params)

    return lookup


def _described(message: str, rows: Batch) -> str:
    """The message of a failed check, with the leaf of the batch that has the index."""
    where = message.partition(" (`check` failed)")[0]
    number, size, line = where.split(" ", maxsplit=2)
    outside = f"an index outside a dim of {size} {line}"
    index = int(number)
    # `jnp.take` has added the size to a negative index.
    given = (index - int(size), index) if index < 0 else (index,)
    for value in given:
        for path, x in leaves_with_paths(rows):
            if np.issubdtype(x.dtype, np.integer) and x.ndim and value in x:
                row = np.argwhere(x == value)[0, 0]
                name = path or "array"
                return f"the batch's {name} has {value} in row {row}, {outside}"
    return f"{index} is {outside}"


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
