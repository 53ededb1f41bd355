"""`communication`: which collectives a compiled program makes, how often, over which axes, from which line."""

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from redco_eqx._compiled.collectives import Collective, collectives
from redco_eqx._compiled.hlo import parse

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Total:
    """Collectives added up, per call of the program.

    **Attributes:**

    - `count`: executions.
    - `result_bytes`: of the results, on one device.
    - `sent_bytes`: what one device sends, if the ring algorithm is used.
    - `bound`: how the truth stands to these numbers: `""` if equal, `">="` where some are in a loop whose
        length the program does not tell (it counts as one trip), `"<="` where some are in a branch of a
        conditional (that with the most bytes counts), `"~"` if both.
    """

    count: int
    result_bytes: int
    sent_bytes: int
    bound: str


@dataclass(frozen=True)
class Communication:
    """What one call of a compiled program communicates. `str()` is a table, by kind, axes and source line.

    **Attributes:**

    - `collectives`: each instruction, in the order of the program; iterating gives the same.
    """

    collectives: tuple[Collective, ...]

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.collectives)

    def __len__(self) -> int:
        return len(self.collectives)

    @property
    def total(self) -> Total:
        """All of it."""
        return _total(self.collectives)

    @property
    def by_kind(self) -> dict[str, Total]:
        """`{"all-reduce": total}`, most bytes first."""
        return _grouped(self.collectives, lambda c: c.kind)

    @property
    def by_axes(self) -> dict[tuple[str, ...], Total]:
        """`{("tensor",): total}`, most bytes first; what goes over two axes at once has a key of both."""
        return _grouped(self.collectives, lambda c: c.axes)

    @property
    def counts(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """`{(kind, axes): count}`. A test compares it as a whole, so that nothing else can be there."""
        return {key: row.count for key, row in _grouped(self.collectives, lambda c: (c.kind, c.axes)).items()}

    def __str__(self) -> str:
        rows = [("kind", "axes", "count", "MiB", "MiB sent", "source")]
        for (kind, axes, source, backward), total in _grouped(self.collectives, _row).items():
            where = os.path.basename(source) + (" (backward)" if backward else "")
            rows.append((kind, ",".join(axes), *_cells(total), where))
        rows.append(("total", "", *_cells(self.total), ""))
        widths = [max(map(len, column)) for column in zip(*rows)]
        justify = (str.ljust, str.ljust, str.rjust, str.rjust, str.rjust, str.ljust)
        lines = ["  ".join(f(x, n) for f, x, n in zip(justify, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *(text for bound, text in _NOTES.items() if bound in _bounds(self.total))])


def communication(compiled: jax.stages.Compiled | str, mesh: Mesh | AbstractMesh) -> Communication:
    """The collectives of a compiled program: which, over which mesh axes, how many times, how many bytes, and
    from which line of Python.

    It reads the program's text (optimized HLO) and runs nothing, so the step may be lowered on abstract
    arguments, for devices that are not there. Loops are multiplied out: the numbers are those of one call.
    Not counted: transfers to and from the host, and point-to-point `send` and `recv`.

    ```python
    found = rx.communication(step.lower(state, batch).compile(), mesh)
    print(found)
    print(found.total.sent_bytes)
    ```

    **Arguments:**

    - `compiled`: what `jit_step(step).lower(...).compile()` or `jax.jit(f).lower(...).compile()` returns, or
        its `as_text()`, for CPU, GPU or TPU.
    - `mesh`: the mesh that the program was compiled for. HLO names a device by its position in
        `mesh.devices.flat`, so only the names and sizes of the axes are used.

    **Returns:**

    A `Communication`: the collectives, their totals by kind and by axes, and by `str()` a table.

    **Raises:**

    - `TypeError` if `compiled` is not a compiled program.
    - `ValueError` if its text is not the optimized HLO of one program, is for another number of devices
        than the mesh has, or holds a form that is not known here. Nothing is skipped silently.
    """
    program = parse(_text(compiled))
    if program.num_devices not in (None, mesh.size):
        raise ValueError(
            f"communication: the program is for {program.num_devices} device(s), but the mesh has "
            f"{mesh.size}: {dict(mesh.shape)}. Pass the mesh that the program's arguments lie on."
        )
    return Communication(tuple(collectives(program, tuple(mesh.shape.items()))))


def _text(compiled: object) -> str:
    if isinstance(compiled, str):
        return compiled
    if not isinstance(compiled, jax.stages.Compiled):
        what = "jit_step(step).lower(state, batch).compile(), or jax.jit(f).lower(...).compile()"
        if isinstance(compiled, jax.stages.Lowered):
            what = "what its compile() returns"
        name = type(compiled).__name__
        raise TypeError(f"communication: compiled is a {name}, but must be a compiled program. Pass {what}.")
    text = compiled.as_text()
    if not text:
        raise ValueError("communication: this executable comes without its text. Compile it in this process.")
    return text


_BOUNDS = {(False, False): "", (True, False): ">=", (False, True): "<=", (True, True): "~"}
_NOTES = {
    ">=": ">= a loop of a length that the program does not tell counts as one trip",
    "<=": "<= of a conditional the branch with the most bytes counts",
}


def _bounds(total: Total) -> tuple[str, ...]:
    return (">=", "<=") if total.bound == "~" else (total.bound,)


def _total(members: Iterable[Collective]) -> Total:
    members = list(members)
    return Total(
        count=sum(c.count for c in members),
        result_bytes=sum(c.total_bytes for c in members),
        sent_bytes=sum(c.sent_bytes for c in members),
        bound=_BOUNDS[any(None in c.loops for c in members), any(c.conditional for c in members)],
    )


def _grouped(members: Iterable[Collective], key: Callable[[Collective], K]) -> dict[K, Total]:
    groups: dict[K, list[Collective]] = {}
    for c in members:
        groups.setdefault(key(c), []).append(c)
    totals = {name: _total(group) for name, group in groups.items()}
    return dict(sorted(totals.items(), key=lambda item: (-item[1].result_bytes, str(item[0]))))


def _row(c: Collective) -> tuple[str, tuple[str, ...], str, bool]:
    return c.kind, c.axes, c.source, c.is_backward


def _cells(total: Total) -> tuple[str, str, str]:
    sizes = [f"{n / 2**20:.3f}" for n in (total.result_bytes, total.sent_bytes)]
    return f"{total.bound}{total.count}", sizes[0], sizes[1]
