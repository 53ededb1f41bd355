"""The building blocks together: gradients, and gradients of these, on meshes and on one device in float64."""

import functools
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from einops import rearrange
from helpers import QUICK_COMPILE, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx

WIDTH, VOCABULARY, BATCH, LENGTH = 16, 32, 8, 8
# Heads of size 2. Over 8 shards those of keys and values stay whole: `unit` tells, and their width would not.
KV_HEADS, KV_WIDTH = 4, 8
SPLIT = {"sequence_parallel": True}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class LanguageModel(eqx.Module):
    table: jax.Array
    layers: dict[str, eqx.nn.Linear]
    head: eqx.nn.Linear


@cache
def make_model(seed: int = 0) -> LanguageModel:
    """Arrays of unit variance by their inputs; those of other seeds serve as directions."""
    keys = iter(jax.random.split(jax.random.key(seed), 16))

    def linear(i: int, o: int, **options: Any) -> eqx.nn.Linear:
        return eqx.nn.Linear(i, o, dtype=jnp.float64, key=next(keys), **options)

    def layer() -> dict[str, eqx.nn.Linear]:
        query, value, output = linear(WIDTH, WIDTH), linear(WIDTH, KV_WIDTH), linear(WIDTH, WIDTH)
        key = linear(WIDTH, KV_WIDTH, use_bias=False)  # a bias has no gradient: the softmax drops it
        mlp = {"gate": linear(WIDTH, 32), "up": linear(WIDTH, 32), "down": linear(32, WIDTH)}
        return {"query": query, "key": key, "value": value, "output": output, **mlp}

    table = jax.random.normal(next(keys), (VOCABULARY, WIDTH), jnp.float64)
    layers = jax.tree.map(lambda *x: jnp.stack(x), layer(), layer())
    return LanguageModel(table, layers, linear(WIDTH, VOCABULARY))


def attention(q: Any, k: Any, v: Any) -> Any:
    """Written out: JAX's own takes its softmax in float32."""
    q = rearrange(q, "b t (h g d) -> b t h g d", h=KV_HEADS, d=2)
    k, v = (rearrange(x, "b t (h d) -> b t h d", h=KV_HEADS) for x in (k, v))
    scores = jnp.einsum("bthgd,bshd->bhgts", q, k) / math.sqrt(2)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    return rearrange(jnp.einsum("bhgts,bshd->bthgd", jax.nn.softmax(scores), v), "b t h g d -> b t (h g d)")


def loss_of(model: Any, tokens: Any, *, remat: Any = "none", num_chunks: int = 1, **split: Any) -> Any:
    def layer_fn(layer: Any, x: Any) -> Any:
        q, k, v = rx.layers.column(x, layer["query"], layer["key"], layer["value"], unit=2, **split)
        x = x + rx.layers.row(attention(q, k, v), layer["output"], unit=2, **split)
        gate, up = rx.layers.column(x, layer["gate"], layer["up"], **split)
        return x + rx.layers.row(jnp.tanh(gate) * up, layer["down"], **split)

    x = rx.layers.embed(model.table, tokens[:, :-1], **split)
    x = rx.layers.scan_layers(layer_fn, model.layers, x, remat=remat, **split)
    return rx.layers.cross_entropy(x, model.head, tokens[:, 1:], num_chunks=num_chunks, **split).value


def adapted_loss(model: Any, batch: Any, **options: Any) -> Any:
    """The loss on the second half of a task after one step of SGD on the first, as in MAML."""
    gradient = jax.grad(lambda model: loss_of(model, batch[:, 0], **options))(model)
    adapted = jax.tree.map(lambda x, g: x - 0.5 * g, model, gradient)
    return loss_of(adapted, batch[:, 1], **options)


def hessian_product(model: Any, direction: Any, tokens: Any, **options: Any) -> Any:
    """Forward over reverse: the derivative of the gradient along a direction."""
    gradient = jax.grad(lambda model: loss_of(model, tokens, **options))
    return jax.jvp(gradient, (model,), (direction,))[1]


def tasks() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, 2, LENGTH + 1)).astype(np.int32)


OPTIMIZER = optax.sgd(1.0)


def meta_step(state: Any, batch: Any, shardings: Any = None, **options: Any) -> Any:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return adapted_loss(model, batch, **options)

    return rx.train_step(state, batch, loss_fn=loss_fn, optimizer=OPTIMIZER, shardings=shardings)[0].params


def run(function: Any, *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile(QUICK_COMPILE)(*arguments)


def assert_close(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.max(np.abs(y)) > 1e-3  # there is something to be wrong
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_the_product_of_the_hessian_with_a_direction() -> None:
    on = mesh_of("2x2x2")
    shardings = rx.shard_rules(make_model(), on)
    model, direction = (eqx.filter_shard(make_model(seed), shardings) for seed in (0, 1))
    tokens = jax.device_put(tasks()[:, 0], rx.batch_sharding(on))
    found = run(functools.partial(hessian_product, remat="full", **SPLIT), model, direction, tokens)
    assert_close(found, run(hessian_product, make_model(), make_model(1), tasks()[:, 0]))


@cache
def expected() -> Any:
    """The parameters after a meta-step on one device."""
    return run(meta_step, rx.init_state(make_model(), OPTIMIZER, key=jax.random.key(0)), tasks())


@pytest.mark.parametrize(
    ("mesh", "options"), [("tensor8", SPLIT), ("2x2x2", {"remat": "row_out", "num_chunks": 2})]
)
def test_a_step_of_meta_learning(mesh: str, options: dict[str, Any]) -> None:
    on = mesh_of(mesh)
    shardings = rx.shard_rules(make_model(), on)
    state = rx.init_state(eqx.filter_shard(make_model(), shardings), OPTIMIZER, key=jax.random.key(0))
    batch = jax.device_put(tasks(), NamedSharding(on, PartitionSpec(("data", "fsdp"))))
    assert_close(run(functools.partial(meta_step, shardings=shardings, **options), state, batch), expected())
