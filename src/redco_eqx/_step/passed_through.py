"""Results of a step that are the arrays that it was given.

JAX copies an array that a compiled program returns unchanged, unless the array was
donated; and then it deletes the caller's. So a program must not return what it only
passes through: the caller has it already.
"""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]

from redco_eqx._base.jaxprs import Operand, body, called, scan_counts
from redco_eqx._step.state import TrainState


def sources(jaxpr: Jaxpr) -> list[int | None]:
    """For each result of a program, the index of the input that it equals, whatever the
    inputs are; `None` if that cannot be told.

    The look goes through calls, loops and branches, and through choices between two
    equal values, such as that of a guard (`jnp.where(ok, new, old)`).
    """
    inputs: list[object] = [object() for _ in jaxpr.invars]
    places = {id(x): i for i, x in enumerate(inputs)}
    values = _Values(jaxpr, inputs)
    return [places.get(id(values.of(atom))) for atom in jaxpr.outvars]


class _Values:
    """The values in a program. Two atoms that are copies of one value have the same
    object for it.

    - `inputs`: the objects for the inputs. In the body of a call, those of its
        operands.
    """

    def __init__(self, jaxpr: Jaxpr, inputs: Sequence[object]):
        self._values: dict[Var, object] = dict(zip(jaxpr.invars, inputs))
        self._made: dict[Var, tuple[JaxprEqn, int]] = {}
        for equation in jaxpr.eqns:
            for place, var in enumerate(equation.outvars):
                self._made[var] = (equation, place)

    def of(self, atom: Operand) -> object:
        """The object for the value of an atom."""
        if isinstance(atom, Literal):
            return atom
        if atom not in self._values:
            value = None
            if atom in self._made:
                value = self._copied(*self._made[atom])
            # A value that is made here, or a constant.
            self._values[atom] = object() if value is None else value
        return self._values[atom]

    def _copied(self, equation: JaxprEqn, place: int) -> object | None:
        """The operand's value that a result of an operation equals, if it is one."""
        kind = equation.primitive.name
        operands = equation.invars
        params = equation.params
        if kind in ("copy", "copy_p", "optimization_barrier"):
            return self.of(operands[place])
        if kind == "select_n":
            first, *others = [self.of(atom) for atom in operands[1:]]
            return first if all(x is first for x in others) else None
        if kind == "scan":
            num_consts, num_carry = scan_counts(equation)
            if place >= num_carry:
                return None
            return self._carried(params["jaxpr"], operands, num_consts, place)
        if kind == "while":
            operands = operands[params["cond_nconsts"] :]
            return self._carried(
                params["body_jaxpr"], operands, params["body_nconsts"], place
            )
        if kind == "cond":
            first, *others = [
                self._result(branch, operands[1:], place)
                for branch in params["branches"]
            ]
            return first if all(x is first for x in others) else None
        inner = called(equation)
        return None if inner is None else self._result(inner, operands, place)

    def _result(
        self, program: Jaxpr | ClosedJaxpr, operands: Sequence[Operand], place: int
    ) -> object | None:
        """The operand's value that a result of a body equals, if it is one."""
        inputs = [self.of(atom) for atom in operands]
        inner = body(program)
        value = _Values(inner, inputs).of(inner.outvars[place])
        return value if any(value is x for x in inputs) else None

    def _carried(
        self,
        program: Jaxpr | ClosedJaxpr,
        operands: Sequence[Operand],
        num_consts: int,
        place: int,
    ) -> object | None:
        """The value of the operand that a loop carries to this result, if its body
        leaves it as it is."""
        inner = body(program)
        inputs: list[object] = [object() for _ in inner.invars]
        value = _Values(inner, inputs).of(inner.outvars[place])
        carried = num_consts + place
        return self.of(operands[carried]) if value is inputs[carried] else None


def frozen_passed_through(
    jaxpr: Jaxpr, inputs: TrainState, results: TrainState
) -> set[str]:
    """The paths of the frozen arrays of a state that a step returns as they were.

    - `inputs`, `results`: states whose leaves are their indices among the inputs and
        results of the program.
    """
    found = sources(jaxpr)
    return {
        path
        for path, index in inputs.frozen.items()
        if found[results.frozen[path]] == index
    }
