"""The reader of traced programs, and functions that run and compare them."""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
    jaxprs_in_params,
)  # pyright: ignore[reportPrivateImportUsage]
from jaxtyping import PyTree

from redco_eqx._base.tree import is_key

# Kinds of operations.

JAX_CHECKPOINTS = ("checkpoint", "remat", "remat2")
"""The names that versions of JAX give to `jax.checkpoint`."""

CALLS = (
    *JAX_CHECKPOINTS,
    "jit",
    "pjit",
    "custom_jvp_call",
    "custom_vjp_call",
    "closed_call",
)
"""Operations that run a body once. The body takes their operands and returns their
results."""

# Each element of the result depends only on the elements of the operands at the same
# place.
_ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy
    copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag
    integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not optimization_barrier or population_count pow real reduce_precision rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
    sqrt square stop_gradient sub tan tanh xor
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())

# These may have the shapes of an elementwise operation, but every number may depend on
# every other.
_NOT_ELEMENTWISE = """
    custom_call custom_partitioning debug_callback ffi_call io_callback mosaic_gpu
    pallas_call pure_callback shard_map tpu_custom_call
"""
NOT_ELEMENTWISE = frozenset(_NOT_ELEMENTWISE.split())


# Values.

Operand: TypeAlias = Var | Literal
"""A variable or literal that an operation reads or writes."""


def type_of(atom: Operand) -> ShapedArray:
    """Shape, dtype and sharding of a variable or literal."""
    return atom.aval  # pyright: ignore[reportReturnType] (declared as any type that JAX has)


def shape_of(atom: Operand) -> tuple[int, ...]:
    """The shape of a variable or literal; `()` for a value without a shape, such as a
    token."""
    return tuple(getattr(atom.aval, "shape", ()))


def dtype_of(atom: Operand) -> Any:
    """The dtype of a variable or literal: a NumPy dtype, or the dtype of PRNG keys."""
    return type_of(atom).dtype


def num_bytes(aval: Any) -> int:
    """Bytes of an array of this type; 0 for a type without a dtype, such as a token."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return 0
    return math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 4)


# Bodies.


def body(program: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The operations of a program, with or without constants."""
    return program.jaxpr if isinstance(program, ClosedJaxpr) else program


def called(equation: JaxprEqn) -> Jaxpr | None:
    """Return the body of a call (`jit`, `checkpoint`, `custom_jvp_call`, ...); None for
    other operations."""
    inner = next(iter(jaxprs_in_params(equation.params)), None)
    if inner is None:
        return None
    # The first program of a `while` or a `cond` takes other operands.
    takes_operands = len(inner.invars) == len(equation.invars)
    gives_results = len(inner.outvars) == len(equation.outvars)
    return inner if takes_operands and gives_results else None


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Count the constants and the carried values of a scan, by shapes, since JAX 0.11
    does not record them."""
    inner = body(equation.params["jaxpr"])
    # A step of the scan gets slices of `xs`, and makes slices of `ys`. Carried values
    # have one shape inside and outside.
    pairs = zip(equation.invars, inner.invars)
    num_xs = sum(len(shape_of(outer)) > len(shape_of(one)) for outer, one in pairs)
    pairs = zip(equation.outvars, inner.outvars)
    num_carry = sum(len(shape_of(outer)) == len(shape_of(one)) for outer, one in pairs)
    return len(equation.invars) - num_carry - num_xs, num_carry


def used(program: Jaxpr, results: Sequence[bool]) -> tuple[list[bool], list[bool]]:
    """Mark the operations and the inputs that the wanted `results` of a program depend
    on."""
    wanted = _chosen(program.outvars, results)
    flags = []
    for equation in reversed(program.eqns):
        outputs = [var in wanted for var in equation.outvars]
        flags.append(any(outputs))
        if not any(outputs):
            continue
        # A result of one step of a scan may be an operand of the next one.
        inner = called(equation) if equation.primitive.name != "scan" else None
        operands = [True] * len(equation.invars)
        if inner is not None:
            _, operands = used(inner, outputs)
        wanted |= _chosen(equation.invars, operands)
    return flags[::-1], [var in wanted for var in program.invars]


def _chosen(atoms: Sequence[Operand], flags: Sequence[bool]) -> set[Var]:
    """The variables among some atoms whose flags are true."""
    pairs = zip(atoms, flags)
    return {atom for atom, is_chosen in pairs if is_chosen and isinstance(atom, Var)}


def _folder(file: str) -> str:
    """The folder of a package, from the path of its `__init__.py`."""
    return file.replace("\\", "/").rpartition("/")[0] + "/"


# The installed packages, not each folder of that name: a user's may be named `jax`.
_LIBRARIES = (
    _folder(jax.__file__),
    _folder(jaxlib.__file__),
    _folder(eqx.__file__),
    _folder(_folder(__file__)[:-1]),
)


def source_line(equation: JaxprEqn) -> str:
    """The line of the user's code that an operation comes from, as
    `file.py:12 (function)`."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in traceback.frames if traceback else ():
        if not frame.file_name.replace("\\", "/").startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "an operation of unknown origin"


# Programs: functions of arrays that are traced once, and then read, changed, run or
# differentiated.


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function of PyTrees of arrays. Calling it adds its operations to the
    surrounding trace.

    - `closed`: the operations. Their inputs and outputs are the leaves of the arguments
        and of the result.
    - `results`: the structure of the result.
    """

    closed: ClosedJaxpr
    results: Any

    def __call__(self, *arguments: PyTree) -> PyTree:
        outputs = jaxpr_as_fun(self.closed)(*jax.tree.leaves(arguments))
        # A constant output is a plain number here.
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in outputs]
        return jax.tree.unflatten(self.results, arrays)

    def replace(self, jaxpr: Jaxpr) -> "Program":
        """Return this program with other operations."""
        return dataclasses.replace(self, closed=self.closed.replace(jaxpr=jaxpr))


def trace(function: Callable[..., PyTree], *arguments: PyTree) -> Program:
    """Trace `function` for arguments of these shapes and dtypes. The arguments may be
    abstract."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return Program(closed, jax.tree.structure(shapes))


def abstract(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    """Make an abstract array of this type; it keeps the mesh that the type has inside a
    trace."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type
    )


def program_digest(closed: ClosedJaxpr) -> str:
    """A digest of a traced program, from its text and the arrays that it captured. It
    is the same in each process.

    Names of functions do not count, and neither does a backward pass that is written by
    hand.
    """
    # Addresses of objects differ between processes.
    text = re.sub(r"0x[0-9a-f]+|\bname=\S+", "", str(closed.jaxpr))
    digest = hashlib.sha256(text.encode())
    for x in closed.consts:
        if getattr(x, "is_fully_addressable", True) and np.size(x) < 2**20:
            # Reading it takes no time.
            data = jax.random.key_data(x) if is_key(x) else x
            digest.update(np.asarray(data).tobytes())
    return digest.hexdigest()[:16]


def manual_axes(equation: JaxprEqn) -> set[str]:
    """The mesh axes over which a `shard_map` around this operation is manual."""
    return set(type_of(equation.invars[0]).sharding.mesh.manual_axes)
