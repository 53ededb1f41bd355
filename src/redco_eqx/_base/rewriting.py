"""Rewriting of traced programs: operations are replaced, and others are put between
them.

A program is read once, from its first operation to its last, and written anew. If
nothing changes, the same object is returned, so that a caller can tell.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]
from jaxtyping import Array

from redco_eqx._base.jaxprs import Operand, abstract, body, type_of

# The programs in the parameters of an operation: the body of a loop, the branches of a
# conditional.


def _is_program(x: Any) -> bool:
    return isinstance(x, Jaxpr | ClosedJaxpr)


def in_body(program: Any, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """Change the operations of a program, with or without constants."""
    inner = change(body(program))
    if inner is body(program):
        return program
    # Since JAX 0.11, a `Jaxpr` may also be closed, and keeps its constants.
    return program.replace(jaxpr=inner) if isinstance(program, ClosedJaxpr) else inner


def in_bodies(equation: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """Change each program in the parameters of an operation, in their order."""

    def changed(x: Any) -> Any:
        return in_body(x, change) if _is_program(x) else x

    params = {}
    for name, value in equation.params.items():
        # A conditional and a linear solve have their programs in a tuple.
        old, structure = jax.tree.flatten(value, is_leaf=_is_program)
        new = [changed(x) for x in old]
        if any(x is not y for x, y in zip(new, old)):
            params[name] = jax.tree.unflatten(structure, new)
    return equation.replace(params=equation.params | params) if params else equation


# A program that is written anew.


class Rewriter:
    """The new version of a program, as far as it is written."""

    def __init__(self, old: Jaxpr):
        self._old = old
        self._equations: list[JaxprEqn] = []
        self._operands: dict[Var, Operand] = {}

    def read(self, atom: Operand) -> Operand:
        """Return the operand that now stands for an operand of the old program."""
        return atom if isinstance(atom, Literal) else self._operands.get(atom, atom)

    def replace(self, var: Var, operand: Operand) -> None:
        """Let `operand` stand for a variable of the old program from here on."""
        self._operands[var] = operand

    def write(self, equation: JaxprEqn, operands: Sequence[Operand]) -> None:
        """Write an operation with these operands."""
        if any(new is not old for new, old in zip(operands, equation.invars)):
            equation = equation.replace(invars=list(operands))
        self._equations.append(equation)

    def apply(self, function: Callable[[Array], Array], operand: Operand) -> Operand:
        """Write the one operation that `function` consists of, and return its
        result."""
        one = traced(function, operand)
        (equation,) = one.eqns
        self.write(equation, [operand])
        return one.outvars[0]

    def program(self, results: Sequence[Operand]) -> Jaxpr:
        """Return the new program with these results."""
        old = self._old
        is_same = (
            len(self._equations) == len(old.eqns)
            and all(new is x for new, x in zip(self._equations, old.eqns))
            and all(new is x for new, x in zip(results, old.outvars))
        )
        if is_same:
            return old
        return old.replace(eqns=self._equations, outvars=list(results))


def traced(function: Callable[[Array], Array], operand: Operand) -> Jaxpr:
    """Trace a function of one array of the type of `operand`. The program has new
    variables each time."""
    return jax.make_jaxpr(function)(abstract(type_of(operand))).jaxpr


# Replacing operations one by one.


Replacement: TypeAlias = Callable[[JaxprEqn], Callable[..., Array] | None]
"""Returns the function that replaces an operation, with the same operands, or `None` to
keep the operation."""

# Marks a replacement, so that it is not replaced again.
_REPLACED = "redco_eqx_replaced"


def replace_operations(jaxpr: Jaxpr, rule: Replacement) -> Jaxpr:
    """Replace each operation of `jaxpr` for which `rule` gives a function, also inside
    loops and calls.

    Replacements do not reach the derivative of a `custom_jvp` or `custom_vjp` that is
    not yet differentiated.
    """
    new = Rewriter(jaxpr)
    for equation in jaxpr.eqns:
        new.write(_replaced(equation, rule), equation.invars)
    return new.program(jaxpr.outvars)


def _replaced(equation: JaxprEqn, rule: Replacement) -> JaxprEqn:
    if equation.params.get("name") == _REPLACED:
        return equation
    function = rule(equation)
    if function is None:
        return in_bodies(equation, lambda inner: replace_operations(inner, rule))

    # Under `jit`, the whole replacement is a single operation.
    def replacement(*operands: Array) -> Array:
        return function(*operands)

    replacement.__name__ = _REPLACED
    operands = [abstract(type_of(atom)) for atom in equation.invars]
    (call,) = jax.make_jaxpr(jax.jit(replacement))(*operands).jaxpr.eqns
    return call.replace(
        invars=equation.invars,
        outvars=equation.outvars,
        source_info=equation.source_info,
    )
