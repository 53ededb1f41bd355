"""The text of a compiled program (optimized HLO): instructions, source lines, trip
counts, device groups."""

import math
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

# The line of Python that an instruction was compiled from, according to the tables at
# the start of the text.


_FILE = re.compile(r'^(\d+) "(.*)"$', re.MULTILINE)
_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", re.MULTILINE)
_FRAME = re.compile(
    r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?", re.MULTILINE
)
# Frames in these files implement an operation. The line to report is the one of the
# model or loop that uses it.
_LIBRARIES = re.compile(
    r"-packages/(?:jax\w*|beartype|equinox|optax|einops)/|/redco_eqx/_\w+/|^<"
)
# What a step adds to the user's functions has no line of theirs.
_STEP = re.compile(r"/redco_eqx/_step/(\w+)\.py:")
_ADDED = {
    "constraints": "split_activations",
    "gather": "gather of stored weights",
    "optimizer": "update",
    "workarounds": "workaround for XLA",
}


def source_lines(text: str) -> dict[int, str]:
    """Return `{id of a stack frame: "/home/me/train.py:12"}`: the innermost line
    outside libraries or, if there is none, the innermost line overall. For an operation
    that this library adds to a step, it is `"redco_eqx: split_activations"`, for
    example. The dict is empty if the text has no such tables."""
    files = dict(_FILE.findall(text.partition("\nFunctionNames\n")[0]))
    places = {
        key: f"{files[file]}:{line}" for key, file, line in _LOCATION.findall(text)
    }
    frames = {
        int(key): (places[place], int(parent or 0))
        for key, place, parent in _FRAME.findall(text)
    }
    # Parents are numbered from one or from zero, depending on the version. The parent
    # of the outermost frame has the lowest number, and is not a frame.
    outermost = min((parent for _, parent in frames.values()), default=0)

    def source(frame: int) -> str:
        innermost = frames[frame][0]
        while frame in frames:
            found, parent = frames[frame]
            if not _LIBRARIES.search(found):
                return found
            step = _STEP.search(found)
            if step is not None:
                return f"redco_eqx: {_ADDED.get(step[1], 'train_step')}"
            frame = parent - outermost
        return innermost

    return {frame: source(frame) for frame in frames}


# The text of a compiled program (optimized HLO): its computations, and their
# instructions.


