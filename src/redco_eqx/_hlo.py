"""Collectives of a compiled program: which, over which mesh axes, how often, how many bytes.

The optimized HLO text of a compiled program is the one place where its communication can be read
without running it. Loops are multiplied out: the numbers are those of one call of the program.
Not counted: transfers to and from the host, and point-to-point `send` and `recv`.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


@dataclass(frozen=True)
class Collective:
    """One collective instruction, at one place that the program calls it from.

    **Attributes:**

    - `kind`: one of `KINDS`.
    - `axes`: the mesh axes, in the mesh's order, along which the devices of one group differ (of a
        permute: sender and receiver). Axes of size one are never named. Groups that are not all the
        devices along those axes have the one label `("part of tensor",)`: it never equals a whole axis.
    - `group_size`: number of devices in one group; 2 for a permute.
    - `shapes`: shapes of the results on one device, `"f32[8,128]"`; several where the compiler combined
        several collectives into one.
    - `result_bytes`: size of all results on one device, for one execution, without padding of tiles.
    - `loops`: trip counts of the enclosing loops, outermost first; None where the text does not tell.
    - `conditional`: whether it is in a branch of a conditional; only that with the most bytes is kept.
    - `source`: the JAX operation that it was compiled from (`op_name`), or the instruction's own name.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    shapes: tuple[str, ...]
    result_bytes: int
    loops: tuple[int | None, ...]
    conditional: bool
    source: str

    @property
    def count(self) -> int:
        """Executions per call of the program; a loop of unknown length counts as one trip."""
        return math.prod(n for n in self.loops if n is not None)

    @property
    def bound(self) -> str:
        """How the truth stands to `count`: `""` if equal, `">="` in a loop of unknown length, `"<="` in
        a conditional, `"~"` in both."""
        return _BOUNDS[None in self.loops, self.conditional]

    @property
    def total_bytes(self) -> int:
        """Bytes of results on one device, per call of the program."""
        return self.count * self.result_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that one device sends per call of the program, if the ring algorithm is used.

        It makes kinds comparable: an all-reduce is a reduce-scatter and an all-gather.
        """
        n = self.group_size
        factors = {
            "all-reduce": 2 * (n - 1) / n,
            "all-gather": (n - 1) / n,
            "reduce-scatter": n - 1,
            "all-to-all": (n - 1) / n,
            "ragged-all-to-all": (n - 1) / n,
        }
        return round(self.total_bytes * factors.get(self.kind, 1))


_BOUNDS = {(False, False): "", (True, False): ">=", (False, True): "<=", (True, True): "~"}


@dataclass(frozen=True)
class Total:
    """Executions, and bytes on one device, per call of the program; `bound` as in `Collective`."""

    count: int
    result_bytes: int
    sent_bytes: int
    bound: str


@dataclass(frozen=True)
class Summary:
    """Collectives added up by kind and axes, most bytes first. `str()` is a table."""

    rows: dict[tuple[str, tuple[str, ...]], Total]
    total: Total
    largest: tuple[Collective, ...]

    @property
    def counts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """`{(kind, axes): count}`. Compare it as a whole, so that nothing else can be there."""
        return {key: row.count for key, row in self.rows.items()}

    def __str__(self) -> str:
        named = [(kind, ",".join(axes), row) for (kind, axes), row in self.rows.items()]
        table = [["kind", "axes", "count", "MiB", "MiB sent"]]
        for kind, axes, row in [*named, ("total", "", self.total)]:
            sizes = [_mib(row.result_bytes), _mib(row.sent_bytes)]
            table.append([kind, axes, f"{row.bound}{row.count}", *sizes])
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = []
        for row in table:
            cells = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2])]
            cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:])]
            lines.append("  ".join(cells))
        for c in self.largest:
            what = f"{c.bound}{c.count} x {c.kind} over {','.join(c.axes)}, {' '.join(c.shapes)}"
            lines.append(f"{_mib(c.total_bytes)} MiB: {what}, {c.source}")
        return "\n".join(lines)


def collectives(compiled: jax.stages.Compiled | str, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """The collectives of a compiled program, in the order of the program.

    An asynchronous pair counts once. A group of one device does not communicate and is left out.

    **Arguments:**

    - `compiled`: `jax.jit(f).lower(...).compile()` or its `as_text()`, for CPU, GPU or TPU.
    - `mesh`: the mesh that the program was compiled for. HLO names a device by its position in
        `mesh.devices.flat`, so only the names and sizes of the axes are used.

    **Raises:**

    `ValueError` if the text is not the optimized HLO of one program, is for another number of devices
    than the mesh has, or holds a form that is not known here. Nothing is skipped silently.
    """
    program = _parse(compiled if isinstance(compiled, str) else compiled.as_text() or "")
    if program.num_devices not in (None, mesh.size):
        raise ValueError(
            f"collectives: the program is for {program.num_devices} device(s), but the mesh has "
            f"{mesh.size}: {dict(mesh.shape)}. Pass the mesh that the program's arguments lie on."
        )
    return list(_walk(program, program.entry, tuple(mesh.shape.items()), (), False))


def summarize(found: Iterable[Collective], *, largest: int = 0) -> Summary:
    """Adds up collectives by kind and axes; names the `largest` ones by bytes, with their sources."""
    found = list(found)
    groups: dict[tuple[str, tuple[str, ...]], list[Collective]] = {}
    for c in found:
        groups.setdefault((c.kind, c.axes), []).append(c)
    rows = {key: _total(members) for key, members in groups.items()}
    ranked = sorted(found, key=lambda c: -c.total_bytes)
    return Summary(
        rows=dict(sorted(rows.items(), key=lambda item: (-item[1].result_bytes, item[0]))),
        total=_total(found),
        largest=tuple(ranked[:largest]),
    )


def _total(members: list[Collective]) -> Total:
    return Total(
        count=sum(c.count for c in members),
        result_bytes=sum(c.total_bytes for c in members),
        sent_bytes=sum(c.sent_bytes for c in members),
        bound=_BOUNDS[any(None in c.loops for c in members), any(c.conditional for c in members)],
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.3f}"


# The text: computations, and their instructions, parsed when they are needed.


@dataclass(frozen=True)
class _Instruction:
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
class _Program:
    computations: dict[str, dict[str, str]]  # name -> {instruction's name: its line}
    roots: dict[str, str]
    entry: str
    num_devices: int | None  # None if the text has no header


_COMPUTATION = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
_DEFINITION = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s+=\s+(.*)$")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_LEAF = re.compile(r"\w+\[[^\]]*\]")


def _parse(text: str) -> _Program:
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
            f"collectives: the text has {len(entries)} ENTRY computations, but one is expected. Pass "
            "the optimized HLO of one program: jax.jit(f).lower(...).compile(), or its as_text()."
        )
    return _Program(computations, roots, entries[0], num_devices)


@lru_cache(maxsize=1024)
def _instruction(line: str) -> _Instruction:
    definition = _DEFINITION.match(line)
    assert definition is not None  # lines are stored by it
    rest = re.sub(r"/\*index=\d+\*/", "", definition[3])
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode = rest.partition("(")[0]
    if not re.fullmatch(r"[\w\-]+", opcode):
        raise ValueError(f"collectives: this is not understood as an instruction: {line.strip()[:300]}")
    end = _closing(rest, len(opcode))
    # An operand comes with or without its shape and "%".
    operands = [x.split()[-1].lstrip("%") for x in _split(rest[len(opcode) + 1 : end - 1])]
    attributes = _STRING.sub('""', rest[end:])
    return _Instruction(definition[2], shape, opcode, tuple(operands), attributes, line)


def _closing(text: str, opening: int) -> int:
    """One past the parenthesis that closes the one at `opening`."""
    depth = 0
    for mark in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if mark[0] == "(" else -1
        if depth == 0:
            return mark.end()
    return len(text)


def _split(text: str) -> list[str]:
    """The parts between the commas that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for mark in re.finditer(r"[()\[\]{},]", text):
        if mark[0] != ",":
            depth += 1 if mark[0] in "([{" else -1
        elif depth == 0:
            parts.append(text[start : mark.start()])
            start = mark.end()
    return [part for part in [*parts, text[start:]] if part.strip()]


