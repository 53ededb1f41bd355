"""Loss and gradients of a program: by plain JAX on one device, and by `train_step` on a
mesh."""

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from gradients.programs import MESHES, Program, Spec, build, make_batch, make_model
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx._dataflow import engine

RATE = 0.1
NUM_MEMBERS = 2  # of an ensemble

# float64 has 1e-16; sums of some thousand terms in another order, solves and second
# derivatives lose two digits (the largest of 300 layouts that are right was 2e-14).
# Some programs amplify rounding: of one, a change of the parameters by 1e-15 moves the
# gradients by 2e-9 on one device. A gradient summed over a device too many, or over a
# wrong one, was off by 2e-4 or more.
TOLERANCE = 1e-8

Gradients = dict[str, np.ndarray]
"""By path; the loss under the name `loss`."""


def on_one_device(
    program: Program, models: list[Any], batch: Any, spec: Spec, num_shards: int
) -> Gradients:
    """By plain JAX; members of an ensemble are stacked. The loss is the mean of those
    of the microbatches, each cut into `num_shards` parts."""
    k = spec["num_microbatches"]

    def loss_of(model: Any, batch: Any) -> Any:
        losses = []
        for i in range(k):
            cut = jax.tree.map(lambda x, i=i: jnp.split(x[i::k], num_shards), batch)
            parts = jax.tree.transpose(
                jax.tree.structure(batch), jax.tree.structure([0] * num_shards), cut
            )
            losses += [program.loss(model, part) for part in parts]
        return sum(losses) / len(losses)

    def after_a_step(model: Any, batch: Any) -> Any:
        gradients = jax.grad(loss_of)(model, batch)
        return program.loss(
            jax.tree.map(lambda p, g: p - RATE * g, model, gradients), batch
        )

    function = jax.value_and_grad(after_a_step if spec["mode"] == "outer" else loss_of)
    model = models[0]
    if spec["mode"] == "ensemble":
        function = jax.vmap(function, (0, None))
        model = jax.tree.map(lambda *members: np.stack(members), *models)
    loss, gradients = jax.jit(function)(
        *jax.device_put((model, batch), jax.devices()[0])
    )
    return jax.device_get({"loss": loss, **rx.to_arrays(gradients)})


# A step leaves activations to the compiler where their layout sends more.
@mock.patch.object(engine, "MOST_SENT", math.inf)
def through_train_step(
    program: Program,
    models: list[Any],
    batch: Any,
    spec: Spec,
    mesh_name: str,
    kind: str | int,
) -> tuple[Gradients, dict[str, int]]:
    """By `train_step` on a mesh, and `eval_step` after it in the mode `outer`.

    With `collectives` in the spec also the bytes of results of each kind of collective
    in the compiled step.
    """
    mesh = rx.make_mesh(**MESHES[mesh_name])
    shardings = layout_of(program, models[0], batch, mesh, kind)
    batch = jax.device_put(batch, rx.batch_sharding(mesh))
    # A trace of decay 0 is the gradient itself: old less new parameters would round it.
    optimizer = optax.sgd(RATE) if spec["mode"] == "outer" else optax.trace(0.0)
    placed = [jax.device_put(model, shardings) for model in models]
    states = [
        rx.init_state(model, optimizer, key=jax.random.key(0)) for model in placed
    ]

    def plain_loss(model: Any, batch: Any, key: Any) -> Any:
        return program.loss(model, batch)

    loss_fn: Any = (
        rx.split_activations(plain_loss) if kind == "activations" else plain_loss
    )

    def step(state: rx.TrainState, batch: Any) -> Any:
        options = {
            name: spec[name] for name in ("num_microbatches", "reshard_after_forward")
        }
        return rx.train_step(
            state,
            batch,
            loss_fn=loss_fn,
            optimizer=optimizer,
            shardings=shardings,
            reduce_once=spec["mode"] == "reduce_once",
            **options,
        )

    def loss_after(params: Any, state: rx.TrainState, batch: Any) -> Any:
        state, _ = step(dataclasses.replace(state, params=params), batch)
        return rx.eval_step(state, batch, loss_fn=loss_fn, shardings=shardings)[
            "loss"
        ].value

    def loss_and_gradients(state: rx.TrainState, batch: Any) -> Any:
        if spec["mode"] == "outer":
            return jax.value_and_grad(loss_after)(state.params, state, batch)
        new, metrics = step(state, batch)
        return metrics["loss"].value, new.opt_state.trace

    if spec["mode"] == "ensemble":
        stacked = jax.tree.map(lambda *members: jnp.stack(members), *states)
        loss, gradients = jax.jit(jax.vmap(loss_and_gradients, (0, None)))(
            stacked, batch
        )
        return jax.device_get({"loss": loss, **gradients}), {}
    compiled = jax.jit(loss_and_gradients).lower(states[0], batch).compile()
    sent: Counter[str] = Counter()
    for x in rx.communication(compiled, mesh) if spec.get("collectives") else ():
        sent[x.kind] += x.total_bytes
    loss, gradients = compiled(states[0], batch)
    found = jax.device_get({"loss": loss, **gradients})
    return found, dict(sent)


