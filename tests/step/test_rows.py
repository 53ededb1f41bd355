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


@functools.cache
def subject(name: str) -> Any:
    """A mesh, a state on it, and its three steps, with a layout and without."""
    mesh = helpers.mesh_of(name)
    model, shardings = helpers.place(helpers.make_mlp(), mesh)

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(model)(batch["x"])

    steps = {}
    for laid_out in (None, shardings):
        common: Any = {"loss_fn": squared_error, "shardings": laid_out}
        train = partial(rx.train_step, optimizer=OPTIMIZER, **common)
        which = "" if laid_out is None else " with shardings"
        steps[f"train_step{which}"] = train
        steps[f"of microbatches{which}"] = partial(train, num_microbatches=2)
        steps[f"eval_step{which}"] = partial(rx.eval_step, **common)
        steps[f"predict_step{which}"] = partial(rx.predict_step, predict_fn=predict_fn, shardings=laid_out)
    return mesh, rx.init_state(model, OPTIMIZER, key=KEY), steps


def cost(function: Any, *arguments: Any, mesh: Any) -> tuple[float, Any]:
    """Operations of a device, and what is sent over which axes, of a function under plain `jit`."""
    compiled = jax.jit(function).lower(*arguments).compile()
    analysis: Any = compiled.cost_analysis()
    return analysis["flops"], rx.communication(compiled, mesh).by_axes


@pytest.mark.parametrize("name", ["data8", "data2xtensor4", "2x2x2"])
def test_a_batch_that_is_not_placed_costs_what_one_does_that_is(name):
    mesh, state, steps = subject(name)
    batch = mlp_batch(0, 32)
    placed = jax.device_put(batch, rx.batch_sharding(mesh))
    for what in steps if name == "data8" else ("train_step with shardings", "eval_step"):
        step = steps[what]
        flops, sent = cost(step, state, batch, mesh=mesh)
        wanted, wanted_sent = cost(step, state, placed, mesh=mesh)
        assert flops == pytest.approx(wanted, rel=0.01), what
        assert {axes: x.sent_bytes for axes, x in sent.items()} == {
            axes: x.sent_bytes for axes, x in wanted_sent.items()
        }, what


