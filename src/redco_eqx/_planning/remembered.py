"""What a traced step remembers of its forward pass for the backward pass, before any compiler has seen it."""

import dataclasses
import itertools
from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Var

from redco_eqx._compiled.buffers import Buffer
from redco_eqx._dataflow.programs import Atom, called, shape_of, type_of
from redco_eqx._dataflow.source import source_line

_DEAR = {"dot_general", "ragged_dot_general", "conv_general_dilated", "scan", "while", "cond", "shard_map"}
"""Whose results take memory if they are used later. Those of others may be computed again where they are read."""

_VIEWS = {"reshape", "transpose", "squeeze", "convert_element_type", "name", "sharding_constraint"}
"""What gives the same numbers again: one form of them is kept."""


@dataclasses.dataclass
class _Value:
    """A dear one, in its smallest form: after operations `first` to `last - 1` it is there."""

    buffer: Buffer
    first: int
    last: int


def remembered(program: Jaxpr) -> tuple[Buffer, ...]:
    """The values, whole, that are there when they take most; the largest first.

    Only results of products and loops count, and each once, in the smallest form that it is given. Split over all
    devices they take no more of each than the compiled step does, however that is laid out.
    """
    values: list[_Value] = []
    known: dict[int, _Value] = {}
    for now, (equation, operands, results) in enumerate(_flat(program, {}, itertools.count())):
        read = [known[x] for x in operands if x in known]
        for value in read:
            value.last = now
        name = equation.primitive.name
        for number, atom in zip(results, equation.outvars):
            if name in _DEAR and shape_of(atom):
                known[number] = _Value(_buffer(equation, atom), now, now)
                values.append(known[number])
            elif name in _VIEWS and len(read) == 1:
                known[number] = read[0]
                smaller = _buffer(equation, atom)
                if smaller.num_bytes < read[0].buffer.num_bytes:
                    read[0].buffer = smaller
    most = max((x.first for x in values), key=lambda now: _total(_there(values, now)), default=0)
    return tuple(sorted(_there(values, most), key=lambda b: (-b.num_bytes, b.shape, b.source)))


def _there(values: list[_Value], now: int) -> list[Buffer]:
    return [x.buffer for x in values if x.first <= now < x.last]


def _total(buffers: list[Buffer]) -> int:
    return sum(x.num_bytes for x in buffers)


def _buffer(equation: JaxprEqn, atom: Atom) -> Buffer:
    aval = type_of(atom)
    line = source_line(equation).partition(" (")[0]
    return Buffer(aval.size * aval.dtype.itemsize, aval.str_short(short_dtypes=True), line)


def _flat(
    program: Jaxpr, numbers: dict[Var, int], fresh: Iterator[int]
) -> Iterator[tuple[JaxprEqn, list[int], list[int]]]:
    """Operations in order, those of calls in their place, with numbers for what they read and make."""

    def number_of(atom: Atom) -> int:
        if not isinstance(atom, Var):
            return next(fresh)
        return numbers.setdefault(atom, next(fresh))

    for equation in program.eqns:
        operands = [number_of(atom) for atom in equation.invars]
        inner = None if equation.primitive.name in _DEAR else called(equation)
        if inner is None:
            results = [number_of(atom) for atom in equation.outvars]
            yield equation, operands, results
            continue
        inside = dict(zip(inner.invars, operands))
        yield from _flat(inner, inside, fresh)
        for atom, result in zip(equation.outvars, inner.outvars):
            numbers[atom] = inside[result] if isinstance(result, Var) else next(fresh)
