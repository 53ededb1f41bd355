"""Traced programs, and what is put in the place of single operations, however deep they lie."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import AxisType
from jaxtyping import Array

from redco_eqx._program.atoms import type_of
from redco_eqx._program.trace import abstract

Rule: TypeAlias = Callable[[JaxprEqn], Callable[..., Array] | None]
"""What is to be computed in place of an operation, from the same operands; `None` leaves it as it is."""

_REPLACED = "redco_eqx_replaced"  # by this name it is known again, and left as it is


def rewrite(jaxpr: Jaxpr, rule: Rule) -> Jaxpr:
    """`jaxpr` with each operation replaced for which `rule` has something, also inside loops and calls.

    A program, or a part of one, in which nothing is replaced is returned as it is, the same object.
    What a `custom_jvp` or `custom_vjp` that is not differentiated yet would do later is not reached.
    """
    equations = [_rewritten(equation, rule) for equation in jaxpr.eqns]
    changed = any(new is not old for new, old in zip(equations, jaxpr.eqns))
    return jaxpr.replace(eqns=equations) if changed else jaxpr


def _rewritten(equation: JaxprEqn, rule: Rule) -> JaxprEqn:
    if equation.params.get("name") == _REPLACED:
        return equation
    new = rule(equation)
    if new is not None:
        operands = [abstract(type_of(atom)) for atom in equation.invars]

        # Under `jit` the whole replacement is one operation, which takes the place of the old one.
        def replaced(*operands: Array) -> Array:
            return new(*operands)

        replaced.__name__ = _REPLACED
        (call,) = jax.make_jaxpr(jax.jit(replaced))(*operands).jaxpr.eqns
        return call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)
    params = {name: _rewritten_parameter(value, rule) for name, value in equation.params.items()}
    changed = any(params[name] is not value for name, value in equation.params.items())
    return equation.replace(params=params) if changed else equation


def _rewritten_parameter(value: Any, rule: Rule) -> Any:
    if isinstance(value, Jaxpr):  # since JAX 0.11 also a closed one, which keeps its constants
        return rewrite(value, rule)
    if isinstance(value, ClosedJaxpr):
        inner = rewrite(value.jaxpr, rule)
        return value if inner is value.jaxpr else value.replace(jaxpr=inner)
    if isinstance(value, tuple) and any(isinstance(x, ClosedJaxpr) for x in value):
        parts = [_rewritten_parameter(x, rule) for x in value]
        changed = any(new is not old for new, old in zip(parts, value))
        return getattr(type(value), "_make", tuple)(parts) if changed else value  # a linear solve's have names
    return value


def manual_axes(equation: JaxprEqn) -> set[str]:
    """The mesh axes over which a `shard_map` around this operation is manual."""
    around = type_of(equation.invars[0]).sharding.mesh
    return {name for name, kind in zip(around.axis_names, around.axis_types) if kind == AxisType.Manual}
