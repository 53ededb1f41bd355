"""How much of a model a program reads where it says itself what its gradient keeps: in a `jax.checkpoint`."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from redco_eqx._dataflow.programs import body, called
from redco_eqx._dataflow.walk import num_bytes
from redco_eqx._program.atoms import shape_of, type_of

CHECKPOINTS = ("checkpoint", "remat", "remat2")
"""The names that JAX has had for it."""


def bytes_in_checkpoints(program: Jaxpr, weights: Sequence[bool]) -> int:
    """Bytes of weights that the checkpoints of `program` read, each layer of a scan for itself.

    `weights` says which inputs are some. What is made of weights alone, such as a cast or a slice, is one too.
    """
    return _read(program, weights)[0]


def _read(program: Jaxpr, weights: Sequence[bool]) -> tuple[int, list[bool]]:
    """What is read, and which results are weights."""
    known = {var for var, is_weight in zip(program.invars, weights) if is_weight}
    total = 0
    for equation in program.eqns:
        inputs = [isinstance(atom, Var) and atom in known for atom in equation.invars]
        read, outputs = _of(equation, inputs)
        total += read
        known.update(var for var, is_weight in zip(equation.outvars, outputs) if is_weight)
    return total, [isinstance(atom, Var) and atom in known for atom in program.outvars]


def _of(equation: JaxprEqn, inputs: Sequence[bool]) -> tuple[int, Sequence[bool]]:
    kind, none = equation.primitive.name, [False] * len(equation.outvars)
    if not any(inputs):
        return 0, none
    if kind in CHECKPOINTS:
        read = [type_of(atom) for atom, is_weight in zip(equation.invars, inputs) if is_weight]
        return sum(map(num_bytes, read)), none
    if kind == "scan":
        read, _ = _read(body(equation.params["jaxpr"]), inputs)
        return read * equation.params["length"], none
    inner = called(equation)
    if inner is not None:
        return _read(inner, inputs)
    arrays = [is_weight for atom, is_weight in zip(equation.invars, inputs) if shape_of(atom)]
    return 0, [all(arrays) and bool(arrays)] * len(equation.outvars)
