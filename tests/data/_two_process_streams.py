"""One of the two processes of `test_two_process_streams.py`; arguments: port, process, directory."""

import json
import pathlib
import sys

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))


import equinox as eqx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

import redco_eqx as rx  # noqa: E402
from redco_eqx._data import streams  # noqa: E402
from redco_eqx._data.batches import Epochs  # noqa: E402
from redco_eqx._data.data import Place  # noqa: E402

streams.PROOF = 4  # so that the states of short epochs are used

process, directory = int(sys.argv[2]), pathlib.Path(sys.argv[3])
MESHES = {"data": {}, "tensor": {"tensor": 8}, "mixed": {"tensor": 2, "fsdp": 2}}
BATCH_SIZE = 8
OPTIMIZER = optax.sgd(0.1)


class Part:
    """The examples of a shard, 100 times its number on; shard 1 has more. It remembers what it gave."""

    def __init__(self, epoch, shard, num_shards):
        self.numbers = [1000 * epoch + 100 * shard + i for i in range(20 + 7 * shard)]
        self.at, self.given = 0, []

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == len(self.numbers):
            raise StopIteration
        self.at += 1
        self.given.append(self.numbers[self.at - 1])
        return self.given[-1]

    def get_state(self):
        return self.at

    def set_state(self, at):
        self.at = at


opened = []


def part(epoch, shard, num_shards):
    opened.append((epoch, shard, num_shards))
    return Part(epoch, shard, num_shards)


def whole(epoch):
    return iter(range(1000 * epoch, 1000 * epoch + 29))


def state_on(mesh):
    model = rx.init_model(lambda key: eqx.nn.Linear(2, 2, key=key), mesh, key=jax.random.key(0))
    return rx.init_state(model, OPTIMIZER, key=jax.random.key(1))


results = {}
for name, axes in MESHES.items():
    mesh = rx.make_mesh(**axes)
    found = results[name] = {}
    for how, stream in {
        "whole": rx.Stream(whole, sharded=False),
        "sharded": rx.Stream(part, sharded=True),
    }.items():
        epochs = Epochs(stream, lambda x: np.asarray(x, np.float32), batch_size=BATCH_SIZE, mesh=mesh)
        seen, places = [], []
        made = epochs.after(Place(0, 0, None), key=jax.random.key(0))
        for batch, place in made:
            seen.append(multihost_utils.process_allgather(batch, tiled=True).tolist())
            places.append([place.epoch, place.batch, [list(p)[:4] for p in place.positions or ()]])
            if len(seen) == 7:
                break
        made.close()
        found[how] = {"batches": seen, "places": places}
    found["opened"] = opened[:]
    opened.clear()


# A run that is left in the middle of an epoch, and gone on with.
mesh = rx.make_mesh()
for how, stream in {"whole": rx.Stream(whole, sharded=False), "sharded": rx.Stream(part, sharded=True)}.items():
    for num_steps in (4, 7):
        state, _ = rx.fit(
            state_on(mesh), stream, collate_fn=lambda x: np.asarray(x, np.float32),
            loss_fn=lambda model, batch, key: jnp.mean(batch) + 0 * jnp.sum(model.weight + model.bias),
            optimizer=OPTIMIZER, batch_size=BATCH_SIZE, num_steps=num_steps, loggers=(),
            checkpoints=rx.Checkpoints(directory / how, every_steps=4, keep_last=None),
        )  # fmt: skip
    results[f"steps {how}"] = int(state.step)
try:
    unlike = rx.Stream(lambda epoch: range(100 * process, 200), sharded=False)
    epochs = Epochs(unlike, np.asarray, batch_size=BATCH_SIZE, mesh=mesh)
    next(epochs.after(Place(0, 0, None), key=jax.random.key(0)))
except ValueError as error:
    results["unlike"] = str(error)
try:
    Epochs(rx.Stream(whole), np.asarray, batch_size=BATCH_SIZE, mesh=mesh)
except ValueError as error:
    results["unsaid"] = str(error)
interleaved = rx.make_mesh(data=8, devices=[jax.devices()[i] for i in (0, 4, 1, 5, 2, 6, 3, 7)])
try:
    Epochs(rx.Stream(part, sharded=True), np.asarray, batch_size=BATCH_SIZE, mesh=interleaved)
    results["interleaved"] = None
except ValueError as error:
    results["interleaved"] = str(error)
(directory / f"{process}.json").write_text(json.dumps(results))
