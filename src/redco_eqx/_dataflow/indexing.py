"""Lookups, and their transposes."""

import math

from jax.extend.core import JaxprEqn

from redco_eqx._dataflow.atoms import Dim, new_dim
from redco_eqx._dataflow.programs import shape_of, type_of
from redco_eqx._dataflow.values import Value
from redco_eqx._dataflow.walk import Walk, result


def dynamic_slice(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    operand = operands[0]
    aval, dims = type_of(equation.outvars[0]), list(operand.dims)
    for i, (before, after) in enumerate(zip(shape_of(equation.invars[0]), aval.shape)):
        if before != after:
            walk.event("whole", [dims[i]], operand, equation)
            dims[i] = new_dim(after)
    return [result(aval, dims, operands)]


def dynamic_update_slice(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    operand, update = operands[:2]
    before, after = (shape_of(var) for var in equation.invars[:2])
    for dim, own, n, m in zip(operand.dims, update.dims, before, after):
        if n == m:
            walk.same([dim], [own], update, equation)
        else:
            walk.event("whole", [dim, own], update, equation)
    return [result(type_of(equation.outvars[0]), operand.dims, operands[:2])]


def gather(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Each device looks up what it has of a split dim; the sum over devices is what was looked up."""
    operand, indices = operands
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    aval, shape = type_of(equation.outvars[0]), shape_of(equation.invars[0])
    batching = tuple(numbers.operand_batching_dims)
    for i, j in zip(batching, numbers.start_indices_batching_dims):
        walk.same([operand.dims[i]], [indices.dims[j]], indices, equation)
    picked = list(numbers.collapsed_slice_dims)
    kept = iter([i for i in range(len(shape)) if i not in picked and i not in batching])
    rows = iter(indices.dims[:-1])
    dims: list[Dim] = []
    for j, size in enumerate(aval.shape):
        if j not in numbers.offset_dims:
            dims.append(next(rows))
            continue
        i = next(kept)
        is_whole = sizes[i] == shape[i]
        dims.append(operand.dims[i] if is_whole else new_dim(size))
        picked += [] if is_whole else [i]
    out = result(aval, dims, operands)
    walk.event("lookup", [operand.dims[i] for i in picked], out, equation, arrays=operands)
    roles = ["vocabulary" if i in picked else "column" for i in range(len(shape))]
    # As much as the product with one-hot rows, which is what a split table is worth in training.
    walk.use(operand, indices, roles, out, math.prod(shape[i] for i in picked))
    return [out]


def scatter(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Updates written or added at rows: each device takes those of its part of the operand."""
    operand, indices, updates = operands
    numbers, shape = equation.params["dimension_numbers"], shape_of(equation.invars[0])
    batching = tuple(numbers.operand_batching_dims)
    for i, j in zip(batching, numbers.scatter_indices_batching_dims):
        walk.same([operand.dims[i]], [indices.dims[j]], indices, equation)
    kept = iter([i for i in range(len(shape)) if i not in numbers.inserted_window_dims and i not in batching])
    rows = iter([(j, dim) for j, dim in enumerate(indices.dims[:-1])])
    out = result(type_of(equation.outvars[0]), operand.dims, operands)
    summed = []
    for j, dim in enumerate(updates.dims):
        if j in numbers.update_window_dims:
            i = next(kept)
            if shape_of(equation.invars[2])[j] == shape[i]:
                walk.same([operand.dims[i]], [dim], updates, equation)
            else:
                walk.event("whole", [dim], updates, equation)
            continue
        row, of_row = next(rows)
        walk.same([of_row], [dim], updates, equation)
        if row not in numbers.scatter_indices_batching_dims:
            summed.append(dim)
    walk.event("sum", summed, out, equation, arrays=[updates])
    return [out]