# The walk through the calls.

_Sizes = tuple[tuple[str, int], ...]  # the mesh: names and sizes of its axes
# Only these lines hold or call a collective; no other line is parsed.
_INTERESTING = re.compile(
    rf"\b(?:{'|'.join(KINDS)})(?:-start)?\(|\b(?:calls|to_apply|body|called_computations)="
    r"|\bconditional\("
)
_CALLS = ("calls", "to_apply", "called_computations")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def _walk(
    program: _Program,
    computation: str,
    mesh: _Sizes,
    loops: tuple[int | None, ...],
    conditional: bool,
) -> Iterator[Collective]:
    if computation not in program.computations:
        raise ValueError(f"collectives: the text calls {computation!r}, but does not hold it.")
    lines = program.computations[computation].values()
    starts = [_instruction(line) for line in lines if '"AsyncCollectiveStart"' in line]
    started = {name for x in starts for name in x.operands}
    walk = partial(_walk, program, mesh=mesh, loops=loops, conditional=conditional)
    for x in (_instruction(line) for line in lines if _INTERESTING.search(line)):
        if x.opcode.removesuffix("-start") in KINDS:
            # TPU prints a collective that is fused with other work in each fusion that drives it on.
            driven = "chain_id=" in x.attributes and x.name not in started
            found = None if driven else _collective(x, mesh, loops, conditional)
            if found is not None:
                yield found
        elif x.opcode == "while":
            trips = _trip_count(program, computation, x)
            yield from walk(x.names("body")[0], loops=(*loops, trips))
            tests = None if trips is None else trips + 1
            yield from walk(x.names("condition")[0], loops=(*loops, tests))
        elif x.opcode == "conditional":
            branches = [callee for key in _BRANCHES for callee in x.names(key)]
            inside = [list(walk(callee, conditional=True)) for callee in branches]
            yield from max(inside, key=lambda branch: sum(c.total_bytes for c in branch))
        elif not x.opcode.endswith(("-update", "-done")):
            for callee in (callee for key in _CALLS for callee in x.names(key)):
                for c in walk(callee):
                    # TPU: an all-reduce fused with the slice that a device keeps of it.
                    scattered = callee.startswith("all-reduce-scatter") and c.kind == "all-reduce"
                    yield replace(c, kind="reduce-scatter", **_result(x, x.shape)) if scattered else c


