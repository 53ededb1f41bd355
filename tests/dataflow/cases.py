"""Code that the tests of this directory share: layouts by the program, for entries of the zoo."""

from functools import cache
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from sharding.zoo import BY_NAME, Entry

from redco_eqx._dataflow.engine import Analysis
from redco_eqx._sharding.rules import analysis_of, explain_by

TENSOR, ROWS = 4, 8


def abstract_mesh(data: int = 2, fsdp: int = 1, tensor: int = TENSOR) -> AbstractMesh:
    return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def abstract(make: Any) -> Any:
    return eqx.filter_eval_shape(make, jax.random.key(0))


def loss_of(entry: Entry) -> Any:
    return lambda model, batch, key: entry.loss(model, batch)


@cache
def analysed(name: str, rows: int = ROWS) -> Analysis:
    """An entry of the zoo on data 2 x tensor 4."""
    entry = BY_NAME[name]
    analysis = analysis_of(abstract(entry.make), abstract_mesh(), loss_of(entry), entry.inputs(rows))
    assert analysis is not None
    return analysis


def specs_of(name: str, rows: int = ROWS) -> dict[str, PartitionSpec]:
    model = abstract(BY_NAME[name].make)
    explanation = explain_by(analysed(name, rows), model, abstract_mesh())
    return {path: d.spec for path, d in explanation.decisions.items()}


def predicted_bytes(analysis: Analysis) -> float:
    """As the CPU compiler does it, which sums over devices before it adds."""
    return analysis.sent(analysis.layout).num_bytes(merged=False)
