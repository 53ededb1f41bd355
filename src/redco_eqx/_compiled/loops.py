"""Trip counts of loops. XLA writes them down for CPU and GPU; for TPU the loop's counter is followed here."""

import re
from functools import partial
from typing import Any, NamedTuple

from redco_eqx._compiled.hlo import Instruction, Program, instruction

_CARRIED = "carried"  # the tuple that a loop carries


class _Slot(NamedTuple):
    """What the loop carries at `place` when a trip begins, plus `offset`."""

    place: int
    offset: int


class _Test(NamedTuple):
    direction: str
    left: Any
    right: Any


_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


def trip_count(program: Program, computation: str, loop: Instruction) -> int | None:
    """How often the body runs, or None if the text does not tell."""
    if known := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.line):
        return int(known[1])
    body, condition = loop.names("body")[0], loop.names("condition")[0]
    before = instruction(program.computations[computation][loop.operands[0]])
    after = instruction(program.computations[body][program.roots[body]])
    test = _value(program, condition, program.roots[condition], [_CARRIED])
    if not isinstance(test, _Test) or before.opcode != "tuple" or after.opcode != "tuple":
        return None

    def first(place: int) -> Any:
        return _value(program, computation, before.operands[place], [])

    def following(place: int) -> Any:
        return _value(program, body, after.operands[place], [_CARRIED])

    direction, counter, limit = test
    if not isinstance(counter, _Slot):
        direction, counter, limit = _MIRRORED[direction], limit, counter
    if isinstance(limit, _Slot) and following(limit.place) == _Slot(limit.place, 0):
        carried = first(limit.place)  # a limit that is carried along unchanged
        limit = carried + limit.offset if isinstance(carried, int) else None
    if not isinstance(counter, _Slot) or not isinstance(limit, int):
        return None
    start, step = first(counter.place), following(counter.place)
    if not isinstance(start, int) or not isinstance(step, _Slot) or step.place != counter.place:
        return None
    distance, stride = limit - start - counter.offset, step.offset
    if stride < 0:
        distance, stride, direction = -distance, -stride, _MIRRORED[direction]
    if stride == 0 or direction not in ("LT", "LE", "NE") or (direction == "NE" and distance % stride):
        return None
    return max(0, -(-(distance + (direction == "LE")) // stride))


def _value(program: Program, computation: str, name: str, arguments: list[Any]) -> Any:
    """What an instruction gives: an int, a `_Slot`, a `_Test`, `_CARRIED`, or None for all else."""
    x = instruction(program.computations[computation][name])
    follow = partial(_value, program, computation, arguments=arguments)
    match x.opcode:
        case "constant":
            return int(x.operands[0]) if re.fullmatch(r"-?\d+", x.operands[0]) else None
        case "parameter":
            place = int(x.operands[0])
            return arguments[place] if place < len(arguments) else None
        case "copy" | "bitcast" | "convert" | "reshape":
            return follow(x.operands[0])
        case "get-tuple-element":
            carried = follow(x.operands[0]) == _CARRIED
            return _Slot(int(x.names("index")[0]), 0) if carried else None
        case "compare":
            return _Test(x.names("direction")[0], follow(x.operands[0]), follow(x.operands[1]))
        case "add" | "subtract":
            left, right = follow(x.operands[0]), follow(x.operands[1])
            if x.opcode == "add" and isinstance(left, int):
                left, right = right, left
            if not isinstance(right, int):
                return None
            right = right if x.opcode == "add" else -right
            if isinstance(left, _Slot):
                return _Slot(left.place, left.offset + right)
            return left + right if isinstance(left, int) else None
        case "fusion" | "call":
            callee = [*x.names("calls"), *x.names("to_apply")][0]
            return _value(program, callee, program.roots[callee], [follow(y) for y in x.operands])
    return None
