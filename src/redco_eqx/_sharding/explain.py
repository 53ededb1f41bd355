"""`explain`: the layout as a table that a person can check."""

import dataclasses
import html
import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from redco_eqx._dataflow.communication import Communication, Stored, communication
from redco_eqx._dataflow.engine import Analysis
from redco_eqx._sharding.mesh import axis_size, in_own_context, stored_axes, tensor_dim
from redco_eqx._sharding.rules import (
    Chosen,
    Decision,
    Overrides,
    analysis_of,
    check_arguments,
    decide_by,
    match_overrides,
)
from redco_eqx._tree import describe, size_text

# Small pictures for notebooks, as SVG: the mesh, and which part of an array one device holds.


_CELL, _GAP = 14, 2
_HELD, _OTHER = "#3b7dd8", "#e3e8ef"


def mesh_svg(shape: Mapping[str, int]) -> str:
    """The devices as a grid: `tensor` from left to right, the other axes from top to bottom."""
    columns = shape.get("tensor", 1)
    rows = math.prod(shape.values()) // columns
    return _grid(rows, columns, held=lambda row, column: True, cell=(_CELL, _CELL))


def split_svg(shape: Sequence[int], parts: Sequence[int]) -> str:
    """An array cut into `parts` along each dim, of which the first device's is filled.

    Drawn are the last two of those dims that are split, or of all where none is.
    """
    dims = [dim for dim, number in enumerate(parts) if number > 1]
    others = [dim for dim in reversed(range(len(shape))) if dim not in dims]
    drawn = sorted((dims[-2:] + others)[:2])
    numbers = [parts[dim] for dim in drawn]
    rows, columns = (1, *numbers)[-2:] if numbers else (1, 1)
    cell = max(3, 42 // rows), max(3, 42 // columns)
    return _grid(rows, columns, held=lambda row, column: row == column == 0, cell=cell)


def _grid(rows: int, columns: int, *, held: Callable[[int, int], bool], cell: tuple[int, int]) -> str:
    height, width = cell
    squares = [
        f'<rect x="{column * (width + _GAP)}" y="{row * (height + _GAP)}" width="{width}" height="{height}" '
        f'fill="{_HELD if held(row, column) else _OTHER}"/>'
        for row in range(rows)
        for column in range(columns)
    ]
    size = columns * (width + _GAP) - _GAP, rows * (height + _GAP) - _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}">{"".join(squares)}</svg>'
    )


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The layout of a model and the reasons for it; `str()` is a table, and so is what a notebook shows.

    - `decisions`: one for each array, by path.
    - `communication`: what a step sends, if a program decided (and no override splits what it cannot follow).
    """

    decisions: dict[str, Decision]
    mesh_shape: dict[str, int]
    communication: Communication | None = None

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all arrays that one device holds."""
        return sum(d.bytes_per_device for d in self.decisions.values())

    def __repr__(self) -> str:
        return f"Explanation({self._total}; print it for the table)"

    def __str__(self) -> str:
        header = ("path", "shape", "spec", "role", "per device", "reason")
        rows: list[tuple[str, ...]] = [header, *(row for row, _ in self._rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header) - 1)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[-1]]) for row in rows]
        return "\n".join([*lines, *self._below])

    def _repr_html_(self) -> str:
        """The table with pictures: the mesh, and of each array the part that one device holds."""
        header = ("", "path", "shape", "spec", "role", "per device", "reason")
        rows = ["".join(f"<th>{name}</th>" for name in header)]
        for row, d in self._rows:
            parts = [_num_parts(entry, self.mesh_shape) for entry in _entries(d)]
            cells = [split_svg(d.shape, parts), *map(html.escape, row)]
            rows.append("".join(f'<td style="text-align:left">{cell}</td>' for cell in cells))
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        below = "<br>".join(html.escape(line) for line in "\n".join(self._below).splitlines())
        return f"{mesh_svg(self.mesh_shape)}<table>{table}</table><p>{below}</p>"

    @property
    def _rows(self) -> list[tuple[tuple[str, ...], Decision]]:
        """The cells of each row of the table, and one of the arrays that it stands for."""
        rows = []
        for path, count, d in _collapse(self.decisions):
            size = size_text(d.bytes_per_device) + (f" x{count}" if count > 1 else "")
            spec = f"({', '.join(map(_entry, _entries(d)))})"
            rows.append(((path, describe(d), spec, d.role, size, d.reason), d))
        return rows

    @property
    def _total(self) -> str:
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        return f"{size_text(self.bytes_per_device)} per device, {len(self.decisions)} arrays on {mesh}"

    @property
    def _below(self) -> list[str]:
        """What is said below the table."""
        is_gathered = any("fsdp" in _entry(entry) for d in self.decisions.values() for entry in d.spec)
        sent = [] if self.communication is None else [str(self.communication)]
        return [self._total, *([_GATHERS] if is_gathered else []), *sent]


