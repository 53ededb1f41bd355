"""Plans by the TPU compiler, with no device: what fits and what does not, and what it
then says."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import topology
import workloads

import redco_eqx as rx

SIZES = workloads.Sizes(
    dim=512, num_layers=4, num_heads=8, vocabulary=1024, length=128, batch_size=16
)


def make_llama(key: Any, sizes: workloads.Sizes = SIZES, **options: Any) -> Any:
    return workloads.make_model("LLaMA", sizes, stacked=True, **options)(key)


def plan(
    make_model: Any = make_llama, sizes: workloads.Sizes = SIZES, **arguments: Any
) -> Any:
    return rx.plan(
        make_model,
        loss_fn=workloads.next_token_loss,
        optimizer=optax.adamw(1e-3),
        batch=jax.ShapeDtypeStruct((sizes.batch_size, sizes.length + 1), jnp.int32),
        **{"target": "v5e:2x4", "progress": False, **arguments},
    )


def test_a_plan_is_the_compiled_step() -> None:
    found = plan(mesh={"tensor": 4})
    assert found.fits
    mesh = rx.make_mesh(tensor=4, devices=topology.devices("v5e:2x4"))
    case = workloads.family_case("LLaMA", SIZES, stacked=True)
    compiled = workloads.lower_step(case, mesh).compile()
    stats = compiled.memory_analysis()
    assert stats is not None
    assert found.memory.peak == stats.peak_memory_in_bytes
    assert found.best.communication.counts == rx.communication(compiled, mesh).counts
    assert found.target.compiler == "tpu"


def test_what_a_refused_step_needs_is_said_and_is_what_a_larger_chip_gives_it() -> None:
    sizes = workloads.Sizes(
        dim=4096,
        num_layers=16,
        num_heads=32,
        vocabulary=32000,
        length=2048,
        batch_size=16,
    )
    make = functools.partial(make_llama, sizes=sizes, sequence_parallel=False)
    of_both: dict[str, Any] = {"mesh": {"tensor": 8}, "options": {"remat": ["full"]}}
    refused = plan(make, sizes, target="v5e:2x4", **of_both)
    taken = plan(make, sizes, target="v6e:2x4", **of_both)
    assert not refused.fits
    assert refused.memory.peak > refused.capacity
    assert "DOES NOT FIT" in str(refused)
    assert taken.fits
    assert refused.memory.peak == pytest.approx(taken.memory.peak, rel=0.05)
    # The stream at each of 16 layers, and not what these compute, except for one layer
    # and the head.
    rows = 16 * 2048 * 4
    scores = rows * 32 // 8 * 2048
    logits = rows * 32000 // 8
    least = 16 * rows * 4096 + 2 * taken.memory.gradients
    assert taken.memory.temporaries < least + 2 * scores + 3 * logits


@pytest.mark.parametrize("target", ["v5e:3x5", "v4:9x9x9"])
def test_a_topology_that_there_is_not(target: str) -> None:
    with pytest.raises(ValueError, match=rf"no topology '{target}'"):
        plan(target=target)
