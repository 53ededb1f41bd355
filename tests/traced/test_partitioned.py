"""Operations that XLA's partitioner gets wrong are right in the steps, on every mesh; others do not change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import MESHES, assert_close, mesh_of
from jax.sharding import PartitionSpec as P

import redco_eqx as rx
from redco_eqx._base.jaxprs import trace
from redco_eqx._compiled.communication import communication
from redco_eqx._step.mends import for_partitioner

SGD = optax.sgd(1.0)
SEVERAL = [name for name in MESHES if name != "one"]


def partitioned(function: Any, mesh: Any, kernels: Any = None) -> Any:
    """The function by way of `for_partitioner`."""
    return lambda *arguments: for_partitioner(trace(function, *arguments), mesh, kernels or ())(*arguments)


class Stem(eqx.Module):
    """A depthwise convolution as a bare array, of which no name and no type tells, and a pointwise one."""

    kernel: jax.Array
    mix: jax.Array

    def __init__(self, key: Any):
        keys = jax.random.split(key)
        self.kernel = jax.random.normal(keys[0], (16, 1, 3, 3))
        self.mix = jax.random.normal(keys[1], (8, 16, 1, 1))

    def __call__(self, x: Any) -> Any:
        x = jnp.sin(jax.lax.conv_general_dilated(x, self.kernel, (1, 1), "SAME", feature_group_count=16))
        return jax.lax.conv_general_dilated(x, self.mix, (1, 1), "SAME")


def whole_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(model(batch) ** 2)


def looped_loss(model: Any, batch: Any, key: Any) -> Any:
    def again(x: Any, _: None) -> Any:
        return jnp.sin(jnp.tile(model(x), (1, 2, 1, 1))), None

    return jnp.mean(jax.lax.scan(jax.checkpoint(again), batch, None, length=2)[0] ** 2)


def penalised_loss(model: Any, batch: Any, key: Any) -> Any:
    inner = jax.grad(lambda model: jnp.mean(model(batch) ** 2))(model)
    return sum(jnp.sum(g**2) for g in jax.tree.leaves(inner))


def clipped_loss(model: Any, batch: Any, key: Any) -> Any:
    """The norm of the gradient of each example."""
    grads = jax.vmap(lambda x: jax.grad(lambda model: jnp.mean(model(x[None]) ** 2))(model))(batch)
    norms = sum(jnp.sum(g**2, axis=tuple(range(1, g.ndim))) for g in jax.tree.leaves(grads))
    return jnp.mean(jnp.tanh(norms))


def gradients(loss_fn: Any, mesh: Any, *, overrides: Any = (), **options: Any) -> Any:
    """By one `train_step`: at a rate of 1 the parameters lose their gradient."""
    model = rx.init_model(Stem, mesh, key=jax.random.key(0), overrides=overrides)
    shardings = rx.shard_rules(model, mesh, overrides=overrides)
    state = rx.init_state(model, SGD, key=jax.random.key(1))
    batch = jax.device_put(images(), rx.batch_sharding(mesh))
    step = partial(rx.train_step, loss_fn=loss_fn, optimizer=SGD, shardings=shardings, **options)
    new, _ = jax.jit(step)(state, batch)
    return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), state.params, new.params)


def images() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(16, 16, 4, 4)).astype(np.float32)


# Rounding of sums of some thousand float32 products, of numbers around 1.
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}


@pytest.mark.parametrize("loss_fn", [whole_loss, looped_loss, penalised_loss, clipped_loss])
@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_of_a_grouped_convolution_do_not_depend_on_the_mesh(loss_fn, name):
    expected = gradients(loss_fn, mesh_of("one"))
    assert_close(gradients(loss_fn, mesh_of(name), overrides=[("*", P())]), expected, **CLOSE)


@pytest.mark.parametrize("options", [{"num_microbatches": 2}, {}], ids=["microbatches", "by the rules"])
def test_also_in_microbatches_and_in_the_layout_of_the_rules(options):
    expected = gradients(whole_loss, mesh_of("one"))
    assert_close(gradients(whole_loss, mesh_of("data2xtensor4"), **options), expected, **CLOSE)


def placed(mesh: Any) -> tuple[Any, Any]:
    model = jax.tree.map(lambda x: jax.device_put(x, jax.NamedSharding(mesh, P())), Stem(jax.random.key(0)))
    return model, jax.device_put(images(), rx.batch_sharding(mesh))


OUTER: dict[str, Callable[[Any], Any]] = {
    "grad": jax.grad,
    "jvp": lambda f: lambda model, x: jax.jvp(lambda model: f(model, x), (model,), (model,))[1],
    "grad of grad": lambda f: jax.grad(
        lambda model, x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(model, x)))
    ),
    "vmap": lambda f: jax.vmap(jax.grad(f), (None, 0)),
}


@pytest.mark.parametrize("outer", list(OUTER))
def test_a_derivative_that_is_taken_from_outside_is_right_too(outer):
    mesh = mesh_of("data2xtensor4")
    model, x = placed(mesh)
    f = partial(whole_loss, key=None)
    x, host = (x[None], images()[None]) if outer == "vmap" else (x, images())
    result = jax.jit(OUTER[outer](partitioned(f, mesh)))(model, x)
    expected = jax.jit(OUTER[outer](f))(Stem(jax.random.key(0)), host)
    assert_close(result, expected, **CLOSE)


def test_a_weight_gradient_is_summed_over_the_axes_of_the_batch_once():
    mesh = mesh_of("data2xtensor4")
    model, x = placed(mesh)
    gradient = partitioned(jax.grad(lambda model, x: jnp.mean(model(x) ** 2)), mesh)
    counts = communication(jax.jit(gradient).lower(model, x).compile(), mesh).counts
    assert set(counts) == {("all-reduce", ("data",))}


def test_channels_that_are_split_stay_so():
    """Between a column and a row split a depthwise convolution sends nothing of its own over `tensor`."""
    mesh = mesh_of("data2xtensor4")
    spec = {"up": P("tensor"), "each": P("tensor"), "down": P(None, "tensor")}
    shapes = {"up": (32, 8, 1, 1), "each": (32, 1, 3, 3), "down": (8, 32, 1, 1)}
    weights = {
        name: jax.device_put(jnp.ones(shape), jax.NamedSharding(mesh, spec[name]))
        for name, shape in shapes.items()
    }
    x = jax.device_put(jnp.ones((16, 8, 4, 4)), rx.batch_sharding(mesh))

    def loss(weights: Any, x: Any) -> Any:
        convolve = partial(jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
        hidden = jnp.sin(convolve(x, weights["up"]))
        hidden = jnp.sin(convolve(hidden, weights["each"], feature_group_count=32))
        return jnp.mean(convolve(hidden, weights["down"]) ** 2)

    compiled = jax.jit(partitioned(jax.grad(loss), mesh, [32 * 3 * 3])).lower(weights, x).compile()
    counts = communication(compiled, mesh).counts
    assert counts == {("all-reduce", ("tensor",)): 1, ("all-reduce", ("data",)): 1}


def test_rows_that_are_looked_up_in_bfloat16_have_the_gradient_of_one_device():
    """To the bit: it is of integers that bfloat16 holds. openxla/xla#42481 adds up rows of several shards."""
    rng = np.random.default_rng(0)
    batch = {
        "ids": rng.integers(0, 5, (16, 8)).astype(np.int32),  # many of each, and none of most rows
        "signs": rng.choice([-1.0, 1.0], (16, 8, 8)).astype(np.float32),
    }

    def loss(model: Any, batch: Any, key: Any) -> Any:
        def one(total: Any, part: Any) -> Any:
            ids, signs = part["ids"], part["signs"].astype(jnp.bfloat16)
            each = jnp.broadcast_to(ids[..., None], signs.shape)
            found = jnp.take(model["take"], ids, axis=0) + 2 * model["index"][ids]
            found += jnp.take_along_axis(model["along"][None], each, axis=1)
            return total + jnp.sum(found * signs, dtype=jnp.float32), None

        halves = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]).swapaxes(0, 1), batch)
        return jax.lax.scan(jax.checkpoint(one), 0.0, halves)[0]

    expected = np.zeros((16, 8), np.float32)
    np.add.at(expected, batch["ids"], batch["signs"])
    for name in ("data2xtensor4", "2x2x2"):
        for spec in (P("tensor"), P(None, "tensor"), P(("fsdp", "tensor")), P("tensor", "fsdp")):
            mesh = mesh_of(name)
            shardings = {name: jax.NamedSharding(mesh, spec) for name in ("take", "index", "along")}
            model = jax.device_put({name: jnp.zeros((16, 8), jnp.bfloat16) for name in shardings}, shardings)
            state = rx.init_state(model, SGD, key=jax.random.key(0))
            step = partial(rx.train_step, loss_fn=loss, optimizer=SGD, shardings=shardings)
            new, _ = jax.jit(step)(state, jax.device_put(batch, rx.batch_sharding(mesh)))
            for path, times in {"take": 1, "index": 2, "along": 1}.items():
                found = -np.asarray(new.params[path]).astype(np.float32)
                np.testing.assert_array_equal(found, times * expected, err_msg=f"{name} {spec} {path}")


