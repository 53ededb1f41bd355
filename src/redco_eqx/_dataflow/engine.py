"""The roles of a model's arrays on a `tensor` axis, from the traced program."""

import dataclasses
from collections.abc import Callable
from typing import Any

from redco_eqx._dataflow.atoms import Dim, pin, resolve, unify
from redco_eqx._dataflow.choice import choose
from redco_eqx._dataflow.costs import Costs, count
from redco_eqx._dataflow.program import Traced, trace_step
from redco_eqx._dataflow.report import why_split, why_whole
from redco_eqx._dataflow.rules import rule_of
from redco_eqx._dataflow.splits import Split
from redco_eqx._dataflow.values import Value
from redco_eqx._dataflow.walk import Walk, unknown

SCANNED = "scanned over"


@dataclasses.dataclass(frozen=True)
class Found:
    """What the program says about one array.

    - `role`: `column`, `row`, `vocabulary`, `expert`, `follows`; or `whole`, `vector`, `buffer`.
    - `dim`: what `tensor` splits, or `None`.
    - `stack`: how many leading dims number layers of a scan, which no axis may split.
    """

    role: str
    reason: str
    dim: int | None
    stack: int


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What a program says about the layout of its parameters.

    - `parameters`: its arrays, as the walk left them.
    - `chosen`: the splits that are taken.
    """

    traced: Traced
    walk: Walk
    parameters: list[Value]
    costs: Costs
    chosen: list[Split]

    def roles(self) -> dict[str, Found]:
        """For each array that the program takes, by path."""
        of_leaf = {leaf: split for split in self.chosen for leaf in split.leaves}
        return {path: self._found(i, of_leaf.get(i)) for i, path in enumerate(self.traced.paths)}

    def _found(self, leaf: int, split: Split | None) -> Found:
        value, shape = self.parameters[leaf], self.traced.shapes[leaf]
        stack = 0
        for dim in value.dims:
            if not dim or resolve(dim)[0].pin != SCANNED:
                break
            stack += 1
        if self.traced.fixed[leaf]:
            return Found("buffer", self.traced.fixed[leaf], None, stack)
        paths = self.traced.paths
        if split is not None:
            dim = split.leaves[leaf]
            reason = why_split(split, value.dims[dim], leaf, paths)
            return Found(self._role(leaf, value.dims[dim]), f"dim {dim}, {reason}", dim, stack)
        name = "whole" if len(shape.shape) - stack > 1 else "vector"
        return Found(name, why_whole(leaf, value.dims, self.costs, self.chosen, paths), None, stack)

    def _role(self, leaf: int, dim: Dim) -> str:
        """What splitting `dim` is called, by the first operation that uses the parameter on data."""
        lead = set(resolve(dim))
        for use in self.walk.uses:
            if use.weight == leaf:
                for own, role in zip(use.dims, use.roles):
                    if role and own and resolve(own)[0] in lead:
                        return role
        return "follows"


def analyse(
    function: Callable[..., Any], model: Any, batch: Any, *, tensor: int, num_shards: int
) -> Analysis:
    """Traces `function(model, batch, key)`, walks through it, and chooses.

    **Arguments:**

    - `function`: a loss or a predict function.
    - `model`, `batch`: may be abstract.
    - `tensor`: over how many devices layers are split; `num_shards`: over how many the batch is.

    **Raises:**

    `ValueError` if the function cannot be traced.
    """
    traced = trace_step(function, model, batch)
    walk = Walk(rule_of)
    values = [unknown(var.aval) for var in traced.jaxpr.invars]
    num_arrays = len(traced.paths)
    parameters, rows = values[:num_arrays], values[num_arrays:][: traced.num_batch]
    for i, value in enumerate(parameters):
        value.weights = (i,)
    for value in rows:
        unify(rows[0].dims[0], value.dims[0])
        pin(value.dims[0], "the batch")
        value.is_data = True
    results = walk.run(traced.jaxpr, values)
    for value, number in zip(parameters, traced.trained):
        if number is not None:
            for dim, of_gradient in zip(value.dims, results[number].dims):
                unify(dim, of_gradient)
    splittable = [[] if reason else list(value.dims) for value, reason in zip(parameters, traced.fixed)]
    costs = count(walk, parameters, splittable, rows, tensor, num_shards)
    return Analysis(traced, walk, parameters, costs, choose(costs))
