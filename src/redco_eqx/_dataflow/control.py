"""Calls, loops, branches, solvers: their bodies are walked."""

from jax.extend.core import JaxprEqn

from redco_eqx._dataflow.atoms import new_dim, pin
from redco_eqx._dataflow.programs import body, called, scan_counts
from redco_eqx._dataflow.values import Value
from redco_eqx._dataflow.walk import Walk, result


def call(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    program = called(equation)
    return walk.opaque_results(equation, operands) if program is None else walk.run(program, operands)


def scan(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """What is carried has the same dims before and after; the dim that is scanned over is never split."""
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
    carry = [
        Value(x.dims, x.num_bytes, (), x.is_data or is_data, is_learned)
        for x in operands[num_consts:][:num_carry]
    ]
    slices = [
        Value(x.dims[1:], x.num_bytes // max(length, 1), x.weights, x.is_data, x.is_learned) for x in stacks
    ]
    # Layers have weights of their own; what goes through a sequence by the same ones waits at each step.
    waits = any(x.weights for x in consts) and not any(x.weights for x in stacks)
    walk.hand_on(equation, operands[num_consts:], [*carry, *slices])
    with walk.loop(length, waits):
        results = walk.run(body(equation.params["jaxpr"]), [*consts, *carry, *slices])
        for before, after in zip(carry, results):
            walk.same(before.dims, after.dims, after, equation)
    stacked = [
        result(var.aval, [over, *x.dims], [x])
        for var, x in zip(equation.outvars[num_carry:], results[num_carry:])
    ]
    walk.hand_on(equation, results[num_carry:], stacked)
    return [*carry, *stacked]


def while_(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Of unknown length: what is sent is counted once."""
    params = equation.params
    first, second = params["cond_nconsts"], params["body_nconsts"]
    carry = [Value(x.dims, x.num_bytes, (), True, True) for x in operands[first + second :]]
    walk.hand_on(equation, operands[first + second :], carry)
    walk.run(body(params["cond_jaxpr"]), [*operands[:first], *carry])
    results = walk.run(body(params["body_jaxpr"]), [*operands[first : first + second], *carry])
    for before, after in zip(carry, results):
        walk.same(before.dims, after.dims, after, equation)
    return carry


def cond(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """All branches are walked, and what they send is added."""
    first, *others = (walk.run(body(branch), operands[1:]) for branch in equation.params["branches"])
    for results in others:
        for one, other in zip(first, results):
            walk.same(one.dims, other.dims, other, equation)
    results = [result(var.aval, x.dims, [x, *operands]) for var, x in zip(equation.outvars, first)]
    walk.hand_on(equation, first, results)
    return results


def linear_solve(walk: Walk, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
    """Its solver is run, on its constants and the right-hand sides; a gradient has a solve of its own."""
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    constants = operands[lengths.matvec + lengths.vecmat :][: lengths.solve]
    return walk.run(body(jaxprs.solve), [*constants, *operands[sum(lengths) :]])
