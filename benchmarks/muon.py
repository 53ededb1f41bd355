"""The recipe of docs/pages/howto/muon.md beside `optax.contrib.muon` and AdamW: what a
step sends and computes.

    python benchmarks/muon.py

One step of LLaMA at the sizes of `workloads.py`, compiled for eight virtual CPU
devices: nothing is run. MiB sent are those of a device by the ring algorithm, and GFLOP
those of a device, counted by the compiler. By default `optax.contrib.muon` also takes
the table and the head; the rows with "the same matrices" leave them to AdamW, as the
recipe does.
"""

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import optax
import optax.contrib
from jax.sharding import Mesh
from workloads import (
    COMPILER_OPTIONS,
    MIB,
    abstract_model,
    family_case,
    lower_step,
    table,
)

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
import pages

CASE = family_case("LLaMA")


def optimizers(model: Any) -> Iterator[tuple[str, optax.GradientTransformation]]:
    of_page = pages.defined(
        "howto/muon.md", "def owned_muon", jax=jax, optax=optax, rx=rx
    )
    dims = of_page["matrices"](model)

    def numbers(params: Any) -> Any:
        return {path: dims.get(path) for path in params}

    yield "AdamW", optax.adamw(1e-3)
    yield "optax.contrib.muon", optax.contrib.muon(1e-3)
    yield (
        "the same matrices",
        optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers),
    )
    yield "the recipe", of_page["owned_muon"](1e-3, model, dims)


def row(
    mesh: Mesh, optimizer: optax.GradientTransformation
) -> tuple[float, int, float]:
    """Compile a step. Return the MiB that a device sends, the number of collectives,
    and a device's GFLOP."""
    compiled = lower_step(CASE, mesh, optimizer=optimizer).compile(
        compiler_options=COMPILER_OPTIONS
    )
    total, cost = rx.communication(compiled, mesh).total, compiled.cost_analysis()
    assert cost is not None
    return total.sent_bytes / MIB, total.count, cost["flops"] / 1e9


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    ratios = "MiB, ratio to AdamW", "GFLOP, ratio to optax with the same matrices"
    head = [
        "mesh",
        "optimizer",
        "MiB sent",
        ratios[0],
        "collectives",
        "GFLOP",
        ratios[1],
    ]
    rows = [head]
    meshes = {
        "data 8": rx.make_mesh(),
        "fsdp 8": rx.make_mesh(fsdp=8),
        "data 2 x tensor 4": rx.make_mesh(tensor=4),
    }
    for name, mesh in meshes.items():
        model, _ = abstract_model(CASE, mesh)
        found = {label: row(mesh, optimizer) for label, optimizer in optimizers(model)}
        for label, (sent, count, flops) in found.items():
            ratios = sent / found["AdamW"][0], flops / found["the same matrices"][2]
            numbers = (
                f"{sent:.1f}",
                f"{ratios[0]:.2f}",
                str(count),
                f"{flops:.2f}",
                f"{ratios[1]:.2f}",
            )
            rows.append([name, label, *numbers])
            name = ""
    print(table(rows, num_left=2))


if __name__ == "__main__":
    main()
