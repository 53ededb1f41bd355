"""The text of a compiled program (optimized HLO): instructions, source lines, shapes, trip counts, buffers."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple, TypeGuard

# Which line of Python an instruction was compiled from, by the tables at the head of the text.


_SECTION = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n?)*)", re.MULTILINE)
# Frames of these say how a thing is computed, not where a model or a loop asks for it.
_LIBRARIES = re.compile(
    r"-packages/(?:jax|jaxlib|jaxtyping|beartype|equinox|optax|einops)/|/redco_eqx/_parallel/|^<"
)


def source_lines(text: str) -> dict[int, str]:
    """`{id of a stack frame: "/home/me/train.py:12"}`: the innermost line that is not of a library, or the
    innermost if all are. Empty where the text has no such tables."""
    sections = {name: dict(re.findall(r"(\d+) (.*)", rows)) for name, rows in _SECTION.findall(text)}
    if len(sections) != 3:
        return {}
    places = {}
    for key, row in sections["FileLocations"].items():
        file = sections["FileNames"][_number(row, "file_name_id")].strip('"')
        places[key] = f"{file}:{_number(row, 'line')}"
    frames = {
        int(key): (places[_number(row, "file_location_id")], int(_number(row, "parent_frame_id")))
        for key, row in sections["StackFrames"].items()
    }
    # Parents are numbered from one or from zero, by version; the outermost frame's is the least, and no frame.
    outermost = min((parent for _, parent in frames.values()), default=0)

    def source(frame: int) -> str:
        found = innermost = frames[frame][0]
        while frame in frames:
            found, parent = frames[frame]
            if not _LIBRARIES.search(found):
                return found
            frame = parent - outermost
        return innermost

    return {frame: source(frame) for frame in frames}


def _number(row: str, field: str) -> str:
    found = re.search(rf"\b{field}=(\d+)", row)
    return found[1] if found else "0"


# The text of a compiled program (optimized HLO): its computations, and their instructions.


@dataclass(frozen=True)
class Instruction:
    """One line of the text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]  # names without "%"; of a constant its value, of a parameter its number
    attributes: str  # with strings emptied: what they say is not an attribute
    line: str

    def names(self, attribute: str) -> list[str]:
        """The names in `attribute=%name` or `attribute={%name, %name}`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return re.findall(r"[\w.\-]+", found[1]) if found else []


@dataclass(frozen=True)
class HloModule:
    """The text, cut into the lines of its instructions, which are parsed when they are wanted."""

    computations: dict[str, dict[str, str]]  # name -> {instruction's name: its line}
    roots: dict[str, str]
    entry: str
    num_devices: int | None  # None if the text has no header
    sources: dict[int, str]  # id of a stack frame -> "file.py:12"

    def source(self, x: Instruction) -> str:
        """The line that an instruction was compiled from; empty where the text does not tell."""
        frame = re.search(r"\bstack_frame_id=(\d+)", x.line)
        return self.sources.get(int(frame[1]), "") if frame else ""


_COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_DEFINITION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def parse(text: str) -> HloModule:
    """The program in a text. Raises `ValueError` if it is not the optimized HLO of one program."""
    computations: dict[str, dict[str, str]] = {}
    roots: dict[str, str] = {}
    entries: list[str] = []
    num_devices = current = name = None
    for line in text.splitlines():
        if line.startswith("HloModule"):
            sizes = re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", line)
            num_devices = math.prod(map(int, sizes))
        elif current is None:
            if start := _COMPUTATION.match(line):
                current, name = start[2], None
                computations[current] = {}
                entries += [current] if start[1] else []
        elif line.lstrip().startswith("}"):
            roots.setdefault(current, name or "")
            current = None
        elif definition := _DEFINITION.match(line):
            name = definition[2]
            computations[current][name] = line
            if definition[1]:
                roots[current] = definition[2]
        elif name is not None:
            computations[current][name] += " " + line.strip()
    if len(entries) != 1:
        raise ValueError(
            f"communication: the text has {len(entries)} ENTRY computations, but one is expected. Pass the "
            "program that jit_step(step).lower(state, batch).compile() returns, or its as_text()."
        )
    return HloModule(computations, roots, entries[0], num_devices, source_lines(text))


@lru_cache(maxsize=1024)
def instruction(line: str) -> Instruction:
    """Parse a line of the text."""
    definition = _DEFINITION.match(line)
    assert definition is not None  # lines are stored by it
    rest = re.sub(r"/\*index=\d+\*/", "", definition[3])
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = rest.partition("(")[0]
    if not re.fullmatch(r"[\w\-]+", opcode):
        raise ValueError(f"communication: this is not understood as an instruction: {line.strip()[:300]}")
    end = _closing(rest, len(opcode))
    # An operand comes with or without its shape and "%".
    operands = [x.split()[-1].lstrip("%") for x in split_commas(rest[len(opcode) + 1 : end - 1])]
    attributes = _STRING.sub('""', rest[end:])
    return Instruction(definition[2], shape, opcode, tuple(operands), attributes, line)


def _closing(text: str, opening: int) -> int:
    """One past the parenthesis that closes the one at `opening`."""
    depth = 0
    for mark in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return mark.end()
    return len(text)


def split_commas(text: str) -> list[str]:
    """The parts between the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for mark in re.finditer(r"[()\[\]{},]", text):
        if mark[0] != ",":
            depth += 1 if mark[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [part for part in [*parts, text[start:]] if part.strip()]


# Shapes as HLO prints them: `"f32[8,128]"`.


_ARRAY = re.compile(r"\w+\[[^\]]*\]")
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


def arrays(shape: str) -> tuple[str, ...]:
    """The arrays in a shape or a tuple of them, without their memory layouts."""
    return tuple(_ARRAY.findall(shape))


def num_elements(array: str) -> int:
    """Elements of `"f32[8,128]"`."""
    dims = array.rstrip("]").split("[")[1]
    # "<=8" is a dim of at most 8.
    return math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)


