"""What a plan predicts, over what the compiled step does, on all meshes of eight
devices.

    python benchmarks/plans.py [MODEL ...]                  by the CPU compiler
    python benchmarks/plans.py --target v5e:2x4 [MODEL ...]

For each mesh: the KiB that a device sends by the ring algorithm, as `plan` predicts
them from the program and as the compiled step does, and the peak of memory. Then the
mesh that `plan` chooses, and the one that is best if all are compiled, by the bytes of
the compiled step and the speeds in the data sheet of the chip. No array is made.
"""

import argparse
import functools
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


class UNet(eqx.Module):
    """Two levels of convolutions with a skip connection, on images of shape (3, 32,
    32)."""

    enter: eqx.nn.Conv2d
    down: eqx.nn.Conv2d
    inner: list[eqx.nn.Conv2d]
    up: eqx.nn.ConvTranspose2d
    leave: eqx.nn.Conv2d

    def __init__(self, width: int, *, key: Any):
        keys = jax.random.split(key, 6)
        self.enter = eqx.nn.Conv2d(3, width, 3, padding=1, key=keys[0])
        self.down = eqx.nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, key=keys[1])
        self.inner = [
            eqx.nn.Conv2d(2 * width, 2 * width, 3, padding=1, key=k) for k in keys[2:4]
        ]
        self.up = eqx.nn.ConvTranspose2d(2 * width, width, 2, stride=2, key=keys[4])
        self.leave = eqx.nn.Conv2d(2 * width, 3, 3, padding=1, key=keys[5])

    def __call__(self, image: Any) -> Any:
        skipped = jax.nn.silu(self.enter(image))
        x = jax.nn.silu(self.down(skipped))
        for convolution in self.inner:
            x = x + jax.nn.silu(convolution(x))
        return self.leave(jnp.concatenate([self.up(x), skipped]))


def cases() -> dict[str, Case]:
    images = jax.ShapeDtypeStruct((16, 3, 32, 32), jnp.float32)
    rows = jax.ShapeDtypeStruct((16, 128), jnp.float32)
    return {
        "MLP": Case(
            lambda key: eqx.nn.MLP(128, 128, 256, 2, key=key),
            squares,
            {"x": rows, "y": rows},
            (16, 1, 256),
            0,
        ),
        "list of eqx.nn layers": quickstart_case(16),
        "stacked LLaMA": family_case("LLaMA", SIZES, stacked=True),
        "U-Net": Case(
            lambda key: UNet(32, key=key),
            squares,
            {"x": images, "y": images},
            (16, 1024, 32),
            0,
        ),
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = cases()
    parser.add_argument(
        "models", nargs="*", choices=[*every, []], help="all without any"
    )
    parser.add_argument("--target", help="as for plan; without one, the CPU compiler")
    args = parser.parse_args()
    rows = [
        [
            "model",
            "data, fsdp, tensor",
            "predicted KiB",
            "compiled KiB",
            "ratio",
            "peak MiB",
        ]
    ]
    choices = [
        [
            "model",
            "chosen",
            "compilations",
            "best if all are compiled",
            "time over the best",
        ]
    ]
    for name in args.models or every:
        case = every[name]
        plan = functools.partial(
            rx.plan,
            case.make_model,
            loss_fn=case.loss_fn,
            optimizer=optax.adamw(1e-3),
            batch=case.batch,
            target=args.target,
            bytes_per_device=None if args.target else 2**40,
            progress=False,
        )
        compiled = {}
        for sizes in meshes(8, 16):
            best = plan(mesh=sizes).best
            mesh = " x ".join(map(str, sizes.values()))
            compiled[mesh] = best
            sent, ratio = (
                (best.predicted_bytes, best.sent_bytes),
                best.predicted_bytes / best.sent_bytes,
            )
            kib = [f"{size / 2**10:.1f}" for size in sent]
            rows.append(
                [
                    name,
                    mesh,
                    *kib,
                    f"{ratio:.3f}",
                    f"{(best.memory.peak or 0) / 2**20:.1f}",
                ]
            )
            print("  ".join(rows[-1]), flush=True)
        found = plan()
        chosen, fastest = (
            " x ".join(map(str, found.mesh.values())),
            min(compiled, key=lambda m: compiled[m].seconds),
        )
        tries = sum(trial.communication is not None for trial in found.trials)
        over = compiled[chosen].seconds / compiled[fastest].seconds
        choices.append([name, chosen, str(tries), fastest, f"{over:.3f}"])
    print(f"\n{table(rows, num_left=2)}\n\n{table(choices, num_left=2)}")


if __name__ == "__main__":
    main()