def _collective(
    x: _Instruction, mesh: _Sizes, loops: tuple[int | None, ...], conditional: bool
) -> Collective | None:
    kind = x.opcode.removesuffix("-start")
    permute = kind == "collective-permute"
    printed = (_PAIRS if permute else _GROUPS).search(x.attributes)
    if printed is None:
        raise ValueError(f"collectives: the groups of this are not understood: {x.line.strip()[:300]}")
    axes, whole, group_size = _group_axes(printed[1], mesh)
    if group_size == 1:
        return None
    shape = x.shape
    if x.opcode.endswith("-start") and kind != "all-reduce":
        # (operands, results, ...); an all-reduce's operands are like its results, and not printed.
        shape = _split(shape[1:-1])[1]
    return Collective(
        kind=kind,
        axes=axes if whole or permute else (f"part of {','.join(axes)}",),
        group_size=group_size,
        loops=loops,
        conditional=conditional,
        **_result(x, shape),
    )


def _result(x: _Instruction, shape: str) -> dict[str, Any]:
    shapes = tuple(_LEAF.findall(shape))
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', x.line)
    size = sum(map(_num_bytes, shapes))
    return {"shapes": shapes, "result_bytes": size, "source": name[1] if name else x.name}


_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


def _num_bytes(shape: str) -> int:
    """Bytes of `"f32[8,128]"`; elements of less than a byte are packed."""
    dtype, dims = shape.rstrip("]").split("[")
    # "s4", "u32", "f16", "f8e4m3fn", "c64": the number is the width.
    width = re.match(r"[sufc](\d+)", dtype)
    bits = int(width[1]) if width else _BITS.get(dtype)
    if bits is None:
        raise ValueError(f"collectives: the width of dtype {dtype!r}, of {shape}, is not known.")
    # "<=8" is a dim of at most 8.
    return -(-bits * math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim) // 8)


# Groups of devices, named by their positions in the mesh.

