"""The table of rules, by kind of operation; and the rules of products, calls, loops and
branches."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax.extend.core import JaxprEqn

from redco_eqx._base.jaxprs import NOT_ELEMENTWISE, body, called, scan_counts
from redco_eqx._dataflow import shapes
from redco_eqx._dataflow.values import EXPERTS, Dim, Value, new_dim, new_dims, pin
from redco_eqx._dataflow.walk import Results, Rule, Walk

# Products: `dot_general`, `conv_general_dilated`, `ragged_dot_general`.


Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Dims of the first operand, and the dims of the second that go with them."""


def dot_general(walk: Walk, operands: list[Value]) -> Results:
    return [_product(walk, operands, walk.params["dimension_numbers"])]


def ragged_dot(walk: Walk, operands: list[Value]) -> Results:
    """Multiply rows by the matrix of their group, `sizes` of them in each; the gradient
    sums rows by group.

    Compilers without a kernel for it multiply by the matrices of all groups, mask, and
    sum over the groups.
    """
    lhs, rhs, sizes = operands[:3]
    numbers = walk.params["ragged_dot_dimension_numbers"]
    pairs, groups = jax.tree.map(
        int, (numbers.dot_dimension_numbers, numbers.rhs_group_dimensions)
    )
    (sums, _), (batch, _) = pairs
    walk.same([lhs.dims[i] for i in batch], sizes.dims[:-1], sizes)
    walk.same([rhs.dims[i] for i in groups], sizes.dims[-1:], sizes)
    by_group = sizes.dims[-1:] if numbers.lhs_ragged_dimensions[0] in sums else ()
    out = _product(walk, [lhs, rhs], pairs, groups=groups, by_group=by_group)
    walk.event("sum", [rhs.dims[i] for i in groups], out, arrays=[rhs])
    return [out]


def _product(
    walk: Walk,
    operands: list[Value],
    numbers: tuple[Pair, Pair],
    *,
    groups: Sequence[int] = (),
    by_group: Sequence[Dim] = (),
) -> Value:
    """A product; `numbers` are the dims that are summed over and those that are shared.

    - `groups`: dims of the second operand in which each row takes one entry.
    - `by_group`: leading dims of the result that neither operand has.
    """
    lhs, rhs = operands
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = numbers
    for i, j in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch)):
        walk.same([lhs.dims[i]], [rhs.dims[j]], rhs)
    lhs_free = [
        dim for i, dim in enumerate(lhs.dims) if i not in (*lhs_sum, *lhs_batch)
    ]
    rhs_free = [
        dim
        for i, dim in enumerate(rhs.dims)
        if i not in (*rhs_sum, *rhs_batch, *groups)
    ]
    shared = [lhs.dims[i] for i in lhs_batch]
    out = walk.result([*by_group, *shared, *lhs_free, *rhs_free], operands)
    walk.event(
        "sum",
        [lhs.dims[i] for i in lhs_sum],
        out,
        arrays=operands,
        along=(lhs_sum, rhs_sum),
    )
    summed = math.prod(walk.before[0][i] for i in lhs_sum)
    experts = (*rhs_batch, *groups)
    for weight, data, sums, batch in (
        (lhs, rhs, lhs_sum, lhs_batch),
        (rhs, lhs, rhs_sum, experts),
    ):
        roles = [
            "row" if i in sums else "expert" if i in batch else "column"
            for i in range(len(weight.dims))
        ]
        walk.use(weight, data, roles, out, summed)
    return out


