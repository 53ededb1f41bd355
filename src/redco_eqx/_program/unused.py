"""What a program's results cannot depend on."""

import jax.extend.core as jex_core

from redco_eqx._program.trace import Program


def zero_outputs(program: Program) -> list[int]:
    """The numbers of the outputs that are constant (zero) whatever comes in: gradients by what is not used."""
    zeros = {
        equation.outvars[0]
        for equation in program.closed.jaxpr.eqns
        if equation.primitive.name == "broadcast_in_dim"
        and isinstance(equation.invars[0], jex_core.Literal)
        and equation.invars[0].val == 0
    }
    return [
        i
        for i, atom in enumerate(program.closed.jaxpr.outvars)
        if isinstance(atom, jex_core.Literal) or atom in zeros
    ]
