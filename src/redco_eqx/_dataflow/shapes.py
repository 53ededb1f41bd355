"""Rules for elementwise operations, operations along one dim, lookups, and operations
that move dims."""

import math
from collections.abc import Sequence
from typing import Any

from redco_eqx._base.jaxprs import NOT_ELEMENTWISE
from redco_eqx._dataflow.values import (
    STREAM,
    Dim,
    Value,
    new_dim,
    new_dims,
    resolve,
    unify,
)
from redco_eqx._dataflow.walk import Results, Rule, Walk, unknown

# Operations that are elementwise, act along one dim, or are of unknown kind.


def unlisted(walk: Walk, operands: list[Value]) -> Sequence[Sequence[Dim]]:
    """An operation without a rule. If the shapes agree, it is assumed to be
    elementwise."""
    name = walk.equation.primitive.name
    shapes = [shape for shape in (*walk.before, *walk.after) if shape]
    if not shapes:
        return [() for _ in walk.after]
    largest = max(shapes, key=math.prod)
    fits = all(
        len(s) == len(largest) and all(n in (1, m) for n, m in zip(s, largest))
        for s in shapes
    )
    if name in NOT_ELEMENTWISE or not fits or largest not in walk.after:
        return walk.opaque_dims(operands)
    dims: list[Dim] = [()] * len(largest)
    for own, operand in zip(walk.before, operands):
        for i, dim in enumerate(operand.dims):
            if own[i] != largest[i]:
                continue  # a dim of size 1 is stretched
            if dims[i]:
                walk.same([dims[i]], [dim], operand)
            else:
                dims[i] = dim
    full = [dim or new for dim, new in zip(dims, new_dims(largest))]
    return [full if shape == largest else new_dims(shape) for shape in walk.after]


def add(walk: Walk, operands: list[Value]) -> Results:
    """Combine several sums over devices into one, also in a different dtype; a bias may
    be added after it."""
    (dims,) = unlisted(walk, operands)
    out = walk.result(dims, operands)
    if all(operand.sums or not operand.is_data for operand in operands):
        out.sums = walk.added(operands)
    return [out]


def copy(walk: Walk, operands: list[Value]) -> Results:
    """Arrays are passed on unchanged. Between layers, the library's blocks keep them
    whole, except for rows."""
    if walk.block == STREAM:
        walk.event("whole", operands[0].dims[1:], operands[0])
    return operands


def unrelated(walk: Walk, operands: list[Value]) -> Results:
    """Results that depend on no dim of an operand: counters and draws. Each device
    makes its own part."""
    return [unknown(var.aval) for var in walk.equation.outvars]


def along_one_dim(walk: Walk, operands: list[Value]) -> Results:
    """Cumulative sums, sorts and reversals, which need the dim that they act along
    whole."""
    params = walk.params
    named: Any = params.get("dimensions", params.get("dimension", params.get("axis")))
    first = operands[0]
    along = named if isinstance(named, tuple | list) else [named]
    for operand in operands:
        walk.event("whole", [operand.dims[i] for i in along], operand)
        walk.same(first.dims, operand.dims, operand)
    dims = list(first.dims)
    if walk.equation.primitive.name == "sort":  # it moves elements to other places
        for i in along:
            dims[i] = new_dim(walk.before[0][i])
    return [dims for _ in walk.after]


def last_dims(num_dims: int) -> Rule:
    """A rule for operations on the last dims, separately for each entry of the others:
    decompositions, top-k."""

    def rule(walk: Walk, operands: list[Value]) -> Results:
        fitting = [x for x in operands if len(x.dims) >= num_dims]
        batch = fitting[0].dims[: len(fitting[0].dims) - num_dims]
        for operand in fitting:
            rest = len(operand.dims) - num_dims
            walk.event("whole", operand.dims[rest:], operand)
            walk.same(batch, operand.dims[:rest], operand)
        return [[*batch, *new_dims(shape[len(batch) :])] for shape in walk.after]

    return rule


def fft(walk: Walk, operands: list[Value]) -> Results:
    """An FFT. All dims except the batch are whole on each device, because the compiler
    would otherwise fail."""
    (operand,) = operands
    kept = operand.dims[: len(operand.dims) - len(walk.params["fft_lengths"])]
    # The steps split only the leading dim, over the batch axes. If it is not pinned,
    # `tensor` might split it.
    is_batch = any(atom.pin for dim in kept[:1] for atom in resolve(dim))
    walk.event("whole", operand.dims[is_batch:], operand)
    return [[*kept, *new_dims(walk.after[0][len(kept) :])]]


# Lookups, and their transposes.


def dynamic_slice(walk: Walk, operands: list[Value]) -> Results:
    operand = operands[0]
    dims = list(operands[0].dims)
    for i, (before, after) in enumerate(zip(walk.before[0], walk.after[0])):
        if before != after:
            walk.event("whole", [dims[i]], operand)
            dims[i] = new_dim(after)
    return [dims]