_GATHERS = (
    "over fsdp, and over fsdp+tensor: the steps gather a weight where it is used, in a lax.scan or list of "
    "layers one layer at a time, and again for its gradient"
)


@in_own_context
def explain(
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    *,
    overrides: Overrides = (),
    loss_fn: Callable[..., Any] | None = None,
    batch: PyTree = None,
    max_bytes_per_device: int | None = None,
) -> Explanation:
    """The layout that `shard_rules` gives, with the role of each array and the reason for it.

    Takes the same arguments and raises the same errors. `print(explain(model, mesh))` shows a table in
    which layers that are laid out alike share a row (`layers.[0-11].mlp.up.weight`).

    ```python
    found = rx.explain(model, mesh, loss_fn=loss_fn, batch=batch)
    print(found)
    print(found.decisions["layers.0.weight"].reason)
    ```
    """
    check_arguments(model, mesh, overrides)
    chosen = match_overrides(model, mesh, overrides)
    analysis = analysis_of(model, mesh, loss_fn, batch, max_bytes_per_device, chosen)
    return explain_by(analysis, model, mesh, chosen)


def explain_by(
    analysis: Analysis | None,
    model: PyTree,
    mesh: Mesh | AbstractMesh,
    chosen: Chosen = MappingProxyType({}),
) -> Explanation:
    """The explanation by the analysis of a program, for which no axis of the mesh but `tensor` counts."""
    decisions = decide_by(analysis, model, mesh, chosen)
    dims = {path: tensor_dim(d.spec) for path, d in decisions.items()}
    laid_out = None if analysis is None else analysis.laid_out(dims)  # with the overrides
    sent = None if laid_out is None else communication(laid_out, _stored(decisions, mesh))
    return Explanation(decisions, dict(mesh.shape), sent)


def _stored(decisions: dict[str, Decision], mesh: Mesh | AbstractMesh) -> dict[str, Stored]:
    """The arrays that are gathered for use."""
    found = {}
    for path, d in decisions.items():
        num_parts = axis_size(mesh, stored_axes(d.spec))
        if num_parts > 1:
            over_data = axis_size(mesh, "data") > 1
            found[path] = Stored(float(d.bytes_per_device * num_parts), num_parts, over_data)
    return found


def _collapse(decisions: dict[str, Decision]) -> list[tuple[str, int, Decision]]:
    """Rows of which only the numbers in the path differ, as one: `(path, how many, an example)`."""
    groups: dict[tuple, list[Decision]] = {}
    for d in decisions.values():
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "#", d.path)
        groups.setdefault((pattern, d.shape, str(d.dtype), d.spec, d.role, d.reason), []).append(d)
    rows = []
    for (pattern, *_), members in groups.items():
        numbers = [re.findall(r"(?<![^.])\d+(?![^.])", d.path) for d in members]
        path = pattern
        for column in zip(*numbers):
            values = sorted({int(n) for n in column})
            is_run = values == list(range(values[0], values[-1] + 1))
            text = str(values[0]) if len(values) == 1 else f"[{values[0]}-{values[-1]}]"
            if len(values) > 1 and not is_run:
                text = f"[{','.join(map(str, values))}]"
            path = path.replace("#", text, 1)
        rows.append((path, len(members), members[0]))
    return rows


def _entries(d: Decision) -> tuple[Any, ...]:
    """The spec's entry of each dim."""
    return (*d.spec, *[None] * (len(d.shape) - len(d.spec)))


def _entry(entry: object) -> str:
    return "-" if entry is None else "+".join(entry) if isinstance(entry, tuple) else str(entry)


def _num_parts(entry: str | tuple[str, ...] | None, mesh_shape: dict[str, int]) -> int:
    axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return math.prod(mesh_shape.get(axis, 1) for axis in axes)
