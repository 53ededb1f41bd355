"""The bytes that a plan predicts, over those of the compiled step, on all meshes of eight devices.

    python benchmarks/plans.py [MODEL ...]

Both numbers are those that a device sends by the ring algorithm. The CPU compiles: no array is made.
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from workloads import Case, Sizes, family_case, quickstart_case, table

import redco_eqx as rx
from redco_eqx._planning.trial import meshes

SIZES = Sizes(dim=64, num_layers=2, vocabulary=256, length=32, batch_size=16)


def squares(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def cases() -> dict[str, Case]:
    rows = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    return {
        "MLP": Case(
            lambda key: eqx.nn.MLP(128, 128, 256, 2, key=key), squares, {"x": rows, "y": rows}, (16, 1, 256), 0
        ),
        "list of eqx.nn layers": quickstart_case(16),
        "stacked LLaMA": family_case("LLaMA", SIZES, stacked=True),
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = cases()
    parser.add_argument("models", nargs="*", choices=[*every, []], help="all without any")
    names = parser.parse_args().models or every
    rows = [["model", "data, fsdp, tensor", "predicted KiB", "compiled KiB", "ratio"]]
    for name in names:
        case = every[name]
        for sizes in meshes(8, 16):
            best = rx.plan(
                case.make_model,
                loss_fn=case.loss_fn,
                optimizer=optax.adamw(1e-3),
                batch=case.batch,
                mesh=sizes,
                bytes_per_device=2**40,
                progress=False,
            ).best
            sent, ratio = (best.predicted_bytes, best.sent_bytes), best.predicted_bytes / best.sent_bytes
            kib = [f"{size / 2**10:.1f}" for size in sent]
            rows.append([name, " x ".join(map(str, sizes.values())), *kib, f"{ratio:.3f}"])
            print("  ".join(rows[-1]), flush=True)
    print(f"\n{table(rows, num_left=2)}")


if __name__ == "__main__":
    main()
