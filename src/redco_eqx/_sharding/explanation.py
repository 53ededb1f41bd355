"""The layout of a model with its reasons: one decision for each array, and the table
that shows them."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from redco_eqx._base.tree import describe, first_few, size_text, table
from redco_eqx._sharding.mesh import (
    axes_in,
    axes_of,
    axis_size,
    stored_axes,
    tensor_dim,
    trimmed,
)

if TYPE_CHECKING:
    # Imported at run time only if there is a program, because most layouts need none.
    from redco_eqx._dataflow.engine import Analysis
    from redco_eqx._dataflow.prediction import Prediction, Stored


@dataclasses.dataclass(frozen=True)
class Decision:
    """The layout of one array, and the reason for it.

    - `path`: the name of the array.
    - `shape`, `dtype`: those of the whole array.
    - `spec`: the `PartitionSpec`, without trailing `None`s. An entry
        `("fsdp", "tensor")` splits the array where it is stored, and a step gathers it
        for use.
    - `role`: `column`, `row`, `vocabulary`, `expert`, `norm`, ..., or `override`.
    - `reason`: the reason in words.
    - `bytes_per_device`: the size of one shard.
    - `is_guess`: true if the path rules decided, but names and shapes do not tell how
        the program uses the array. Another layout may send several times less.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec
    role: str
    reason: str
    bytes_per_device: int
    is_guess: bool = False


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The layout of a model and the reasons for it. `str()` and a notebook show it as a
    table. If a program decided that `tensor` splits arrays, the last line says what a
    device would send and hold if they were whole.

    - `decisions`: one decision for each array, by path.
    - `shardings`: a tree like the model, with a `NamedSharding` for each array, and
        `None` elsewhere.
    - `mesh`: the mesh that the layout is for.
    - `communication`: the bytes that a step sends, if a program decided (and no
        override makes a split that the analysis of the program cannot follow). For a
        loss from `split_activations`, those with its activations, unless a step leaves
        them to the compiler: `str()` then says why.
    - `with_activations`: the same for `split_activations(loss_fn)`. It is `None` if
        `loss_fn` is the result of `split_activations`, if no program decided, if the
        mesh has no `tensor` axis, if a step would leave the activations to the
        compiler, or if the choice takes minutes. `str()` shows it if it is less by more
        than 10%. The first access computes it, in 2 seconds of CPU time for a
        transformer of 12 layers.
    """

    decisions: dict[str, Decision]
    shardings: PyTree[NamedSharding | None] = dataclasses.field(repr=False)
    mesh: Mesh | AbstractMesh
    _analysis: "Analysis | None" = None

    @functools.cached_property
    def communication(self) -> "Prediction | None":
        found = self._laid_out
        if found is None:
            return None
        from redco_eqx._dataflow.prediction import predict_communication

        split, _ = self._with_own_activations
        return predict_communication(split or found, self.stored)

    @functools.cached_property
    def _with_own_activations(self) -> "tuple[Analysis | None, str]":
        """For a loss from `split_activations`, the analysis with its activations, or
        `None` and the reason why a step leaves them to the compiler."""
        found = self._laid_out
        if found is None or not found.traced.splits:
            return None, ""
        from redco_eqx._dataflow.engine import laid_out_values

        try:
            return laid_out_values(found, self.mesh), ""
        except ValueError as error:
            return None, str(error)

    @functools.cached_property
    def with_activations(self) -> "Prediction | None":
        found = self._laid_out
        if found is None or found.traced.splits:
            return None
        from redco_eqx._dataflow.engine import with_activations
        from redco_eqx._dataflow.prediction import predict_communication

        split = with_activations(found, self.mesh, is_quick=True)
        return None if split is None else predict_communication(split, self.stored)

    @property
    def _laid_out(self) -> "Analysis | None":
        """The analysis with the overrides, or `None` if it cannot follow them."""
        if self._analysis is None:
            return None
        dims = {path: tensor_dim(d.spec) for path, d in self.decisions.items()}
        return self._analysis.laid_out(dims)

    def _not_followed(self) -> list[str]:
        """The arrays that an override splits so that the program cannot follow."""
        if self._analysis is None:
            return []
        return [
            path
            for path, d in self.decisions.items()
            if d.role == "override"
            and self._analysis.laid_out({path: tensor_dim(d.spec)}) is None
        ]

    @property
    def stored(self) -> "dict[str, Stored]":
        """The arrays that are stored split and gathered for use, by path."""
        return self._stored(self.decisions.values())

    def _stored(self, decisions: Iterable[Decision]) -> "dict[str, Stored]":
        from redco_eqx._dataflow.prediction import Stored

        fsdp = axis_size(self.mesh, "fsdp")
        found = {}
        for d in decisions:
            num_parts = axis_size(self.mesh, stored_axes(d.spec))
            if num_parts > 1:
                gathered = float(d.bytes_per_device * num_parts)
                found[d.path] = Stored(gathered, num_parts, fsdp)
        return found

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all arrays on one device."""
        return sum(d.bytes_per_device for d in self.decisions.values())

    def _without_tensor(self) -> tuple[float, int] | None:
        """Bytes that a device would send in a step, and hold for the arrays, if
        `tensor` split nothing and `fsdp` the same.

        `None` if `tensor` splits nothing, or if no program says what is sent.
        """
        if axis_size(self.mesh, "tensor") == 1 or self._laid_out is None:
            return None
        from redco_eqx._dataflow.prediction import sent_by_axes

        assert self._analysis is not None
        decisions = [self._whole(d) for d in self.decisions.values()]
        if decisions == list(self.decisions.values()):
            return None
        found = self._analysis.laid_out({})
        assert found is not None  # a layout without splits is always known
        sent = sent_by_axes(found, self._stored(decisions), merged=True)
        return sum(sent), sum(d.bytes_per_device for d in decisions)

    def _whole(self, decision: Decision) -> Decision:
        """The decision without the `tensor` axis."""
        spec = _without(decision.spec, "tensor")
        num_parts = axis_size(self.mesh, axes_of(decision.spec))
        num_bytes = decision.bytes_per_device * num_parts
        return dataclasses.replace(
            decision,
            spec=spec,
            bytes_per_device=num_bytes // axis_size(self.mesh, axes_of(spec)),
        )

    def __repr__(self) -> str:  # so that a notebook shows the table, too
        rows = [("path", "shape", "spec", "role", "per device", "reason")]
        for path, count, d in _collapse(self.decisions):
            size = size_text(d.bytes_per_device)
            if count > 1:
                size += f" x{count}"
            entries = ["+".join(axes_in(entry)) or "-" for entry in d.spec]
            entries += ["-"] * (len(d.shape) - len(d.spec))
            rows.append(
                (path, describe(d), f"({', '.join(entries)})", d.role, size, d.reason)
            )
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        size = size_text(self.bytes_per_device)
        lines = [
            *table(rows),
            f"{size} per device, {len(self.decisions)} arrays on {mesh}",
        ]
        plain = self.communication
        split = self.with_activations
        if plain is not None:
            lines.append(str(plain))
        elif unknown := self._not_followed():
            lines.append(
                "the bytes that a step sends are not predicted: the program cannot "
                f"follow the split of {first_few(unknown)}"
            )
        _, why_left = self._with_own_activations
        if why_left and axis_size(self.mesh, "tensor") > 1:
            lines.append(f"the activations are left to the compiler: {why_left}")
        if plain and split and split.num_bytes_unmerged < 0.9 * plain.num_bytes:
            lines.append(
                "with loss_fn=redco_eqx.split_activations(loss_fn), "
                f"{str(split).splitlines()[0]}"
            )
        whole = self._without_tensor()
        if plain is not None and whole is not None:
            sent, held = map(size_text, whole)
            lines.append(
                f"with all arrays whole over tensor, a device would send {sent} in a "
                f"step (here {size_text(plain.num_bytes)}) and hold {held} of them "
                f"(here {size})"
            )
        return "\n".join(lines)