def test_rows_that_are_taken_inside_of_a_scan_are_split_too():
    mesh, state, steps = subject("data2xtensor4")
    step, data = steps["train_step with shardings"], jax.tree.map(jnp.asarray, mlp_batch(0, 64))

    def epoch(state: Any, rows: Any) -> Any:
        return jax.lax.scan(lambda state, rows: step(state, jax.tree.map(lambda x: x[rows], data)), state, rows)

    rows = np.random.default_rng(0).permutation(64).reshape(4, 16)
    flops, sent = cost(epoch, state, rows, mesh=mesh)
    alone, _ = cost(step, state, jax.device_put(mlp_batch(0), rx.batch_sharding(mesh)), mesh=mesh)
    assert flops < 1.2 * alone  # a body of a scan is counted once; the rest takes the rows
    assert sent[("data",)].sent_bytes > 0
    found, _ = jax.jit(epoch)(state, rows)
    for taken in rows:
        state, _ = jax.jit(step)(state, jax.tree.map(lambda x, taken=taken: x[taken], data))
    helpers.assert_close(found.params, state.params, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_shared", [False, True])
def test_members_under_vmap_are_each_computed_in_parts(is_shared):
    mesh, state, steps = subject("data8")
    step = steps["train_step with shardings"]
    members = jax.device_put(jax.tree.map(lambda x: jnp.stack([x, x]), state), NamedSharding(mesh, P()))
    batch = mlp_batch(0, 32)
    data = batch if is_shared else jax.tree.map(lambda x: np.stack([x, x[::-1]]), batch)
    vmapped = jax.vmap(step, in_axes=(0, None if is_shared else 0))
    flops, sent = cost(vmapped, members, data, mesh=mesh)
    alone, _ = cost(step, state, jax.device_put(batch, rx.batch_sharding(mesh)), mesh=mesh)
    assert flops < 2.2 * alone
    assert ("data",) in sent
    together, _ = jax.jit(vmapped)(members, data)
    for i in range(2):
        own = data if is_shared else jax.tree.map(lambda x, i=i: x[i], data)
        expected = jax.jit(step)(state, own)[0].params
        found = {path: x[i] for path, x in together.params.items()}
        helpers.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scanned", [False, True])
def test_what_spmd_axis_name_says_of_an_axis_comes_first(scanned):
    """Clients that are laid over `data` train without a word to each other."""
    mesh, state, steps = subject("data8")
    step = steps["train_step with shardings"]

    def train(key: Any, batches: Any) -> Any:
        own = dataclasses.replace(state, key=key)
        if not scanned:
            return step(own, jax.tree.map(lambda x: x[0], batches))[0].params
        return jax.lax.scan(step, own, batches)[0].params

    batches = jax.tree.map(lambda x: x.reshape(8, 2, 8, *x.shape[1:]), mlp_batch(0, 128))
    keys = jax.random.split(KEY, 8)
    flops, sent = cost(jax.vmap(train, spmd_axis_name="data"), keys, batches, mesh=mesh)
    alone, _ = cost(train, KEY, jax.tree.map(lambda x: x[0], batches), mesh=mesh)
    assert flops < 8 * alone  # `alone` is split over eight
    assert ("data",) not in sent


def test_other_dims_stay_as_they_were_placed():
    mesh = rx.make_mesh(tensor=4)
    state = rx.init_state({"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P()))}, key=KEY)
    tokens = jax.device_put(np.ones((4, 16, 8), np.float32), NamedSharding(mesh, P("data", "tensor")))
    step = partial(rx.predict_step, predict_fn=lambda model, batch, key: jnp.tanh(batch @ model["w"]))
    compiled: Any = jax.jit(step).lower(state, tokens).compile()
    assert not rx.communication(compiled, mesh)
    assert compiled.output_shardings.is_equivalent_to(tokens.sharding, tokens.ndim)


def test_gradients_and_keys_pass_through():
    _, state, steps = subject("data8")
    batch = mlp_batch(0, 32)
    evaluate = steps["eval_step"]

    def loss(x: Any) -> Any:
        return evaluate(state, {**batch, "x": x})["loss"].value

    def plain(x: Any) -> Any:
        return squared_error(state.model, {**batch, "x": x}, None)[0].value

    helpers.assert_close(jax.jit(jax.grad(loss))(batch["x"]), jax.grad(plain)(batch["x"]), rtol=1e-4, atol=1e-6)
    tangent = np.ones_like(batch["x"])
    found = jax.jit(lambda x: jax.jvp(loss, (x,), (tangent,))[1])(batch["x"])
    np.testing.assert_allclose(found, jax.jvp(plain, (batch["x"],), (tangent,))[1], rtol=1e-4)

    def draw(model: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(jax.random.normal)(batch["keys"]) * batch["scale"]

    keys = {"keys": jax.random.split(KEY, 16), "scale": jnp.float32(2)}
    drawn = jax.jit(partial(rx.predict_step, predict_fn=draw))(state, keys)
    np.testing.assert_array_equal(drawn, 2 * jax.vmap(jax.random.normal)(keys["keys"]))


def test_rows_that_do_not_divide_are_warned_of_and_a_tail_is_not():
    _, state, steps = subject("data8")
    for step in (steps["train_step"], steps["eval_step with shardings"]):
        with pytest.warns(ShardingWarning, match=r"weight has 12 rows, which do not divide over 8") as seen:
            jax.jit(step).lower(state, mlp_batch(0, 12))
        assert len(seen) == 1
        for size in (16, 3):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                jax.jit(step).lower(state, mlp_batch(0, size))
    with pytest.warns(ShardingWarning, match="8 data shards"):  # 8 rows, in 2 microbatches of 4
        jax.jit(steps["of microbatches"]).lower(state, mlp_batch(0, 24))
