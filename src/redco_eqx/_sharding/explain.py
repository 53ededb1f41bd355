"""`explain`: the layout as a table that a person can check."""

import dataclasses
import re
from collections.abc import Callable
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
        rows = [header, *self._rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header) - 1)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths)), row[-1]]) for row in rows]
        return "\n".join([*lines, *self._below])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the table in a notebook, and in IPython."""
        printer.text(str(self))

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        """The cells of each row of the table."""
        rows = []
        for path, count, d in _collapse(self.decisions):
            size = size_text(d.bytes_per_device) + (f" x{count}" if count > 1 else "")
            spec = f"({', '.join(map(_entry, _entries(d)))})"
            rows.append((path, describe(d), spec, d.role, size, d.reason))
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
