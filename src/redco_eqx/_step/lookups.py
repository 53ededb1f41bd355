"""Lookups whose indices follow from some inputs alone, such as the rows for the tokens of a batch."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.lax import GatherScatterMode

from redco_eqx._jaxprs.read import CALLS, Atom, body, called, scan_counts, shape_of, source_line

Known: TypeAlias = tuple[frozenset[int], Callable[[], Any]]
"""The numbers of the inputs that a value comes from, and the value, computed when it is asked for."""

_WITH_BODIES = (*CALLS, "scan", "while", "cond", "shard_map")
_LONGEST = 1000  # number of steps of a loop that is looked into


class Outside(NamedTuple):
    """A lookup outside of what there is.

    - `sources`: the numbers of the inputs that its indices come from.
    - `row`, `found`: where along the first dim the first index is that is outside, and that index.
    - `size`: how many there are to look up.
    - `line`: of the user's code, where it is asked for.
    """

    sources: frozenset[int]
    row: int
    found: int
    size: int
    line: str


def outside(program: Jaxpr, inputs: Sequence[Known | None]) -> Outside | None:
    """The first lookup that gives NaN as it is outside, of those whose indices follow from the known `inputs`.

    Nothing is computed but what the indices depend on, one operation at a time. Calls, checkpoints and loops
    are looked into; conditions, `while` loops and `shard_map` are not.
    """
    for equation, asked, (sources, value) in _walk(program, inputs)[1]:
        numbers, shape = equation.params["dimension_numbers"], shape_of(equation.invars[0])
        indices = np.asarray(value())
        for place, dim in enumerate(numbers.start_index_map):
            own = indices[..., place]
            wrong = np.argwhere((own < 0) | (own > shape[dim] - equation.params["slice_sizes"][dim]))
            if len(wrong):
                first = tuple(wrong[0])
                row = int(first[0]) if first else 0
                return Outside(sources, row, int(own[first]), shape[dim], source_line(asked))
    return None


_Found: TypeAlias = list[tuple[JaxprEqn, JaxprEqn, Known]]
"""Each with the operation of the whole program that it is in, and its indices."""


def _walk(program: Jaxpr, inputs: Sequence[Known | None]) -> tuple[list[Known | None], _Found]:
    """Collect what is known of the results, and the lookups."""
    known: dict[Var, Known] = {var: x for var, x in zip(program.invars, inputs) if x is not None}
    found: _Found = []
    for equation in program.eqns:
        operands = [_read(atom, known) for atom in equation.invars]
        results: Sequence[Known | None] = [None] * len(equation.outvars)
        inner = called(equation) if equation.primitive.name in CALLS else None
        if inner is not None:
            results, more = _walk(inner, operands)
            found += [(one, equation, indices) for one, _, indices in more]
        elif equation.primitive.name == "scan":
            results, more = _walk_loop(equation, operands)
            found += [(one, equation, indices) for one, _, indices in more]
        elif equation.primitive.name == "gather":
            indices, mode = operands[1], equation.params["mode"]
            if indices is not None and indices[0] and mode == GatherScatterMode.FILL_OR_DROP:
                found.append((equation, equation, indices))
        given = [x for x in operands if x is not None]
        if len(given) == len(operands) and equation.primitive.name not in _WITH_BODIES:
            results = _computed(equation, given)
        known.update((var, x) for var, x in zip(equation.outvars, results) if x is not None)
    return [_read(atom, known) for atom in program.outvars], found


def _walk_loop(equation: JaxprEqn, operands: Sequence[Known | None]) -> tuple[list[Known | None], _Found]:
    inner, length = body(equation.params["jaxpr"]), equation.params["length"]
    num_consts, num_carry = scan_counts(equation)
    consts, carry = operands[:num_consts], list(operands[num_consts : num_consts + num_carry])
    xs = operands[num_consts + num_carry :]
    found: _Found = []
    if length > _LONGEST or not any(x is not None and x[0] for x in operands):
        return [None] * len(equation.outvars), found
    order = range(length)[:: -1 if equation.params["reverse"] else 1]
    ys: dict[int, list[Known | None]] = {}
    for i in order:
        one = [None if x is None else (x[0], functools.cache(lambda x=x, i=i: x[1]()[i])) for x in xs]
        results, more = _walk(inner, [*consts, *carry, *one])
        carry, ys[i] = results[:num_carry], results[num_carry:]
        found += more
    stacked = [_stacked([ys[i][n] for i in range(length)]) for n in range(len(equation.outvars) - num_carry)]
    return [*carry, *stacked], found


def _stacked(parts: Sequence[Known | None]) -> Known | None:
    given = [x for x in parts if x is not None]
    if not given or len(given) < len(parts):
        return None
    return frozenset().union(*(x[0] for x in given)), functools.cache(
        lambda: jnp.stack([x[1]() for x in given])
    )


def _read(atom: Atom, known: Mapping[Var, Known]) -> Known | None:
    return (frozenset(), lambda: atom.val) if isinstance(atom, Literal) else known.get(atom)


def _computed(equation: JaxprEqn, operands: Sequence[Known]) -> list[Known | None]:
    """The results of an operation whose operands are known."""

    @functools.cache
    def results() -> Any:
        made = equation.primitive.bind(*(x[1]() for x in operands), **equation.params)
        return made if equation.primitive.multiple_results else [made]

    sources = frozenset().union(*(x[0] for x in operands))
    return [(sources, lambda i=i: results()[i]) for i in range(len(equation.outvars))]
