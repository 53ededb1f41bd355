"""Code that the tests of this directory share: layouts by the program, for entries of the zoo."""

import dataclasses
from collections.abc import Mapping
from functools import cache
from typing import Any

from helpers import abstract, abstract_mesh
from jax.sharding import PartitionSpec
from sharding.zoo import BY_NAME, Entry
from solves_and_groups import ENTRIES

import redco_eqx as rx
from redco_eqx.types import Explanation

MESH, ROWS = abstract_mesh(data=2, tensor=4), 8
PROGRAMS = {**BY_NAME, **ENTRIES}


def loss_of(entry: Entry) -> Any:
    return lambda model, batch, key: entry.loss(model, batch)


@cache
def explained(name: str, rows: int = ROWS) -> Explanation:
    """A program on `MESH`."""
    entry = PROGRAMS[name]
    return rx.explain(abstract(entry.make), MESH, loss_fn=loss_of(entry), batch=entry.inputs(rows))


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
