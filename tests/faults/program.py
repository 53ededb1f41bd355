"""A training run that faults happen to: `python program.py '{"directory": ...}'`; see
`DEFAULTS`.

It ends with a line of JSON: the step, a digest of every bit of the state, and how many
batches were made.
"""

import hashlib
import json
import os
import pathlib
import signal
import sys
from typing import Any

DEFAULTS: dict[str, Any] = {
    "directory": None,  # for checkpoints
    "log": None,  # a JSONL file
    "num_steps": 40,
    "every_steps": 1,
    "keep_last": 2,
    "evaluates": False,  # every 10 steps, with predictions
    "mesh": {"tensor": 2, "fsdp": 2},
    "num_microbatches": 1,
    "port": None,  # of process 0, for two processes of 4 devices
    "process": 0,
    "signal": None,  # sent to itself
    "again_after": None,  # seconds until the same signal is sent a second time
    "hangs": False,  # after the signal, the call does not return
    "prefetch": 0,
    "where": "training",  # or "compilation", "evaluation", "prediction"
    "at": 7,  # at which call of that
    "seconds_per_batch": 0.0,
}
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402


def main(options: dict[str, Any]) -> None:
    jax.config.update("jax_num_cpu_devices", 8 if options["port"] is None else 4)
    if options["port"] is not None:
        jax.distributed.initialize(
            f"127.0.0.1:{options['port']}", 2, options["process"]
        )

    import time

    import numpy as np
    import optax
    from fit_helpers import collate, dropout_loss, fit, make_examples, mlp_state

    import redco_eqx as rx

    num_calls: dict[str, int] = dict.fromkeys(
        ("training", "compilation", "evaluation", "prediction"), 0
    )

    def happen(where: str) -> None:
        num_calls[where] += 1
        if options["signal"] is not None and (where, num_calls[where]) == (
            options["where"],
            options["at"],
        ):
            os.kill(os.getpid(), options["signal"])
            if options["again_after"] is not None:
                time.sleep(options["again_after"])
                os.kill(os.getpid(), options["signal"])
            if options["hangs"]:
                time.sleep(3600)

    def train_collate(examples: Any) -> Any:
        time.sleep(options["seconds_per_batch"])
        # Evaluated are the first examples, in order; training shuffles.
        happen("evaluation" if [e["id"] for e in examples] in evaluated else "training")
        return collate(examples)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        happen("compilation")
        return dropout_loss(model, batch, key)

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        return batch["id"]

    def metric_fn(examples: Any, predictions: Any) -> Any:
        happen("prediction")
        return {"sum": int(np.sum(predictions))}

    examples = make_examples(44, dim=8)
    evaluated = [
        list(range(8)),
        list(range(8, 16)),
        list(range(4)),
        list(range(8, 12)),
        list(range(4, 8)),
    ]
    functions: Any = {"predict_fn": predict_fn, "metric_fn": metric_fn}
    evaluation = (
        rx.Evaluation(examples[:16], every_steps=10, **functions)
        if options["evaluates"]
        else None
    )
    functions = {
        "collate_fn": train_collate,
        "loss_fn": loss_fn,
        "optimizer": optax.adam(1e-2),
    }
    saving = {name: options[name] for name in ("every_steps", "keep_last")}
    arguments = {name: options[name] for name in ("num_steps", "num_microbatches")}
    arguments |= {
        "evaluation": evaluation,
        "checkpoints": rx.Checkpoints(options["directory"], **saving),
    }
    arguments["loggers"] = (
        [] if options["log"] is None else [rx.JSONLLogger(options["log"])]
    )
    code = 0
    state = mlp_state(functions["optimizer"], rx.make_mesh(**options["mesh"]))
    try:
        state = fit(
            state,
            examples,
            prefetch=options["prefetch"],
            batch_size=8,
            log_every=1,
            **functions,
            **arguments,
        )
    except rx.errors.TrainingInterrupted as error:
        code, state = error.code, error.state
    print(
        json.dumps(
            {"step": int(state.step), "digest": digest_of(state), "calls": num_calls}
        ),
        flush=True,
    )
    sys.exit(code)


def digest_of(state: Any) -> str:
    """SHA-256 over the bits of every leaf; on several processes, over what this one
    holds."""
    from fit_helpers import host

    total = hashlib.sha256()
    for x in jax.tree.leaves(state):
        for piece in sorted(x.addressable_shards, key=lambda shard: shard.device.id):
            total.update(host(piece.data).tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    # Ignored in a job of the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main({**DEFAULTS, **json.loads(sys.argv[1])})
