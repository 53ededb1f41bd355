"""A traced program with its calls inlined: cut into the programs of its values, compared, run step by step."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.typing import ArrayLike
from jaxtyping import Array

from redco_eqx._jaxprs.read import CHECKPOINTS, Atom, dtype_of, type_of

Value: TypeAlias = jax.Array | np.ndarray
"""What a variable stands for when the program runs."""

# What these primitives call is run in their place, on the same operands.
CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", *CHECKPOINTS)


@dataclasses.dataclass(frozen=True)
class FlatProgram:
    """A program without calls.

    - `equations`: in the order in which they were traced.
    - `values`: what is known from the start: arguments, constants, and the literals outside of any call.
        Those are operands, as they are when Python runs the program, so layers that differ in such a number
        alone still have equal programs. Literals inside of a call stay in its equations.
    - `outputs`: its results.
    - `producers`: for each variable that an equation makes, the index of that equation.
    - `template`: the jaxpr that all programs cut out of this one are copies of, but for these fields.
    """

    equations: list[JaxprEqn]
    values: dict[Var, Value]
    outputs: list[Var]
    producers: dict[Var, int]
    template: Jaxpr


def flatten(program: ClosedJaxpr, arguments: Sequence[Value]) -> FlatProgram:
    """`program` on `arguments`, with its calls inlined."""
    equations: list[JaxprEqn] = []
    values: dict[Var, Value] = {}

    def known(value: Value, aval: AbstractValue) -> Var:
        var = Var(aval)
        values[var] = value
        return var

    def lift(atom: Atom) -> Var:
        return known(np.asarray(atom.val, dtype_of(atom)), atom.aval) if isinstance(atom, Literal) else atom

    def inline(jaxpr: Jaxpr, consts: Sequence[Value], operands: Sequence[Atom], outermost: bool) -> list[Atom]:
        env: dict[Var, Atom] = {var: known(value, var.aval) for var, value in zip(jaxpr.constvars, consts)}
        env.update(zip(jaxpr.invars, operands))

        def read(atom: Atom) -> Atom:
            if isinstance(atom, Literal):
                return lift(atom) if outermost else atom
            return env[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            called = called_by(equation)
            if called is None:
                results = [Var(var.aval) for var in equation.outvars]
                equations.append(equation.replace(invars=inputs, outvars=results))
                outputs: list[Atom] = [*results]
            else:
                outputs = inline(*called, inputs, False)
            if outermost:
                outputs = [rounded(atom) for atom in outputs]
            env.update(zip(equation.outvars, outputs))
        return [read(atom) for atom in jaxpr.outvars]

    def rounded(atom: Atom) -> Atom:
        aval = type_of(atom)
        if not jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype.itemsize >= 4:
            return atom
        # Within one program, XLA computes in more bits than bfloat16 has, and would not round here.
        info = jnp.finfo(aval.dtype)
        rounding = jax.make_jaxpr(lambda x: jax.lax.reduce_precision(x, info.nexp, info.nmant))(aval)
        return inline(rounding.jaxpr, (), [atom], False)[0]

    operands = [known(value, var.aval) for var, value in zip(program.jaxpr.invars, arguments)]
    outputs = [lift(atom) for atom in inline(program.jaxpr, program.consts, operands, True)]
    producers = {var: i for i, equation in enumerate(equations) for var in equation.outvars}
    return FlatProgram(equations, values, outputs, producers, program.jaxpr)


def called_by(equation: JaxprEqn) -> tuple[Jaxpr, Sequence[Value]] | None:
    """The jaxpr that an equation calls, and its constants."""
    if equation.primitive.name not in CALLS:
        return None
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if isinstance(called, ClosedJaxpr):
        return called.jaxpr, called.consts
    return (called, ()) if isinstance(called, Jaxpr) and not called.constvars else None


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among the operands of an equation, each once."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def cut_out(program: FlatProgram, target: Var, given: Callable[[Var], bool]) -> Jaxpr:
    """The program that makes `target` out of variables that are `given`: its inputs, in order of first use."""
    needed: set[int] = set()
    stack = [target]
    while stack:
        var = stack.pop()
        if not given(var) and program.producers[var] not in needed:
            needed.add(program.producers[var])
            stack += variables(program.equations[program.producers[var]].invars)
    equations = [program.equations[i] for i in sorted(needed)]
    inputs = [v for v in variables(a for e in equations for a in e.invars) if given(v)]
    return as_jaxpr(program.template, equations, inputs, [target])


def as_jaxpr(
    template: Jaxpr, equations: list[JaxprEqn], inputs: Sequence[Var], outputs: Sequence[Var]
) -> Jaxpr:
    """A jaxpr of these equations."""
    effects = frozenset().union(*(equation.effects for equation in equations))
    return template.replace(constvars=(), invars=[*inputs], outvars=[*outputs], eqns=equations, effects=effects)


class Canonical:
    """A jaxpr that equals every other that computes the same, whatever their variables are called."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.key = _canonical_key(jaxpr)
        self.hash = hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Canonical) and self.key == other.key

    def __hash__(self) -> int:
        return self.hash


