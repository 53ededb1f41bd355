"""The cost of a checkpoint: the time for which it delays the loop, and its size.

    python benchmarks/checkpoints.py [--megabytes 200]

A loop takes steps over a state of AdamW and saves now and then. "Blocked" is the time
within `save`, without the steps that were still running. "Added" is the time by which a
save makes the whole loop longer, including the writing in the background (on a CPU it
takes time from the steps, on an accelerator it does not). "Synchronous" waits for each
save to be complete. At the end, `save` and `restore` are compared with Orbax alone,
which computes no checksums. Only the ratios are meaningful.
"""

import argparse
import collections
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax

if jax.config.jax_platforms in (None, "cpu"):  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_num_cpu_devices", 8)

import equinox as eqx
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import redco_eqx as rx
from redco_eqx._checkpoint.arrays import as_saved, to_names


def make(megabytes: float, optimizer: optax.GradientTransformation) -> rx.TrainState:
    """Make parameters and two moments of `megabytes` in total, split over all
    devices."""
    width = int((megabytes * 1e6 / 3 / 4 / 8) ** 0.5) // 64 * 64
    mesh = rx.make_mesh(fsdp=len(jax.devices()))
    model = rx.init_model(
        lambda key: eqx.nn.MLP(width, width, width, 7, key=key),
        mesh,
        key=jax.random.key(0),
    )
    return rx.init_state(model, optimizer, key=jax.random.key(1))


def size_of(state: rx.TrainState) -> int:
    """Return the bytes of the arrays, each counted once."""
    return sum(
        x.nbytes
        for x in (
            *jax.tree.leaves((state.params, state.frozen, state.opt_state)),
            state.step,
        )
    )


def ratios_to_orbax(state: rx.TrainState, directory: pathlib.Path) -> list[float]:
    """Measure the times of `save` and `restore` over those of Orbax, for the same
    arrays in the same layout."""
    arrays = as_saved(to_names(state))
    layouts = jax.tree.map(
        lambda x: ocp.ArrayRestoreArgs(
            sharding=x.sharding, global_shape=x.shape, dtype=x.dtype
        ),
        arrays,
    )
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    theirs = directory / "theirs"
    ours = directory / "ours"
    to_save: Any = ocp.args.PyTreeSave(arrays)
    to_restore: Any = ocp.args.PyTreeRestore(item=arrays, restore_args=layouts)

    def seconds(function: Any) -> float:
        began = time.perf_counter()
        jax.block_until_ready(function())
        return time.perf_counter() - began

    plain_save = seconds(lambda: checkpointer.save(theirs, args=to_save))
    our_save = seconds(lambda: rx.save(ours, state))
    plain_restore = seconds(lambda: checkpointer.restore(theirs, args=to_restore))
    our_restore = seconds(lambda: rx.restore(ours, state))
    return [our_save / plain_save, our_restore / plain_restore]


def compare_with_orbax(state: rx.TrainState, rounds: int) -> None:
    found = []
    for _ in range(rounds + 1):
        with tempfile.TemporaryDirectory() as directory:
            found.append(ratios_to_orbax(state, pathlib.Path(directory)))
    # The first round compiles.
    saves, restores = zip(*found[1:])
    print(f"save over Orbax alone: {statistics.median(saves):.2f}")
    print(f"restore over Orbax alone: {statistics.median(restores):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--megabytes", type=float, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="between two saves")
    arguments = parser.parse_args()
    optimizer = optax.adamw(1e-3)
    state = make(arguments.megabytes, optimizer)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)

    def update(state: rx.TrainState, batch: Any) -> rx.TrainState:
        return rx.train_step(state, batch, loss_fn=loss_fn, optimizer=optimizer)[0]

    step = jax.jit(update, donate_argnums=0)
    width = state.params["layers.0.weight"].shape[0]
    batch = jax.random.normal(jax.random.key(2), (64, width))
    batch = jax.device_put(
        batch, rx.batch_sharding(rx.make_mesh(fsdp=len(jax.devices())))
    )
    state = step(state, batch)

    def turn(
        state: rx.TrainState, writer: Any, wait: bool
    ) -> tuple[rx.TrainState, float, float]:
        """Take the steps between two saves. Return the state, the seconds in total, and
        those blocked in the save."""
        jax.block_until_ready(state)
        began = time.perf_counter()
        blocked, ahead = 0.0, collections.deque[jax.Array]()
        if writer is not None:
            writer.save(state)
            if wait:
                writer.wait()
            blocked = time.perf_counter() - began
        for _ in range(arguments.steps):
            state = step(state, batch)
            ahead.append(state.step + 0)
            if len(ahead) > 2:  # a loop that reads metrics does not run further ahead
                jax.block_until_ready(ahead.popleft())
        jax.block_until_ready(state)
        return state, time.perf_counter() - began, blocked

    with (
        tempfile.TemporaryDirectory() as directory,
        rx.Checkpoints(directory, keep_last=1).open() as writer,
    ):
        times: dict[str, list[tuple[float, float]]] = {
            "none": [],
            "asynchronous": [],
            "synchronous": [],
        }
        for _ in range(arguments.rounds + 1):
            for name, found in times.items():
                writer.wait()
                state, total, blocked = turn(
                    state, None if name == "none" else writer, name == "synchronous"
                )
                found.append((total, blocked))
        writer.wait()
        on_disk = sum(
            path.stat().st_size
            for path in pathlib.Path(directory).rglob("*")
            if path.is_file()
        )

    device = jax.devices()[0]
    print(
        f"{size_of(state) / 1e6:.0f} MB of state on {len(jax.devices())} devices "
        f"({device.device_kind})"
    )
    # The first round compiles.
    base = statistics.median(total for total, _ in times["none"][1:])
    print(f"{arguments.steps} steps take {base:.3f} s")
    print(f"{'save':<14}{'blocked, s':>12}{'added, s':>12}")
    results = {}
    for name in ("asynchronous", "synchronous"):
        blocked = statistics.median(blocked for _, blocked in times[name][1:])
        added = statistics.median(total for total, _ in times[name][1:]) - base
        results[name] = blocked, added
        print(f"{name:<14}{blocked:>12.3f}{added:>12.3f}")
    ratios = [x / y for x, y in zip(results["asynchronous"], results["synchronous"])]
    print(f"{'ratio':<14}{ratios[0]:>12.3f}{ratios[1]:>12.3f}")
    print(f"bytes on disk over bytes of state: {on_disk / size_of(state):.3f}")
    compare_with_orbax(state, arguments.rounds)


if __name__ == "__main__":
    main()
