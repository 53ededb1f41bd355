"""What compiled steps communicate: the layouts of `shard_rules` held by counts, not by equality of losses.

The models and the measurement are those of `benchmarks/` (on the path by pytest's `pythonpath`). Counted are
results, arrays larger than [batch on a device, length]: which of them share one instruction is the compiler's
choice. The mesh is data 2 x tensor 4.
"""

from functools import cache

import collectives
import jax
import models
import pytest
from jax.sharding import Mesh, PartitionSpec

from redco_eqx import make_mesh

TINY = models.Sizes(dim=64, num_layers=2, num_heads=8, vocabulary=64, length=16, batch_size=4)
NAMES = list(models.MODELS)
TENSOR, DATA = ("tensor",), ("data",)

# Forward: 2 all-reduces a layer and 1 for the lookup. GPT-2's even split of its fused query, key and value
# crosses their borders: 7 permutes a layer, until there is a building block for it.
FORWARD = {
    "LLaMA": {("all-reduce", TENSOR): 2 * 2 + 1},
    "GPT-2": {("all-reduce", TENSOR): 2 * 2 + 1, ("collective-permute", TENSOR): 2 * 7},
    "GPT-J": {("all-reduce", TENSOR): 2 * 2 + 1},
    "OPT": {("all-reduce", TENSOR): 2 * 2 + 1},
}
# Backward over tensor: one for the head, and in each layer one for each Linear that opens a pair, where CPU's
# compiler does not add before it reduces: q, k, v, gate, up; c_attn, c_fc; q, k, v, fc_in; q, k, v, fc1.
# Over data: each parameter's gradient once, a tied embedding's twice (lookup and head).
TRAIN = {
    "LLaMA": {("all-reduce", TENSOR): 5 + 2 * 5 + 1, ("all-reduce", DATA): 2 * 9 + 3},
    "GPT-2": {
        ("all-reduce", TENSOR): 5 + 2 * 2 + 1,
        ("collective-permute", TENSOR): 2 * 7,
        ("all-to-all", TENSOR): 2 * 4,
        ("all-reduce", DATA): 2 * 12 + 4 + 1,
    },
    "GPT-J": {("all-reduce", TENSOR): 5 + 2 * 4 + 1, ("all-reduce", DATA): 2 * 10 + 5},
    "OPT": {("all-reduce", TENSOR): 5 + 2 * 4 + 1, ("all-reduce", DATA): 2 * 16 + 4 + 1},
}
TIED = ("GPT-2", "OPT")


@cache
def mesh() -> Mesh:
    return make_mesh(tensor=4)


@cache
def results(name: str, *, train: bool, overrides: tuple = ()) -> list[collectives.Result]:
    case = collectives.shaped(name, TINY)
    found = collectives.step_collectives(case, mesh(), train=train, overrides=overrides)
    return collectives.results(found, case, mesh())


def assert_counts(found: list[collectives.Result], expected: dict) -> None:
    """Equal, with the compiler that the numbers were read from; with another one none more, and no new kind."""
    counts = collectives.count(found)
    if jax.__version_info__[:2] == (0, 10):
        assert counts == expected
    assert not {key: n for key, n in counts.items() if n > expected.get(key, 0)}


@pytest.mark.parametrize("name", NAMES)
def test_forward_reduces_twice_a_layer_and_for_the_lookup(name):
    found = results(name, train=False)
    assert_counts(found, FORWARD[name])
    # The layout alone decides this, on any compiler; only GPT-J's parallel branches can share a reduction.
    least = TINY.num_layers * (1 if name == "GPT-J" else 2) + 1
    assert least <= collectives.count(found)["all-reduce", TENSOR] <= 2 * TINY.num_layers + 1


@pytest.mark.parametrize("name", NAMES)
def test_train_step_has_the_expected_collectives(name):
    # The whole dict: no all-gather, of a weight or of anything else, and nothing over both axes.
    assert_counts(results(name, train=True), TRAIN[name])


@pytest.mark.parametrize("name", NAMES)
def test_only_activations_cross_the_tensor_axis_and_only_gradients_the_data_axis(name):
    case = collectives.shaped(name, TINY)
    unit = collectives.activation_bytes(case, mesh())
    found = [r for r in results(name, train=True) if not r.small]
    over_tensor = [r for r in found if r.axes == TENSOR]
    assert {r.num_bytes for r in over_tensor if r.kind == "all-reduce"} == {unit}
    assert all(r.num_bytes < unit for r in over_tensor if r.kind != "all-reduce")
    parameters = collectives.parameter_bytes(case, mesh())
    tied = 4 * TINY.vocabulary * TINY.dim // 4 if name in TIED else 0
    assert parameters <= collectives.total_bytes(r for r in found if r.axes == DATA) <= parameters + tied
    # The cross-entropy over a split vocabulary: its maximum, its sum, its label.
    rows = 4 * TINY.batch_size * TINY.length // 2
    small = [r for r in results(name, train=True) if r.small and r.num_bytes > 4]
    assert collectives.total_bytes(small) <= 3 * rows


@pytest.mark.parametrize(("name", "most"), [("LLaMA", 18.6), ("GPT-J", 16.6)])
def test_train_step_at_the_peers_sizes_moves_less_than_the_peers(name, most):
    case = collectives.shaped(name)
    found = collectives.step_collectives(case, mesh())
    total = sum(c.total_bytes for c in found) / collectives.MIB
    assert case.peer is not None
    assert total <= most < case.peer
    least = sum(collectives.least(case, mesh()).values()) / collectives.MIB
    assert total >= least, "the least is not the least"


# Negative controls: a worse layout is seen.

ROW, COLUMN, WHOLE = PartitionSpec(None, "tensor"), PartitionSpec("tensor"), PartitionSpec()
PEERS_GPT2 = (  # its rules go by the last two names of a path, of which both c_proj have the same
    ("*.mlp.c_fc.weight", ROW),
    ("*.mlp.c_fc.bias", WHOLE),
    ("*.c_proj.weight", COLUMN),
    ("*.c_proj.bias", COLUMN),
)
SWAPPED_LLAMA = (("*.mlp.gate_proj.weight", ROW), ("*.mlp.up_proj.weight", ROW), ("*.down_proj.weight", COLUMN))


@pytest.mark.parametrize(
    ("name", "overrides", "train"),
    [("GPT-2", PEERS_GPT2, False), ("GPT-2", PEERS_GPT2, True), ("LLaMA", SWAPPED_LLAMA, False)],
    ids=["peers-forward", "peers-train", "swapped-forward"],
)
def test_swapping_column_and_row_costs_more_and_is_noticed(name, overrides, train):
    ours, worse = results(name, train=train), results(name, train=train, overrides=overrides)
    assert collectives.total_bytes(worse) > 1.2 * collectives.total_bytes(ours)
    with pytest.raises(AssertionError):
        assert_counts(worse, (TRAIN if train else FORWARD)[name])
