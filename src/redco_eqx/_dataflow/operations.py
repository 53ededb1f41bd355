"""The table of rules, by kind of operation; and the rules of products, calls, loops and branches."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
from jax.extend.core import JaxprEqn

from redco_eqx._base.jaxprs import NOT_ELEMENTWISE, body, called, scan_counts, shape_of, type_of
from redco_eqx._dataflow import shapes
from redco_eqx._dataflow.values import Dim, Value, new_dim, new_dims, pin, unify
from redco_eqx._dataflow.walk import Rule, Walk, result

# Products: `dot_general`, `conv_general_dilated`, `ragged_dot_general`.


Pair: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Dims of the first operand, and the dims of the second that go with them."""


def dot_general(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    return [_product(walk, equation, operands, equation.params["dimension_numbers"])]


def ragged_dot(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Multiplies rows by the matrix of their group, `sizes` of them in each; the gradient sums rows by group.

    Compilers without a kernel for it multiply by the matrices of all groups, mask, and sum over the groups.
    """
    lhs, rhs, sizes = operands[:3]
    numbers = equation.params["ragged_dot_dimension_numbers"]
    pairs, groups = jax.tree.map(int, (numbers.dot_dimension_numbers, numbers.rhs_group_dimensions))
    (sums, _), (batch, _) = pairs
    walk.same([lhs.dims[i] for i in batch], sizes.dims[:-1], sizes, equation)
    walk.same([rhs.dims[i] for i in groups], sizes.dims[-1:], sizes, equation)
    by_group = sizes.dims[-1:] if numbers.lhs_ragged_dimensions[0] in sums else ()
    out = _product(walk, equation, [lhs, rhs], pairs, groups=groups, by_group=by_group)
    walk.event("sum", [rhs.dims[i] for i in groups], out, equation, arrays=[rhs])
    return [out]


def _product(
    walk: Walk,
    equation: JaxprEqn,
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
    aval = type_of(equation.outvars[0])
    for i, j in zip((*lhs_sum, *lhs_batch), (*rhs_sum, *rhs_batch)):
        walk.same([lhs.dims[i]], [rhs.dims[j]], rhs, equation)
    lhs_free = [dim for i, dim in enumerate(lhs.dims) if i not in (*lhs_sum, *lhs_batch)]
    rhs_free = [dim for i, dim in enumerate(rhs.dims) if i not in (*rhs_sum, *rhs_batch, *groups)]
    shared = [lhs.dims[i] for i in lhs_batch]
    out = result(aval, [*by_group, *shared, *lhs_free, *rhs_free], operands)
    walk.event("sum", [lhs.dims[i] for i in lhs_sum], out, equation, arrays=operands, along=(lhs_sum, rhs_sum))
    summed = math.prod(shape_of(equation.invars[0])[i] for i in lhs_sum)
    experts = (*rhs_batch, *groups)
    for weight, data, sums, batch in ((lhs, rhs, lhs_sum, lhs_batch), (rhs, lhs, rhs_sum, experts)):
        roles = ["row" if i in sums else "expert" if i in batch else "column" for i in range(len(weight.dims))]
        walk.use(weight, data, roles, out, summed)
    return out


def convolution(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """A convolution. Channels are like a product's features; a split along the window is not understood."""
    lhs, rhs = operands
    params, aval = equation.params, type_of(equation.outvars[0])
    numbers = params["dimension_numbers"]
    batch, channels, *spatial = numbers.lhs_spec
    outputs, inputs, *window = numbers.rhs_spec
    dims: list[Dim] = list(new_dims(aval.shape))
    dims[numbers.out_spec[1]] = rhs.dims[outputs]
    sums = lhs.dims[channels]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    if batch_groups > 1:
        group = new_dim(batch_groups)
        walk.same([(*group, *dims[numbers.out_spec[0]])], [lhs.dims[batch]], lhs, equation)
        _lead(walk, equation, group, rhs, outputs, batch_groups)
    else:
        dims[numbers.out_spec[0]] = lhs.dims[batch]
    if groups > 1:
        group, sums = new_dim(groups), rhs.dims[inputs]
        walk.same([(*group, *sums)], [lhs.dims[channels]], lhs, equation)
        _lead(walk, equation, group, rhs, outputs, groups)
    else:
        walk.same([sums], [rhs.dims[inputs]], rhs, equation)
    out = result(aval, dims, operands)
    walk.event("sum", [sums], out, equation, arrays=operands, along=([channels], [inputs]))
    walk.event("whole", [lhs.dims[i] for i in spatial], lhs, equation)
    for i in window:
        if rhs.weights:
            pin(rhs.dims[i], "a convolution's window")
    each = math.prod(shape_of(equation.invars[1])) // max(shape_of(equation.invars[1])[outputs], 1)
    roles = ["column" if i == outputs else "row" if i == inputs else "" for i in range(len(rhs.dims))]
    walk.use(rhs, lhs, roles, out, each)
    return [out]


def _lead(walk: Walk, equation: JaxprEqn, group: Dim, rhs: Value, outputs: int, count: int) -> None:
    """Makes `group` the leading factor of the outputs of a kernel, which are `count` groups in a row."""
    each = shape_of(equation.invars[1])[outputs] // count
    if not unify(rhs.dims[outputs], (*group, *new_dim(each))):
        walk.event("reshard", [rhs.dims[outputs]], rhs, equation)


# Calls, loops, branches, solvers: the walk enters their bodies.


def call(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    program = called(equation)
    return walk.opaque_results(equation, operands) if program is None else walk.run(program, operands)


def scan(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """A carried value has the same dims before and after; the dim that is scanned over is never split."""
    num_consts, num_carry = scan_counts(equation)
    length = equation.params["length"]
    consts, stacks = operands[:num_consts], operands[num_consts + num_carry :]
    over = new_dim(length)
    pin(over, "scanned over")
    for stack in stacks:
        walk.same([over], [stack.dims[0]], stack, equation)
        walk.event("whole", [stack.dims[0]], stack, equation)
    is_data = any(x.is_data for x in operands)
    is_learned = any(x.is_learned for x in operands)
    before = operands[num_consts:][:num_carry]
    carry = [Value(x.dims, x.num_bytes, (), is_data, is_learned) for x in before]
    slices = [
        Value(x.dims[1:], x.num_bytes // max(length, 1), x.weights, x.is_data, x.is_learned) for x in stacks
    ]
    # Layers have different weights; a loop that goes through a sequence with the same weights waits at each
    # step.
    waits = any(x.weights for x in consts) and not any(x.weights for x in stacks)
    walk.hand_on(equation, before, carry)
    walk.hand_on(equation, stacks, slices, (1, length))
    with walk.loop(length, waits):
        results = walk.run(body(equation.params["jaxpr"]), [*consts, *carry, *slices])
        walk.carry(carry, results, equation)
    stacked = [
        result(var.aval, [over, *x.dims], [x])
        for var, x in zip(equation.outvars[num_carry:], results[num_carry:])
    ]
    walk.hand_on(equation, results[num_carry:], stacked, (length, 1))
    return [*carry, *stacked]


def while_(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """A loop of unknown length: the bytes that it sends count once."""
    params = equation.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = [Value(x.dims, x.num_bytes, (), True, True) for x in operands[first + second :]]
    walk.hand_on(equation, operands[first + second :], carry)
    walk.run(body(params["cond_jaxpr"]), [*operands[:first], *carry])
    results = walk.run(body(params["body_jaxpr"]), [*operands[first : first + second], *carry])
    walk.carry(carry, results, equation)
    return carry


def cond(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Walks all branches, and adds up the bytes that they send."""
    first, *others = (walk.run(body(branch), operands[1:]) for branch in equation.params["branches"])
    for results in others:
        for one, other in zip(first, results):
            walk.same(one.dims, other.dims, other, equation)
    results = [result(var.aval, x.dims, [x, *operands]) for var, x in zip(equation.outvars, first)]
    walk.hand_on(equation, first, results)
    return results


def linear_solve(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Walks the solver, with its constants and the right-hand sides; a gradient is a separate solve."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    constants = operands[lengths.matvec + lengths.vecmat :][: lengths.solve]
    return walk.run(body(jaxprs.solve), [*constants, *operands[sum(lengths) :]])


# The table: the rule for each kind of operation.


RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot,
    "conv_general_dilated": convolution,
    "transpose": shapes.transpose,
    "reshape": shapes.reshape,
    "squeeze": shapes.reshape,
    "broadcast_in_dim": shapes.broadcast_in_dim,
    "slice": shapes.slice_,
    "split": shapes.split,
    "stack": shapes.stack,
    "unstack": shapes.unstack,
    "concatenate": shapes.concatenate,
    "pad": shapes.pad,
    "tile": shapes.tile,
    "dynamic_slice": shapes.dynamic_slice,
    "dynamic_update_slice": shapes.dynamic_update_slice,
    "gather": shapes.gather,
    "scan": scan,
    "while": while_,
    "cond": cond,
    "custom_linear_solve": linear_solve,
    "add": shapes.add,
    "add_any": shapes.add,
    "convert_element_type": shapes.add,
    "copy": shapes.copy,
    "fft": shapes.fft,
    "optimization_barrier": shapes.copy,
    "top_k": shapes.last_dims(1),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_mul", "scatter_min", "scatter_max"), shapes.scatter),
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce"), shapes.reduce),
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"), shapes.reduce),
    **dict.fromkeys(("psum", "pmax", "pmin"), shapes.reduce),
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max"), shapes.window),
    **dict.fromkeys(("reduce_window_min", "select_and_gather_add", "select_and_scatter_add"), shapes.window),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), shapes.along_one_dim),
    **dict.fromkeys(("sort", "rev"), shapes.along_one_dim),
    **dict.fromkeys(("cholesky", "triangular_solve", "lu", "eigh", "eig", "svd"), shapes.last_dims(2)),
    **dict.fromkeys(("qr", "geqrf", "householder_product", "schur", "hessenberg"), shapes.last_dims(2)),
    **dict.fromkeys(("tridiagonal_solve", "lu_pivots_to_permutation"), shapes.last_dims(1)),
    **dict.fromkeys(("iota", "random_bits", "random_seed", "random_wrap"), shapes.unrelated),
    **dict.fromkeys(("random_unwrap", "random_split", "random_fold_in"), shapes.unrelated),
    **dict.fromkeys(("random_gamma", "rng_bit_generator", "threefry2x32"), shapes.unrelated),
}


def rule_of(equation: JaxprEqn) -> Rule:
    """The rule of an operation. A call is entered; for an unlisted operation the shapes decide."""
    name = equation.primitive.name
    rule = RULES.get(name.replace("-", "_"))  # `scatter-add` has a hyphen in some versions of JAX
    if rule is not None:
        return rule
    is_call = name not in NOT_ELEMENTWISE and called(equation) is not None
    return call if is_call else shapes.unlisted
