"""The collectives of a compiled program, one by one: a walk through its text, with loops multiplied out."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

from redco_eqx._compiled.groups import GROUPS, PAIRS, Sizes, group_axes
from redco_eqx._compiled.hlo import Instruction, Program, instruction, split_commas
from redco_eqx._compiled.loops import trip_count
from redco_eqx._compiled.shapes import arrays, num_bytes

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

    - `kind`: as XLA calls it: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`,
        `"ragged-all-to-all"`, `"collective-permute"` or `"collective-broadcast"`.
    - `axes`: the mesh axes, in the mesh's order, along which the devices of one group differ (of a
        permute: sender and receiver). Axes of size one are never named. Groups that are not all the
        devices along those axes have the one label `("part of tensor",)`: it never equals a whole axis.
    - `group_size`: number of devices in one group; 2 for a permute.
    - `shapes`: shapes of the results on one device, `"f32[8,128]"`; several where the compiler combined
        several collectives into one.
    - `result_bytes`: size of all results on one device, for one execution, without padding of tiles.
    - `loops`: trip counts of the enclosing loops, outermost first; None where the text does not tell.
    - `conditional`: whether it is in a branch of a conditional; only that with the most bytes is kept.
    - `operation`: the JAX operation that it was compiled from, `"jit(step)/transpose(jvp())/dot_general"`,
        or the instruction's own name. What the compiler adds by itself has the operation of what it sends,
        and what it combined has that of one of them.
    - `source`: the line of that operation, `"/home/me/train.py:12"`: the innermost that is not in JAX,
        Equinox, Optax or a building block of this library. Empty where the text does not tell.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    shapes: tuple[str, ...]
    result_bytes: int
    loops: tuple[int | None, ...]
    conditional: bool
    operation: str
    source: str

    @property
    def count(self) -> int:
        """Executions per call of the program; a loop of unknown length counts as one trip."""
        return math.prod(n for n in self.loops if n is not None)

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

    @property
    def is_backward(self) -> bool:
        """Whether it is of a backward pass, by the name that JAX gives to transposed operations."""
        return "transpose(" in self.operation


class _Place(NamedTuple):
    """Where the walk is: in which program on which mesh, and in which loops."""

    program: Program
    mesh: Sizes
    loops: tuple[int | None, ...] = ()
    conditional: bool = False

    def inside(self, num_trips: int | None) -> "_Place":
        return self._replace(loops=(*self.loops, num_trips))


def collectives(program: Program, mesh: Sizes) -> list[Collective]:
    """The collectives of a program, in its order. An asynchronous pair counts once, and a group of one device,
    which does not communicate, not at all. Raises `ValueError` for a form that is not known here."""
    return list(_walk(program.entry, _Place(program, mesh)))


# Only these lines hold or call a collective; no other line is parsed.
_INTERESTING = re.compile(
    rf"\b(?:{'|'.join(KINDS)})(?:-start)?\(|\b(?:calls|to_apply|body|called_computations)="
    r"|\bconditional\("
)
_CALLS = ("calls", "to_apply", "called_computations")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def _walk(computation: str, place: _Place) -> Iterator[Collective]:
    if computation not in place.program.computations:
        raise ValueError(f"communication: the text calls {computation!r}, but does not hold it.")
    lines = place.program.computations[computation].values()
    starts = [instruction(line) for line in lines if '"AsyncCollectiveStart"' in line]
    started = {name for x in starts for name in x.operands}
    for x in (instruction(line) for line in lines if _INTERESTING.search(line)):
        if x.opcode.removesuffix("-start") in KINDS:
            # TPU prints a collective that is fused with other work in each fusion that drives it on.
            driven = "chain_id=" in x.attributes and x.name not in started
            found = None if driven else _collective(x, computation, place)
            if found is not None:
                yield found
        elif x.opcode == "while":
            num_trips = trip_count(place.program, computation, x)
            num_tests = None if num_trips is None else num_trips + 1
            yield from _walk(x.names("body")[0], place.inside(num_trips))
            yield from _walk(x.names("condition")[0], place.inside(num_tests))
        elif x.opcode == "conditional":
            branches = [callee for key in _BRANCHES for callee in x.names(key)]
            found_in = [list(_walk(callee, place._replace(conditional=True))) for callee in branches]
            yield from max(found_in, key=lambda branch: sum(c.total_bytes for c in branch))
        elif not x.opcode.endswith(("-update", "-done")):
            for callee in (callee for key in _CALLS for callee in x.names(key)):
                yield from _called(x, computation, callee, place)


def _called(x: Instruction, computation: str, callee: str, place: _Place) -> Iterator[Collective]:
    for c in _walk(callee, place):
        if callee.startswith("all-reduce-scatter") and c.kind == "all-reduce":
            # TPU: an all-reduce fused with the slice that a device keeps of it.
            yield replace(
                c, kind="reduce-scatter", **_result(x.shape), **_origin(x, computation, place.program)
            )
        else:
            yield c


def _collective(x: Instruction, computation: str, place: _Place) -> Collective | None:
    kind = x.opcode.removesuffix("-start")
    is_permute = kind == "collective-permute"
    printed = (PAIRS if is_permute else GROUPS).search(x.attributes)
    if printed is None:
        raise ValueError(f"communication: the groups of this are not understood: {x.line.strip()[:300]}")
    axes, is_whole, group_size = group_axes(printed[1], place.mesh)
    if group_size == 1:
        return None
    shape = x.shape
    if x.opcode.endswith("-start") and kind != "all-reduce":
        # (operands, results, ...); an all-reduce's operands are like its results, and not printed.
        shape = split_commas(shape[1:-1])[1]
    return Collective(
        kind=kind,
        axes=axes if is_whole or is_permute else (f"part of {','.join(axes)}",),
        group_size=group_size,
        loops=place.loops,
        conditional=place.conditional,
        **_result(shape),
        **_origin(x, computation, place.program),
    )


class _Result(TypedDict):
    shapes: tuple[str, ...]
    result_bytes: int


def _result(shape: str) -> _Result:
    shapes = arrays(shape)
    return {"shapes": shapes, "result_bytes": sum(map(num_bytes, shapes))}


class _Origin(TypedDict):
    operation: str
    source: str


def _origin(x: Instruction, computation: str, program: Program) -> _Origin:
    lines = program.computations[computation]
    told = x
    while 'op_name="' not in told.line and told.operands and told.operands[0] in lines:
        told = instruction(lines[told.operands[0]])
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', told.line)
    frame = re.search(r"\bstack_frame_id=(\d+)", told.line)
    return {
        "operation": name[1] if name else x.name,
        "source": program.sources.get(int(frame[1]), "") if frame else "",
    }