def _canonical_key(jaxpr: Jaxpr) -> Hashable:
    numbers: dict[Atom, int] = {}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers))

    inputs = tuple((name(var), var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            equation.primitive,
            tuple((field, _frozen(value)) for field, value in sorted(equation.params.items())),
            tuple(name(atom) for atom in equation.invars),
            tuple((name(var), var.aval) for var in equation.outvars),
        )
        for equation in jaxpr.eqns
    )
    return inputs, equations, tuple(name(atom) for atom in jaxpr.outvars)


def _frozen(value: object) -> Hashable:
    """A parameter of an equation as a key. What can be compared in no other way is equal to itself alone: by
    its `id`, which nothing else takes while the jaxpr beside the key keeps it alive."""
    if isinstance(value, ClosedJaxpr):
        return _canonical_key(value.jaxpr), tuple(map(id, value.consts))
    if isinstance(value, Jaxpr):
        return _canonical_key(value)
    if isinstance(value, tuple | list):
        return tuple(_frozen(entry) for entry in value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def run_stepwise(program: FlatProgram, wanted: Sequence[Var], keep: Callable[[Var, Value], None]) -> None:
    """Runs what makes `wanted`, and every effect, one equation at a time and in order.

    Each value is handed to `keep` as soon as it is there, and dropped after its last use.
    """
    targets = set(wanted)
    needed: dict[int, JaxprEqn] = {}
    live = set(targets)
    for i in reversed(range(len(program.equations))):
        equation = program.equations[i]
        if equation.effects or live.intersection(equation.outvars):
            needed[i] = equation
            live.update(variables(equation.invars))
    env = {var: value for var, value in program.values.items() if var in live}
    for var in targets.intersection(env):
        keep(var, env[var])
    last_use = {var: i for i in sorted(needed) for var in variables(needed[i].invars)}
    for i in sorted(needed):
        inputs = variables(needed[i].invars)
        values = _run(program.template, needed[i], inputs, [env[var] for var in inputs])
        for var, value in zip(needed[i].outvars, values):
            if var in targets:
                keep(var, value)
            if var in last_use:
                env[var] = value
        for var in inputs:
            if last_use[var] == i:
                del env[var]
        values = value = None  # or the last array would live on, whole, while the next is made


def _run(
    template: Jaxpr, equation: JaxprEqn, inputs: Sequence[Var], values: Sequence[Value]
) -> Sequence[Array]:
    if equation.primitive.name == "slice" and set(equation.params["strides"] or (1,)) == {1}:
        # Where it starts is an operand here, not a part of the program: keys[0], keys[1], ... compile once.
        starts, limits = equation.params["start_indices"], equation.params["limit_indices"]
        sizes = [limit - start for start, limit in zip(starts, limits)]
        return [jax.lax.dynamic_slice(values[0], starts, sizes)]
    return run_jaxpr(as_jaxpr(template, [equation], inputs, equation.outvars), values)


def run_jaxpr(jaxpr: Jaxpr, values: Sequence[ArrayLike]) -> Sequence[Array]:
    """The results of a jaxpr without constants."""
    return jex_core.jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*values)
