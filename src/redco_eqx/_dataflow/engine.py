"""The roles of a model's arrays on a `tensor` axis, from the traced program."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from redco_eqx._dataflow.atoms import Dim, pin, resolve, unify
from redco_eqx._dataflow.choice import best_set, choose
from redco_eqx._dataflow.costs import Costs, count
from redco_eqx._dataflow.program import Traced, trace_step
from redco_eqx._dataflow.report import why_split, why_whole
from redco_eqx._dataflow.rules import rule_of
from redco_eqx._dataflow.search import Layout, as_layout, freed_bytes, relax, score
from redco_eqx._dataflow.simulation import Sent, simulate
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

    - `parameters`, `gradients`: its arrays, as the walk left them.
    - `layout`: the split of each parameter that is split, by numbers.
    - `is_given`: whether that is the layout which was given to compare with, because it is better.
    """

    traced: Traced
    walk: Walk
    parameters: list[Value]
    gradients: list[Value | None]
    costs: Costs
    layout: Layout
    is_given: bool = False

    def sent(self, layout: Layout) -> Sent:
        """What a device sends in a step, if parameters are split so."""
        return simulate(self.costs, self.walk.steps, self.parameters, self.gradients, layout)

    def laid_out(self, dims: Mapping[str, int]) -> "Analysis | None":
        """The same with a layout that splits these dims, by path; `None` if what that sends is not known."""
        numbers = {path: i for i, path in enumerate(self.traced.paths)}
        layout = as_layout(self.costs, {numbers[path]: dim for path, dim in dims.items() if path in numbers})
        return None if layout is None else dataclasses.replace(self, layout=layout)

    def score(self, layout: Layout) -> float:
        return score(self.costs, self.parameters, layout, self.sent(layout))

    def roles(self) -> dict[str, Found]:
        """For each array that the program takes, by path."""
        return {path: self._found(i) for i, path in enumerate(self.traced.paths)}

    def _found(self, leaf: int) -> Found:
        value, shape = self.parameters[leaf], self.traced.shapes[leaf]
        stack = 0
        for dim in value.dims:
            if not dim or resolve(dim)[0].pin != SCANNED:
                break
            stack += 1
        if self.traced.fixed[leaf]:
            return Found("buffer", self.traced.fixed[leaf], None, stack)
        number = self.layout.get(leaf)
        if number is not None:
            split = self.costs.splits[number]
            dim = split.leaves[leaf]
            reason = why_split(split, value.dims[dim], leaf)
            return Found(self._role(leaf, value.dims[dim]), f"dim {dim}, {reason}", dim, stack)
        name = "whole" if len(shape.shape) - stack > 1 else "vector"
        reason = why_whole(leaf, value.dims, self.costs, self.layout, self.traced.paths)
        return Found(name, reason, None, stack)

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
    function: Callable[..., Any],
    model: Any,
    batch: Any,
    *,
    tensor: int,
    num_shards: int,
    given: Mapping[str, int] | None = None,
    max_bytes: int | None = None,
) -> Analysis:
    """Traces `function(model, batch, key)`, walks through it, and chooses.

    **Arguments:**

    - `function`: a loss or a predict function.
    - `model`, `batch`: may be abstract.
    - `tensor`: over how many devices layers are split; `num_shards`: over how many the batch is.
    - `given`: a layout to compare with: by path, the dim that is split.
    - `max_bytes`: of parameters on one device, at most.

    **Raises:**

    `ValueError` if the function cannot be traced, or no layout fits into `max_bytes`.
    """
    traced = trace_step(function, model, batch)
    walk = Walk(rule_of)
    values = [unknown(var.aval) for var in traced.jaxpr.invars]
    num_arrays = len(traced.paths)
    parameters, rows = values[:num_arrays], values[num_arrays:][: traced.num_batch]
    for i, value in enumerate(parameters):
        value.weights, value.is_learned = (i,), True
    for value in rows:
        unify(rows[0].dims[0], value.dims[0])
        pin(value.dims[0], "the batch")
        value.is_data = True
    results = walk.run(traced.jaxpr, values)
    gradients = [None if number is None else results[number] for number in traced.trained]
    for value, gradient in zip(parameters, gradients):
        if gradient is not None:
            for dim, of_gradient in zip(value.dims, gradient.dims):
                unify(dim, of_gradient)
    splittable = [[] if reason else list(value.dims) for value, reason in zip(parameters, traced.fixed)]
    costs = count(walk, parameters, splittable, rows, tensor, num_shards)
    return _decided(Analysis(traced, walk, parameters, gradients, costs, {}), given or {}, max_bytes)


def _decided(analysis: Analysis, given: Mapping[str, int], max_bytes: int | None) -> Analysis:
    costs, paths, parameters = analysis.costs, analysis.traced.paths, analysis.parameters
    total = sum(value.num_bytes for value in parameters)
    least_freed = 0.0 if max_bytes is None else max(0.0, float(total - max_bytes))

    def judge(layout: Layout) -> float:
        fits = freed_bytes(costs, parameters, layout) >= least_freed
        return analysis.score(layout) if fits else -math.inf

    try:
        chosen = choose(costs, least_freed)
    except ValueError:
        freed = [split.freed for split in costs.splits]
        most = best_set(freed, freed, range(len(freed)), costs.clashes)
        raise ValueError(
            f"shard_rules: no layout on tensor={costs.tensor} brings the parameters of one device, "
            f"{total} bytes, to {max_bytes} bytes; the least is {total - sum(freed[n] for n in most):.0f}. Use "
            "more devices for tensor or fsdp."
        ) from None
    layout = {leaf: split.number for split in chosen for leaf in split.leaves}
    layout = relax(layout, paths, len(analysis.walk.steps), judge)
    other = analysis.laid_out(given)
    if other is not None and judge(other.layout) > judge(layout):
        return dataclasses.replace(other, is_given=True)
    return dataclasses.replace(analysis, layout=layout)