def test_other_programs_are_left_as_they_are():
    mesh = mesh_of("2x2x2")
    model = eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0))
    arrays, static = eqx.partition(model, eqx.is_array)

    def f(arrays: Any, x: Any) -> Any:
        y = jax.lax.scan(lambda x, _: (jax.vmap(eqx.combine(arrays, static))(x), None), x, None, length=2)[0]
        return jnp.mean(jax.lax.conv_general_dilated(y[:, None], jnp.ones((4, 1, 3)), (1,), "SAME") ** 2)

    x = jnp.ones((4, 8))
    traced = [str(jax.make_jaxpr(g)(arrays, x)) for g in (jax.grad(f), partitioned(jax.grad(f), mesh))]
    assert traced[0] == traced[1]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", SEVERAL)
def test_a_fourier_transform_over_a_split_dim_works(name, axis):
    mesh = mesh_of(name)
    x = np.random.default_rng(0).normal(size=(16, 8, 16)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(16, 16)).astype(np.float32)

    def f(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.abs(jnp.fft.fft(x @ w, axis=axis)) ** 2)

    split = P(None, "tensor") if mesh.shape["tensor"] > 1 else P(None, "fsdp")
    w_there = jax.device_put(w, jax.NamedSharding(mesh, split))
    x_there = jax.device_put(x, rx.batch_sharding(mesh))
    result = jax.jit(partitioned(jax.grad(f), mesh))(w_there, x_there)
    assert_close(result, jax.jit(jax.grad(f))(w, x), **CLOSE)


