"""The activations that a backward pass keeps: the gradients are the same, and between
the least work and the least memory lie the results of products."""

from functools import cache, partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import compilations, in_long, mesh_of, place, stepped
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params

import redco_eqx as rx

SIZE, LENGTH, BATCH, NUM_LAYERS = 16, 8, 8, 2
POLICIES = jax.checkpoint_policies
REMATS: dict[str, Any] = {
    "none": "none",
    "products": "products",
    "row_out": "row_out",
    "full": "full",
    "without scores": POLICIES.dots_with_no_batch_dims_saveable,
    "offload": POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["row_out"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Layer(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any):
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(SIZE, 4 * SIZE, key=up_key)
        self.down = eqx.nn.Linear(4 * SIZE, SIZE, key=down_key)


def make_layers() -> Any:
    keys = jax.random.split(jax.random.key(0), NUM_LAYERS)
    layers = eqx.filter_vmap(Layer)(keys)
    return rx.cast(layers, jnp.result_type(float))


def rows(length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(BATCH, length, SIZE))


def apply(layer: Any, x: Any) -> Any:
    """An MLP with a chain of activations, and attention without projections."""
    (hidden,) = rx.layers.column(x, layer.up)
    hidden = jnp.sin(jax.nn.gelu(jnp.tanh(hidden)))
    x = x + rx.layers.row(hidden, layer.down)
    weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, jnp.sin(x)))
    return x + jnp.einsum("bts,bsd->btd", weights, jnp.tanh(x))


def loss_fn(layers: Any, batch: Any, key: Any, *, remat: Any = "none") -> Any:
    return jnp.mean(rx.layers.scan_layers(apply, layers, batch, remat=remat) ** 2)


@cache
def expected() -> dict[str, Any]:
    """The parameters after a step of SGD with rate 1, by a loop and no mesh."""

    def loss(layers: Any) -> Any:
        x = jnp.asarray(rows())
        for i in range(NUM_LAYERS):
            x = apply(jax.tree.map(lambda a, i=i: a[i], layers), x)
        return jnp.mean(x**2)

    layers = make_layers()
    new = jax.tree.map(lambda x, g: x - g, layers, jax.grad(loss)(layers))
    return jax.device_get(rx.to_arrays(new))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("remat", "mesh_name"),
    [
        *((remat, "2x2x2") for remat in REMATS),
        ("products", "data2xtensor4"),
        *in_long(*((remat, "fsdp8") for remat in REMATS)),
    ],
)
def test_the_gradient_is_the_same_whatever_is_kept(remat: str, mesh_name: str) -> None:
    new = stepped(
        make_layers(),
        rows(),
        mesh_of(mesh_name),
        partial(loss_fn, remat=REMATS[remat]),
        optax.sgd(1.0),
    )
    found = rx.to_arrays(new.state.model)
    for path, x in expected().items():
        np.testing.assert_allclose(found[path], x, rtol=1e-9, atol=1e-12, err_msg=path)


@pytest.mark.parametrize("mesh_name", ["data8", "data2xtensor4", "fsdp8"])
def test_products_take_memory_between_none_and_full(mesh_name: str) -> None:
    """Under `fsdp`, none keeps what products keeps, and no gathered weight."""
    mesh = mesh_of(mesh_name)

    def num_bytes(remat: Any) -> int:
        layers, shardings = place(make_layers(), mesh)
        state = rx.init_state(layers, optax.sgd(1.0), key=jax.random.key(1))
        step = partial(
            rx.train_step,
            loss_fn=partial(loss_fn, remat=remat),
            optimizer=optax.sgd(1.0),
            shardings=shardings,
        )
        batch = jax.device_put(rows(64).astype(np.float32), rx.batch_sharding(mesh))
        stats = jax.jit(step).lower(state, batch).compile().memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes

    none, products, full = map(num_bytes, ("none", "products", "full"))
    assert full < products
    if mesh_name == "fsdp8":
        assert products == none
    else:
        assert products < none


def test_the_gradient_of_a_split_stream_keeps_no_matrix_twice() -> None:
    """Few tokens: the matrices are nearly all of the memory."""
    size = 64
    num_layers = 8
    mesh = mesh_of("data2xtensor4")
    keys = jax.random.split(jax.random.key(0), num_layers)

    def make(key: Any) -> dict[str, eqx.nn.Linear]:
        up_key, down_key = jax.random.split(key)
        return {
            "up": eqx.nn.Linear(size, 4 * size, key=up_key),
            "down": eqx.nn.Linear(4 * size, size, key=down_key),
        }

    layers, _ = place(eqx.filter_vmap(make)(keys), mesh)
    batch = jax.device_put(jnp.ones((2, 4, size)), rx.batch_sharding(mesh))

    def num_bytes(is_split: bool) -> int:
        split: Any = {"sequence_parallel": is_split}

        def layer(own: Any, x: Any) -> Any:
            (hidden,) = rx.layers.column(x, own["up"], **split)
            return x + rx.layers.row(jnp.sin(hidden), own["down"], **split)

        def loss(layers: Any) -> Any:
            return jnp.sum(rx.layers.scan_layers(layer, layers, batch, **split) ** 2)

        program = jax.jit(jax.grad(loss)).lower(layers).compile()
        stats = program.memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes

    matrices = num_layers * 2 * 4 * size**2 * 4 // 4
    assert num_bytes(True) < num_bytes(False) + matrices / 4


