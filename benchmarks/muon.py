"""The recipe of docs/pages/howto/muon.md beside `optax.contrib.muon` and AdamW: what a step sends and computes.

    python benchmarks/muon.py

One step of LLaMA at the sizes of `workloads.py`, compiled for eight virtual CPU devices: nothing is run. MiB
sent are those of a device by the ring algorithm, and GFLOP those of a device, counted by the compiler. By
default `optax.contrib.muon` also takes the table and the head; the rows with "the same matrices" leave them to
AdamW, as the recipe does.
"""

import functools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import optax
import optax.contrib
from jax.sharding import Mesh
from workloads import COMPILER_OPTIONS, MIB, abstract_model, family_case, table

import redco_eqx as rx

sys.path.append(str(pathlib.Path(__file__).parents[1] / "tests"))
import pages

CASE = family_case("LLaMA")


def recipe() -> dict[str, Any]:
    """Returns the names that the first block of the page defines."""
    block = next(b for b in pages.blocks((pages.PAGES / "howto/muon.md").read_text()) if b.language == "python")
    names: dict[str, Any] = {"jax": jax, "optax": optax, "rx": rx}
    exec(compile(block.code, "howto/muon.md", "exec"), names)
    return names


def optimizers(model: Any) -> Iterator[tuple[str, optax.GradientTransformation]]:
    of_page = recipe()
    dims = of_page["matrices"](model)

    def numbers(params: Any) -> Any:
        return {path: dims.get(path) for path in params}

    yield "AdamW", optax.adamw(1e-3)
    yield "optax.contrib.muon", optax.contrib.muon(1e-3)
    yield "the same matrices", optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)
    yield "the recipe", of_page["owned_muon"](1e-3, model, dims)


def row(
    mesh: Mesh, model: Any, shardings: Any, optimizer: optax.GradientTransformation
) -> tuple[float, int, float]:
    """Compiles a step. Returns the MiB that a device sends, the number of collectives, and a device's GFLOP."""
    state = rx.init_state(model, optimizer, key=jax.random.key(0))
    step = functools.partial(rx.train_step, loss_fn=CASE.loss_fn, optimizer=optimizer, shardings=shardings)
    batch = jax.ShapeDtypeStruct(CASE.batch.shape, CASE.batch.dtype, sharding=rx.batch_sharding(mesh))
    compiled = jax.jit(step, donate_argnums=0).lower(state, batch).compile(compiler_options=COMPILER_OPTIONS)
    total, cost = rx.communication(compiled, mesh).total, compiled.cost_analysis()
    assert cost is not None
    return total.sent_bytes / MIB, total.count, cost["flops"] / 1e9


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    head = ["mesh", "optimizer", "MiB sent", "of AdamW's", "collectives", "GFLOP", "of optax's, same matrices"]
    rows = [head]
    meshes = {
        "data 8": rx.make_mesh(),
        "fsdp 8": rx.make_mesh(fsdp=8),
        "data 2 x tensor 4": rx.make_mesh(tensor=4),
    }
    for name, mesh in meshes.items():
        model, shardings = abstract_model(CASE, mesh)
        found = {label: row(mesh, model, shardings, optimizer) for label, optimizer in optimizers(model)}
        for label, (sent, count, flops) in found.items():
            ratios = sent / found["AdamW"][0], flops / found["the same matrices"][2]
            numbers = f"{sent:.1f}", f"{ratios[0]:.2f}", str(count), f"{flops:.2f}", f"{ratios[1]:.2f}"
            rows.append([name, label, *numbers])
            name = ""
    print(table(rows, num_left=2))


if __name__ == "__main__":
    main()