@dataclass(frozen=True)
class Instruction:
    """One line of the text."""

    name: str
    shape: str
    opcode: str
    # Names without "%"; the value of a constant; the number of a parameter.
    operands: tuple[str, ...]
    attributes: str  # with empty strings, because their text is not an attribute
    line: str

    def names(self, attribute: str) -> list[str]:
        """Return the names in `attribute=%name` or `attribute={%name, %name}`."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        if found is None:
            return []
        return re.findall(r"[\w.\-]+", found[1])


@dataclass(frozen=True)
class HloModule:
    """The text, split into lines of instructions. Each line is parsed only when it is
    needed."""

    computations: dict[str, dict[str, str]]  # name -> {instruction's name: its line}
    roots: dict[str, str]
    entry: str
    num_devices: int | None  # None if the text has no header
    sources: dict[int, str]  # id of a stack frame -> "file.py:12"


_COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_DEFINITION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def parse(text: str) -> HloModule:
    """Read a program from text. Raises `ValueError` if the text is not the optimized
    HLO of one program."""
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
                current = start[2]
                name = None
                computations[current] = {}
                if start[1]:
                    entries.append(current)
        elif line.lstrip().startswith("}") and not (
            name is not None and _is_open(computations[current][name])
        ):
            current = None
        elif definition := _DEFINITION.match(line):
            name = definition[2]
            computations[current][name] = line
            if definition[1]:
                roots[current] = definition[2]
        elif name is not None:  # a long instruction has several lines
            computations[current][name] += " " + line.strip()
    if len(entries) != 1:
        raise ValueError(
            f"communication: the text has {len(entries)} ENTRY computations, but one "
            "is expected. Pass what jit_step(step).lower(state, batch).compile() "
            "returns, or its as_text()."
        )
    return HloModule(computations, roots, entries[0], num_devices, source_lines(text))


def _is_open(line: str) -> bool:
    """Return true if an instruction goes on in the next line. The metadata of a kernel
    for TPUs ends with a line that begins like the end of a computation."""
    bare = _STRING.sub("", line)
    return bare.count("{") > bare.count("}")


@lru_cache(maxsize=1024)
def instruction(line: str) -> Instruction:
    """Parse a line of the text."""
    definition = _DEFINITION.match(line)
    assert definition is not None  # only matching lines are stored
    rest = re.sub(r"/\*index=\d+\*/", "", definition[3])
    head = re.match(r"(\(.*?\)|\S+)\s+([\w\-]+)(?=\()", rest)
    if head is None:
        raise ValueError(
            "communication: cannot read this line as an instruction: "
            f"{line.strip()[:300]}"
        )
    operands, *_ = split_commas(rest[head.end() :])
    attributes = _STRING.sub('""', rest[head.end() + len(operands) :])
    # An operand has a shape and "%", or not.
    names = [
        operand.split()[-1].lstrip("%")
        for operand in split_commas(operands.strip()[1:-1])
    ]
    return Instruction(definition[2], head[1], head[2], tuple(names), attributes, line)


def split_commas(text: str) -> list[str]:
    """Return the parts between the commas that are not in brackets."""
    parts = []
    depth = 0
    start = 0
    for mark in re.finditer(r"[()\[\]{},]", text):
        if mark[0] != ",":
            depth += 1 if mark[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [part for part in [*parts, text[start:]] if part.strip()]


# Shapes as HLO prints them: `"f32[8,128]"`.


_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


def num_elements(array: str) -> int:
    """Return the number of elements of `"f32[8,128]"`."""
    dims = array.rstrip("]").split("[")[1]
    # "<=8" is a dim of at most 8.
    return math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)


def shape_bytes(array: str) -> int:
    """Return the size of `"f32[8,128]"` in bytes. Elements smaller than a byte are
    packed."""
    dtype = array.split("[")[0]
    # In "s4", "u32", "f16", "f8e4m3fn" and "c64", the number is the width.
    width = re.match(r"[sufc](\d+)", dtype)
    bits = _BITS.get(dtype) if width is None else int(width[1])
    if bits is None:
        raise ValueError(
            f"communication: the width of dtype {dtype!r} (in {array}) is not known."
        )
    return -(-bits * num_elements(array) // 8)


# Trip counts of loops. The text has them for CPU and GPU. For TPU, the counters of the
# loop are evaluated here.


_MOST_TRIPS = 10_000
# A number; the numbers that a loop carries, by position; unknown.
_Value = int | dict[int, Any] | None


def trip_count(program: HloModule, computation: str, loop: Instruction) -> int | None:
    """Return the number of trips of a loop, or None if the text does not determine
    it."""
    if known := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.line):
        return int(known[1])
    body = loop.names("body")[0]
    condition = loop.names("condition")[0]
    before = instruction(program.computations[computation][loop.operands[0]])
    after = instruction(program.computations[body][program.roots[body]])
    if before.opcode != "tuple" or after.opcode != "tuple":
        return None
    carried = {
        place: _value(program, computation, name, [])
        for place, name in enumerate(before.operands)
    }
    for num_trips in range(_MOST_TRIPS):
        goes_on = _value(program, condition, program.roots[condition], [carried])
        if goes_on is None:
            return None
        if not goes_on:
            return num_trips
        # Only numbers that are known can tell the next ones.
        known = [place for place, value in carried.items() if value is not None]
        carried = {
            place: _value(program, body, after.operands[place], [carried])
            for place in known
        }
    return None


def _value(
    program: HloModule, computation: str, name: str, arguments: Sequence[_Value]
) -> _Value:
    """Compute the value of an instruction, in a computation that is called with
    `arguments`."""
    x = instruction(program.computations[computation][name])
    if x.opcode == "parameter":
        number = int(x.operands[0])
        return arguments[number] if arguments else None
    if not re.match(r"(?:pred|[su]\d+)\[\]", x.shape):  # not a whole number
        return None
    if x.opcode == "constant":
        # The other constants are `true`, `false` and numbers with a point.
        is_whole = re.fullmatch(r"-?\d+", x.operands[0])
        return int(x.operands[0]) if is_whole else None
    if x.opcode == "get-tuple-element":
        carried = _value(program, computation, x.operands[0], arguments)
        if not isinstance(carried, dict):
            return None
        return carried.get(int(x.names("index")[0]))
    operands = [
        _value(program, computation, operand, arguments) for operand in x.operands
    ]
    match x.opcode, operands:
        case "copy" | "bitcast" | "convert" | "reshape", [value]:
            return value
        case "fusion" | "call", _:
            callee = [*x.names("calls"), *x.names("to_apply")][0]
            return _value(program, callee, program.roots[callee], operands)
        case "add", [int(left), int(right)]:
            return left + right
        case "subtract", [int(left), int(right)]:
            return left - right
        case "compare", [int(left), int(right)]:
            return getattr(operator, x.names("direction")[0].lower())(left, right)
    return None


# Groups of devices in a compiled program, named by the axes of the mesh.
#
# HLO names a device by its position in `mesh.devices.flat`.


Sizes = tuple[tuple[str, int], ...]  # the mesh: names and sizes of its axes

_LIST = r"\{(?:\{[\d,]*\}[,\s]*)*\}"
_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
_AXIS = r"'[^']*'|[\w.\-]+"
_MESH = rf"mesh\[([^\]]*)\](?:, device_ids=\(({_IOTA}|[\d,]+)\))? \{{([^}}]*)\}}"
GROUPS = re.compile(
    rf"(?:replica_groups|source_target_pairs)=({_LIST}|\[[\d,]+\]<={_IOTA}|{_MESH})"
)


@lru_cache(maxsize=1024)
def group_axes(printed: str, mesh: Sizes) -> tuple[tuple[str, ...], bool, int]:
    """Return the axes along which the members of a group differ, true if every group
    has all devices along these axes, and the size of the largest group."""
    names, shape = zip(*mesh)
    groups = [sorted(set(group)) for group in _groups(printed, math.prod(shape))]
    coordinates = [np.stack(np.unravel_index(group, shape)) for group in groups]
    # For each group, find the axes along which the coordinates of its devices differ.
    differing = {tuple(np.flatnonzero(np.ptp(x, axis=1)).tolist()) for x in coordinates}
    along = sorted(set().union(*differing))
    sizes = {len(group) for group in groups}
    num_along = math.prod(shape[axis] for axis in along)
    whole = len(differing) == 1 and sizes == {num_along}
    return tuple(names[axis] for axis in along), whole, max(sizes)


def _groups(printed: str, num_devices: int) -> list[list[int]]:
    if printed.startswith("{"):
        # {{0,1},{2,3}}, or {} for one group of all devices.
        groups = [
            _numbers(group) for group in re.findall(r"\{([\d,]*)\}", printed[1:-1])
        ]
        return groups or [list(range(num_devices))]
    if printed.startswith("["):
        # [4,2]<=[2,4]T(1,0): 4 groups of 2, cut from the numbers in shape [2,4],
        # transposed.
        shape, numbers = printed.split("<=")
        return _iota(numbers).reshape(_numbers(shape)).tolist()
    # mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'a','b':(2)4}: a group lies along
    # 'a', and along the 4 of 'b' that come after its outer 2. XLA makes up these axes.
    found = re.fullmatch(_MESH, printed)
    assert found is not None  # by GROUPS
    sizes, listed, grouped = found.groups()
    # For each axis, its size and the distance between neighbours.
    axes = {}
    num_devices = 1
    for name, size in reversed(re.findall(rf"({_AXIS})=(\d+)", sizes)):
        axes[name] = int(size), num_devices
        num_devices *= int(size)
    # `group`: for each place the first one of its group.
    place = group = np.arange(num_devices)
    for name, outer, inner in re.findall(rf"({_AXIS})(?::\((\d+)\)(\d+))?", grouped):
        size, stride = axes[name]
        num = int(inner or size)
        # An outer part of 2 divides the axis into two halves. Inside them, `num` places
        # follow at this distance.
        apart = stride * size // num // int(outer or 1)
        group = group - place // apart % num * apart
    devices = place
    if listed is not None and "[" in listed:
        devices = _iota(listed)
    elif listed is not None:
        devices = np.array(_numbers(listed))
    return [devices[group == first].tolist() for first in np.unique(group)]


def _iota(printed: str) -> np.ndarray:
    """Read `[2,4]T(1,0)`: the numbers from 0 in that shape, transposed, in a row."""
    shape, _, order = printed.partition("T")
    dims = _numbers(shape)
    numbers = np.arange(math.prod(dims)).reshape(dims)
    if order:
        numbers = numbers.transpose(_numbers(order))
    return numbers.reshape(-1)


def _numbers(printed: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", printed)]
