"""One process of a run: the same on one host and on many, whatever starts it.

    # trains, evaluates, predicts on each mesh; writes results
    python program.py OUT equal [MESH ...]
    # trains until something goes wrong on that process; or to the end, if FAULT is
    # `finish`
    python program.py OUT FAULT PROCESS [CHECKPOINTS]

Each process touches `OUT/ready.<process>` when it is in the middle of its work.
"""

import gc
import json
import os
import pathlib
import signal
import sys
import time

import equinox as eqx
import jax
import numpy as np
import optax

import redco_eqx as rx

MESHES = {
    "data": {},
    "tensor4": {"tensor": 4},
    "tensor8": {"tensor": 8},
    "fsdp8": {"fsdp": 8},
}
MESHES |= {"fsdp2tensor2": {"fsdp": 2, "tensor": 2}, "microbatches": {"tensor": 4}}
NUM_TRAIN, NUM_EVAL, NUM_PREDICT, BATCH_SIZE = 35, 29, 13, 8
NUM_STEPS, SAVE_EVERY, FAULT_AT = 80, 7, 20
LAST_BIAS = "layers.1.layers.2.bias"


def make_model(key):
    keys = jax.random.split(key)
    return eqx.nn.Sequential(
        [eqx.nn.Embedding(32, 16, key=keys[0]), eqx.nn.MLP(16, 32, 64, 2, key=keys[1])]
    )


def collate(examples):
    x = np.asarray(examples, np.int32)
    return {
        "tokens": x,
        "weight": (1 + x % 3).astype(np.float32),
        "mask": np.ones((len(x), 4), np.float32),
    }


def loss_fn(model, batch, key):
    logits = jax.vmap(model)(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, (batch["tokens"] + 1) % 32
    )
    right = logits.argmax(-1) == (batch["tokens"] + 1) % 32
    weight = batch["weight"] * batch["mask"].min(axis=1)
    return rx.Mean((losses * weight).sum(), weight.sum()), {"accuracy": right.mean()}


def predict_fn(model, batch, key):
    return {"logits": jax.vmap(model)(batch["tokens"]), "token": batch["tokens"]}


def examples(number, start=0):
    return np.arange(start, start + number) * 7 % 32


def begin(mesh_name, differs=""):
    mesh = rx.make_mesh(**MESHES[mesh_name])
    scale = 1.0001 if differs == "weights" else 1.0

    def make_scaled(key):
        return jax.tree.map(
            lambda x: x * scale if eqx.is_array(x) else x, make_model(key)
        )

    model = rx.init_model(
        make_scaled, mesh, key=jax.random.key(5 if differs == "model key" else 0)
    )
    optimizer = optax.sgd(0.01 if differs == "learning rate" else 0.05, momentum=0.9)
    return rx.init_state(
        model, optimizer, key=jax.random.key(5 if differs == "key" else 1)
    ), optimizer


def gather(state):
    whole = jax.jit(
        lambda x: x,
        out_shardings=jax.sharding.NamedSharding(state.step.sharding.mesh, jax.P()),
    )
    return {path: np.asarray(whole(x)).tolist() for path, x in state.params.items()}


def say(out, what, results=None):
    """Writes a file of this process, with its results."""
    (
        out / f"{what}.{jax.process_index()}{'' if results is None else '.json'}"
    ).write_text(json.dumps(results))


def equal(out, names):
    results = {}
    for name in names:
        state, optimizer = begin(name)
        rows = []
        common = {"collate_fn": collate, "batch_size": BATCH_SIZE}
        options = {
            "num_epochs": 2,
            "num_microbatches": 2 if name == "microbatches" else 1,
            "log_every": 1,
        }
        loggers = [lambda step, row, rows=rows: rows.append([step, row["train/loss"]])]
        functions = {"loss_fn": loss_fn, "optimizer": optimizer}
        state, _ = rx.fit(
            state,
            examples(NUM_TRAIN),
            loggers=loggers,
            **functions,
            **options,
            **common,
        )
        predictions = rx.predict(
            state, examples(NUM_PREDICT, 3), predict_fn=predict_fn, **common
        )
        results[name] = {
            "rows": rows,
            "params": gather(state),
            "evaluation": rx.evaluate(
                state, examples(NUM_EVAL, 1), loss_fn=loss_fn, **common
            ),
            "predictions": [
                {name: x.tolist() for name, x in p.items()} for p in predictions
            ],
        }
        say(out, "ready")
    say(out, "result", results)