def dynamic_update_slice(walk: Walk, operands: list[Value]) -> Results:
    operand, update = operands[:2]
    for dim, own, n, m in zip(operand.dims, update.dims, *walk.before[:2]):
        if n == m:
            walk.same([dim], [own], update)
        else:
            walk.event("whole", [dim, own], update)
    return [walk.result(operand.dims, operands[:2])]


def gather(walk: Walk, operands: list[Value]) -> Results:
    """A lookup. Each device looks up its part of a split dim, and the sum over devices
    is the result."""
    operand, indices = operands
    numbers = walk.params["dimension_numbers"]
    sizes = walk.params["slice_sizes"]
    batching = numbers.operand_batching_dims
    shape = walk.before[0]
    for i, j in zip(batching, numbers.start_indices_batching_dims):
        walk.same([operand.dims[i]], [indices.dims[j]], indices)
    kept = [
        i
        for i in range(len(shape))
        if i not in (*numbers.collapsed_slice_dims, *batching)
    ]
    picked = [
        i for i, size in enumerate(shape) if i not in batching and sizes[i] != size
    ]
    dims = list(new_dims(walk.after[0]))
    for j, i in zip(numbers.offset_dims, kept):
        dims[j] = dims[j] if i in picked else operand.dims[i]
    rows = [j for j in range(len(dims)) if j not in numbers.offset_dims]
    for j, dim in zip(rows, indices.dims):
        dims[j] = dim
    out = walk.result(dims, operands)
    walk.event("lookup", [operand.dims[i] for i in picked], out, arrays=operands)
    roles = ["vocabulary" if i in picked else "column" for i in range(len(shape))]
    # Count it like a product with one-hot rows, because a split table is worth that
    # much in training.
    walk.use(operand, indices, roles, out, math.prod(shape[i] for i in picked))
    return [out]


def scatter(walk: Walk, operands: list[Value]) -> Results:
    """Write or add updates at rows. Each device takes the updates for its part of the
    operand."""
    operand, indices, updates = operands
    numbers = walk.params["dimension_numbers"]
    batching = numbers.operand_batching_dims
    shape = walk.before[0]
    for i, j in zip(batching, numbers.scatter_indices_batching_dims):
        walk.same([operand.dims[i]], [indices.dims[j]], indices)
    kept = [
        i
        for i in range(len(shape))
        if i not in (*numbers.inserted_window_dims, *batching)
    ]
    for j, i in zip(numbers.update_window_dims, kept):
        if walk.before[2][j] == shape[i]:
            walk.same([operand.dims[i]], [updates.dims[j]], updates)
        else:
            walk.event("whole", [updates.dims[j]], updates)
    rows = [
        dim for j, dim in enumerate(updates.dims) if j not in numbers.update_window_dims
    ]
    walk.same(indices.dims, rows, updates)
    summed = [
        dim
        for n, dim in enumerate(rows)
        if n not in numbers.scatter_indices_batching_dims
    ]
    out = walk.result(operand.dims, operands)
    walk.event("sum", summed, out, arrays=[updates])
    return [out]


# Operations that move, cut or concatenate dims.


def transpose(walk: Walk, operands: list[Value]) -> Results:
    return [
        _moved(
            walk, [operands[0].dims[i] for i in walk.params["permutation"]], operands[0]
        )
    ]


def _moved(walk: Walk, dims: Sequence[Dim], operand: Value) -> Value:
    """A value with the same elements, whose pending sum over devices can be handled as
    before."""
    out = walk.result(dims, [operand])
    out.sums = operand.sums
    return out


def reshape(walk: Walk, operands: list[Value]) -> Results:
    """A reshape. Elements keep their order, so the runs of factors before and after are
    the same."""
    operand = operands[0]
    before = walk.before[0]
    after = walk.after[0]
    if [n for n in before if n > 1] == [n for n in after if n > 1]:
        left = iter([dim for dim, n in zip(operand.dims, before) if n > 1])
        return [_moved(walk, [next(left) if n > 1 else () for n in after], operand)]
    dims = new_dims(after)
    unify(sum(operand.dims, ()), sum(dims, ()))
    # A factor that no longer comes first in a dim cannot be split there.
    walk.event("merge", operand.dims, operand, unless=dims)
    return [_moved(walk, dims, operand)]


def broadcast_in_dim(walk: Walk, operands: list[Value]) -> Results:
    before = walk.before[0]
    after = walk.after[0]
    dims = list(new_dims(after))
    for i, j in enumerate(walk.params["broadcast_dimensions"]):
        if before[i] == after[j]:
            dims[j] = operands[0].dims[i]
    return [walk.result(dims, operands[:1])]


