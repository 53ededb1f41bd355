"""One walk through a program: dims become atoms, and what a split would cost is written down."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from jax.core import AbstractValue
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from redco_eqx._dataflow.atoms import Dim, new_dims, unify
from redco_eqx._dataflow.programs import Atom, shape_of, used
from redco_eqx._dataflow.source import block_of
from redco_eqx._dataflow.values import Event, Step, Use, Value

Rule: TypeAlias = Callable[["Walk", JaxprEqn, list[Value]], list[Value]]
"""What an operation does to the dims of its operands: `(walk, equation, operands) -> results`."""


class Walk:
    """What was found so far.

    - `events`, `uses`, `steps`: in the program's order.
    - `opaque`: operations that nothing is known of, with how many there are and one of them.
    """

    def __init__(self, rule_of: Callable[[JaxprEqn], Rule]):
        self.rule_of = rule_of
        self.events: list[Event] = []
        self.uses: list[Use] = []
        self.steps: list[Step] = []
        self.opaque: dict[str, list[JaxprEqn]] = {}
        self.times = self.waits = 1
        self.block = ""

    def run(
        self, program: Jaxpr, arguments: Sequence[Value], wanted: Sequence[bool] | None = None
    ) -> list[Value]:
        """The results of a program without constants; those that are not `wanted` may know nothing."""
        values: dict[Atom, Value] = dict(zip(program.invars, arguments))
        values |= {var: unknown(var.aval) for var in program.constvars}
        flags, _ = used(program, wanted or [True] * len(program.outvars))

        def read(atom: Atom) -> Value:
            if isinstance(atom, Literal):
                return unknown(atom.aval)
            return values[atom] if atom in values else unknown(atom.aval)

        for equation, is_used in zip(program.eqns, flags):
            if not is_used:
                continue
            operands = [read(atom) for atom in equation.invars]
            num_steps, num_events = len(self.steps), len(self.events)
            outer, self.block = self.block, block_of(equation) or self.block
            results = self._results(equation, operands)
            if len(self.steps) == num_steps:  # or else it has a body, whose operations are what is done
                own = self.events[num_events:]
                self.steps.append(Step(equation, self.times, operands, results, own, self.block))
            self.block = outer
            values.update(zip(equation.outvars, results))
        return [read(atom) for atom in program.outvars]

    def _results(self, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        try:
            results = self.rule_of(equation)(self, equation, operands)
        except (AttributeError, IndexError, KeyError, TypeError):
            results = []  # a rule that was written for another version of JAX: its parameters are not there
        fit = [len(x.dims) == len(shape_of(v)) for x, v in zip(results, equation.outvars)]
        return results if sum(fit) == len(equation.outvars) else self.opaque_results(equation, operands)

    def opaque_results(self, equation: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Of an operation that nothing is known of: it has to have everything whole."""
        self.opaque.setdefault(equation.primitive.name, []).append(equation)
        for operand in operands:
            self.event("whole", operand.dims, operand, equation)
        return [_of_type(var.aval, operands) for var in equation.outvars]

    @contextlib.contextmanager
    def loop(self, length: int, waits: bool) -> Iterator[None]:
        """What is found inside is done `length` times; if it `waits`, one after the other."""
        before = self.times, self.waits
        self.times *= length
        self.waits *= length if waits else 1
        yield
        self.times, self.waits = before

    def event(
        self,
        kind: str,
        dims: Sequence[Dim],
        sent: Value,
        equation: JaxprEqn,
        *,
        unless: Sequence[Dim] = (),
        arrays: Sequence[Value] = (),
        along: Sequence[Sequence[int]] = (),
    ) -> None:
        """Notes that `sent` is sent if one of `dims`, of it or of `arrays`, is split."""
        if any(dims):
            of = tuple(arrays) or (sent,)
            places = tuple(tuple(numbers) for numbers in along)
            found = Event(
                kind,
                tuple(dims),
                sent,
                of,
                equation,
                self.times,
                self.waits,
                tuple(unless),
                self.block,
                places,
            )
            self.events.append(found)
            if kind == "sum":
                sent.sums = (found,)

    def hand_on(self, equation: JaxprEqn, before: Sequence[Value], after: Sequence[Value]) -> None:
        """Notes that values are handed into a body, or out of it, as they are."""
        for one, other in zip(before, after):
            self.steps.append(Step(equation, self.times, [one], [other], []))

    def same(self, first: Sequence[Dim], second: Sequence[Dim], value: Value, equation: JaxprEqn) -> None:
        """Unifies dims pairwise. Where they do not fit, `value`, which has the second, would be sent."""
        for one, other in zip(first, second):
            if not unify(one, other):
                self.event("reshard", (one, other), value, equation)

    def use(self, weight: Value, data: Value, roles: Sequence[str], made: Value, depth: int) -> None:
        """Notes the use of a weight on data, if that is what the two operands are."""
        if data.is_data:
            for number in weight.weights:
                size = made.num_bytes * self.times
                self.uses.append(Use(number, weight.dims, tuple(roles), size, depth))


def num_bytes(aval: AbstractValue) -> int:
    """Of one that has no dtype, such as a token, 0; PRNG keys are two words or more."""
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 4)


def unknown(aval: AbstractValue) -> Value:
    """A value whose dims nothing is known of."""
    return Value(new_dims(getattr(aval, "shape", ())), num_bytes(aval))


def _of_type(aval: AbstractValue, operands: Sequence[Value]) -> Value:
    return result(aval, new_dims(getattr(aval, "shape", ())), operands)


def result(aval: AbstractValue, dims: Sequence[Dim], operands: Sequence[Value]) -> Value:
    """A result with these dims, that comes from these operands."""
    is_data, is_learned = any(x.is_data for x in operands), any(x.is_learned for x in operands)
    weights = () if is_data else tuple(sorted({number for x in operands for number in x.weights}))
    return Value(tuple(dims), num_bytes(aval), weights, is_data, is_learned)
