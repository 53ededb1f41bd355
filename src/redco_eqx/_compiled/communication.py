"""`communication`: the collectives of a compiled program, with their counts, mesh axes
and source lines."""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from redco_eqx._base.tree import ring_bytes, size_text, table
from redco_eqx._compiled import hlo

# The collectives in the text of a compiled program, with loops multiplied out.


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
    """One collective instruction, at one place where the program calls it.

    **Attributes:**

    - `kind`: the name that XLA uses: `"all-reduce"`, `"all-gather"`,
        `"reduce-scatter"`, `"all-to-all"`, `"ragged-all-to-all"`,
        `"collective-permute"` or `"collective-broadcast"`.
    - `axes`: the mesh axes, in the mesh's order, along which the devices of one group
        differ (for a permute: sender and receiver). Axes of size one are never named.
        If groups do not have all devices along those axes, the only label is
        `("part of tensor",)`, which never equals a whole axis.
    - `group_size`: the number of devices in one group; 2 for a permute.
    - `shapes`: the shapes of the results on one device, such as `"f32[8,128]"`; several
        if the compiler combined several collectives.
    - `result_bytes`: the size of all results on one device, for one execution, without
        padding of tiles.
    - `loops`: the trip counts of the enclosing loops, outermost first; None for a count
        that the text does not have.
    - `conditional`: true if it is in a branch of a conditional. Only the branch with
        the most bytes is kept.
    - `operation`: the JAX operation that it was compiled from, such as
        `"jit(step)/transpose(jvp())/dot_general"`, or else the name of the instruction.
        For a collective that the compiler added, it is the operation whose result is
        sent. For a combined one, it is the operation of one of its parts.
    - `source`: the line of that operation, such as `"/home/me/train.py:12"`. It is the
        innermost line outside JAX, Equinox, Optax and this library, or empty if the
        text does not have it. For an operation that a step adds to your functions, it
        says what adds it, such as `"redco_eqx: split_activations"`. JAX's persistent
        compilation cache returns a program with the lines of its first compilation.
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
        """The number of executions per call of the program. A loop of unknown length
        counts as one trip."""
        return math.prod(n for n in self.loops if n is not None)

    @property
    def total_bytes(self) -> int:
        """The bytes of results on one device, per call of the program."""
        return self.count * self.result_bytes

    @property
    def sent_bytes(self) -> int:
        """The bytes that one device sends per call of the program, if the ring
        algorithm is used."""
        return round(ring_bytes(self.kind, self.total_bytes, self.group_size))

    @property
    def is_backward(self) -> bool:
        """True in a backward pass, according to the name that JAX gives to transposed
        operations."""
        return "transpose(" in self.operation


# Only these lines can be or call a collective, so no other line is parsed.
_INTERESTING = re.compile(
    rf"\b(?:{'|'.join(KINDS)})(?:-start)?\(|\b(?:calls|to_apply|body|called_computations)="
    r"|\bconditional\("
)
_CALLS = ("calls", "to_apply", "called_computations")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")


def _collectives_of(
    program: hlo.HloModule, computation: str, mesh: hlo.Sizes
) -> Iterator[Collective]:
    """Yield the collectives of a computation in order. An asynchronous pair counts
    once. A group of one device does not communicate, and does not count. Raises
    `ValueError` if the text has an unknown form."""
    lines = program.computations[computation].values()
    started: set[str] = set()
    for line in lines:
        if '"AsyncCollectiveStart"' in line:
            started.update(hlo.instruction(line).operands)
    for x in (hlo.instruction(line) for line in lines if _INTERESTING.search(line)):
        if x.opcode.removesuffix("-start") in KINDS:
            # For TPU, a collective that is fused with other work is printed in each
            # fusion that advances it.
            if "chain_id=" not in x.attributes or x.name in started:
                yield from _collective(program, computation, mesh, x)
        elif x.opcode == "while":
            num_trips = hlo.trip_count(program, computation, x)
            # The condition is also computed after the last trip.
            num_tests = None if num_trips is None else num_trips + 1
            for key, times in (("body", num_trips), ("condition", num_tests)):
                for c in _collectives_of(program, x.names(key)[0], mesh):
                    yield replace(c, loops=(times, *c.loops))
        elif x.opcode == "conditional":
            branches = [
                list(_collectives_of(program, callee, mesh))
                for callee in _names_in(x, _BRANCHES)
            ]
            for c in max(branches, key=_total_bytes):
                yield replace(c, conditional=True)
        elif not x.opcode.endswith(("-update", "-done")):
            for callee in _names_in(x, _CALLS):
                # On TPU, this is an all-reduce fused with the slice of it that a device
                # keeps.
                is_scatter = callee.startswith("all-reduce-scatter")
                for c in _collectives_of(program, callee, mesh):
                    if is_scatter and c.kind == "all-reduce":
                        c = replace(
                            c,
                            kind="reduce-scatter",
                            **_described(program, computation, x, x.shape),
                        )
                    yield c


def _names_in(x: hlo.Instruction, attributes: Sequence[str]) -> list[str]:
    names: list[str] = []
    for attribute in attributes:
        names += x.names(attribute)
    return names


def _total_bytes(collectives: Iterable[Collective]) -> int:
    return sum(c.total_bytes for c in collectives)


def _collective(
    program: hlo.HloModule, computation: str, mesh: hlo.Sizes, x: hlo.Instruction
) -> Iterator[Collective]:
    kind = x.opcode.removesuffix("-start")
    is_permute = kind == "collective-permute"
    printed = hlo.GROUPS.search(x.attributes)
    if printed is None:
        raise ValueError(
            "communication: cannot read the groups of this line: "
            f"{x.line.strip()[:300]}"
        )
    axes, is_whole, group_size = hlo.group_axes(printed[1], mesh)
    if group_size == 1:
        return
    shape = x.shape
    if x.opcode.endswith("-start") and kind != "all-reduce":
        # (operands, results, ...); the operands of an all-reduce have the shapes of its
        # results, and are not printed.
        shape = hlo.split_commas(shape[1:-1])[1]
    if not is_whole and not is_permute:
        axes = (f"part of {','.join(axes)}",)
    yield Collective(
        kind=kind,
        axes=axes,
        group_size=group_size,
        loops=(),
        conditional=False,
        **_described(program, computation, x, shape),
    )


def _described(
    program: hlo.HloModule, computation: str, x: hlo.Instruction, shape: str
) -> dict[str, Any]:
    lines = program.computations[computation]
    # The shapes, without their layouts in memory.
    shapes = tuple(re.findall(r"\w+\[[^\]]*\]", shape))
    # A collective that the compiler added has no name of an operation, but what it
    # sends has one.
    told = x
    while 'op_name="' not in told.line and told.operands and told.operands[0] in lines:
        told = hlo.instruction(lines[told.operands[0]])
    name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', told.line)
    frame = re.search(r"\bstack_frame_id=(\d+)", told.line)
    source = ""
    if frame:
        source = program.sources.get(int(frame[1]), "")
    return {
        "shapes": shapes,
        "result_bytes": sum(map(hlo.shape_bytes, shapes)),
        "operation": name[1] if name else x.name,
        "source": source,
    }


# `communication`: the collectives of a compiled program, with their counts, mesh axes
# and source lines.


@dataclass(frozen=True)
class Total:
    """The total of several collectives, per call of the program.

    **Attributes:**

    - `count`: the number of executions.
    - `result_bytes`: the bytes of the results on one device.
    - `sent_bytes`: the bytes that one device sends, if the ring algorithm is used.
    - `bound`: how the true numbers relate to these: `""` if they are equal; `">="` if
        some collectives are in a loop whose length the program does not state (it
        counts as one trip); `"<="` if some are in a branch of a conditional (the branch
        with the most bytes counts); `"~"` if both apply.
    """

    count: int
    result_bytes: int
    sent_bytes: int
    bound: str


class Communication(tuple[Collective, ...]):
    """A tuple of the collectives in one call to a compiled program, in the order of the
    program.

    `str()` gives a table by kind, axes and source line.
    """

    @property
    def total(self) -> Total:
        """The total over all collectives."""
        return _total(self)

    @property
    def by_axes(self) -> dict[tuple[str, ...], Total]:
        """`{("tensor",): total}`, most bytes first. A collective over two axes has a
        key with both."""
        return _grouped(self, lambda c: c.axes)

    @property
    def counts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """`{(kind, axes): count}`. A test should compare the whole dict, so that it
        allows nothing else."""
        totals = _grouped(self, lambda c: (c.kind, c.axes))
        return {key: total.count for key, total in totals.items()}

    def __str__(self) -> str:
        rows = [("kind", "axes", "count", "MiB", "MiB sent", "source")]
        groups = _grouped(self, lambda c: (c.kind, c.axes, c.source, c.is_backward))
        groups["total", (), "", False] = self.total
        for (kind, axes, source, is_backward), total in groups.items():
            where = os.path.basename(source)
            if is_backward:
                where += " (backward)"
            made = f"{total.result_bytes / 2**20:.3f}"
            sent = f"{total.sent_bytes / 2**20:.3f}"
            rows.append(
                (kind, ",".join(axes), f"{total.bound}{total.count}", made, sent, where)
            )
        lines = table(rows, right=(2, 3, 4))
        bounds = (">=", "<=") if self.total.bound == "~" else (self.total.bound,)
        lines += [text for bound, text in _NOTES.items() if bound in bounds]
        return "\n".join(lines)


def communication(
    compiled: jax.stages.Compiled | str, mesh: Mesh | AbstractMesh
) -> Communication:
    """List the collectives of a compiled program with their kinds, mesh axes, counts,
    bytes and lines of Python.

    It reads the text of the program (optimized HLO) and runs nothing, so you may lower
    the step on abstract arguments, for devices that you do not have. An operation in a
    loop counts once per iteration, so the numbers are those of one call. Transfers to
    and from the host, and point-to-point `send` and `recv`, do not count.

    ```python
    found = rx.communication(step.lower(state, batch).compile(), mesh)
    print(found)
    print(found.total.sent_bytes)
    ```

    **Arguments:**

    - `compiled`: the result of `jit_step(step).lower(...).compile()` or
        `jax.jit(f).lower(...).compile()`, or its `as_text()`, for CPU, GPU or TPU.
    - `mesh`: the mesh that the program was compiled for. HLO names a device by its
        position in `mesh.devices.flat`, so only the names and sizes of the axes are
        used.

    **Returns:**

    A `Communication`: the collectives, and their totals by kind and by axes. `str()`
    gives a table.

    **Raises:**

    - `TypeError` if `compiled` is not a compiled program.
    - `ValueError` if its text is not the optimized HLO of one program, is for a
        different number of devices than the mesh has, or has an unknown form. Nothing
        is skipped silently.
    """
    if not isinstance(compiled, str | jax.stages.Compiled):
        name = type(compiled).__name__
        raise TypeError(
            f"communication: compiled is a {name}, but must be what Lowered.compile() "
            "returns."
        )
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    program = hlo.parse(text or "")
    if program.num_devices not in (None, mesh.size):
        raise ValueError(
            f"communication: the program is for {program.num_devices} device(s), but "
            f"the mesh has {mesh.size}: {dict(mesh.shape)}. Pass the mesh that its "
            "arguments lie on."
        )
    sizes = tuple(mesh.shape.items())
    return Communication(_collectives_of(program, program.entry, sizes))


_BOUNDS = {
    (False, False): "",
    (True, False): ">=",
    (False, True): "<=",
    (True, True): "~",
}
_NOTES = {
    ">=": ">= a loop whose length the program does not state counts as one trip",
    "<=": "<= a conditional counts as its branch with the most bytes",
}


def _total(members: Sequence[Collective]) -> Total:
    return Total(
        count=sum(c.count for c in members),
        result_bytes=sum(c.total_bytes for c in members),
        sent_bytes=sum(c.sent_bytes for c in members),
        bound=_BOUNDS[
            any(None in c.loops for c in members), any(c.conditional for c in members)
        ],
    )


def _grouped(
    members: Iterable[Collective], key: Callable[[Collective], Any]
) -> dict[Any, Total]:
    groups: dict[Any, list[Collective]] = {}
    for c in members:
        groups.setdefault(key(c), []).append(c)
    totals = {name: _total(group) for name, group in groups.items()}
    return dict(
        sorted(totals.items(), key=lambda item: (-item[1].result_bytes, str(item[0])))
    )


# The memory and communication of a compiled step, in bytes and as a line of text.


def memory_bytes(compiled: jax.stages.Compiled) -> tuple[int, int]:
    """Return the bytes that a program takes on a device at its peak, and those of its
    arguments alone.

    The TPU compiler reports the peak. For other compilers, it is the sum of the
    arguments, the results that do not overwrite arguments, and the temporaries, which
    is at least as large.
    """
    stats = compiled.memory_analysis()
    assert stats is not None  # CPU, GPU and TPU have one
    arguments = stats.argument_size_in_bytes
    # `input_shardings` fails for some programs with captured arrays (jax 0.10.2, no
    # upstream issue known).
    shardings = jax.tree.leaves(compiled.output_shardings)
    is_for_tpu = False
    if shardings:
        device = next(iter(shardings[0].device_set))
        is_for_tpu = device.platform == "tpu"
    if is_for_tpu and stats.peak_memory_in_bytes:
        return stats.peak_memory_in_bytes, arguments
    # Results that overwrite donated arguments take no memory of their own.
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return arguments + results + stats.temp_size_in_bytes, arguments


_ATTENTION = {
    "splash": "splash_mha",
    "cudnn": "__cudnn$fmha",
    "xla": "redco_eqx.attention",
}
"""The texts by which a compiled program shows how it computes attention, by the names
of `redco_eqx.layers.attention`."""


def attention_of(text: str) -> str:
    """The way in which a compiled program computes the attention of
    `redco_eqx.layers.attention`; empty without one."""
    return next((name for name, mark in _ATTENTION.items() if mark in text), "")


def cost(compiled: jax.stages.Compiled, mesh: Mesh) -> str:
    """Describe the cost of a step in a line: `a step takes 1.5 MiB of each device, 0.9
    MiB of it while it runs, and sends 256.0 KiB over data`. With
    `redco_eqx.layers.attention`, also the implementation that was chosen."""
    peak, arguments = memory_bytes(compiled)
    line = (
        f"a step takes {size_text(peak)} of each device, {size_text(peak - arguments)} "
        "of it while it runs"
    )
    try:
        found = communication(compiled, mesh).by_axes
    except ValueError:  # an unknown form of the text
        return line
    sent = [
        f"{size_text(total.sent_bytes)} over {' and '.join(axes)}"
        for axes, total in found.items()
    ]
    line += f", and sends {', '.join(sent) or 'nothing'}"
    attention = attention_of(compiled.as_text() or "")
    return f"{line}; attention by {attention}" if attention else line