def _piece(
    walk: Walk, value: Value, dim: Dim, total: int, start: int, size: int, stride: int
) -> Dim:
    """A slice of a dim. If it is one of several equal pieces, the dim is
    `(pieces, size)`."""
    if size == total:
        return dim
    pieces = new_dim(total // size if size else 1)
    inner = new_dim(size)
    aligned = size > 0 and total % size == 0
    if stride == 1 and aligned and start % size == 0 and unify(dim, (*pieces, *inner)):
        walk.pieces.append((pieces, False))
        walk.event("whole", [dim], value, unless=[inner])
        return inner
    if (
        stride > 1
        and aligned
        and stride == total // size
        and unify(dim, (*inner, *pieces))
    ):
        return inner
    walk.event("reshard", [dim], value)
    return new_dim(size)


def slice_(walk: Walk, operands: list[Value]) -> Results:
    (operand,) = operands
    before = walk.before[0]
    after = walk.after[0]
    starts = map(int, walk.params["start_indices"])  # at times these are NumPy numbers
    strides = map(int, walk.params["strides"] or (1,) * len(before))
    pieces = zip(operand.dims, before, starts, after, strides)
    return [[_piece(walk, operand, *of_dim) for of_dim in pieces]]


def split(walk: Walk, operands: list[Value]) -> Results:
    (operand,) = operands
    axis = walk.params["axis"]
    start = 0
    results = []
    total = walk.before[0][axis]
    for size in map(int, walk.params["sizes"]):
        dims = list(operand.dims)
        dims[axis] = _piece(walk, operand, dims[axis], total, start, size, 1)
        start += size
        results.append(dims)
    return results


def stack(walk: Walk, operands: list[Value]) -> Results:
    axis = walk.params["axis"]
    first = operands[0]
    for operand in operands[1:]:
        walk.same(first.dims, operand.dims, operand)
    return [[*first.dims[:axis], new_dim(len(operands)), *first.dims[axis:]]]


def unstack(walk: Walk, operands: list[Value]) -> Results:
    axis = walk.params["axis"]
    operand = operands[0]
    walk.event("whole", [operand.dims[axis]], operand)
    return [[*operand.dims[:axis], *operand.dims[axis + 1 :]] for _ in walk.after]


def concatenate(walk: Walk, operands: list[Value]) -> Results:
    axis = walk.params["dimension"]
    first = operands[0]
    after = walk.after[0]
    is_even = len({shape[axis] for shape in walk.before}) == 1
    alike = [i for i in range(len(after)) if i != axis or is_even]
    for operand in operands[1:]:
        walk.same(
            [first.dims[i] for i in alike], [operand.dims[i] for i in alike], operand
        )
    dims = list(first.dims)
    if is_even:
        pieces = new_dim(len(operands))
        dims[axis] = (*pieces, *first.dims[axis])
        if walk.before[0][axis] > 1:
            walk.pieces.append((pieces, True))
    else:
        dims[axis] = new_dim(after[axis])
    for operand in operands:
        walk.event("reshard", [operand.dims[axis]], operand, unless=[dims[axis]])
    return [dims]


def pad(walk: Walk, operands: list[Value]) -> Results:
    """Padding; also the transpose of a slice, which is one piece among zeros."""
    operand = operands[0]
    dims = []
    before = walk.before[0]
    after = walk.after[0]
    config = [tuple(map(int, entry)) for entry in walk.params["padding_config"]]
    for dim, size, total, (low, high, interior) in zip(
        operand.dims, before, after, config
    ):
        if size == total and (low, high, interior) == (0, 0, 0):
            dims.append(dim)
        elif (
            size > 0
            and total % size == 0
            and total > size
            and interior == 0
            and low >= 0
            and low % size == 0
        ):
            dims.append((*new_dim(total // size), *dim))
        elif size > 0 and total == size * (interior + 1) and low >= 0:
            dims.append((*dim, *new_dim(interior + 1)))
        else:
            dims.append(new_dim(total))
        walk.event("reshard", [dim], operand, unless=[dims[-1]])
    return [walk.result(dims, operands[:1])]


def tile(walk: Walk, operands: list[Value]) -> Results:
    dims = [
        (*new_dim(n), *dim) for n, dim in zip(walk.params["reps"], operands[0].dims)
    ]
    walk.event("merge", operands[0].dims, operands[0], unless=dims)
    return [dims]


def reduce(walk: Walk, operands: list[Value]) -> Results:
    """Reductions (sums, maxima and others), including `psum` over a dim that `vmap`
    named."""
    params = walk.params
    axes = [
        int(x)
        for x in params.get("axes", params.get("dimensions", ()))
        if not isinstance(x, str)
    ]
    results = []
    for number, operand in enumerate(operands[: len(walk.after)]):
        out = walk.result(
            [d for i, d in enumerate(operand.dims) if i not in axes], operands, number
        )
        walk.event("sum", [operand.dims[i] for i in axes], out, arrays=[operand])
        results.append(out)
    return results


def window(walk: Walk, operands: list[Value]) -> Results:
    """Pooling and its gradients, which need the dims that the window moves along
    whole."""
    sizes = walk.params["window_dimensions"]
    first = operands[0]
    kept = [i for i, n in enumerate(sizes) if n == 1]
    for operand in operands:
        if len(operand.dims) == len(sizes):
            # Skips the value that a reduction begins with.
            walk.event(
                "whole", [d for d, n in zip(operand.dims, sizes) if n > 1], operand
            )
            walk.same(
                [first.dims[i] for i in kept], [operand.dims[i] for i in kept], operand
            )
    return [
        [d if n == 1 else new_dim(m) for d, n, m in zip(first.dims, sizes, shape)]
        for shape in walk.after
    ]
