"""Operations that move dims, cut them, and put them together."""

from collections.abc import Sequence

from jax.extend.core import JaxprEqn

from redco_eqx._dataflow.atoms import Dim, new_dim, new_dims, unify
from redco_eqx._dataflow.programs import shape_of, type_of
from redco_eqx._dataflow.values import Value
from redco_eqx._dataflow.walk import Walk, result


def transpose(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    dims = [operands[0].dims[i] for i in equation.params["permutation"]]
    return [_moved(equation, dims, operands[0])]


def _moved(equation: JaxprEqn, dims: Sequence[Dim], operand: Value) -> Value:
    """The same numbers, so that what can be done with their sum over devices can still be done."""
    out = result(type_of(equation.outvars[0]), dims, [operand])
    out.sums = operand.sums
    return out


def reshape(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Numbers keep their order, so that the runs of factors before and after are the same."""
    operand = operands[0]
    aval = type_of(equation.outvars[0])
    sizes = [n for n in shape_of(equation.invars[0]) if n > 1]
    if sizes == [n for n in aval.shape if n > 1]:
        left = iter([dim for dim, n in zip(operand.dims, shape_of(equation.invars[0])) if n > 1])
        return [_moved(equation, [next(left) if n > 1 else () for n in aval.shape], operand)]
    dims = new_dims(aval.shape)
    before = tuple(atom for dim in operand.dims for atom in dim)
    unify(before, tuple(atom for dim in dims for atom in dim))
    # A factor that no longer leads a dim cannot be split there.
    walk.event("merge", operand.dims, operand, equation, unless=dims)
    return [_moved(equation, dims, operand)]


def squeeze(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    gone = equation.params["dimensions"]
    dims = [dim for i, dim in enumerate(operands[0].dims) if i not in gone]
    return [_moved(equation, dims, operands[0])]


def broadcast_in_dim(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    aval, before = type_of(equation.outvars[0]), shape_of(equation.invars[0])
    dims = list(new_dims(aval.shape))
    for i, j in enumerate(equation.params["broadcast_dimensions"]):
        if before[i] == aval.shape[j]:
            dims[j] = operands[0].dims[i]
    return [result(aval, dims, operands[:1])]


def _piece(
    walk: Walk, equation: JaxprEqn, value: Value, dim: Dim, total: int, start: int, size: int, stride: int
) -> Dim:
    """A slice of a dim. If it is one of several equal pieces, the dim is `(pieces, size)`."""
    if size == total:
        return dim
    pieces, inner = new_dim(total // size if size else 1), new_dim(size)
    aligned = size > 0 and total % size == 0
    if stride == 1 and aligned and start % size == 0 and unify(dim, (*pieces, *inner)):
        walk.event("whole", [dim], value, equation, unless=[inner])
        return inner
    if stride > 1 and aligned and stride == total // size and unify(dim, (*inner, *pieces)):
        return inner
    walk.event("reshard", [dim], value, equation)
    return new_dim(size)


def slice_(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    (operand,) = operands
    aval, before = type_of(equation.outvars[0]), shape_of(equation.invars[0])
    starts = map(int, equation.params["start_indices"])  # NumPy's numbers at times
    strides = map(int, equation.params["strides"] or (1,) * len(before))
    dims = [
        _piece(walk, equation, operand, *of_dim)
        for of_dim in zip(operand.dims, before, starts, aval.shape, strides)
    ]
    return [result(aval, dims, operands)]


def split(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    (operand,) = operands
    axis, start, results = equation.params["axis"], 0, []
    total = shape_of(equation.invars[0])[axis]
    for var, size in zip(equation.outvars, equation.params["sizes"]):
        dims = list(operand.dims)
        dims[axis] = _piece(walk, equation, operand, dims[axis], total, start, int(size), 1)
        start += int(size)
        results.append(result(var.aval, dims, operands))
    return results


def stack(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    axis, first = equation.params["axis"], operands[0]
    for operand in operands[1:]:
        walk.same(first.dims, operand.dims, operand, equation)
    dims = [*first.dims[:axis], new_dim(len(operands)), *first.dims[axis:]]
    return [result(type_of(equation.outvars[0]), dims, operands)]


def unstack(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    axis, operand = equation.params["axis"], operands[0]
    walk.event("whole", [operand.dims[axis]], operand, equation)
    dims = [*operand.dims[:axis], *operand.dims[axis + 1 :]]
    return [result(var.aval, dims, operands) for var in equation.outvars]


def concatenate(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    axis, aval = equation.params["dimension"], type_of(equation.outvars[0])
    first = operands[0]
    others = [i for i in range(len(aval.shape)) if i != axis]
    for operand in operands[1:]:
        walk.same([first.dims[i] for i in others], [operand.dims[i] for i in others], operand, equation)
    dims = list(first.dims)
    sizes = {shape_of(var)[axis] for var in equation.invars}
    if len(sizes) == 1:
        for operand in operands[1:]:
            walk.same([first.dims[axis]], [operand.dims[axis]], operand, equation)
        dims[axis] = (*new_dim(len(operands)), *first.dims[axis])
    else:
        dims[axis] = new_dim(aval.shape[axis])
    out = result(aval, dims, operands)
    for operand in operands:
        walk.event("reshard", [operand.dims[axis]], operand, equation, unless=[dims[axis]])
    return [out]


def pad(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Also the transpose of a slice: one piece among zeros."""
    operand = operands[0]
    aval, before = type_of(equation.outvars[0]), shape_of(equation.invars[0])
    dims = []
    config = [tuple(map(int, entry)) for entry in equation.params["padding_config"]]
    for dim, size, total, (low, high, interior) in zip(operand.dims, before, aval.shape, config):
        if size == total and (low, high, interior) == (0, 0, 0):
            dims.append(dim)
        elif size > 0 and total % size == 0 and total > size and interior == 0 and low >= 0 and low % size == 0:
            dims.append((*new_dim(total // size), *dim))
        elif size > 0 and total == size * (interior + 1) and low >= 0:
            dims.append((*dim, *new_dim(interior + 1)))
        else:
            dims.append(new_dim(total))
        walk.event("reshard", [dim], operand, equation, unless=[dims[-1]])
    return [result(aval, dims, operands[:1])]


def tile(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    dims = [(*new_dim(n), *dim) for n, dim in zip(equation.params["reps"], operands[0].dims)]
    walk.event("merge", operands[0].dims, operands[0], equation, unless=dims)
    return [result(type_of(equation.outvars[0]), dims, operands)]


def reduce(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Sums, maxima and the like; `psum` over a dim that `vmap` gave a name is one too."""
    params = equation.params
    axes = [int(x) for x in params.get("axes", params.get("dimensions", ())) if not isinstance(x, str)]
    results = []
    for operand, var in zip(operands, equation.outvars):
        out = result(var.aval, [d for i, d in enumerate(operand.dims) if i not in axes], operands)
        walk.event("sum", [operand.dims[i] for i in axes], out, equation, arrays=[operand])
        results.append(out)
    return results


def window(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Pooling, and its gradients: dims that the window goes along are needed whole."""
    sizes = equation.params["window_dimensions"]
    results = []
    for operand in operands:
        if len(operand.dims) == len(sizes):
            walk.event("whole", [d for d, n in zip(operand.dims, sizes) if n > 1], operand, equation)
    for var in equation.outvars:
        dims = [d if n == 1 else new_dim(m) for d, n, m in zip(operands[0].dims, sizes, shape_of(var))]
        for operand in operands[1:]:
            if len(operand.dims) == len(sizes):
                kept = [i for i, n in enumerate(sizes) if n == 1]
                walk.same([dims[i] for i in kept], [operand.dims[i] for i in kept], operand, equation)
        results.append(result(var.aval, dims, operands))
    return results
