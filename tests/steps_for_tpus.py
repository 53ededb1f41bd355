"""Steps compiled for TPUs, and what they must send."""

import math
from collections.abc import Iterable
from typing import Any

import collectives as bench
import equinox as eqx
import jax
import pytest
import topology
import workloads

import redco_eqx as rx
from redco_eqx._compiled.communication import Collective, communication


def compiled(
    case: workloads.Case, name: str, fsdp: int, tensor: int
) -> tuple[Any, ...]:
    """Case, mesh, collectives and memory of one `train_step` with AdamW."""
    mesh = topology.mesh(name, fsdp=fsdp, tensor=tensor)
    program = workloads.lower_step(case, mesh).compile(
        compiler_options=topology.OPTIONS
    )
    return case, mesh, communication(program, mesh), program.memory_analysis()


def over(found: Iterable[Collective], axis: str) -> list[Collective]:
    return [c for c in found if any(axis in a for a in c.axes)]


def num_bytes(model: Any) -> int:
    """Return the bytes of all parameters, whole."""
    return 4 * sum(math.prod(x.shape) for x in rx.to_arrays(model).values())


def assert_sends_the_least(case: Any, mesh: Any, found: Any, at_least: float) -> None:
    """Four activations a layer and each gradient once, as predicted; the bound has
    `at_least` of them."""
    least = bench.least(case, mesh)
    moved = sum(c.total_bytes for c in over(found, "tensor"))
    rows = 4 * math.prod(case.activation[:2]) // workloads.num_shards(mesh)
    # And for each token the three numbers of the cross-entropy.
    assert 0 <= moved - least["forward"] - least["backward"] <= 4 * rows
    assert {c.kind for c in over(found, "tensor")} == {"all-reduce"}
    # Over data each gradient once, and some scalars: this compiler adds the two of a
    # tied embedding first.
    reduced = sum(c.total_bytes for c in over(found, "data"))
    assert 0 <= reduced - least["gradients"] <= 100
    model = eqx.filter_eval_shape(case.make_model, jax.random.key(0))
    predicted = rx.explain(
        model, mesh, loss_fn=case.loss_fn, batch=case.batch
    ).communication
    assert predicted is not None
    sent = sum(c.sent_bytes for c in found)
    assert predicted.num_bytes == pytest.approx(sent, rel=0.01)
    # In the bound, the quickstart gathers its table, which is smaller than the rows
    # that it looks up.
    assert at_least * sent <= predicted.at_least <= sent
