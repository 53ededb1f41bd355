"""What a program's results cannot depend on."""

import jax.numpy as jnp
from jax.extend.core import Literal

from redco_eqx._program.atoms import Atom
from redco_eqx._program.trace import Program


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
