"""One of the two processes of `test_two_processes.py`; its argument is a directory."""

import dataclasses
import itertools
import json
import pathlib
import sys
import time
import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from fit_helpers import fit, raised
from stream_sources import BEGIN, StatefulIterator

import redco_eqx as rx
from redco_eqx._data import batches, streams
from redco_eqx._data.batches import Epochs
from redco_eqx._distributed import consensus
from redco_eqx._sharding.mesh import replicated
from redco_eqx._training import loop as training

rx.initialize_distributed()
streams.PROOF = 4  # so that the states of short epochs are used

process, directory = jax.process_index(), pathlib.Path(sys.argv[1])
MESHES = {
    "data": rx.make_mesh(),
    "tensor": rx.make_mesh(tensor=8),
    "mixed": rx.make_mesh(tensor=2, fsdp=2),
    "interleaved": rx.make_mesh(
        devices=[jax.devices()[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)]
    ),
}
results: dict[str, Any] = {name: {} for name in MESHES}


def wait_for(path):
    """Process 1 waits until process 0 is done."""
    while process == 1 and not path.exists():
        time.sleep(0.01)


# A sequence. Process 1 makes its first batch only after process 0 has made its last, so
# a collective in `batches` would wait forever.

for name, mesh in MESHES.items():
    seen = []

    def collate(examples, seen=seen):
        seen.append([int(x) for x in examples])
        return {
            "x": np.asarray(examples),
            "wide": np.stack([np.full(3, x, np.float32) for x in examples]),
        }

    key = jax.jit(lambda: jax.random.key(5), out_shardings=replicated(mesh))()
    wait_for(directory / f"{name}.done")
    options = {
        "batch_size": 8,
        "mesh": mesh,
        "key": key,
        "epoch": 2,
        "remainder": "split",
    }
    made = list(rx.batches(np.arange(29), collate, **options))
    (directory / f"{name}.done").touch()
    gathered = [multihost_utils.process_allgather(batch, tiled=True) for batch in made]
    results[name]["sequence"] = {
        "seen": seen,
        "batches": jax.tree.map(lambda x: x.tolist(), gathered),
    }
# The shapes of the batches: other ones in an epoch, and other ones than those of
# process 0, which comes first.

BATCH = {"x": np.zeros((4, 3), np.float32), "y": np.zeros(4, np.int32)}
OTHERS = [
    {**BATCH, "x": BATCH["x"][:, :2]},
    {**BATCH, "x": BATCH["x"].astype(np.float16)},
    {"x": BATCH["x"]},
    {**BATCH, "z": np.zeros(4, np.float32)},
]


def refused(first, second):
    """The batches of an epoch that are accepted, and the error."""
    made = []
    rest = iter([first, second])
    options = {"batch_size": 8, "mesh": MESHES["data"]}
    try:
        for _ in rx.batches(
            rx.Data(range(16), prefetch=0), lambda _: next(rest), **options
        ):
            made.append(0)
    except ValueError as error:
        return len(made), str(error)
    return len(made), ""


results["shapes"] = [refused(BATCH, other) for other in OTHERS]
wait_for(directory / "shapes.done")
results["first shapes"] = [
    refused(*2 * [other if process else BATCH]) for other in OTHERS
]
(directory / "shapes.done").touch()


# Rows that devices of both need. Process 1 makes its batches after process 0, so it
# sees a difference.


def noisy(examples):
    """Numbers that nobody has seeded."""
    return (
        np.random.default_rng()
        .normal(size=(len(np.asarray(examples)), 3))
        .astype(np.float32)
    )


def seeded(examples):
    return np.stack(
        [np.random.default_rng(int(x)).normal(size=3) for x in np.asarray(examples)]
    )


def third(examples):
    """Another number in the third batch alone."""
    rows = np.asarray(examples, np.float32)
    return {"x": rows, "y": rows + (0.5 * process) * (rows.max() == 23)}


ROWS = {
    "tensor": (np.arange(24), noisy, "tensor", {}),
    "workers": (rx.Data(np.arange(24), num_workers=2), noisy, "tensor", {}),
    "one batch": (np.arange(24), third, "tensor", {}),
    "rest": (
        np.arange(29),
        lambda x: noisy(x) * (len(x) == 1),
        "mixed",
        {"remainder": "split"},
    ),
    "whole": (rx.Stream(lambda _: range(24), sharded=False), noisy, "tensor", {}),
    "shard": (rx.Stream(lambda *_: range(24), sharded=True), noisy, "tensor", {}),
    "batched": (
        rx.Stream(lambda _: np.arange(24).reshape(3, 8), sharded=False, batched=True),
        noisy,
        "tensor",
        {},
    ),
    "seeded": (np.arange(24), seeded, "tensor", {}),
    "other rows": (np.arange(24), noisy, "data", {}),
    "seeded rest": (np.arange(29), seeded, "mixed", {"remainder": "split"}),
}


def made_with(examples, collate_fn, mesh, options):
    """The number of batches that are accepted, and the error."""
    made = 0
    try:
        for _ in rx.batches(
            examples, collate_fn, batch_size=8, mesh=MESHES[mesh], **options
        ):
            made += 1
    except ValueError as error:
        return made, str(error)
    return made, ""


results["rows"] = {}
vote = batches.__dict__["Vote"]
# So that a stream waits for nobody, either.
batches.__dict__["Vote"] = lambda mesh: lambda *numbers: numbers
for i, (name, of_rows) in enumerate(ROWS.items(), start=1):
    # One that has been refused is at another number.
    consensus._numbers[0, 1] = itertools.count(1000 * i)
    wait_for(directory / f"{name}.made")
    results["rows"][name] = made_with(*of_rows)
    (directory / f"{name}.made").touch()
