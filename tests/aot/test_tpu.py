"""What the TPU compiler makes of a train step: communication and memory, with no device.

Bytes are compared as numbers of elements sent: the compiler turns weights into bfloat16 before it gathers them,
where a product would do so anyway.
"""

import dataclasses
import math
from functools import cache
from typing import Any

import collectives as bench
import equinox as eqx
import jax
import pytest
import quickstart
import topology

import redco_eqx as rx
from redco_eqx._collectives import Collective, collectives

SIZES = bench.Sizes(dim=512, num_layers=4, num_heads=8, vocabulary=1024, length=128, batch_size=16)
WIDE = bench.Sizes(dim=2048, num_layers=16, num_heads=16, vocabulary=4096, length=128, batch_size=8)
ITEM_BYTES = {"bf16": 2, "f32": 4}


@cache
def compiled(
    case_name: str, sizes: bench.Sizes | None, name: str, fsdp: int, tensor: int, **options: Any
) -> Any:
    """Case, mesh, collectives and memory of one `train_step` with AdamW."""
    case = bench.quickstart_case() if sizes is None else bench.shaped(case_name, sizes, **options)
    mesh = topology.mesh(name, fsdp=fsdp, tensor=tensor)
    program = bench.lower_step(case, mesh).compile(compiler_options=topology.OPTIONS)
    return case, mesh, collectives(program, mesh), program.memory_analysis()


def over(found: list[Collective], axis: str) -> list[Collective]:
    return [c for c in found if any(axis in a for a in c.axes)]


def sent_elements(c: Collective) -> float:
    dtypes = {shape.partition("[")[0] for shape in c.shapes}
    assert len(dtypes) == 1, c
    return c.sent_bytes / ITEM_BYTES[dtypes.pop()]


@pytest.mark.parametrize("name", ["quickstart", *bench.PEER])
def test_the_tensor_axis_carries_four_activations_a_layer(name):
    # The quickstart's is a user's own model, plain eqx.nn, with no building block.
    options = {} if name == "quickstart" else {"remat": "row_out", "stacked": True}
    sizes = None if name == "quickstart" else SIZES
    case, mesh, found, _ = compiled(name, sizes, "v4:2x2x2", 1, 4, **options)
    least = bench.least(case, mesh)
    moved = sum(c.total_bytes for c in over(found, "tensor"))
    rows = 4 * math.prod(case.activation[:2]) // bench.num_shards(mesh)
    # And for each token the three numbers of the cross-entropy.
    assert 0 <= moved - least["forward"] - least["backward"] <= 4 * rows
    assert {c.kind for c in over(found, "tensor")} == {"all-reduce"}


@cache
def wide() -> tuple[Any, ...]:
    return compiled("LLaMA", WIDE, "v5e:2x4", 8, 1, remat="full", stacked=True)


def whole_parameters() -> dict[str, int]:
    """Bytes of each parameter, whole."""
    model = eqx.filter_eval_shape(bench.make_model("LLaMA", WIDE, stacked=True), jax.random.key(0))
    return {path: 4 * math.prod(x.shape) for path, x in rx.to_arrays(model).items()}


def test_fsdp_moves_three_times_the_parameters():
    _, mesh, found, _ = wide()
    parameters = sum(whole_parameters().values()) / 4
    ring = 1 - 1 / mesh.size
    sent = sum(map(sent_elements, over(found, "fsdp"))) / (ring * parameters)
    assert 2.85 <= sent <= 3.15
    assert {"all-gather", "reduce-scatter"} <= {c.kind for c in found}


def test_fsdp_needs_the_memory_of_zero_3():
    _, mesh, _, memory = wide()
    parameters = whole_parameters()
    layer = sum(n for path, n in parameters.items() if path.startswith("model.layers")) // WIDE.num_layers
    # Weights, two moments and gradients are split; one layer at a time is whole.
    zero_3 = 4 * sum(parameters.values()) // mesh.size + layer
    assert memory.peak_memory_in_bytes <= 1.1 * zero_3


def test_fsdp_and_tensor_add_up():
    case, mesh, found, _ = compiled("LLaMA", SIZES, "v5e:2x4", 4, 2, remat="row_out", stacked=True)
    least = bench.least(case, mesh)
    moved = sum(c.total_bytes for c in over(found, "tensor"))
    assert 0 <= moved - least["forward"] - least["backward"] <= 0.02 * moved
    assert {c.kind for c in over(found, "tensor")} == {"all-reduce"}


def test_fsdp_of_a_users_own_layers_needs_the_memory_of_zero_3():
    # Plain eqx.nn in a Python loop, with no building block: the quickstart's, made wide.
    def make_model(key: Any) -> Any:
        return quickstart.Transformer(dim=1024, num_heads=16, num_layers=6, key=key)

    case = dataclasses.replace(bench.quickstart_case(), make_model=make_model)
    mesh = topology.mesh("v5e:2x4", fsdp=8)
    program = bench.lower_step(case, mesh).compile(compiler_options=topology.OPTIONS)
    model = eqx.filter_eval_shape(make_model, jax.random.key(0))
    parameters = 4 * sum(math.prod(x.shape) for x in rx.to_arrays(model).values())
    layer = 4 * sum(math.prod(x.shape) for x in rx.to_arrays(model.layers[0]).values())
    peak = program.memory_analysis().peak_memory_in_bytes
    assert peak <= 1.1 * (4 * parameters // mesh.size + layer)
