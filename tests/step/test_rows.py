"""A batch is computed in parts, wherever it comes from: at the operations and bytes of one that is placed."""

import dataclasses
import functools
import warnings
from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY
from helpers import mlp_batch, squared_error
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import redco_eqx as rx
from redco_eqx.errors import ShardingWarning

OPTIMIZER = optax.sgd(0.1)


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return jax.vmap(model)(batch["x"])


@functools.cache
def subject(name: str) -> Any:
    """A mesh, a state on it, and steps, with a layout or without."""
    mesh = helpers.mesh_of(name)
    model, shardings = helpers.place(helpers.make_mlp(), mesh)
    train = partial(rx.train_step, optimizer=OPTIMIZER, loss_fn=squared_error)
    steps = {
        "train_step": partial(train, shardings=shardings),
        "of microbatches": partial(train, num_microbatches=2),
        "eval_step": partial(rx.eval_step, loss_fn=squared_error),
        "predict_step": partial(rx.predict_step, predict_fn=predict_fn, shardings=shardings),
    }
    return mesh, rx.init_state(model, OPTIMIZER, key=KEY), steps


def cost(function: Any, *arguments: Any, mesh: Any) -> tuple[float, dict[Any, int], Any]:
    """Operations of a device, bytes that are sent over which axes, and the program, under plain `jit`."""
    compiled = jax.jit(function).lower(*arguments).compile()
    analysis: Any = compiled.cost_analysis()
    sent = {axes: x.sent_bytes for axes, x in rx.communication(compiled, mesh).by_axes.items()}
    return analysis["flops"], sent, compiled


@functools.cache
def alone(name: str) -> tuple[float, dict[Any, int], Any]:
    """The cost of one train_step of a batch that is placed."""
    mesh, state, steps = subject(name)
    return cost(steps["train_step"], state, jax.device_put(mlp_batch(0), rx.batch_sharding(mesh)), mesh=mesh)


def test_a_batch_that_is_not_placed_costs_what_one_does_that_is():
    mesh, state, steps = subject("2x2x2")
    batch = mlp_batch(0)
    placed = jax.device_put(batch, rx.batch_sharding(mesh))
    for what, step in steps.items():
        flops, sent, _ = cost(step, state, batch, mesh=mesh)
        wanted = alone("2x2x2") if what == "train_step" else cost(step, state, placed, mesh=mesh)
        assert flops == pytest.approx(wanted[0], rel=0.01), what
        assert sent == wanted[1], what


def test_rows_that_are_taken_inside_of_a_scan_are_split_too():
    mesh, state, steps = subject("2x2x2")
    data = jax.tree.map(jnp.asarray, mlp_batch(0, 48))
    step, one = steps["train_step"], alone("2x2x2")

    def epoch(state: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda state, rows: step(state, jax.tree.map(lambda x: x[rows], data)), state, rows)

    rows = np.random.default_rng(0).permutation(48).reshape(3, 16)
    flops, sent, compiled = cost(epoch, state, rows, mesh=mesh)
    assert flops < 1.2 * one[0]  # a body of a scan is counted once; the rest takes the rows
    assert any("data" in axes for axes in sent)
    found, _ = compiled(state, rows)
    helpers.assert_same_layout(found.params, state.params)
    for taken in rows:
        batch = jax.tree.map(lambda x, taken=taken: np.asarray(x)[taken], data)
        state, _ = one[2](state, jax.device_put(batch, rx.batch_sharding(mesh)))
    helpers.assert_close(found.params, state.params, rtol=1e-5, atol=1e-6)