def _without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """A spec that does not split over this axis."""
    entries: list[str | tuple[str, ...] | None] = []
    for entry in spec:
        left = tuple(name for name in axes_in(entry) if name != axis)
        if len(left) > 1:
            entries.append(left)
        else:
            entries.append(left[0] if left else None)
    return trimmed(PartitionSpec(*entries))


def _collapse(decisions: dict[str, Decision]) -> Iterator[tuple[str, int, Decision]]:
    """Merge rows that differ only in the numbers of their paths:
    `(path, number of rows, an example)`."""
    groups: dict[tuple, list[tuple[list[str], Decision]]] = {}
    for d in decisions.values():
        # In the list, every second word is a number.
        words = re.split(r"(?<![^.])(\d+)(?![^.])", d.path)
        key = (*words[::2], d.shape, str(d.dtype), d.spec, d.role, d.reason)
        groups.setdefault(key, []).append((words, d))
    for members in groups.values():
        path = ""
        for i, column in enumerate(zip(*(words for words, _ in members))):
            path += _numbers(column) if i % 2 else column[0]
        yield path, len(members), members[0][1]


def _numbers(texts: Sequence[str]) -> str:
    """`3`, `[0-11]` or `[0,2,4]`."""
    values = sorted({int(text) for text in texts})
    if len(values) == 1:
        return str(values[0])
    has_no_gap = values[-1] - values[0] == len(values) - 1
    if has_no_gap:
        return f"[{values[0]}-{values[-1]}]"
    return f"[{','.join(map(str, values))}]"
