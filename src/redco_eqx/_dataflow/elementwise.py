"""Operations number by number, along one dim, or of unknown kind."""

import math

from jax.extend.core import JaxprEqn

from redco_eqx._dataflow.atoms import Dim, new_dim, new_dims
from redco_eqx._dataflow.programs import shape_of, type_of
from redco_eqx._dataflow.source import ADDING, STREAM
from redco_eqx._dataflow.values import Value
from redco_eqx._dataflow.walk import Rule, Walk, result, unknown

# Shapes would fit, but every number may depend on every other.
NOT_ELEMENTWISE = frozenset(
    [
        "custom_call",
        "custom_partitioning",
        "debug_callback",
        "ffi_call",
        "io_callback",
        "mosaic_gpu",
        "pallas_call",
        "pure_callback",
        "shard_map",
        "tpu_custom_call",
    ]
)


def unlisted(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """An operation with no rule of its own: if shapes agree, it is taken to go number by number."""
    name = equation.primitive.name
    shapes = [shape for var in (*equation.invars, *equation.outvars) if (shape := shape_of(var))]
    if not shapes:
        return [result(var.aval, (), operands) for var in equation.outvars]
    largest = max(shapes, key=math.prod)
    fits = all(len(s) == len(largest) and all(n in (1, m) for n, m in zip(s, largest)) for s in shapes)
    if name in NOT_ELEMENTWISE or not fits or all(shape_of(v) != largest for v in equation.outvars):
        return walk.opaque_results(equation, operands)
    return _elementwise(walk, equation, operands, largest)


def _elementwise(walk: Walk, equation: JaxprEqn, operands: list[Value], shape: tuple[int, ...]) -> list[Value]:
    """Dims of size 1, and scalars, are stretched."""
    dims: list[Dim] = [()] * len(shape)
    if len(operands) == 1:
        dims = list(operands[0].dims)
    else:
        for var, operand in zip(equation.invars, operands):
            own = shape_of(var)
            for i, dim in enumerate(operand.dims):
                if own[i] != shape[i]:
                    continue
                if dims[i]:
                    walk.same([dims[i]], [dim], operand, equation)
                else:
                    dims[i] = dim
    missing = new_dims(shape)
    full = [dim or new for dim, new in zip(dims, missing)]
    return [
        result(var.aval, full if shape_of(var) == shape else new_dims(shape_of(var)), operands)
        for var in equation.outvars
    ]


def add(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """The sum of sums over devices is one sum; a bias may be added after it."""
    (out,) = unlisted(walk, equation, operands)
    if all(operand.sums or not operand.is_data for operand in operands):
        out.sums = tuple(dict.fromkeys(event for operand in operands for event in operand.sums))
        for event in out.sums[1:]:
            event.first = out.sums[0]
        if len(out.sums) > 1 and all(event.block in ADDING for event in out.sums):
            for event in out.sums[1:]:
                event.joined = out.sums[0]
    return [out]


def convert(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    (out,) = unlisted(walk, equation, operands)
    out.sums = operands[0].sums
    return [out]


def copy(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Where layers meet, the library's blocks keep what flows between them whole, all but its rows."""
    if walk.block == STREAM:
        walk.event("whole", operands[0].dims[1:], operands[0], equation)
    return operands


def each_alone(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Several arrays at once, each as it is."""
    return list(operands)


def unrelated(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Made by numbers of their own: counters and draws, of which each device makes its part."""
    return [unknown(var.aval) for var in equation.outvars]


def along_one_dim(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Cumulative sums, sorts, reversals: they need this dim whole."""
    params = equation.params
    named = params.get("dimensions", params.get("dimension", params.get("axis")))
    first = operands[0]
    along = (
        list(named) if isinstance(named, tuple | list) else [len(first.dims) - 1 if named is None else named]
    )
    for operand in operands:
        walk.event("whole", [operand.dims[i] for i in along], operand, equation)
        walk.same(first.dims, operand.dims, operand, equation)
    dims = list(first.dims)
    if equation.primitive.name == "sort":  # what stood in one place is in another
        for i in along:
            dims[i] = new_dim(shape_of(equation.invars[0])[i])
    return [result(var.aval, dims, operands) for var in equation.outvars]


def last_dims(num_dims: int) -> Rule:
    """A rule for what works on the last dims, for each entry of the others: decompositions, top-k."""

    def rule(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        batch: list[Dim] | None = None
        for operand in operands:
            rest = len(operand.dims) - num_dims
            if rest < 0:
                continue
            walk.event("whole", operand.dims[rest:], operand, equation)
            if batch is None:
                batch = list(operand.dims[:rest])
            walk.same(batch, operand.dims[:rest], operand, equation)
        batch = batch or []
        found = []
        for var in equation.outvars:
            inner = new_dims(shape_of(var)[len(batch) :])
            found.append(result(var.aval, [*batch, *inner], operands))
        return found

    return rule


def fft(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Every dim but the batch is whole on each device: the compiler goes wrong otherwise."""
    (operand,) = operands
    num_whole = len(equation.params["fft_lengths"])
    aval = type_of(equation.outvars[0])
    walk.event("whole", operand.dims, operand, equation)
    kept = operand.dims[: len(operand.dims) - num_whole]
    return [result(aval, [*kept, *new_dims(aval.shape[len(kept) :])], operands)]