def test_members_under_vmap_are_each_computed_in_parts_and_stay_split():
    mesh, state, steps = subject("2x2x2")
    others = {path: 2 * x for path, x in state.params.items()}
    states = [state, dataclasses.replace(state, params=others)]
    members = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    batches = [mlp_batch(seed) for seed in range(2)]
    data = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    flops, sent, compiled = cost(jax.vmap(steps["train_step"]), members, data, mesh=mesh)
    one = alone("2x2x2")
    assert flops < 2.2 * one[0]
    assert any("data" in axes for axes in sent)
    together, _ = compiled(members, data)
    assert not together.params["layers.0.weight"].is_fully_replicated
    for i in range(2):
        expected, _ = one[2](states[i], jax.device_put(batches[i], rx.batch_sharding(mesh)))
        found = {path: x[i] for path, x in together.params.items()}
        helpers.assert_close(found, expected.params, rtol=1e-5, atol=1e-6)


def test_what_spmd_axis_name_says_of_an_axis_comes_first():
    """Clients that are laid over `data` train without a word to each other."""
    mesh, state, steps = subject("data8")

    def train(key: Any, batches: Any) -> Any:
        return jax.lax.scan(steps["train_step"], dataclasses.replace(state, key=key), batches)[0].params

    batches = jax.tree.map(lambda x: x.reshape(8, 2, 8, *x.shape[1:]), mlp_batch(0, 128))
    keys = jax.random.split(KEY, 8)
    flops, sent, _ = cost(jax.vmap(train, spmd_axis_name="data"), keys, batches, mesh=mesh)
    one, _, _ = cost(train, KEY, jax.tree.map(lambda x: x[0], batches), mesh=mesh)
    assert flops < 8 * one  # `one` is split over eight
    assert ("data",) not in sent


def test_other_dims_stay_as_they_were_placed():
    mesh = rx.make_mesh(tensor=4)
    state = rx.init_state({"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P()))}, key=KEY)
    tokens = jax.device_put(np.ones((4, 16, 8), np.float32), NamedSharding(mesh, P("data", "tensor")))
    step = partial(rx.predict_step, predict_fn=lambda model, batch, key: jnp.tanh(batch @ model["w"]))
    _, sent, compiled = cost(step, state, tokens, mesh=mesh)
    assert not sent
    assert compiled.output_shardings.is_equivalent_to(tokens.sharding, tokens.ndim)


def test_gradients_and_keys_pass_through():
    _, state, steps = subject("data8")
    batch = mlp_batch(0)
    tangent = np.ones_like(batch["x"])

    def loss(x: Any) -> Any:
        return steps["eval_step"](state, {**batch, "x": x})["loss"].value

    def plain(x: Any) -> Any:
        return squared_error(helpers.make_mlp(), {**batch, "x": x}, None)[0].value

    found, expected = (
        jax.jit(lambda x, f=f: (jax.grad(f)(x), jax.jvp(f, (x,), (tangent,))[1]))(batch["x"])
        for f in (loss, plain)
    )
    helpers.assert_close(found, expected, rtol=1e-4, atol=1e-6)

    def normals(model: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(jax.random.normal)(batch["keys"]) * batch["scale"]

    keys = {"keys": jax.random.split(KEY, 16), "scale": jnp.float32(2)}
    drawn = jax.jit(partial(rx.predict_step, predict_fn=normals))(state, keys)
    np.testing.assert_array_equal(drawn, 2 * jax.vmap(jax.random.normal)(keys["keys"]))


def test_rows_that_do_not_divide_are_warned_of_and_a_tail_is_not():
    _, state, steps = subject("data8")
    for step in (steps["train_step"], steps["eval_step"]):
        with pytest.warns(
            ShardingWarning, match=r"weight has 12 rows, which do not divide evenly over 8"
        ) as seen:
            jax.jit(step).lower(state, mlp_batch(0, 12))
        assert len(seen) == 1
        for size in (16, 3):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                jax.jit(step).lower(state, mlp_batch(0, size))
    with pytest.warns(ShardingWarning, match="8 data shards"):  # 8 rows, in 2 microbatches of 4
        jax.jit(steps["of microbatches"]).lower(state, mlp_batch(0, 24))