def shape_bytes(array: str) -> int:
    """Bytes of `"f32[8,128]"`; elements of less than a byte are packed."""
    dtype = array.split("[")[0]
    # "s4", "u32", "f16", "f8e4m3fn", "c64": the number is the width.
    width = re.match(r"[sufc](\d+)", dtype)
    bits = int(width[1]) if width else _BITS.get(dtype)
    if bits is None:
        raise ValueError(f"communication: the width of dtype {dtype!r}, of {array}, is not known.")
    return -(-bits * num_elements(array) // 8)


# Trip counts of loops. XLA writes them down for CPU and GPU; for TPU the loop's counter is followed here.


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


def trip_count(program: HloModule, computation: str, loop: Instruction) -> int | None:
    """Return the number of trips of a loop, or None if the text does not tell."""
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


def _value(program: HloModule, computation: str, name: str, arguments: Sequence[_Value]) -> _Value:
    """Follow an instruction to its value, in a computation that is called with `arguments`."""
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


# The largest values that a compiled program computes: what takes the memory besides its arguments.


# What makes no buffer of its own.
_VIEWS = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"}
_BODIES = ("body", "branch_computations", "true_computation", "false_computation")


@dataclass(frozen=True)
class Buffer:
    """A value on one device.

    - `num_bytes`: its size. `shape`: as `"f32[8,128]"`.
    - `source`: the line that asked for it, `"/home/me/train.py:12"`; empty where the text does not tell.
    """

    num_bytes: int
    shape: str
    source: str


def largest_buffers(program: HloModule, *, most: int = 5) -> list[Buffer]:
    """The values of most bytes, those of one shape and line once. Not all of them exist at the same time."""
    found = dict.fromkeys(_buffers(program, program.entry))
    return sorted(found, key=lambda b: (-b.num_bytes, b.shape, b.source))[:most]


def _buffers(program: HloModule, computation: str) -> Iterator[Buffer]:
    for line in program.computations[computation].values():
        x = instruction(line)
        if x.opcode in _VIEWS:
            bodies = [body for key in _BODIES for body in x.names(key)]
            bodies += x.names("to_apply") if x.opcode == "call" else []
            for body in bodies:
                yield from _buffers(program, body)
            continue
        for shape in arrays(x.shape):
            yield Buffer(shape_bytes(shape), shape, program.source(x))
