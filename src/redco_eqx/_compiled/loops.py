"""Trip counts of loops. XLA writes them down for CPU and GPU; for TPU the loop's counter is followed here."""

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeGuard

from redco_eqx._compiled.hlo import Instruction, Program, instruction


class _Carried(NamedTuple):
    """The tuple that a loop carries."""


class _Integer(NamedTuple):
    """`offset`, plus what the loop carries at `place` when a trip begins; a constant has no place."""

    place: int | None
    offset: int


class _Test(NamedTuple):
    direction: str
    left: _Integer
    right: _Integer


_Value = _Carried | _Integer | _Test | None  # None: not followed

_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def trip_count(program: Program, computation: str, loop: Instruction) -> int | None:
    """How often the body runs, or None if the text does not tell."""
    if known := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.line):
        return int(known[1])
    body, condition = loop.names("body")[0], loop.names("condition")[0]
    before = instruction(program.computations[computation][loop.operands[0]])
    after = instruction(program.computations[body][program.roots[body]])
    test = _value(program, condition, program.roots[condition], [_Carried()])
    if not isinstance(test, _Test) or before.opcode != "tuple" or after.opcode != "tuple":
        return None

    def first(place: int) -> _Value:
        return _value(program, computation, before.operands[place], [])

    def following(place: int) -> _Value:
        return _value(program, body, after.operands[place], [_Carried()])

    direction, counter, limit = test
    if counter.place is None:
        direction, counter, limit = _MIRRORED[direction], limit, counter
    if limit.place is not None and following(limit.place) == _Integer(limit.place, 0):
        carried = first(limit.place)  # a limit that is carried along unchanged
        limit = _Integer(None, carried.offset + limit.offset) if _is_constant(carried) else limit
    if counter.place is None or not _is_constant(limit):
        return None
    start, step = first(counter.place), following(counter.place)
    if not _is_constant(start) or not isinstance(step, _Integer) or step.place != counter.place:
        return None
    distance, stride = limit.offset - start.offset - counter.offset, step.offset
    if stride < 0:
        distance, stride, direction = -distance, -stride, _MIRRORED[direction]
    if stride == 0 or direction not in ("LT", "LE", "NE") or (direction == "NE" and distance % stride):
        return None
    return max(0, -(-(distance + (direction == "LE")) // stride))


def _is_constant(value: _Value) -> TypeGuard[_Integer]:
    return isinstance(value, _Integer) and value.place is None


def _value(program: Program, computation: str, name: str, arguments: Sequence[_Value]) -> _Value:
    """What an instruction gives, in a computation that is called with `arguments`."""
    x = instruction(program.computations[computation][name])
    follow = partial(_value, program, computation, arguments=arguments)
    match x.opcode:
        case "constant":
            is_integer = re.fullmatch(r"-?\d+", x.operands[0])
            return _Integer(None, int(x.operands[0])) if is_integer else None
        case "parameter":
            place = int(x.operands[0])
            return arguments[place] if place < len(arguments) else None
        case "copy" | "bitcast" | "convert" | "reshape":
            return follow(x.operands[0])
        case "get-tuple-element":
            carried = isinstance(follow(x.operands[0]), _Carried)
            return _Integer(int(x.names("index")[0]), 0) if carried else None
        case "compare" | "add" | "subtract":
            left, right = follow(x.operands[0]), follow(x.operands[1])
            if not isinstance(left, _Integer) or not isinstance(right, _Integer):
                return None
            if x.opcode == "compare":
                return _Test(x.names("direction")[0], left, right)
            if x.opcode == "add" and left.place is None:
                left, right = right, left
            if right.place is not None:
                return None
            return left._replace(offset=left.offset + (1 if x.opcode == "add" else -1) * right.offset)
        case "fusion" | "call":
            callee = [*x.names("calls"), *x.names("to_apply")][0]
            return _value(program, callee, program.roots[callee], [follow(y) for y in x.operands])
    return None
