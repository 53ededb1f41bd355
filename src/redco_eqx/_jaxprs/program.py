"""Traced programs, and what is put in the place of single operations, however deep they lie."""

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun
from jax.sharding import AxisType
from jaxtyping import Array, PyTree

from redco_eqx._jaxprs.read import Atom, type_of
from redco_eqx._tree import is_key

# A function of arrays as a program: traced once, looked at, changed, and run or differentiated.


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function of PyTrees of arrays. To call it adds its operations to the trace around it.

    - `closed`: its operations; inputs and outputs are the leaves of arguments and result.
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
        """The same, of other operations."""
        return dataclasses.replace(self, closed=self.closed.replace(jaxpr=jaxpr))


def trace(function: Callable[..., PyTree], *arguments: PyTree) -> Program:
    """`function` as it is for arguments of these shapes and dtypes, which may be abstract."""
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    return Program(closed, jax.tree.structure(shapes))


def abstract(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    """Make an abstract array of this type; it keeps the mesh that arrays inside a trace know."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


def program_digest(closed: ClosedJaxpr) -> str:
    """A digest of a traced program, the same in each process: of its text, and of the arrays that it captured.

    The names of functions do not count, nor does a backward pass that is written by hand.
    """
    text = hashlib.sha256(re.sub(r"0x[0-9a-f]+|\bname=\S+", "", str(closed.jaxpr)).encode())
    for x in closed.consts:
        if getattr(x, "is_fully_addressable", True) and np.size(x) < 2**20:  # what is read in no time
            text.update(np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes())
    return text.hexdigest()[:16]


# Outputs that are zero whatever comes in.


def zero_outputs(program: Program) -> list[int]:
    """The numbers of the outputs that are constant (zero) whatever comes in: gradients by what is not used."""
    zeros = {
        equation.outvars[0]
        for equation in program.closed.jaxpr.eqns
        if equation.primitive.name == "broadcast_in_dim" and _is_zero(equation.invars[0])
    }
    outputs = enumerate(program.closed.jaxpr.outvars)
    return [i for i, atom in outputs if isinstance(atom, Literal) or atom in zeros]


def _is_zero(atom: Atom) -> bool:
    # What takes the place of the gradient by an integer is of a dtype that cannot be compared.
    is_literal = isinstance(atom, Literal)
    return is_literal and jnp.issubdtype(jnp.result_type(atom.val), jnp.inexact) and bool(atom.val == 0)


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
