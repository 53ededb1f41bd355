"""Communication of compiled steps of our models, counted: equality of losses would not
show a bad layout.

The measurement is that of `benchmarks/collectives.py` (on the path by pytest's
`pythonpath`); the quickstart's model stands for a user's own, plain `eqx.nn`. Counted
are results, arrays larger than [batch on a device, length]: which of them share one
instruction is the compiler's choice.
"""

import math
from functools import cache
from typing import Any

import collectives
import pytest
import workloads
from helpers import in_long, mesh_of

import redco_eqx as rx
from redco_eqx._compiled.communication import Communication
from redco_eqx._compiled.hlo import num_elements

TINY = workloads.Sizes(
    dim=64, num_layers=2, num_heads=8, vocabulary=64, length=16, batch_size=8
)
TENSOR, DATA = ("tensor",), ("data",)


@cache
def step_of(
    name: str, mesh_name: str, **options: Any
) -> tuple[workloads.Case, Communication]:
    """The case, and what one of its train steps communicates, compiled and not run."""
    case = workloads.family_case(name, TINY, stacked=True, **options)
    return case, collectives.step_communication(case, mesh_of(mesh_name))


def counts(found: Communication, case: workloads.Case, mesh: Any) -> dict[Any, int]:
    return collectives.count(collectives.results(found, case, mesh))


# In a layer of GPT-J the outputs of attention and MLP are summed together.
@pytest.mark.parametrize(
    ("name", "in_layer", "others"), [("LLaMA", 9, 3), ("GPT-J", 10, 5)]
)
def test_a_step_over_tensor_and_data_moves_the_least(name, in_layer, others):
    mesh = mesh_of("data2xtensor4")
    case, found = step_of(name, "data2xtensor4", sequence_parallel=False)
    # The whole dict: no all-gather, of a weight or of anything else, and nothing over
    # both axes.
    expected = {
        ("all-reduce", TENSOR): 2 * case.reductions,
        ("all-reduce", DATA): 2 * in_layer + others,
    }
    assert counts(found, case, mesh) == expected
    large = [r for r in collectives.results(found, case, mesh) if not r.small]
    assert {r.size for r in large if r.axes == TENSOR} == {
        collectives.activation_bytes(case, mesh)
    }
    parameters = collectives.parameter_bytes(case, mesh)
    assert collectives.total_bytes(r for r in large if r.axes == DATA) == parameters
    assert found.total.result_bytes <= 1.01 * sum(
        collectives.least(case, mesh).values()
    )


def test_a_users_own_layers_reduce_twice_forward():
    # Backward the CPU compiler reduces for query, key and value apart; TPU's adds first
    # (tests/aot).
    case = workloads.quickstart_case()
    mesh = mesh_of("data2xtensor4")
    forward, step = (
        collectives.step_communication(case, mesh, train=train)
        for train in (False, True)
    )
    assert counts(forward, case, mesh) == {("all-reduce", TENSOR): case.reductions}
    assert set(counts(step, case, mesh)) == {
        ("all-reduce", TENSOR),
        ("all-reduce", DATA),
    }


@pytest.mark.parametrize("name", workloads.FAMILIES)
def test_a_stream_split_along_the_tokens_moves_the_bytes_of_one_that_is_whole(name):
    """An all-reduce of a stream for each part that is added to it, and again backward,
    in two halves each."""
    mesh = mesh_of("data2xtensor4")
    case, found = step_of(name, "data2xtensor4", sequence_parallel=True)
    streams = [
        c
        for c in found
        if c.axes == TENSOR and any(shape.count(",") == 2 for shape in c.shapes)
    ]
    assert {c.kind for c in streams} == {"all-gather", "reduce-scatter"}
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter", "all-reduce"}
    all_reduce = 2 * 3 / 4 * collectives.activation_bytes(case, mesh)
    assert sum(c.sent_bytes for c in streams) == 2 * case.reductions * all_reduce


@pytest.mark.parametrize(
    ("mesh_name", "stacked", "remat", "reshard"),
    [
        ("fsdp8", True, "none", None),
        ("2x2x2", True, "full", True),
        ("2x2x2", False, "row_out", True),
        ("2x2x2", False, "row_out", None),
        ("fsdp8", True, "none", False),
        *in_long(
            ("2x2x2", True, "none", True),
            ("2x2x2", True, "row_out", None),
            ("fsdp8", False, "full", True),
            ("2x2x2", True, "full", False),
        ),
    ],
)
def test_fsdp_gathers_each_layer_forward_and_backward_unless_it_is_kept(
    mesh_name, stacked, remat, reshard
):
    mesh = mesh_of(mesh_name)
    case = workloads.family_case(
        "LLaMA", TINY, stacked=stacked, remat=remat, sequence_parallel=False
    )
    found = collectives.step_communication(case, mesh, reshard_after_forward=reshard)
    arrays = rx.to_arrays(workloads.abstract_model(case, mesh)[0])
    split = {path: x for path, x in arrays.items() if "fsdp" in x.sharding.spec}

    def whole(part: str) -> int:
        shards = [
            math.prod(x.sharding.shard_shape(x.shape))
            for path, x in split.items()
            if part in path
        ]
        return 4 * sum(shards) * mesh.shape["fsdp"]

    # Whatever is kept of the activations, weights are not (ZeRO-3), unless the step is
    # told to. On CPUs, those outside of scans are by default. The lookup and the head
    # need theirs once.
    keeps = reshard is False or (reshard is None and not stacked)
    gathers = [c for c in found if c.kind == "all-gather"]
    assert {c.axes for c in gathers} == {("fsdp",)}
    assert sum(c.total_bytes for c in gathers) == (
        0 if keeps else whole("model.layers")
    ) + whole("")
    # Gradients are summed over each axis once, whether scattered (as TPUs do) or not.
    sums = [
        c
        for c in found
        if c.kind in ("all-reduce", "reduce-scatter") and "fsdp" in c.axes
    ]
    parts = sum(
        c.total_bytes * (mesh.shape["fsdp"] if c.kind == "reduce-scatter" else 1)
        for c in sums
    )
    assert whole("") <= parts <= 1.05 * whole("")
    # No sum over tensor is repeated, unless all is: the last MLP need not be, as
    # nothing after it is needed.
    streams = [
        c.count
        for c in found
        if "tensor" in c.axes and max(map(num_elements, c.shapes)) > 8 * 16
    ]
    repeated = 2 * TINY.num_layers - 1 - 1 if remat == "full" else 0
    assert sum(streams) == (
        2 * case.reductions + repeated if mesh.shape["tensor"] > 1 else 0
    )