consensus._numbers[0, 1] = itertools.count(1000_000)
batches.__dict__["Vote"] = vote


# Streams.


shards = []


def part(epoch, shard, num_shards):
    """The examples of a shard, 100 times its number on; shard 1 has more."""
    shards.append((epoch, shard, num_shards))
    return StatefulIterator(
        [1000 * epoch + 100 * shard + i for i in range(20 + 7 * shard)], epoch
    )


def whole(epoch):
    return iter(range(1000 * epoch, 1000 * epoch + 29))


def as_floats(examples):
    return np.asarray(examples, np.float32)


def epochs_of(stream, mesh):
    return Epochs(stream, as_floats, batch_size=8, mesh=mesh)


STREAMS = {
    "whole": rx.Stream(whole, sharded=False),
    "sharded": rx.Stream(part, sharded=True),
}
for name in ("data", "tensor", "mixed"):
    for how, stream in STREAMS.items():
        seen, places = [], []
        made = epochs_of(stream, MESHES[name]).after(BEGIN, key=jax.random.key(0))
        for batch, place in made:
            seen.append(multihost_utils.process_allgather(batch, tiled=True).tolist())
            places.append(
                [place.epoch, place.batch, [list(p)[:4] for p in place.positions or ()]]
            )
            if len(seen) == 7:
                break
        made.close()
        results[name][how] = {"batches": seen, "places": places}
    results[name]["shards"] = shards[:]
    shards.clear()
unlike = rx.Stream(lambda epoch: range(100 * process, 200), sharded=False)
epochs = epochs_of(unlike, MESHES["data"]).after(BEGIN, key=jax.random.key(0))
results["unlike"] = str(raised(ValueError, next, epochs))
results["unsaid"] = str(raised(ValueError, epochs_of, rx.Stream(whole), MESHES["data"]))
# Each process holds every second row: a shard of its own, which is not refused.
epochs_of(STREAMS["sharded"], MESHES["interleaved"])


# Runs.

# Each step adds 1.
OPTIMIZER = optax.stateless(lambda grads, _: jax.tree.map(jnp.ones_like, grads))


def loss_fn(model, batch, key):
    return jnp.mean(batch) + 0 * jnp.sum(model.weight + model.bias)


def run(mesh, examples, **arguments):
    """The state after a run from parameters that are zero."""
    model = rx.init_model(
        lambda key: eqx.nn.Linear(4, 4, key=key), mesh, key=jax.random.key(0)
    )
    model = jax.tree.map(jnp.zeros_like, model)
    state = rx.init_state(model, OPTIMIZER, key=jax.random.key(1))
    defaults = {
        "loss_fn": loss_fn,
        "optimizer": OPTIMIZER,
        "batch_size": 8,
        "collate_fn": as_floats,
    }
    return fit(state, examples, **{**defaults, **arguments})


def evaluation_of(stream: Any) -> rx.Evaluation:
    return rx.Evaluation(
        stream, num_batches=2, collate_fn=as_floats, loss_fn=loss_fn, batch_size=8
    )


# One that is left in the middle of an epoch of a stream, and gone on with.
states = {}
for how, stream in STREAMS.items():
    for num_steps in (4, 7):
        checkpoints = rx.Checkpoints(directory / how, every_steps=4, keep_last=None)
        state = run(
            MESHES["data"], stream, num_steps=num_steps, checkpoints=checkpoints
        )
        states[how] = state
    state = states[how]
    results[f"steps {how}"] = int(state.step)
    apart = dataclasses.replace(state, step=state.step + process)
    results[f"apart {how}"] = str(
        raised(ValueError, rx.save, directory / "apart", apart)
    )

    evaluation = evaluation_of(stream)
    results[f"evaluated {how}"] = [evaluation(state) for _ in range(2)]
results["evaluated unlike"] = str(
    raised(ValueError, evaluation_of(unlike), states["whole"])
)

# Saved by the clock of process 0: both save after the same steps.
checkpoints = rx.Checkpoints(directory / "often", every_minutes=1e-9, keep_last=None)
run(MESHES["data"], STREAMS["whole"], num_steps=7, checkpoints=checkpoints)
results["often"] = [info.step for info in rx.list_checkpoints(directory / "often")]

calls = []


def deciding(run, row, state):
    """Each process would end the run elsewhere."""
    calls.append([run.step, next(iter(row.values()))])
    return run.step >= (6 if process == 0 else 2)


now = 0.0


def slow(examples):
    """Takes a second on process 0, and three on process 1, by a clock of its own."""
    global now
    now += 1.0 + 2.0 * process
    return as_floats(examples)


def clocks(step, row):
    names = ("data_wait_seconds", "slowest_process", "slowest_by_seconds")
    results["clocks"].append([step, *(row[f"train/{name}"] for name in names)])


training.__dict__["time"] = types.SimpleNamespace(perf_counter=lambda: now)
results["clocks"] = []
examples = rx.Data([np.float32(i) for i in range(80)], prefetch=0)
options = {
    "hook": deciding,
    "num_steps": 10,
    "log_every": 2,
    "checkpoints": directory / "run",
}
state = run(MESHES["mixed"], examples, collate_fn=slow, loggers=[clocks], **options)
params = jnp.stack([jnp.mean(x) for x in jax.tree.leaves(state.params)])
results["ended"] = [int(state.step), np.asarray(params).tolist()]
results["calls"] = calls

# Fewer examples on process 1, which ends for this reason; process 0 came first, and did
# not wait.
if process == 1:
    (directory / "1.json").write_text(json.dumps(results))
    wait_for(directory / "0.json")
rx.batches(np.arange(29 - process), np.asarray, batch_size=8, mesh=MESHES["data"])
(directory / f"{process}.json").write_text(json.dumps(results))
