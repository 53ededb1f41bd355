"""The one reader of traced programs: their values, the bodies of calls and loops, kinds of operations.

Knows how JAX 0.10 to 0.12 write programs down.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

# Kinds of operations.

CHECKPOINTS = ("checkpoint", "remat", "remat2")
"""The names that JAX has had for `jax.checkpoint`."""

CALLS = (*CHECKPOINTS, "jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call")
"""Operations that run a body once, on their operands, for their results."""

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
"""Products of matrices, and convolutions."""

# Each element of the result depends on the elements of the operands at its own place alone.
_ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type
    cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq
    erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt
    max min mul ne neg nextafter not optimization_barrier or population_count pow real reduce_precision rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square
    stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())

# Shapes would fit, but every number may depend on every other.
NOT_ELEMENTWISE = frozenset(
    [
        "custom_call",
        "custom_partitioning",
        "debug_callback",
        "ffi_call",
        "io_callback",
        "mosaic_gpu",
        "pallas_call",
        "pure_callback",
        "shard_map",
        "tpu_custom_call",
    ]
)


# Values.

Atom: TypeAlias = Var | Literal
"""What an operation reads or writes."""


def type_of(atom: Atom) -> ShapedArray:
    """Shape, dtype and sharding of a variable or literal."""
    return atom.aval  # pyright: ignore[reportReturnType] (declared as any type that JAX has)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal; `()` of what has none, such as a token."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Atom) -> Any:
    """The dtype of a variable or literal: one of NumPy, or that of PRNG keys."""
    return type_of(atom).dtype


def num_bytes(aval: Any) -> int:
    """Bytes of an array of this type; 0 of what has no dtype, such as a token."""
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 4)


# Bodies.


def body(program: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The operations of a program, with or without constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def called(equation: JaxprEqn) -> Jaxpr | None:
    """Return the body of a call (`jit`, `checkpoint`, `custom_jvp_call`, ...), or None of what is no call."""
    for value in equation.params.values():
        if isinstance(value, Jaxpr | ClosedJaxpr):
            inner = body(value)
            fits = len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(equation.outvars)
            return inner if fits else None
    return None


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Count the constants and the carried values of a scan. From shapes: 0.11 does not write them down."""
    inner = body(equation.params["jaxpr"])
    pairs = zip(equation.invars, inner.invars)
    num_xs = sum(len(shape_of(outer)) > len(shape_of(one)) for outer, one in pairs)
    pairs = zip(equation.outvars, inner.outvars)
    num_carry = sum(len(shape_of(outer)) == len(shape_of(one)) for outer, one in pairs)
    return len(equation.invars) - num_carry - num_xs, num_carry


def used(program: Jaxpr, results: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Mark the operations, and the inputs, that the wanted `results` of a program depend on."""
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


def source_line(equation: JaxprEqn) -> str:
    """`file.py:12 (function)`: where the user's code asked for an operation."""
    traceback = getattr(equation.source_info, "traceback", None)
    own = ("/jax/", "/jaxlib/", "/equinox/", "/redco_eqx/")
    for frame in traceback.frames if traceback else ():
        if not any(part in frame.file_name.replace("\\", "/") for part in own):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "an operation of unknown origin"
