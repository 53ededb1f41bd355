"""What a traced step remembers of its forward pass for the backward pass, before any compiler has seen it."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Var

from redco_eqx._compiled.buffers import Buffer
from redco_eqx._dataflow.programs import Atom, called, shape_of, type_of
from redco_eqx._dataflow.source import source_line

_DEAR = {"dot_general", "ragged_dot_general", "conv_general_dilated", "scan", "while", "cond", "shard_map"}
"""Whose results take memory if they are used later. Others' may be computed again where they are read."""


@dataclasses.dataclass
class _Form:
    """A dear value, or what is made of it alone: of all forms that are used later, the largest is kept.

    - `origin`: a number for the dear value.
    - `first`, `last`: after operations `first` to `last - 1` this form is there.
    """

    buffer: Buffer
    origin: int
    first: int
    last: int


def remembered(program: Jaxpr) -> tuple[Buffer, ...]:
    """The values, whole, that are there when they take most; the largest first.

    Only results of products and loops count, each once, and what is made of one of them alone in its place.
    Split over all devices they take no more of each than the compiled step does, however that is laid out.
    """
    known: dict[int, _Form] = {}
    for now, (equation, operands, results) in enumerate(_flat(program, {}, itertools.count())):
        read = [known[x] for x in operands if x in known]
        for form in read:
            form.last = now
        origins = {form.origin for form in read}
        for number, atom in zip(results, equation.outvars):
            if not shape_of(atom):
                continue
            if equation.primitive.name in _DEAR:
                known[number] = _Form(_buffer(equation, atom), number, now, now)
            elif len(origins) == 1:
                # Padded or broadcast, it may as well be kept as it was.
                smallest = min((_buffer(equation, atom), *(form.buffer for form in read)), key=_size)
                known[number] = _Form(smallest, min(origins), now, now)
    return tuple(sorted(_most(known.values()), key=lambda b: (-b.num_bytes, b.shape, b.source)))


def _most(forms: Iterable[_Form]) -> list[Buffer]:
    """What is kept after the operation after which most is."""
    changes: dict[int, list[_Form]] = {}
    for form in forms:
        changes.setdefault(form.first, []).append(form)
        changes.setdefault(form.last, []).append(form)
    there: dict[int, list[_Form]] = {}
    total, most, kept = 0, 0, []

    def size(origin: int) -> int:
        return max((form.buffer.num_bytes for form in there.get(origin, ())), default=0)

    for now in sorted(changes):
        origins = {form.origin for form in changes[now]}
        total -= sum(map(size, origins))
        for form in changes[now]:
            alike = there.setdefault(form.origin, [])
            if form.last == now and form in alike:
                alike.remove(form)
            elif form.last > now:
                alike.append(form)
        total += sum(map(size, origins))
        if total > most:
            most = total
            kept = [max((form.buffer for form in alike), key=_size) for alike in there.values() if alike]
    return kept


def _size(buffer: Buffer) -> int:
    return buffer.num_bytes


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
