"""The families laid out by their programs, as by their paths: their blocks say where
layers begin and end."""

import pytest
import workloads
from helpers import abstract, decide, in_long, mesh_of
from layouts import compiled_bytes, family_cases

import redco_eqx as rx

FAMILIES = {case.name: case for case in family_cases()}
FEW = ("LLaMA, stacked", "GPT-2")


@pytest.mark.parametrize(
    "name", [*FEW, *in_long(*(name for name in FAMILIES if name not in FEW))]
)
def test_families_are_laid_out_as_by_paths_and_what_blocks_add_first_is_predicted(name):
    case = FAMILIES[name]
    mesh = mesh_of("data2xtensor4")
    explanation = rx.explain(case.model, mesh, loss_fn=case.loss, batch=case.batch)
    specs = {path: d.spec for path, d in explanation.decisions.items()}
    assert specs == {path: d.spec for path, d in decide(case.model, mesh).items()}
    compiled = compiled_bytes(case.model, case.loss, case.batch, specs, mesh)
    assert explanation.communication is not None
    assert explanation.communication.num_bytes_unmerged == pytest.approx(
        compiled, rel=0.01
    )


# The tied table of GPT-2 is gathered once for both ends, and has two gradients; that of
# T5 has three. A table of 16,402 rows does not divide over `tensor`, so it is stored
# over both axes.
@pytest.mark.parametrize(
    ("name", "axes", "vocabulary"),
    [
        ("LLaMA", {"fsdp": 2, "tensor": 4}, 256),
        ("GPT-2", {"data": 2, "fsdp": 4}, 256),
        ("GPT-2", {"fsdp": 2, "tensor": 4}, 16402),
        ("T5", {"fsdp": 2, "tensor": 4}, 256),
    ],
)
def test_what_is_gathered_over_fsdp_is_predicted(name, axes, vocabulary):
    sizes = workloads.Sizes(dim=64, num_layers=2, length=32, vocabulary=vocabulary)
    case = workloads.family_case(name, sizes, stacked=True, sequence_parallel=False)
    mesh = rx.make_mesh(**axes)
    model = abstract(case.make_model)
    of_step = {"loss_fn": case.loss_fn, "batch": case.batch}
    predicted = rx.explain(model, mesh, **of_step).communication
    assert predicted is not None
    # Weights and rows: the norm of the gradients, which a step also sends, is some
    # numbers.
    found = rx.communication(
        workloads.lower_step(case, mesh).compile(workloads.COMPILER_OPTIONS), mesh
    )
    total = sum(c.sent_bytes for c in found)
    assert predicted.num_bytes_unmerged == pytest.approx(
        total, rel=0.05 if "tensor" in axes else 0.001
    )
