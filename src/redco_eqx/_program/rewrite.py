"""Traced programs, and what is put in the place of single operations, however deep they lie."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.extend.core as jex_core
from jax.sharding import AxisType
from jaxtyping import Array

from redco_eqx._program.trace import abstract

Rule: TypeAlias = Callable[[jex_core.JaxprEqn], Callable[..., Array] | None]
"""What is to be computed in place of an operation, from the same operands; `None` leaves it as it is."""


_REPLACED = "redco_eqx_replaced"  # by this name it is known again, and left as it is


def rewrite(jaxpr: Any, rule: Rule) -> Any:
    """`jaxpr` with each operation replaced for which `rule` has something, also inside loops and calls.

    A program, or a part of one, in which nothing is replaced is returned as it is, the same object.
    What a `custom_jvp` or `custom_vjp` that is not differentiated yet would do later is not reached.
    """
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        inner = rewrite(jaxpr.jaxpr, rule)
        return jaxpr if inner is jaxpr.jaxpr else jaxpr.replace(jaxpr=inner)
    equations = [_rewritten(equation, rule) for equation in jaxpr.eqns]
    changed = any(new is not old for new, old in zip(equations, jaxpr.eqns))
    return jaxpr.replace(eqns=equations) if changed else jaxpr


def _rewritten(equation: jex_core.JaxprEqn, rule: Rule) -> jex_core.JaxprEqn:
    if equation.params.get("name") == _REPLACED:
        return equation
    new = rule(equation)
    if new is not None:
        operands = [abstract(atom.aval) for atom in equation.invars]

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
    if isinstance(value, jex_core.Jaxpr | jex_core.ClosedJaxpr):
        return rewrite(value, rule)
    if isinstance(value, tuple) and any(isinstance(x, jex_core.ClosedJaxpr) for x in value):
        branches = tuple(_rewritten_parameter(x, rule) for x in value)
        return branches if any(new is not old for new, old in zip(branches, value)) else value
    return value


def manual_axes(equation: jex_core.JaxprEqn) -> set[str]:
    """The mesh axes over which a `shard_map` around this operation is manual."""
    around: Any = getattr(equation.invars[0].aval, "sharding").mesh  # noqa: B009 (not declared by its class)
    return {name for name, kind in zip(around.axis_names, around.axis_types) if kind == AxisType.Manual}
