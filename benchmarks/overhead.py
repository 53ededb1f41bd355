"""The overhead of the library over the bare program: per step, and per run of `fit`.

    python benchmarks/overhead.py

1. With 1,000 arrays and hardly any computation, which could hide overhead: the jitted
   `train_step` and `fit` over `jax.jit` of the same update on a flat list of arrays.
2. With one small layer on one device, and with the quickstart's model on eight: `fit`
   over a hand-written loop of the jitted `train_step`, which makes each batch itself.

Only the ratios within one run are meaningful.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from workloads import quickstart

import redco_eqx as rx

jax.config.update("jax_num_cpu_devices", 8)


def trivial_compute(num_arrays: int, num_steps: int, rounds: int) -> None:
    """Measure SGD on 1,000 scalars on one device, where nearly all time is dispatch and
    Python."""
    optimizer = optax.sgd(0.1)
    batch = jnp.zeros((8,))

    def loss_fn(model: list[Any], batch: Any, key: Any) -> Any:
        return sum(model) * jnp.mean(batch)

    def fresh() -> rx.TrainState:
        model = [jnp.ones(()) * i for i in range(num_arrays)]
        return rx.init_state(model, optimizer, key=jax.random.key(0))

    treedef = jax.tree.structure(fresh())
    update = functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer)
    step = jax.jit(update, donate_argnums=0)

    @functools.partial(jax.jit, donate_argnums=0)
    def flat_step(leaves: list[Any], batch: Any) -> tuple[list[Any], Any]:
        state, metrics = update(jax.tree.unflatten(treedef, leaves), batch)
        return jax.tree.leaves(state), metrics

    def timed(step: Callable[..., Any], carry: Any) -> float:
        metrics: Any = None
        start = time.perf_counter()
        for _ in range(num_steps):
            carry, metrics = step(carry, batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - start) / num_steps

    print(f"{num_arrays} scalar arrays, trivial compute, one device", flush=True)
    turns = [
        (timed(flat_step, jax.tree.leaves(fresh())), timed(step, fresh()))
        for _ in range(rounds + 1)
    ]
    examples = np.zeros(((rounds + 2) * num_steps * 8,), np.float32)
    fit = fit_seconds(
        fresh(), examples, num_steps, rounds, loss_fn, optimizer, np.stack
    )
    flat, bare = zip(*turns[1:])  # the first turn compiles
    report({"flat leaves": list(flat), "train_step": list(bare), "fit": fit})


def fit_seconds(
    state: rx.TrainState,
    examples: Any,
    num_steps: int,
    rounds: int,
    loss_fn: Any,
    optimizer: Any,
    collate_fn: Any,
) -> list[float]:
    """Return the seconds per step in each of `rounds` log windows of one `fit`, after
    the first, which compiles."""
    rates: list[float] = []
    rx.fit(
        state,
        examples,
        collate_fn=collate_fn,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=8,
        num_steps=(rounds + 1) * num_steps,
        log_every=num_steps,
        loggers=[lambda step, row: rates.append(row["train/examples_per_second"])],
    )
    return [8 / rate for rate in rates[1:]]


def report(times: dict[str, list[float]]) -> None:
    """Print the medians, and their ratios to the first one."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = next(iter(medians.values()))
    for name, seconds in medians.items():
        print(
            f"  {name:20s} {1e6 * seconds:12.1f} us/step   x{seconds / base:.3f}",
            flush=True,
        )


def over_a_loop(
    mesh: Mesh,
    make_model: Callable[[Any], Any],
    examples: Any,
    loss_fn: Any,
    optimizer: optax.GradientTransformation,
    collate_fn: Any,
    num_steps: int,
    rounds: int,
) -> None:
    """Measure `fit` against a loop written by hand, which makes each batch between two
    steps, in order."""
    model = rx.init_model(make_model, mesh, key=jax.random.key(0))
    update = functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer)
    step = jax.jit(
        functools.partial(update, shardings=rx.shard_rules(model, mesh)),
        donate_argnums=0,
    )
    state, rows = (
        rx.init_state(model, optimizer, key=jax.random.key(1)),
        rx.batch_sharding(mesh),
    )

    loop: list[float] = []
    carry, start = jax.tree.map(jnp.copy, state), 0.0
    for done in range(1, (rounds + 1) * num_steps + 1):
        first = 8 * done % (len(examples) - 8)
        batch = jax.device_put(
            collate_fn([examples[i] for i in range(first, first + 8)]), rows
        )
        carry, metrics = step(carry, batch)
        if done % 5 == 0:  # virtual devices can deadlock if they fall too far behind
            jax.block_until_ready(metrics)
        if done % num_steps == 0:
            loop.append((time.perf_counter() - start) / num_steps)
            start = time.perf_counter()
    fit = fit_seconds(
        state, examples, num_steps, rounds, loss_fn, optimizer, collate_fn
    )
    report({"hand-written loop": loop[1:], "fit": fit})


def one_layer(num_steps: int, rounds: int) -> None:
    print("\none layer of width 16, one device, batch 8")

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((jax.vmap(model)(batch) - batch) ** 2)

    examples = np.random.default_rng(0).normal(size=(32768, 16)).astype(np.float32)
    mesh = rx.make_mesh(devices=jax.devices()[:1])
    over_a_loop(
        mesh,
        lambda key: eqx.nn.Linear(16, 16, key=key),
        examples,
        loss_fn,
        optax.adamw(1e-3),
        np.stack,
        num_steps,
        rounds,
    )


def quickstart_model(num_steps: int, rounds: int) -> None:
    print("\nquickstart model, data=2 x tensor=4, batch 8 x 128 bytes")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    train, _ = quickstart.standard_library()
    over_a_loop(
        rx.make_mesh(tensor=4),
        lambda key: quickstart.Transformer(key=key),
        train,
        quickstart.loss_fn,
        optimizer,
        quickstart.collate_fn,
        num_steps,
        rounds,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--arrays", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    trivial_compute(args.arrays, args.steps, args.rounds)
    one_layer(10 * args.steps, args.rounds)
    quickstart_model(args.steps, args.rounds)