def layout_of(
    program: Program, model: Any, batch: Any, mesh: Any, kind: str | int
) -> Any:
    """By paths (`rules`), by the program, by it with `activations`, all whole, or (a
    number) dims split over any axes, by that seed."""
    if kind == "rules":
        return rx.shard_rules(model, mesh)
    if kind in ("program", "activations"):
        # NumPy's are constants.
        arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)

        def loss_fn(model: Any, batch: Any, key: Any) -> Any:
            return program.loss(model, batch)

        marked = rx.split_activations(loss_fn) if kind == "activations" else loss_fn
        return rx.shard_rules(arrays, mesh, loss_fn=marked, batch=batch)
    if kind == "whole":
        return rx.shard_rules(model, mesh, overrides=[("*", PartitionSpec())])
    rng = np.random.default_rng(int(kind))

    def one(x: np.ndarray) -> NamedSharding:
        entries: list[tuple[str, ...]] = [()] * x.ndim
        rest = list(x.shape)
        for axis in rng.permutation(
            ("tensor", "fsdp")
        ).tolist():  # the order in an entry has a meaning
            dim = rng.integers(-1, x.ndim)
            if dim >= 0 and rest[dim] % mesh.shape[axis] == 0:
                entries[dim] = (*entries[dim], axis)
                rest[dim] //= mesh.shape[axis]
        return NamedSharding(mesh, PartitionSpec(*entries))

    return jax.tree.map(one, model)


def differences(found: Gradients, expected: Gradients) -> dict[str, float]:
    """The largest difference by path, over the largest number expected there.

    A gradient that cancels to zero (of a bias before a norm) leaves rounding errors of
    the others' size, so nothing is compared at less than 1e-5 of the largest gradient.
    What is not a number is 1e30.
    """
    largest = {path: float(np.abs(x).max(initial=0)) for path, x in expected.items()}
    floor = 1e-5 * max(size for path, size in largest.items() if path != "loss")
    worst = {}
    for path, x in expected.items():
        difference = float(np.abs(found[path] - x).max(initial=0)) / max(
            largest[path], floor, 1e-30
        )
        worst[path] = difference if np.isfinite(difference) else 1e30
    return worst


@jax.enable_x64(True)
def check(
    spec: Spec, allowed: Callable[[Exception], bool] = lambda error: False
) -> None:
    """Compares the gradients on each mesh and layout of a program with those of one
    device, in float64."""
    print(json.dumps(spec), flush=True)
    program = build(spec)
    batch = make_batch(spec)
    models = [
        make_model(program, seed)
        for seed in range(NUM_MEMBERS if spec["mode"] == "ensemble" else 1)
    ]

    @functools.cache
    def expected_of(num_shards: int) -> Gradients:
        return on_one_device(program, models, batch, spec, num_shards)

    for mesh, kind in spec["layouts"]:
        num_shards = 1
        if spec["mode"] == "reduce_once":
            num_shards = MESHES[mesh].get("data", 1)
        try:
            expected = expected_of(num_shards)
        except (NotImplementedError, TypeError, ValueError):
            return  # plain JAX has no such gradient
        try:
            found, collectives = through_train_step(
                program, models, batch, spec, mesh, kind
            )
        except Exception as error:
            error.add_note(f"on {mesh}, {kind}")
            if allowed(error):
                continue
            raise
        worst = differences(found, expected)
        assert max(worst.values()) <= TOLERANCE, (mesh, kind, worst)
        if spec.get("collectives"):
            # Left to XLA, the step gathers the batch, and each device does all of it
            # (openxla/xla#47945).
            kernel = 8 * (3 * (spec["channels"] // 2) * 2 * 8)  # float64
            assert set(collectives) == {"all-reduce"}, (mesh, collectives)
            assert kernel < collectives["all-reduce"] < 1.2 * kernel, (
                mesh,
                collectives,
            )
