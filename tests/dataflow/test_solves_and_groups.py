"""Linear solves and products by groups of rows: understood, laid out and predicted."""

import pytest
from cases import ROWS, abstract, abstract_mesh, loss_of
from jax.sharding import PartitionSpec
from layouts import compiled_bytes
from sharding.zoo import goldens, strip
from solves_and_groups import ENTRIES

import redco_eqx as rx
from redco_eqx._sharding.rules import analysis_of, explain_by

BY_COLUMNS = {
    "ridge_of_heads": {"up": 1, "down": 0},
    "solve_of_rows": {"up": 1, "down": 0},
    "experts_of_rows": {"up": 2, "down": 1},
    "experts_by_example": {"up": 2, "down": 1},
}
BY_GROUP = {"experts_of_rows": {"up": 0, "down": 0}, "experts_by_example": {"up": 0, "down": 0}}


def analysed(name):
    entry = ENTRIES[name]
    analysis = analysis_of(abstract(entry.make), abstract_mesh(), loss_of(entry), entry.inputs(ROWS))
    assert analysis is not None
    return analysis


@pytest.mark.parametrize("name", list(ENTRIES))
def test_nothing_is_opaque_and_the_layout_is_that_by_hand(name):
    analysis, model = analysed(name), abstract(ENTRIES[name].make)
    assert not analysis.walk.opaque
    golden = {path: spec for path, spec in goldens(ENTRIES[name], model).items() if spec is not ...}
    found = {path: strip(d.spec) for path, d in explain_by(analysis, model, abstract_mesh()).decisions.items()}
    assert {path: found[path] for path in golden} == golden


@pytest.mark.parametrize(
    ("name", "dims"), [*BY_COLUMNS.items(), *BY_GROUP.items(), *((name, {}) for name in BY_GROUP)]
)
def test_what_a_layout_sends_is_what_the_compiled_program_sends(name, dims):
    entry, mesh = ENTRIES[name], rx.make_mesh(tensor=4)
    model, analysis = abstract(entry.make), analysed(name)
    laid_out = analysis.laid_out(dims)
    assert laid_out is not None
    specs = {
        path: PartitionSpec(*[None] * dims[path], "tensor") if path in dims else PartitionSpec()
        for path in model
    }
    compiled = compiled_bytes(model, loss_of(entry), entry.inputs(ROWS), specs, mesh)
    assert laid_out.sent(laid_out.layout).num_bytes(merged=False) == pytest.approx(compiled, rel=0.035)
