"""This library: the layout by the traced program, layers as a list; scanned; and with
the stream between layers whole, or split over `tensor` up to the loss. By default, it
is split up to the head."""

import itertools
import pathlib
import sys
from functools import partial
from typing import Any

import comparison
import jax
import optax
from jax.sharding import Mesh

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import workloads


def case_of(name: str, **options: Any) -> workloads.Case:
    return workloads.family_case(
        name,
        workloads.Sizes(comparison.DIM, comparison.LAYERS, comparison.HEADS),
        **options,
    )


def measure(
    peer: str,
    name: str,
    mesh_name: str,
    mesh: Mesh,
    *,
    overrides: Any = (),
    **options: Any,
) -> None:
    case = case_of(name, **options)
    optimizer, by_program = (
        optax.adamw(comparison.LEARNING_RATE),
        {"loss_fn": case.loss_fn, "batch": case.batch},
    )
    model = rx.init_model(
        case.make_model, mesh, key=jax.random.key(0), overrides=overrides, **by_program
    )
    shardings = rx.shard_rules(model, mesh, overrides=overrides, **by_program)
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    step = jax.jit(
        partial(
            rx.train_step,
            loss_fn=case.loss_fn,
            optimizer=optimizer,
            shardings=shardings,
        ),
        donate_argnums=0,
    )
    following = comparison.tokens(comparison.LENGTH + 1)
    batch: Any = (
        {"source": comparison.tokens(), "target": following}
        if isinstance(case.batch, dict)
        else following
    )
    batch = jax.device_put(batch, rx.batch_sharding(mesh))
    comparison.measure(
        peer,
        name,
        mesh_name,
        step,
        (state, batch),
        lambda output, given: (output[0], given[1]),
        lambda output: output[1]["loss"].value,
    )


PEERS: dict[str, dict[str, Any]] = {
    "redco_eqx": {},
    "redco_eqx, scanned": {"stacked": True},
    "redco_eqx, whole stream": {"sequence_parallel": False},
    "redco_eqx, sequence parallel": {"sequence_parallel": True},
}


def main() -> None:
    comparison.start()
    for (mesh_name, sizes), (peer, options) in itertools.product(
        comparison.MESHES.items(), PEERS.items()
    ):
        if "tensor" in sizes or "sequence_parallel" not in options:
            mesh = rx.make_mesh(**sizes)
            comparison.each(
                peer, mesh_name, partial(_one, peer, mesh_name, mesh, options)
            )


def _one(
    peer: str, mesh_name: str, mesh: Mesh, options: dict[str, Any], name: str
) -> None:
    measure(peer, name, mesh_name, mesh, **options)


if __name__ == "__main__":
    main()
