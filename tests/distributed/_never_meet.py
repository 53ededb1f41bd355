"""One of two processes that do not make the same calls. Its arguments are a directory
and the name of a case.

Process 0 is blocked first, unless the case says otherwise. Each process that comes to
its end writes a file.
"""

import contextlib
import pathlib
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import redco_eqx as rx

directory = pathlib.Path(sys.argv[1])
case = sys.argv[2]
rx.initialize_distributed(leave_seconds=1.0)
me, mesh, optimizer = jax.process_index(), rx.make_mesh(), optax.sgd(0.1)
examples = [np.full(2, i, np.float32) for i in range(16)]


def make_model(key):
    return eqx.nn.Linear(2, 2, key=key)


def loss_fn(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)


def predict_fn(model, batch, key):
    return jax.vmap(model)(batch)


def collate(rows):
    return np.stack(rows)


def state_of(key=0):
    return rx.init_state(
        rx.init_model(make_model, mesh, key=jax.random.key(key)),
        optimizer,
        key=jax.random.key(1),
    )


COMMON = {"collate_fn": collate, "batch_size": 8}
CALLS = {
    "evaluate": lambda state: rx.evaluate(state, examples, loss_fn=loss_fn, **COMMON),
    "predict": lambda state: rx.predict(
        state, examples, predict_fn=predict_fn, **COMMON
    ),
    "Evaluation": lambda state: rx.Evaluation(examples, loss_fn=loss_fn, **COMMON)(
        state
    ),
    "save": lambda state: rx.save(directory / "saved", state),
    "restore": lambda state: rx.restore(directory / "saved", state),
    "init_model": lambda state: state_of(),
    "fit": lambda state: rx.fit(
        state, examples, loss_fn=loss_fn, optimizer=optimizer, num_steps=2, **COMMON
    ),
}


def train(state, **options):
    defaults = {
        "loss_fn": loss_fn,
        "optimizer": optimizer,
        "num_steps": 6,
        "log_every": 2,
        "loggers": (),
    }
    return rx.fit(state, examples, **{**COMMON, **defaults, **options})[0]


def leave(rows, code=1):
    """Ends process 1 in its fourth batch of training."""
    leave.__dict__["count"] = leave.__dict__.get("count", 0) + (len(rows) == 4)
    if me == 1 and leave.__dict__["count"] == 6:
        sys.exit(code)
    return collate(rows)


def alone(call):
    """A hook that makes a call on process 0 alone."""

    def hook(run, row, state):
        if me == 0 and run.step == 2:
            CALLS[call](state)

    return hook


def slow(rows):
    """Process 1 reads for a long time."""
    if me == 1 and not (directory / "slow").exists():
        (directory / "slow").touch()
        time.sleep(12)
    return collate(rows)


state = state_of()
kind, _, what = case.partition(" ")
if kind == "sys.exit":
    train(state, collate_fn=lambda rows: leave(rows, int(what)))
elif kind == "hook":
    train(state, hook=alone(what))
elif kind == "after":  # process 1 has come to its end
    jax.block_until_ready(state)
    if me == 0:
        CALLS[what](state)
elif kind == "crossed":  # each waits for the other in another call
    CALLS[what if me == 0 else "init_model"](state)
elif kind == "caught":  # by all
    with contextlib.suppress(SystemExit):
        train(
            state,
            collate_fn=lambda rows: sys.exit(1) if len(rows) == 4 else collate(rows),
        )
    if me == 0:
        time.sleep(12)
elif kind == "slow":
    state = train(state, collate_fn=slow)
    rx.evaluate(state, examples, loss_fn=loss_fn, **COMMON)
    if me == 0:  # uploads a log, and computes something of its own
        time.sleep(12)
        print(jnp.sum(jnp.arange(8)))
(directory / f"{me}.end").touch()