def convolution(walk: Walk, operands: list[Value]) -> Results:
    """A convolution. Channels are treated like the features of a product. The window
    cannot be split."""
    lhs, rhs = operands
    params = walk.params
    numbers = params["dimension_numbers"]
    batch, channels, *spatial = numbers.lhs_spec
    outputs, inputs, *window = numbers.rhs_spec
    dims: list[Dim] = list(new_dims(walk.after[0]))
    dims[numbers.out_spec[1]] = rhs.dims[outputs]
    counts = params["feature_group_count"], params["batch_group_count"]
    sums = rhs.dims[inputs]
    of_channels, of_batch = map(new_dim, counts)  # there is at most one kind of groups
    each = new_dim(walk.before[1][outputs] // math.prod(counts))
    walk.same([(*of_channels, *sums)], [lhs.dims[channels]], lhs)
    walk.same([(*of_batch, *dims[numbers.out_spec[0]])], [lhs.dims[batch]], lhs)
    walk.same([(*of_channels, *of_batch, *each)], [rhs.dims[outputs]], rhs)
    out = walk.result(dims, operands)
    walk.event("sum", [sums], out, arrays=operands, along=([channels], [inputs]))
    walk.event("whole", [lhs.dims[i] for i in spatial], lhs)
    for i in window:
        if rhs.weights:
            pin(rhs.dims[i], "a convolution's window")
    depth = math.prod(walk.before[1]) // max(walk.before[1][outputs], 1)
    roles = [
        "column" if i == outputs else "row" if i == inputs else ""
        for i in range(len(rhs.dims))
    ]
    walk.use(rhs, lhs, roles, out, depth)
    return [out]


# Calls, loops, branches, solvers: the walk enters their bodies.


def call(walk: Walk, operands: list[Value]) -> Results:
    program = called(walk.equation)
    return (
        walk.opaque_dims(operands) if program is None else walk.run(program, operands)
    )


def scan(walk: Walk, operands: list[Value]) -> Results:
    """A carried value has the same dims before and after; the dim that is scanned over
    is never split."""
    num_consts, num_carry = scan_counts(walk.equation)
    length = walk.params["length"]
    consts = operands[:num_consts]
    stacks = operands[num_consts + num_carry :]
    over = new_dim(length)
    pin(over, "scanned over")
    for stack in stacks:
        walk.same([over], [stack.dims[0]], stack)
        walk.event("whole", [stack.dims[0]], stack)
    is_data = any(x.is_data for x in operands)
    is_learned = any(x.is_learned for x in operands)
    before = operands[num_consts:][:num_carry]
    carry = [Value(x.dims, x.num_bytes, (), is_data, is_learned) for x in before]
    slices = [
        Value(
            x.dims[1:],
            x.num_bytes // max(length, 1),
            x.weights,
            x.is_data,
            x.is_learned,
        )
        for x in stacks
    ]
    walk.hand_on(before, carry)
    walk.hand_on(stacks, slices, (1, length))
    outside = walk.times
    walk.times *= length
    walk.num_loops += 1
    results = walk.run(body(walk.params["jaxpr"]), [*consts, *carry, *slices])
    walk.num_loops -= 1
    walk.carry(carry, results)
    walk.times = outside
    made = results[num_carry:]
    stacked = [
        walk.result([over, *x.dims], [x], num_carry + i) for i, x in enumerate(made)
    ]
    walk.hand_on(made, stacked, (length, 1))
    return [*carry, *stacked]


def while_(walk: Walk, operands: list[Value]) -> Results:
    """A loop of unknown length: the bytes that it sends count once."""
    params = walk.params
    first = params["cond_nconsts"]
    second = params["body_nconsts"]
    carry = [
        Value(x.dims, x.num_bytes, (), True, True) for x in operands[first + second :]
    ]
    walk.hand_on(operands[first + second :], carry)
    walk.num_loops += 1
    walk.run(body(params["cond_jaxpr"]), [*operands[:first], *carry])
    results = walk.run(
        body(params["body_jaxpr"]), [*operands[first : first + second], *carry]
    )
    walk.num_loops -= 1
    walk.carry(carry, results)
    return carry


def cond(walk: Walk, operands: list[Value]) -> Results:
    """Walk all branches, and count their mean; for branches by platform, count only the
    default."""
    branches = walk.params["branches"]
    platforms = walk.params.get("branches_platforms")
    if platforms:
        branches = [
            x for x, names in zip(branches, platforms) if names is None
        ] or branches[:1]
    if walk.block == EXPERTS:
        for weight in (x for x in operands if x.weights):
            pin(weight.dims[0], "the experts, each of which is split inside")
    outside = walk.times
    walk.times /= len(branches)
    first, *others = [walk.run(body(branch), operands[1:]) for branch in branches]
    walk.times = outside
    for results in others:
        for one, other in zip(first, results):
            walk.same(one.dims, other.dims, other)
    results = [walk.result(x.dims, [x, *operands], i) for i, x in enumerate(first)]
    walk.hand_on(first, results)
    return results


def linear_solve(walk: Walk, operands: list[Value]) -> Results:
    """Walk the solver, with its constants and the right-hand sides; a gradient is a
    separate solve."""
    lengths = walk.params["const_lengths"]
    jaxprs = walk.params["jaxprs"]
    constants = operands[lengths.matvec + lengths.vecmat :][: lengths.solve]
    return walk.run(body(jaxprs.solve), [*constants, *operands[sum(lengths) :]])


# The table: the rule for each kind of operation.


# Names are those of operations, with `_` for `-`: `scatter-add` has a hyphen in some
# versions of JAX.
_NAMES: dict[Rule, str] = {
    dot_general: "dot_general",
    ragged_dot: "ragged_dot_general",
    convolution: "conv_general_dilated",
    scan: "scan",
    while_: "while",
    cond: "cond",
    linear_solve: "custom_linear_solve",
    shapes.add: "add add_any convert_element_type",
    shapes.copy: "copy optimization_barrier",
    shapes.unrelated: """
        iota random_bits random_seed random_wrap random_unwrap random_split
        random_fold_in random_gamma rng_bit_generator threefry2x32
    """,
    shapes.along_one_dim: "cumsum cumprod cummax cummin cumlogsumexp sort rev",
    shapes.last_dims(1): "top_k tridiagonal_solve lu_pivots_to_permutation",
    shapes.last_dims(2): """
        cholesky triangular_solve lu eigh eig svd qr geqrf householder_product schur
        hessenberg
    """,
    shapes.fft: "fft",
    shapes.dynamic_slice: "dynamic_slice",
    shapes.dynamic_update_slice: "dynamic_update_slice",
    shapes.gather: "gather",
    shapes.scatter: "scatter scatter_add scatter_mul scatter_min scatter_max",
    shapes.transpose: "transpose",
    shapes.reshape: "reshape squeeze",
    shapes.broadcast_in_dim: "broadcast_in_dim",
    shapes.slice_: "slice",
    shapes.split: "split",
    shapes.stack: "stack",
    shapes.unstack: "unstack",
    shapes.concatenate: "concatenate",
    shapes.pad: "pad",
    shapes.tile: "tile",
    shapes.reduce: """
        reduce_sum reduce_max reduce_min reduce_prod reduce reduce_and reduce_or
        reduce_xor argmax argmin psum pmax pmin
    """,
    shapes.window: """
        reduce_window reduce_window_sum reduce_window_max reduce_window_min
        select_and_gather_add select_and_scatter_add
    """,
}
RULES = {name: rule for rule, names in _NAMES.items() for name in names.split()}


def rule_of(equation: JaxprEqn) -> Rule:
    """The rule of an operation. A call is entered; for an unlisted operation the shapes
    decide."""
    name = equation.primitive.name
    is_call = name not in NOT_ELEMENTWISE and called(equation) is not None
    return RULES.get(name.replace("-", "_")) or (call if is_call else shapes.unlisted)
