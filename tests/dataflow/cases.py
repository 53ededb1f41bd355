"""Code that the tests of this directory share: layouts by the program, for entries of the zoo."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from sharding.zoo import BY_NAME, Entry
from solves_and_groups import ENTRIES

import redco_eqx as rx
from redco_eqx.types import Explanation

TENSOR, ROWS = 4, 8
PROGRAMS = {**BY_NAME, **ENTRIES}


def abstract_mesh(data: int = 2, fsdp: int = 1, tensor: int = TENSOR) -> AbstractMesh:
    return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)


def abstract(make: Any) -> Any:
    return eqx.filter_eval_shape(make, jax.random.key(0))


def loss_of(entry: Entry) -> Any:
    return lambda model, batch, key: entry.loss(model, batch)


@cache
def explained(name: str, rows: int = ROWS) -> Explanation:
    """A program on data 2 x tensor 4."""
    entry = PROGRAMS[name]
    model, batch = abstract(entry.make), entry.inputs(rows)
    return rx.explain(model, abstract_mesh(), loss_fn=loss_of(entry), batch=batch)


def specs_of(explanation: Explanation) -> dict[str, PartitionSpec]:
    return {path: d.spec for path, d in explanation.decisions.items()}


def sent(explanation: Explanation, specs: Mapping[str, PartitionSpec] | None = None) -> Any:
    """The bytes that are predicted for a layout: that of `explanation`, or another one of the same program."""
    decisions = {
        path: d if specs is None else dataclasses.replace(d, spec=specs[path])
        for path, d in explanation.decisions.items()
    }
    found = dataclasses.replace(explanation, decisions=decisions).communication
    assert found is not None
    return found