def test_a_shard_map_that_leaves_the_batch_to_the_compiler_is_refused_by_its_line():
    mesh = mesh_of("data2xtensor4")
    model, x = placed(mesh)

    def f(model: Any, x: Any) -> Any:
        inside = jax.shard_map(
            lambda model, x: model(x), mesh=mesh, in_specs=(P(), P()), out_specs=P(), axis_names={"tensor"}
        )
        return jnp.mean(inside(model, x) ** 2)

    with pytest.raises(ValueError, match=r"test_partitioned\.py:\d+ \(.*__call__\): a grouped convolution"):
        partitioned(jax.grad(f), mesh)(model, x)


def test_jit_step_mends_a_step_of_the_users_own():
    def run(name: str) -> Any:
        mesh = mesh_of(name)
        overrides = [("*", P())]
        model = rx.init_model(Stem, mesh, key=jax.random.key(0), overrides=overrides)
        state = rx.init_state(model, SGD, key=jax.random.key(1))

        def step_fn(state: Any, batch: Any) -> Any:
            def loss(params: Any) -> Any:
                return whole_loss(state.build(params, {}), batch, None)

            value, grads = jax.value_and_grad(loss)(state.params)
            params = jax.tree.map(lambda p, g: p - g, state.params, grads)
            return eqx.tree_at(lambda s: (s.params, s.step), state, (params, state.step + 1)), {"loss": value}

        batch = jax.device_put(images(), rx.batch_sharding(mesh))
        state, _ = rx.jit_step(step_fn)(state, batch)
        return jax.tree.map(np.asarray, state.params)

    assert_close(run("data2xtensor4"), run("one"), **CLOSE)


@pytest.mark.parametrize("name", ["fsdp8", "data2xtensor4"])
def test_complex_products_train(name):
    def make(key: Any) -> Any:
        linear = partial(eqx.nn.Linear, dtype=jnp.complex64)
        return [linear(64, 128, key=key), linear(128, 64, key=jax.random.fold_in(key, 1))]

    def loss(model: Any, batch: Any, key: Any) -> Any:
        def layers(model: Any, x: Any) -> Any:
            return rx.layers.row(jnp.tanh(rx.layers.column(x, model[0])[0]), model[1])

        x = rx.layers.scan_layers(layers, [model], batch, remat="row_out")
        x = rx.layers.scan_layers(layers, [model], x)
        return jnp.mean(jnp.abs(jax.vmap(model[1])(jax.vmap(model[0])(x))) ** 2)

    def grads(name: str) -> Any:
        mesh = mesh_of(name)
        model = rx.init_model(make, mesh, key=jax.random.key(0))
        state = rx.init_state(model, SGD, key=jax.random.key(1))
        batch = jax.device_put(np.ones((16, 64), np.complex64), rx.batch_sharding(mesh))
        step = partial(rx.train_step, loss_fn=loss, optimizer=SGD, shardings=rx.shard_rules(model, mesh))
        new, _ = jax.jit(step)(state, batch)
        return jax.tree.map(lambda old, new: np.asarray(old) - np.asarray(new), state.params, new.params)

    assert_close(grads(name), grads("one"), **CLOSE)


def test_a_jitted_step_refuses_a_state_that_was_given_away():
    mesh = mesh_of("data2xtensor4")
    model = rx.init_model(Stem, mesh, key=jax.random.key(0))
    state = rx.init_state(model, SGD, key=jax.random.key(1))
    batch = jax.device_put(images(), rx.batch_sharding(mesh))
    train = partial(rx.train_step, loss_fn=whole_loss, optimizer=SGD, shardings=rx.shard_rules(model, mesh))
    evaluate = rx.jit_step(partial(rx.eval_step, loss_fn=whole_loss), donate=False)
    step = rx.jit_step(train)
    before = float(evaluate(state, batch)["loss"])
    new, metrics = step(state, batch)  # what eval_step was given is still there
    assert float(metrics["loss"]) == pytest.approx(before, rel=1e-5)
    with pytest.raises(ValueError, match="its array kernel has been deleted"):
        step(state, batch)
    with pytest.raises(ValueError, match="its array kernel has been deleted"):
        evaluate(state, batch)
    assert "all-reduce" in (step.lower(new, batch).compile().as_text() or "")
    assert int(step(new, batch)[0].step) == 2
