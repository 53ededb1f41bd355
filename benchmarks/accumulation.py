"""What a step of several microbatches sends, if each sums its gradients over `data`,
and with `reduce_once`: read from the compiled program. Nothing is run.

    python benchmarks/accumulation.py

MiB that a device sends in one `train_step` with AdamW, by the ring algorithm, and MiB
of temporaries, for 1 and 4 microbatches of the same batch, on eight devices: an MLP of
four layers of width 1,024, the quickstart's model, and the library's LLaMA, GPT-2 and
T5 with the stream between layers whole.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from workloads import (
    COMPILER_OPTIONS,
    MIB,
    Case,
    Sizes,
    family_case,
    lower_step,
    quickstart_case,
    table,
)

import redco_eqx as rx

WAYS: dict[str, dict[str, Any]] = {
    "1": {},
    "4": {"num_microbatches": 4},
    "4, once": {"num_microbatches": 4, "reduce_once": True},
}


def mlp_case() -> Case:
    """An MLP of four layers of 1,024, with 64 rows."""

    def make_model(key: Any) -> Any:
        return eqx.nn.MLP(256, 256, 1024, depth=3, key=key)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(jax.vmap(model)(batch) ** 2)

    rows = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    return Case(make_model, loss_fn, rows, (64, 1, 256), 2)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    meshes = {
        "data 8": rx.make_mesh(),
        "data 2 x tensor 4": rx.make_mesh(tensor=4),
        "2 x 2 x 2": rx.make_mesh(tensor=2, fsdp=2),
    }
    cases = {"MLP": mlp_case(), "quickstart": quickstart_case(batch_size=64)}
    for name in ("LLaMA", "GPT-2", "T5"):
        sizes = Sizes(batch_size=64)
        cases[name] = family_case(name, sizes, sequence_parallel=False)
    head = [f"sent, {way}" for way in WAYS] + [f"temporaries, {way}" for way in WAYS]
    rows = [["model", "mesh", *head]]
    for name, case in cases.items():
        for mesh_name, mesh in meshes.items():
            sent = []
            temporaries = []
            for options in WAYS.values():
                lowered = lower_step(case, mesh, **options)
                compiled = lowered.compile(compiler_options=COMPILER_OPTIONS)
                found = rx.communication(compiled, mesh)
                memory = compiled.memory_analysis()
                assert memory is not None
                sent.append(f"{found.total.sent_bytes / MIB:.2f}")
                temporaries.append(f"{memory.temp_size_in_bytes / MIB:.2f}")
            rows.append([name, mesh_name, *sent, *temporaries])
            name = ""
    print(table(rows, num_left=2))


if __name__ == "__main__":
    main()
