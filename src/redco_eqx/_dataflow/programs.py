"""The one place that knows how JAX 0.10 and 0.11 write programs down: bodies, loops, lines, dead code."""

from collections.abc import Sequence
from typing import TypeAlias

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom: TypeAlias = Var | Literal
"""What an operation reads or writes."""


def type_of(atom: Atom) -> ShapedArray:
    """Shape, dtype and sharding of a variable or literal."""
    return atom.aval  # pyright: ignore[reportReturnType] (declared as any type that JAX has)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal; `()` of what has none, such as a token."""
    return tuple(getattr(atom.aval, "shape", ()))


def body(program: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The operations of a program, with or without constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def called(equation: JaxprEqn) -> Jaxpr | None:
    """What a call (`jit`, `checkpoint`, `custom_jvp_call`, ...) runs, on its operands, for its results."""
    for value in equation.params.values():
        if isinstance(value, Jaxpr | ClosedJaxpr):
            inner = body(value)
            fits = len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(equation.outvars)
            return inner if fits else None
    return None


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Of a scan, the numbers of constants and of carried values. From shapes: 0.11 does not write them down."""
    inner = body(equation.params["jaxpr"])
    pairs = zip(equation.invars, inner.invars)
    num_xs = sum(len(shape_of(outer)) > len(shape_of(one)) for outer, one in pairs)
    pairs = zip(equation.outvars, inner.outvars)
    num_carry = sum(len(shape_of(outer)) == len(shape_of(one)) for outer, one in pairs)
    return len(equation.invars) - num_carry - num_xs, num_carry


def used(program: Jaxpr, results: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Which operations, and which inputs, the wanted `results` of a program depend on."""
    wanted = {var for var, is_wanted in zip(program.outvars, results) if is_wanted and isinstance(var, Var)}
    flags = []
    for equation in reversed(program.eqns):
        outputs = [var in wanted for var in equation.outvars]
        flags.append(any(outputs))
        if not flags[-1]:
            continue
        inner = called(equation) if equation.primitive.name != "scan" else None
        operands = [True] * len(equation.invars) if inner is None else used(inner, outputs)[1]
        wanted.update(v for v, is_used in zip(equation.invars, operands) if is_used and isinstance(v, Var))
    return flags[::-1], [var in wanted for var in program.invars]
