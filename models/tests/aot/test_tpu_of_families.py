"""The TPU compiler's output for a train step of the families: communication and memory,
without a device.

FSDP is measured with products in float32, which makes bytes and memory those of the
parameters. At the default precision this compiler turns weights into bfloat16 first:
half the bytes to gather, and a copy in bfloat16 of each device's part, which it keeps
throughout a scan.
"""

from functools import partial
from typing import Any

import collectives as bench
import equinox as eqx
import jax
import pytest
import topology
import workloads
from steps_for_tpus import assert_sends_the_least, compiled, num_bytes, over

import redco_eqx as rx
import redco_eqx_models as models
from redco_eqx import _sharded_init as sharded_init
from redco_eqx._base.tree import leaves_with_paths

SIZES = workloads.Sizes(
    dim=512, num_layers=4, num_heads=8, vocabulary=1024, length=128, batch_size=16
)
# Each device has a multiple of 24 rows of every weight: this compiler rounds the parts
# of a reduce-scatter up to that, and shifts what is over to the neighbour by a permute.
WIDE = workloads.Sizes(
    dim=1152, num_layers=24, num_heads=9, vocabulary=1536, length=128, batch_size=8
)


def case_of(
    name: str, sizes: workloads.Sizes = SIZES, remat: Any = "row_out"
) -> workloads.Case:
    # With a split stream, each sum is a reduce-scatter and an all-gather.
    return workloads.family_case(
        name, sizes, remat=remat, stacked=True, sequence_parallel=False
    )


@pytest.mark.parametrize("name", workloads.FAMILIES)
def test_what_is_sent_is_four_activations_a_layer_and_each_gradient_once_as_predicted(
    name,
):
    case, mesh, found, _ = compiled(case_of(name), "v4:2x2x2", 1, 4)
    assert_sends_the_least(case, mesh, found, 0.95)


def test_fsdp_moves_three_times_the_parameters_and_needs_the_memory_of_zero_3():
    with jax.default_matmul_precision("float32"):
        _, mesh, found, memory = compiled(
            case_of("LLaMA", WIDE, remat="full"), "v5e:2x4", 8, 1
        )
    model = eqx.filter_eval_shape(
        workloads.make_model("LLaMA", WIDE, stacked=True), jax.random.key(0)
    )
    parameters = num_bytes(model)
    ring = 1 - 1 / mesh.size
    sent = sum(c.sent_bytes for c in over(found, "fsdp")) / (ring * parameters)
    assert 2.85 <= sent <= 3.15
    # All-reduces are of norms and scalars, which are not split.
    assert {c.kind for c in found} == {"all-gather", "reduce-scatter", "all-reduce"}
    reduced = sum(c.sent_bytes for c in found if c.kind == "all-reduce")
    assert reduced <= 0.01 * parameters
    # Weights, gradients and two moments, all split; a whole layer, for a while, is
    # within the tenth.
    assert memory.peak_memory_in_bytes <= 1.1 * 4 * parameters / mesh.size


def test_fsdp_and_tensor_add_up():
    case, mesh, found, _ = compiled(case_of("LLaMA"), "v5e:2x4", 4, 2)
    least = bench.least(case, mesh)
    moved = sum(c.total_bytes for c in over(found, "tensor"))
    assert 0 <= moved - least["forward"] - least["backward"] <= 0.02 * moved
    assert {c.kind for c in over(found, "tensor")} == {"all-reduce"}


def test_a_stack_is_created_in_shards():
    # OPT-66B on 64 chips: of its largest array, 81 GiB, a chip makes 1.3 GiB, in place.
    config = models.OPTConfig(
        vocab_size=50272,
        hidden_size=9216,
        ffn_dim=36864,
        num_hidden_layers=64,
        num_attention_heads=72,
    )
    mesh = topology.mesh("v4:4x4x4", fsdp=8, tensor=8)
    path = "model.decoder.layers.fc1.weight"
    key = jax.random.key(0)
    make: Any = partial(models.OPTForCausalLM, config, stacked=True)
    closed, arrays, static = sharded_init.trace_arrays(lambda key: make(key=key), key)
    shardings = rx.shard_rules(eqx.combine(arrays, static), mesh)
    sharding = dict(leaves_with_paths(shardings))[path]
    initializers, values = sharded_init.initializers_of(closed, key)
    paths = [name for name, _ in leaves_with_paths(arrays)]
    initializer = initializers[paths.index(path)]
    run: Any = sharded_init.compiled(initializer, sharding)
    inputs = [values[var] for var in initializer.program.invars]
    memory = run.lower(*inputs).compile().memory_analysis()
    whole = 64 * 36864 * 9216 * 4
    assert initializer.way == "spread"
    assert memory.output_size_in_bytes <= 1.01 * whole / 64
    assert memory.temp_size_in_bytes <= 0.01 * whole / 64