class Faulty:
    """A collate that works for a while."""

    def __init__(self, out, fault, process):
        self.out = out
        self.fault = fault
        self.mine = process == jax.process_index()
        self.num_batches = 0
        self.last = None

    def __call__(self, rows):
        # A run with checkpoints makes its first batch twice, of the same rows.
        self.num_batches += rows is not self.last
        self.last = rows
        batch = collate(rows)
        if self.fault == "finish":
            return batch
        time.sleep(0.02)
        if self.num_batches >= FAULT_AT:
            say(self.out, "ready")
            time.sleep(0.2)
        if self.mine and self.num_batches == FAULT_AT:
            if self.fault == "raise":
                raise KeyError("no such column")
            if self.fault == "stuck":
                time.sleep(3600)
            if self.fault == "exit":
                sys.exit(1)
            if self.fault == "shape":
                batch["mask"] = np.ones((len(rows), 5), np.float32)
        if self.fault == "random rows":
            batch["weight"] = (
                np.random.default_rng().uniform(size=len(rows)).astype(np.float32)
            )
        if self.mine and self.fault == "collate":
            batch["weight"] = batch["weight"] * np.float32(1.01)
        return batch


def faulty(out, fault, process, checkpoints, mesh="fsdp2tensor2"):
    differs = fault if process == jax.process_index() else ""
    state, optimizer = begin("tensor4" if fault == "random rows" else mesh, differs)
    if differs == "directory" and checkpoints:
        checkpoints = f"{checkpoints}-other"
    rows = examples(NUM_TRAIN - (differs == "fewer"), 3 if differs == "examples" else 0)
    if differs == "order":
        rows[[3, 4]] = rows[[4, 3]]

    def other_loss(model, batch, key):
        loss, metrics = loss_fn(model, batch, key)
        return rx.Mean(1.5 * loss.total, loss.weight), metrics

    def hook(run, row, state):
        if run.step == FAULT_AT:
            say(out, "ready")
            if differs == "evaluates":
                rx.evaluate(
                    state,
                    examples(NUM_EVAL, 1),
                    collate_fn=collate,
                    loss_fn=loss_fn,
                    batch_size=BATCH_SIZE,
                )
            if differs == "forks" and os.fork() == 0:  # a worker that outlives it
                time.sleep(60)
                os._exit(0)
            if differs == "forks":
                os.kill(os.getpid(), signal.SIGKILL)
            # Behind the back of `fit`, whose own state is changed.
            if differs == "drift":
                (own,) = [x for x in gc.get_objects() if type(x).__name__ == "Training"]
                own.arrays[sorted(state.params).index(LAST_BIAS)] = (
                    1.5 * state.params[LAST_BIAS]
                )

    options = (
        {"hook": hook, "log_every": 10}
        if fault in ("drift", "evaluates", "forks")
        else {}
    )
    if fault in ("evaluation", "metrics"):
        held_out = examples(NUM_EVAL, 5 if differs == "evaluation" else 1)
        alone = lambda *arguments: loss_fn(*arguments)[0]  # noqa: E731
        options["evaluation"] = rx.Evaluation(
            held_out, loss_fn=alone if differs == "metrics" else loss_fn
        )
    options |= {"step_timeout_seconds": 5} if fault == "stuck" else {}
    functions = {
        "loss_fn": other_loss if differs == "loss" else loss_fn,
        "optimizer": optimizer,
    }
    functions["collate_fn"] = Faulty(out, fault, process)
    changes = differs == "allow_changes"
    saved = checkpoints and rx.Checkpoints(
        checkpoints, every_steps=SAVE_EVERY, allow_changes=changes
    )
    num_steps = NUM_STEPS - (differs == "steps")
    options |= {"batch_size": BATCH_SIZE, "checkpoints": saved, "loggers": []}
    state, _ = rx.fit(state, rows, num_steps=num_steps, **functions, **options)
    if differs == "ends":
        say(out, "ready")
        return
    if fault == "ends":
        rx.evaluate(
            state,
            examples(NUM_EVAL, 1),
            collate_fn=collate,
            loss_fn=loss_fn,
            batch_size=BATCH_SIZE,
        )
    say(out, "result", {"params": gather(state)})


def main():
    out = pathlib.Path(sys.argv[1])
    what = sys.argv[2]
    timeout = int(os.environ.get("REDCO_TIMEOUT", 120))
    rx.initialize_distributed(
        timeout_seconds=timeout, heartbeat_timeout_seconds=10, leave_seconds=3
    )
    if what == "equal":
        equal(out, sys.argv[3:] or list(MESHES))
    else:
        faulty(out, what, int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)


if __name__ == "__main__":
    main()
