"""Communication of compiled steps: counts, not equality of losses, check the layouts of `shard_rules`.

The measurement is that of `benchmarks/collectives.py` (on the path by pytest's `pythonpath`); the quickstart's
model stands for a user's own, plain `eqx.nn`. Counted are results, arrays larger than [batch on a device,
length]: which of them share one instruction is the compiler's choice. The mesh is data 2 x tensor 4.
"""

from functools import cache

import collectives
import pytest
import workloads
from jax.sharding import Mesh, PartitionSpec

from redco_eqx import make_mesh

TINY = workloads.Sizes(dim=64, num_layers=2, num_heads=8, vocabulary=64, length=16, batch_size=4)
NAMES = workloads.FAMILIES
TENSOR, DATA = ("tensor",), ("data",)

# In a layer: attention and MLP, and of GPT-J both at once. And the lookup forward, the head backward.
PER_LAYER = {"LLaMA": 2, "GPT-2": 2, "GPT-J": 1, "OPT": 2}
# Each parameter's gradient once, a tied embedding's twice (lookup and head).
GRADIENTS = {"LLaMA": 2 * 9 + 3, "GPT-2": 2 * 12 + 4 + 1, "GPT-J": 2 * 10 + 5, "OPT": 2 * 16 + 4 + 1}
TIED = ("GPT-2", "OPT")


@cache
def mesh() -> Mesh:
    return make_mesh(tensor=4)


@cache
def case_of(name: str) -> workloads.Case:
    return workloads.quickstart_case() if name == "quickstart" else workloads.family_case(name, TINY)


@cache
def results(name: str, *, train: bool, overrides: tuple = ()) -> list[collectives.Result]:
    found = collectives.step_communication(case_of(name), mesh(), train=train, overrides=overrides)
    return collectives.results(found, case_of(name), mesh())


def forward(name: str) -> dict:
    return {("all-reduce", TENSOR): PER_LAYER[name] * TINY.num_layers + 1}


@pytest.mark.parametrize("name", NAMES)
def test_train_step_has_the_expected_collectives(name):
    # The whole dict: no all-gather, of a weight or of anything else, and nothing over both axes.
    both = 2 * (PER_LAYER[name] * TINY.num_layers + 1)
    expected = {("all-reduce", TENSOR): both, ("all-reduce", DATA): GRADIENTS[name]}
    assert collectives.count(results(name, train=True)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_only_activations_cross_the_tensor_axis_and_only_gradients_the_data_axis(name):
    case = case_of(name)
    found = [r for r in results(name, train=True) if not r.small]
    over_tensor = [r for r in found if r.axes == TENSOR]
    assert {r.size for r in over_tensor} == {collectives.activation_bytes(case, mesh())}
    parameters = collectives.parameter_bytes(case, mesh())
    tied = 4 * TINY.vocabulary * TINY.dim // 4 if name in TIED else 0
    assert parameters <= collectives.total_bytes(r for r in found if r.axes == DATA) <= parameters + tied
    # The cross-entropy over a split vocabulary: its maximum, its sum, its label.
    rows = 4 * TINY.batch_size * TINY.length // 2
    small = [r for r in results(name, train=True) if r.small and r.size > 4]
    assert collectives.total_bytes(small) <= 3 * rows


def test_a_users_own_layers_reduce_twice_forward():
    # Backward the CPU compiler reduces for query, key and value apart; TPU's adds first (tests/aot).
    case = case_of("quickstart")
    assert collectives.count(results("quickstart", train=False)) == {("all-reduce", TENSOR): case.reductions}
    assert set(collectives.count(results("quickstart", train=True))) == {
        ("all-reduce", TENSOR),
        ("all-reduce", DATA),
    }


def test_train_step_of_llama_moves_the_least():
    case = workloads.family_case("LLaMA")
    total = collectives.step_communication(case, mesh()).total.result_bytes
    least = sum(collectives.least(case, mesh()).values())
    assert least <= total <= 1.01 * least


# Negative controls: a worse layout is seen.

ROW, COLUMN = PartitionSpec(None, "tensor"), PartitionSpec("tensor")
SWAPPED = (("*.mlp.gate_proj.weight", ROW), ("*.mlp.up_proj.weight", ROW), ("*.down_proj.weight", COLUMN))


def test_swapping_column_and_row_costs_more_and_is_noticed():
    ours, worse = results("LLaMA", train=False), results("LLaMA", train=False, overrides=SWAPPED)
    assert collectives.count(ours) == forward("LLaMA")
    assert collectives.count(worse) != forward("LLaMA")
    assert collectives.total_bytes(worse) > 1.2 * collectives.total_bytes(ours)