_LIST = r"\{(?:\{[\d,]*\}[,\s]*)*\}"
_IOTA = r"\[[\d,]+\](?:T\([\d,]+\))?"
_AXIS = r"'[^']*'|[\w.\-]+"
_MESH = rf"mesh\[([^\]]*)\](?:, device_ids=\(({_IOTA}|[\d,]+)\))? \{{([^}}]*)\}}"
_GROUPS = re.compile(rf"replica_groups=({_LIST}|\[[\d,]+\]<={_IOTA}|{_MESH})")
_PAIRS = re.compile(rf"source_target_pairs=({_LIST})")


@lru_cache(maxsize=1024)
def _group_axes(printed: str, mesh: _Sizes) -> tuple[tuple[str, ...], bool, int]:
    """The axes along which members of a group differ; whether every group is all of their devices; the
    size of the largest group."""
    shape = tuple(size for _, size in mesh)
    differing: set[tuple[int, ...]] = set()
    whole, largest = True, 1
    for group in _groups(printed, math.prod(shape)):
        members = sorted(set(group))
        if members[-1] >= math.prod(shape):
            raise ValueError(f"collectives: device {members[-1]} is not in the mesh {dict(mesh)}.")
        coordinates = np.unravel_index(members, shape)
        axes = tuple(i for i, along in enumerate(coordinates) if len(set(along.tolist())) > 1)
        differing.add(axes)
        whole = whole and len(members) == math.prod(shape[i] for i in axes)
        largest = max(largest, len(members))
    named = tuple(name for i, (name, _) in enumerate(mesh) if any(i in axes for axes in differing))
    return named, whole and len(differing) == 1, largest


def _groups(printed: str, num_devices: int) -> list[list[int]]:
    if printed.startswith("{"):
        # {{0,1},{2,3}}, or {} for one group of all.
        groups = [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", printed[1:-1])]
        return groups or [list(range(num_devices))]
    if printed.startswith("["):
        # [4,2]<=[2,4]T(1,0): 4 groups of 2, cut from the numbers in shape [2,4], transposed.
        shape, numbers = printed.split("<=")
        return _iota(numbers).reshape(_numbers(shape)).tolist()
    # mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'a','b':(2)4}: a group lies along 'a', and along the
    # 4 of 'b' that come after its outer 2. The axes are of XLA's own making.
    found = re.fullmatch(_MESH, printed)
    assert found is not None  # by _GROUPS
    sizes, listed, grouped = found.groups()
    wanted = re.findall(rf"({_AXIS})(?::\((\d+)\)(\d+))?", grouped)
    dims: list[int] = []
    inner: list[int] = []
    for name, size in re.findall(rf"({_AXIS})=(\d+)", sizes):
        parts = {int(pre or 1): int(n or size) for axis, pre, n in wanted if axis == name}
        cuts = sorted({1, int(size), *parts, *(pre * n for pre, n in parts.items())})
        for low, high in pairwise(cuts):
            inner += [len(dims)] if low in parts else []
            dims.append(high // low)
    devices = np.arange(math.prod(dims))
    if listed is not None:
        devices = _iota(listed) if "[" in listed else np.array(_numbers(listed))
    order = [i for i in range(len(dims)) if i not in inner] + inner
    group_size = math.prod(dims[i] for i in inner)
    return devices.reshape(dims).transpose(order).reshape(-1, group_size).tolist()


def _iota(printed: str) -> np.ndarray:
    """`[2,4]T(1,0)`: the numbers from 0 in that shape, transposed, in a row."""
    shape, _, order = printed.partition("T")
    dims = _numbers(shape)
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(_numbers(order) if order else None).reshape(-1)


def _numbers(printed: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", printed)]


# Trip counts. XLA writes them down for CPU and GPU; for TPU the loop's counter is followed here.

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


def _trip_count(program: _Program, computation: str, loop: _Instruction) -> int | None:
    """How often the body runs, or None if the text does not tell."""
    if known := re.search(r'known_trip_count\\?":\{\\?"n\\?":\\?"(\d+)', loop.line):
        return int(known[1])
    body, condition = loop.names("body")[0], loop.names("condition")[0]
    before = _instruction(program.computations[computation][loop.operands[0]])
    after = _instruction(program.computations[body][program.roots[body]])
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


def _value(program: _Program, computation: str, name: str, arguments: list[Any]) -> Any:
    """What an instruction gives: an int, a `_Slot`, a `_Test`, `_CARRIED`, or None for all else."""
    x = _instruction(program.computations[computation][name])
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
