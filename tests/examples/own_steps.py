"""Runs of `fit` with a step of the user's own: both of the page "Your own training
step", and that of the example of differential privacy."""

import functools
import os
import signal
import time
from typing import Any

import digits_data
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pages
from differential_privacy import main as dp

import redco_eqx as rx

NUM_STEPS = 16
KILLED_IN_BATCH = 12


def of_page(mark: str) -> dict[str, Any]:
    """Return the names that the block of the page with `mark` defines."""
    rng = np.random.default_rng(0)
    examples = [(rng.integers(0, 128, 32), int(rng.integers(512))) for _ in range(256)]
    names = pages.defined(
        "five-minutes.md", "def collate_fn", np=np, optax=optax, jax=jax
    )
    pipeline = {
        "collate_fn": names["collate_fn"],
        "loss_fn": names["loss_fn"],
        "optimizer": optax.adamw(1e-3),
        "batch_size": 64,
        "loggers": (),
    }
    return pages.defined(
        "howto/own-step.md",
        mark,
        **names,
        rx=rx,
        eqx=eqx,
        jnp=jnp,
        make_model=lambda key: eqx.nn.MLP(32, 512, 32, 1, key=key),
        mesh=rx.make_mesh(tensor=4),
        examples=examples,
        optimizer=pipeline["optimizer"],
        pipeline=pipeline,
    )


def teacher() -> tuple[Any, Any, dict[str, Any]]:
    page = of_page("def averaging_step")
    options = {**page["pipeline"], "step_fn": page["averaging_step"]}
    return page["taught_state"](), page["examples"], options


def gan() -> tuple[Any, Any, dict[str, Any]]:
    page = of_page("def gan_step")
    return page["gan_state"](), page["examples"], page["pipeline"]


def private() -> tuple[Any, Any, dict[str, Any]]:
    train, _ = digits_data.digits()
    examples = dp.PoissonSamples(
        examples=[(x, y, 1.0) for x, y in train], rate=0.05, places=128, seed=0
    )
    optimizer = optax.sgd(1.0, momentum=0.5)
    model = rx.init_model(
        lambda key: eqx.nn.MLP(64, 10, 16, 1, key=key),
        rx.make_mesh(tensor=2),
        key=jax.random.key(0),
    )
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    options = {
        "collate_fn": dp.collate_fn,
        "loss_fn": dp.loss_fn,
        "optimizer": optimizer,
        "batch_size": 128,
        "loggers": (),
        "step_fn": functools.partial(
            dp.private_step, clip=1.0, noise=1.0, batch_size=64
        ),
    }
    return state, rx.Stream(examples), options


RUNS = {"teacher": teacher, "gan": gan, "private": private}


def run(kind: str, directory: Any, *, killed: bool = False) -> Any:
    """Return the state after `NUM_STEPS` steps. A killed run ends by SIGKILL while it
    makes a batch."""
    state, examples, options = RUNS[kind]()
    num_batches = 0

    def collate_fn(batch: Any) -> Any:
        nonlocal num_batches
        num_batches += 1
        if killed:
            time.sleep(0.1)  # so that checkpoints are written
        if killed and num_batches == KILLED_IN_BATCH:
            os.kill(os.getpid(), signal.SIGKILL)
        return options["collate_fn"](batch)

    checkpoints = None
    if directory is not None:
        checkpoints = rx.Checkpoints(directory, every_steps=1)
    given = {**options, "collate_fn": collate_fn}
    return rx.fit(
        state, examples, **given, num_steps=NUM_STEPS, checkpoints=checkpoints
    )[0]
