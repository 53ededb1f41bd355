"""A layout of parameters and activations together, for `shard_rules` and `explain`."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from redco_eqx._base.tree import size_text
from redco_eqx._dataflow.choice import WHOLE, State, Values, scatters
from redco_eqx._dataflow.engine import Analysis, factors
from redco_eqx._dataflow.prediction import Prediction, Stored, opaque_of, over_fsdp
from redco_eqx._dataflow.solution import Solution, sent, solve


@dataclasses.dataclass(frozen=True)
class ActivationLayout:
    """The choice for each value, in the place of an `Analysis`, which says the rest."""

    analysis: Analysis
    values: Values
    solution: Solution
    is_given: bool = False

    def dim_of(self, leaf: int) -> int | None:
        """The dim of a parameter that is split."""
        value = self.analysis.parameters[leaf]
        state = self.solution.states[self.values.groups.find(id(value))]
        return self.values.dim_of(value, state)

    def roles(self) -> dict[str, tuple[str, str, int | None, int]]:
        """As `Analysis.roles`."""
        return {path: self._role(i) for i, path in enumerate(self.analysis.traced.paths)}

    def _role(self, leaf: int) -> tuple[str, str, int | None, int]:
        dim, value = self.dim_of(leaf), self.analysis.parameters[leaf]
        role, reason, _, stack = self.analysis.whole_role(leaf)
        if dim is not None:
            role = self.analysis.name_of(leaf, value.dims[dim])
            reason = f"dim {dim}, {factors(value.dims[dim])} is split, chosen with the activations"
        elif role != "buffer":
            reason = "whole: with the activations split, this sends less"
        return role, reason, dim, stack

    def laid_out(self, dims: Mapping[str, int | None]) -> "ActivationLayout | None":
        """The same, if these dims of parameters are split, by path."""
        numbers = {path: i for i, path in enumerate(self.analysis.traced.paths)}
        fixed: dict[int, State] = {
            numbers[path]: WHOLE if dim is None else dim for path, dim in dims.items() if path in numbers
        }
        own = {leaf: self.dim_of(leaf) for leaf in fixed}
        if all(own[leaf] == (None if dim == WHOLE else dim) for leaf, dim in fixed.items()):
            return self
        try:
            return dataclasses.replace(self, solution=solve(self.values, fixed=fixed))
        except ValueError:
            return None

    def prediction(self, stored: Mapping[str, Stored]) -> Prediction:
        """The bytes that a device sends."""
        sizes = sent(self.values, self.solution)
        sizes["over fsdp: weights gathered, and parts of their gradients"] = over_fsdp(
            self.analysis, stored, merged=True
        )
        total = sum(sizes.values())
        ordered = sorted(sizes.items(), key=lambda item: -item[1])
        lines = tuple(f"{size_text(size)} {name}" for name, size in ordered if size > 0)
        return Prediction(total, total, 0.0, lines, (), opaque_of(self.analysis))


def choose_with_activations(
    analysis: Analysis,
    mesh: Mesh | AbstractMesh,
    *,
    fixed: Mapping[str, int | None],
    max_bytes: float | None = None,
) -> ActivationLayout:
    """The layout of all values that sends least.

    **Arguments:**

    - `analysis`: with the layout of parameters alone. Those of the new one take as much memory at most.
    - `fixed`: of some arrays, by path, what is decided already: the dim that is split, or `None`.
    - `max_bytes`: of parameters on one device, at most, in place of what `analysis` holds.

    Raises `ValueError` if no layout fits.
    """
    costs, paths = analysis.costs, analysis.traced.paths
    values = Values(
        analysis.walk, analysis.parameters, analysis.gradients, costs.tensor, costs.num_shards, scatters(mesh)
    )
    dims = {leaf: costs.splits[number].leaves[leaf] for leaf, number in analysis.layout.items()}
    held = [costs.held(leaf, dims.get(leaf)) for leaf in range(len(paths))]
    decided: dict[int, State] = {
        paths.index(path): WHOLE if dim is None else dim for path, dim in fixed.items() if path in paths
    }
    budget = sum(held) * 1.001 if max_bytes is None else max_bytes
    return ActivationLayout(analysis, values, solve(values, fixed=decided, max_bytes=budget, held=costs.held))
