"""A layout of parameters and activations together, for `shard_rules` and `explain`."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from jax.sharding import AbstractMesh, Mesh

from redco_eqx._base.compiler import compiler_of
from redco_eqx._dataflow.choice import Values
from redco_eqx._dataflow.engine import Analysis, RoleOf, factors
from redco_eqx._dataflow.solution import OVER_BATCH, Solution, solve


@dataclasses.dataclass(frozen=True)
class ActivationLayout(Analysis):
    """An analysis with a choice for each value, which takes the place of its layout."""

    solution: Solution
    splits: ClassVar[bool] = True

    def dim_of(self, leaf: int) -> int | None:
        value = self.walk.parameters[leaf]
        return self.solution.values.dim_of(value, self.solution.state(value))

    def role(self, leaf: int) -> RoleOf:
        dim, value = self.dim_of(leaf), self.walk.parameters[leaf]
        role, reason, _, stack = self.whole_role(leaf)
        if dim is not None:
            role = self.name_of(leaf, value.dims[dim])
            reason = f"dim {dim}, {factors(value.dims[dim])} is split, chosen with the activations"
        elif role != "buffer":
            reason = "whole: with the activations split, this sends less"
        return role, reason, dim, stack

    def laid_out(self, dims: Mapping[str, int | None]) -> "ActivationLayout | None":
        """The layout that splits these dims of parameters, by path, or `None` if there is none."""
        fixed = self.traced.by_leaf(dims)
        if all(self.dim_of(leaf) == dim for leaf, dim in fixed.items()):
            return self
        try:
            return dataclasses.replace(self, solution=solve(self.solution.values, fixed=fixed))
        except ValueError:
            return None

    def sent(self, *, merged: bool) -> tuple[float, float]:
        batch = self.solution.sent.get(OVER_BATCH, 0.0)
        return sum(self.solution.sent.values()) - batch, batch

    def by_place(self) -> dict[str, float]:
        return self.solution.sent


def choose_with_activations(
    analysis: Analysis,
    mesh: Mesh | AbstractMesh,
    *,
    fixed: Mapping[str, int | None],
    is_quick: bool = False,
) -> ActivationLayout:
    """Choose the layout of all values that sends the least.

    **Arguments:**

    - `analysis`: an analysis with a layout of only the parameters. In the new layout, the parameters take no
        more memory.
    - `fixed`: decisions that are fixed for some arrays, by path: the dim that is split, or `None`.
    - `is_quick`: see `solve`.

    Raises `ValueError` if no layout fits.
    """
    costs = analysis.costs
    values = Values(analysis.walk, costs.tensor, costs.num_shards, compiler_of(mesh).merges)
    held = [costs.held(leaf, analysis.dim_of(leaf)) for leaf in range(len(analysis.traced.paths))]
    decided = analysis.traced.by_leaf(fixed)
    budget = max(1.0, sum(held) * 1.001)
    solution = solve(values, fixed=decided, max_bytes=budget, held=costs.held, is_quick=is_quick)
    return ActivationLayout(analysis.traced, analysis.walk, costs, analysis.layout, solution)
