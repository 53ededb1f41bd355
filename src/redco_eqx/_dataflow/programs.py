"""The one place that knows how JAX 0.10 and 0.11 write programs down: bodies, loops, lines, dead code."""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jex_core


def is_program(x: Any) -> bool:
    return isinstance(x, jex_core.Jaxpr | jex_core.ClosedJaxpr)


def body(program: Any) -> Any:
    """The operations of a program, with or without constants."""
    return getattr(program, "jaxpr", program)


def called(equation: Any) -> Any | None:
    """What a call (`jit`, `checkpoint`, `custom_jvp_call`, ...) runs, on its operands, for its results."""
    for value in equation.params.values():
        if is_program(value):
            inner = body(value)
            fits = len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(equation.outvars)
            return inner if fits else None
    return None


def scan_counts(equation: Any) -> tuple[int, int]:
    """Of a scan, the numbers of constants and of carried values. From shapes: 0.11 does not write them down."""
    inner = body(equation.params["jaxpr"])
    pairs = zip(equation.invars, inner.invars)
    num_xs = sum(len(outer.aval.shape) > len(one.aval.shape) for outer, one in pairs)
    pairs = zip(equation.outvars, inner.outvars)
    num_carry = sum(len(outer.aval.shape) == len(one.aval.shape) for outer, one in pairs)
    return len(equation.invars) - num_carry - num_xs, num_carry


def used(program: Any, results: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Which operations, and which inputs, the wanted `results` of a program depend on."""
    wanted = {var for var, is_wanted in zip(program.outvars, results) if is_wanted and _is_variable(var)}
    flags = []
    for equation in reversed(program.eqns):
        outputs = [var in wanted for var in equation.outvars]
        flags.append(any(outputs))
        if not flags[-1]:
            continue
        inner = called(equation) if equation.primitive.name != "scan" else None
        operands = [True] * len(equation.invars) if inner is None else used(inner, outputs)[1]
        wanted.update(v for v, is_used in zip(equation.invars, operands) if is_used and _is_variable(v))
    return flags[::-1], [var in wanted for var in program.invars]


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, jex_core.Literal)
