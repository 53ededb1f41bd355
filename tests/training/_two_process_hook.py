"""One of the two processes of `test_two_process_hook.py`; arguments: port, process, directory."""

import json
import pathlib
import sys

import jax

jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))

import dataclasses  # noqa: E402

import equinox as eqx  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import redco_eqx as rx  # noqa: E402

process, directory = int(sys.argv[2]), pathlib.Path(sys.argv[3])
OPTIMIZER = optax.stateless(lambda grads, _: jax.tree.map(jnp.ones_like, grads))  # each step adds 1
EXAMPLES = [np.float32(i) for i in range(80)]
MESH = rx.make_mesh(tensor=2)


def run(hook, **arguments):
    """The state after a run of ten steps at most, from parameters that are zero."""
    model = rx.init_model(lambda key: eqx.nn.Linear(4, 4, key=key), MESH, key=jax.random.key(0))
    model = jax.tree.map(jnp.zeros_like, model)
    return rx.fit(
        rx.init_state(model, OPTIMIZER, key=jax.random.key(1)), EXAMPLES, collate_fn=np.asarray,
        loss_fn=lambda model, batch, key: jnp.mean(batch) + 0 * jnp.sum(model.weight + model.bias),
        optimizer=OPTIMIZER, batch_size=8, num_steps=10, log_every=2, loggers=(), hook=hook, **arguments,
    )[0]  # fmt: skip


def values(state):
    """The steps, and what each number of the parameters is by now."""
    params = jnp.stack([jnp.mean(x) for x in jax.tree.leaves(state.params)])
    return [int(state.step), np.asarray(params).tolist()]


calls = []


def deciding(run, row, state):
    """Each process would end the run elsewhere; the state is changed alike."""
    calls.append([run.step, next(iter(row.values()))])
    doubled = {path: 2 * x for path, x in state.params.items()}
    ends = run.step >= (6 if process == 0 else 2)
    return rx.Change(stop=ends, state=dataclasses.replace(state, params=doubled))


results = {"ended": values(run(deciding, checkpoints=directory / "run")), "calls": calls}
(directory / f"{process}.json").write_text(json.dumps(results))