# A kernel that keeps a second result for its backward pass, as flash attention does.


@jax.custom_vjp
def kernel(x: Any) -> Any:
    return _forward(x)[0]


def _forward(x: Any) -> Any:
    def body(x_ref: Any, y_ref: Any, scale_ref: Any) -> None:
        scale_ref[...] = jnp.cos(x_ref[...])
        y_ref[...] = jnp.sin(x_ref[...])

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    y, scale = pl.pallas_call(body, out_shape=(shape, shape), interpret=True)(x)
    return y, scale


kernel.defvjp(_forward, lambda scale, g: (g * scale,))


def convolved(weight: Any, x: Any) -> Any:
    window = weight.reshape(SIZE, SIZE, 1)
    y = jax.lax.conv_general_dilated(x.mT, window, (1,), "SAME").mT
    return jnp.sin(y)


def in_groups(weight: Any, x: Any) -> Any:
    sizes = jnp.array([x.shape[0]], jnp.int32)
    return jnp.sin(jax.lax.ragged_dot(x, weight[None], sizes))


OPERATIONS: dict[str, tuple[Any, Any]] = {
    "dot_general": (lambda weight, x: jnp.sin(x @ weight), rows()[0]),
    "conv_general_dilated": (convolved, rows()),
    "ragged_dot_general": (in_groups, rows()[0]),
    "pallas_call": (lambda weight, x: kernel(x * jnp.mean(weight)), rows()[0]),
}


def count(name: str, jaxpr: Any) -> int:
    inside = (count(name, x) for e in jaxpr.eqns for x in jaxprs_in_params(e.params))
    return sum(e.primitive.name == name for e in jaxpr.eqns) + sum(inside)


@pytest.mark.parametrize("is_list", [False, True], ids=["stacked", "list"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_no_product_is_computed_twice(name: str, is_list: bool) -> None:
    operation, x = OPERATIONS[name]

    def layer(weight: Any, x: Any) -> Any:
        return jnp.tanh(operation(weight, x))

    def loss(weights: Any, remat: Any) -> Any:
        given = list(weights) if is_list else weights
        y = rx.layers.scan_layers(
            layer, given, jnp.asarray(x, jnp.float32), remat=remat
        )
        return jnp.sum(y)

    weights = jnp.ones((3, SIZE, SIZE))

    def num(remat: Any) -> int:
        program = jax.make_jaxpr(jax.grad(partial(loss, remat=remat)))(weights)
        return count(name, program.jaxpr)

    assert num("products") == num("none") < num("full")


# A policy in a static field of a model.


class Model(eqx.Module):
    layers: Any
    remat: Any = eqx.field(static=True)


def of_model(model: Any, batch: Any, key: Any) -> Any:
    return loss_fn(model.layers, batch, key, remat=model.remat)


def state_with(remat: Any) -> rx.TrainState:
    layers, _ = place(make_layers(), mesh_of("data8"))
    return rx.init_state(Model(layers, remat), optax.sgd(0.1), key=jax.random.key(1))


@pytest.mark.skipif(
    POLICIES.save_only_these_names("a") != POLICIES.save_only_these_names("a"),
    reason="from JAX 0.12 on, policies of names are closures, which differ",
)
def test_models_with_equal_policies_share_a_compiled_step() -> None:
    """JAX's policies of names are equal if their names are."""
    states = [state_with(POLICIES.save_only_these_names("row_out")) for _ in range(2)]
    assert states[0].structure == states[1].structure
    step = jax.jit(partial(rx.train_step, loss_fn=of_model, optimizer=optax.sgd(0.1)))
    batch = jax.device_put(
        rows().astype(np.float32), rx.batch_sharding(mesh_of("data8"))
    )
    step(states[0], batch)
    with compilations() as compiled:
        step(states[1], batch)
    assert not compiled
    other = state_with(POLICIES.save_only_these_names("another"))
    assert other.structure != states[0].structure


def test_a_run_with_a_policy_goes_on_from_its_checkpoint(tmp_path: Any) -> None:
    def run(num_epochs: int) -> Any:
        state, _ = rx.fit(
            state_with(POLICIES.save_only_these_names("row_out")),
            rows().astype(np.float32),
            collate_fn=np.stack,
            loss_fn=of_model,
            optimizer=optax.sgd(0.1),
            batch_size=BATCH,
            num_epochs=num_epochs,
            checkpoints=tmp_path / "run",
            loggers=[],
        )
        return state

    run(1)
    assert int(run(2).step) == 2


def test_a_function_that_makes_policies_is_refused() -> None:
    layers = make_layers()
    with pytest.raises(Exception, match="policy should be a bool"):
        eqx.filter_grad(partial(loss_fn, remat=POLICIES.save_only_these_names))(
            layers, jnp.asarray(rows(), jnp.float32), None
        )
