"""Collectives of a compiled program: which, over which mesh axes, how often, how many bytes.

The optimized HLO text of a compiled program is the one place where its communication can be read
without running it. Loops are multiplied out: the numbers are those of one call of the program.
Not counted: transfers to and from the host, and point-to-point `send` and `recv`.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from redco_eqx._compiled.groups import GROUPS, PAIRS, Sizes, group_axes
from redco_eqx._compiled.hlo import Instruction, Program, instruction, parse, split
from redco_eqx._compiled.loops import trip_count

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
    program = parse(compiled if isinstance(compiled, str) else compiled.as_text() or "")
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


# The walk through the calls.

_LEAF = re.compile(r"\w+\[[^\]]*\]")
# Only these lines hold or call a collective; no other line is parsed.
_INTERESTING = re.compile(
    rf"\b(?:{'|'.join(KINDS)})(?:-start)?\(|\b(?:calls|to_apply|body|called_computations)="
    r"|\bconditional\("
)
_CALLS = ("calls", "to_apply", "called_computations")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def _walk(
    program: Program,
    computation: str,
    mesh: Sizes,
    loops: tuple[int | None, ...],
    conditional: bool,
) -> Iterator[Collective]:
    if computation not in program.computations:
        raise ValueError(f"collectives: the text calls {computation!r}, but does not hold it.")
    lines = program.computations[computation].values()
    starts = [instruction(line) for line in lines if '"AsyncCollectiveStart"' in line]
    started = {name for x in starts for name in x.operands}
    walk = partial(_walk, program, mesh=mesh, loops=loops, conditional=conditional)
    for x in (instruction(line) for line in lines if _INTERESTING.search(line)):
        if x.opcode.removesuffix("-start") in KINDS:
            # TPU prints a collective that is fused with other work in each fusion that drives it on.
            driven = "chain_id=" in x.attributes and x.name not in started
            found = None if driven else _collective(x, mesh, loops, conditional)
            if found is not None:
                yield found
        elif x.opcode == "while":
            trips = trip_count(program, computation, x)
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
    x: Instruction, mesh: Sizes, loops: tuple[int | None, ...], conditional: bool
) -> Collective | None:
    kind = x.opcode.removesuffix("-start")
    permute = kind == "collective-permute"
    printed = (PAIRS if permute else GROUPS).search(x.attributes)
    if printed is None:
        raise ValueError(f"collectives: the groups of this are not understood: {x.line.strip()[:300]}")
    axes, whole, group_size = group_axes(printed[1], mesh)
    if group_size == 1:
        return None
    shape = x.shape
    if x.opcode.endswith("-start") and kind != "all-reduce":
        # (operands, results, ...); an all-reduce's operands are like its results, and not printed.
        shape = split(shape[1:-1])[1]
    return Collective(
        kind=kind,
        axes=axes if whole or permute else (f"part of {','.join(axes)}",),
        group_size=group_size,
        loops=loops,
        conditional=conditional,
        **_result(x, shape),
    )


def _result(x: Instruction, shape: str) -> dict[str, Any]:
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
