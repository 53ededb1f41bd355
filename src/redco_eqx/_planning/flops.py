"""How many floating-point operations a traced program takes."""

import math

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from redco_eqx._dataflow.programs import body, shape_of


def num_flops(program: Jaxpr) -> float:
    """Those of all products of matrices and convolutions: two for each pair of numbers that is multiplied.

    A scan counts as often as it runs, a `while` once, of a conditional the branch with the most. Elementwise
    work, solvers and kernels are not counted.
    """
    return sum((_of(equation) for equation in program.eqns), 0.0)


def _of(equation: JaxprEqn) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "cond":
        return max(num_flops(body(branch)) for branch in params["branches"])
    inside = sum((num_flops(body(x)) for x in params.values() if isinstance(x, Jaxpr | ClosedJaxpr)), 0.0)
    if name == "scan":
        return inside * params["length"]
    depth = _DEPTHS.get(name)
    if depth is None:
        return inside
    return 2.0 * math.prod(shape_of(equation.outvars[0])) * depth(equation)


def _of_dot(equation: JaxprEqn) -> float:
    (lhs, _), _ = equation.params["dimension_numbers"]
    return float(math.prod(shape_of(equation.invars[0])[dim] for dim in lhs))


def _of_ragged_dot(equation: JaxprEqn) -> float:
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    depth = float(math.prod(shape_of(equation.invars[0])[dim] for dim in contracted))
    # What is summed within each group has the groups as the first dim of the result.
    is_by_group = set(numbers.lhs_ragged_dimensions) & set(contracted)
    return depth / shape_of(equation.outvars[0])[0] if is_by_group else depth


def _of_convolution(equation: JaxprEqn) -> float:
    kernel = shape_of(equation.invars[1])
    return math.prod(kernel) / kernel[equation.params["dimension_numbers"].rhs_spec[0]]


_DEPTHS = {
    "dot_general": _of_dot,
    "ragged_dot_general": _of_ragged_dot,
    "conv_general_dilated": _of_convolution,
}
"""How many products each number of the result is the sum of."""
