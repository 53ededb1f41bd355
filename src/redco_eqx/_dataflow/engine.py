"""The roles of a model's arrays, from the traced program."""

import dataclasses
from collections.abc import Callable
from typing import Any

from redco_eqx._dataflow.atoms import pin, resolve, unify
from redco_eqx._dataflow.choice import choose
from redco_eqx._dataflow.costs import Costs, count
from redco_eqx._dataflow.program import Traced, trace_step
from redco_eqx._dataflow.rules import rule_of
from redco_eqx._dataflow.splits import Split
from redco_eqx._dataflow.values import Value
from redco_eqx._dataflow.walk import Walk, unknown


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What a program says about the layout of its parameters."""

    traced: Traced
    walk: Walk
    parameters: list[Value]
    costs: Costs
    chosen: list[Split]


def analyse(
    function: Callable[..., Any], model: Any, batch: Any, *, tensor: int, num_shards: int
) -> Analysis:
    traced = trace_step(function, model, batch)
    walk = Walk(rule_of)
    values = [unknown(var.aval) for var in traced.jaxpr.invars]
    num_arrays = len(traced.paths)
    parameters = values[:num_arrays]
    rows = values[num_arrays : num_arrays + traced.num_batch]
    for i, value in enumerate(parameters):
        value.weights = (i,)
        if traced.trained[i] is None and not _is_floating(traced.shapes[i]):
            for dim in value.dims:
                pin(dim, "not trained")
    for value in rows:
        pin(value.dims[0], "the batch")
        value.is_data = True
    for value in rows[1:]:
        unify(rows[0].dims[0], value.dims[0])
    results = walk.run(traced.jaxpr, values)
    for value, number in zip(parameters, traced.trained):
        if number is not None:
            for dim, of_gradient in zip(value.dims, results[number].dims):
                unify(dim, of_gradient)
    costs = count(walk, parameters, rows, tensor, num_shards)
    return Analysis(traced, walk, parameters, costs, choose(costs))


def _is_floating(x: Any) -> bool:
    import jax.numpy as jnp

    return jnp.issubdtype(x.dtype, jnp.inexact)
