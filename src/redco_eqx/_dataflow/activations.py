"""A layout of parameters and activations together, for `shard_rules` and `explain`."""

import dataclasses
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from redco_eqx._dataflow.choice import Values, scatters
from redco_eqx._dataflow.engine import Analysis, factors
from redco_eqx._dataflow.prediction import OVER_FSDP, Prediction, Stored, lines_of, opaque_of, over_fsdp
from redco_eqx._dataflow.solution import Solution, solve


@dataclasses.dataclass(frozen=True)
class ActivationLayout:
    """A choice for each value. It stands in for an `Analysis`, which it asks for everything else."""

    analysis: Analysis
    solution: Solution

    def dim_of(self, leaf: int) -> int | None:
        """The dim of a parameter that is split, or `None`."""
        value = self.analysis.walk.parameters[leaf]
        return self.solution.values.dim_of(value, self.solution.state(value))

    def roles(self) -> dict[str, tuple[str, str, int | None, int]]:
        """Returns the roles as `Analysis.roles` does."""
        return {path: self._role(i) for i, path in enumerate(self.analysis.traced.paths)}

    def _role(self, leaf: int) -> tuple[str, str, int | None, int]:
        dim, value = self.dim_of(leaf), self.analysis.walk.parameters[leaf]
        role, reason, _, stack = self.analysis.whole_role(leaf)
        if dim is not None:
            role = self.analysis.name_of(leaf, value.dims[dim])
            reason = f"dim {dim}, {factors(value.dims[dim])} is split, chosen with the activations"
        elif role != "buffer":
            reason = "whole: with the activations split, this sends less"
        return role, reason, dim, stack

    def laid_out(self, dims: Mapping[str, int | None]) -> "ActivationLayout | None":
        """The layout with these dims of parameters split, by path; `None` if there is none."""
        fixed = self.analysis.traced.by_leaf(dims)
        if all(self.dim_of(leaf) == dim for leaf, dim in fixed.items()):
            return self
        try:
            return dataclasses.replace(self, solution=solve(self.solution.values, fixed=fixed))
        except ValueError:
            return None

    def prediction(self, stored: Mapping[str, Stored]) -> Prediction:
        """The bytes that a device sends."""
        sizes = dict(self.solution.sent)
        sizes[OVER_FSDP] = over_fsdp(self.analysis, stored, merged=True)
        total = sum(sizes.values())
        return Prediction(total, total, 0.0, lines_of(sizes), (), opaque_of(self.analysis))


def choose_with_activations(
    analysis: Analysis,
    mesh: Mesh | AbstractMesh,
    *,
    fixed: Mapping[str, int | None],
    max_bytes: float | None = None,
) -> ActivationLayout:
    """Chooses the layout of all values that sends least.

    **Arguments:**

    - `analysis`: an analysis with a layout of parameters alone. In the new layout the parameters take at most
        as much memory.
    - `fixed`: for some arrays, by path, a decision that stands: the dim that is split, or `None`.
    - `max_bytes`: a limit on the bytes of parameters on one device, in place of the bytes in `analysis`.

    Raises `ValueError` if no layout fits.
    """
    costs = analysis.costs
    values = Values(analysis.walk, costs.tensor, costs.num_shards, scatters(mesh))
    dims = {leaf: costs.splits[number].leaves[leaf] for leaf, number in analysis.layout.items()}
    held = [costs.held(leaf, dims.get(leaf)) for leaf in range(len(analysis.traced.paths))]
    decided = analysis.traced.by_leaf(fixed)
    budget = sum(held) * 1.001 if max_bytes is None else max_bytes
    return ActivationLayout(analysis, solve(values, fixed=decided, max_bytes=budget, held=costs.held))
