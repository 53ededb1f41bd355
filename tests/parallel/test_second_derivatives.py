"""Gradients of gradients through every building block, on every mesh, against one device in float64."""

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
from helpers import MESHES, QUICK_COMPILE
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx

WIDTH, VOCABULARY, BATCH, LENGTH, HEADS = 16, 32, 8, 8, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"remat": "row_out", "num_chunks": 2},
    "recomputed": {"remat": "full"},
    "sequence": {"sequence_parallel": True},
}
CASES = [
    ("data8", "plain"),
    ("tensor8", "chunked"),
    ("tensor8", "sequence"),
    ("fsdp8", "recomputed"),
    ("2x2x2", "chunked"),
    ("2x2x2", "sequence"),
]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Layer(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear


class LanguageModel(eqx.Module):
    table: jax.Array
    layers: Layer
    head: eqx.nn.Linear


@cache
def make_model(seed: int = 0) -> LanguageModel:
    """Arrays of unit variance by their inputs; those of other seeds serve as directions."""
    keys = iter(jax.random.split(jax.random.key(seed), 14))

    def linear(i: int, o: int, **options: Any) -> eqx.nn.Linear:
        return eqx.nn.Linear(i, o, dtype=jnp.float64, key=next(keys), **options)

    def layer() -> Layer:
        query, value, output = (linear(WIDTH, WIDTH) for _ in range(3))
        key = linear(WIDTH, WIDTH, use_bias=False)  # a bias of keys has no gradient: the softmax drops it
        return Layer(query, key, value, output, linear(WIDTH, 32), linear(32, WIDTH))

    layers = jax.tree.map(lambda *x: jnp.stack(x), layer(), layer())
    table = jax.random.normal(next(keys), (VOCABULARY, WIDTH), jnp.float64)
    return LanguageModel(table, layers, linear(WIDTH, VOCABULARY))


def attention(q: Any, k: Any, v: Any) -> Any:
    """Written out: JAX's own takes its softmax in float32."""
    q, k, v = (rearrange(x, "b t (h d) -> b t h d", h=HEADS) for x in (q, k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    return rearrange(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v), "b t h d -> b t (h d)")


def loss_of(
    model: LanguageModel,
    tokens: Any,
    *,
    sequence_parallel: bool = False,
    remat: Any = "none",
    num_chunks: int = 1,
) -> Any:
    split: Any = {"sequence_parallel": sequence_parallel}

    def layer_fn(layer: Layer, x: Any) -> Any:
        q, k, v = rx.layers.column(x, layer.query, layer.key, layer.value, unit=WIDTH // HEADS, **split)
        x = x + rx.layers.row(attention(q, k, v), layer.output, unit=WIDTH // HEADS, **split)
        (up,) = rx.layers.column(x, layer.up, **split)
        return x + rx.layers.row(jnp.tanh(up), layer.down, **split)

    x = rx.layers.embed(model.table, tokens[:, :-1], **split)
    x = rx.layers.scan_layers(layer_fn, model.layers, x, remat=remat, **split)
    return rx.layers.cross_entropy(x, model.head, tokens[:, 1:], num_chunks=num_chunks, **split).value


def inner_product(a: Any, b: Any) -> Any:
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def adapted_loss(model: Any, batch: Any, **options: Any) -> Any:
    """The loss on the second half of a task after one step of SGD on the first, as in MAML."""
    gradient = jax.grad(lambda model: loss_of(model, batch[:, 0], **options))(model)
    adapted = jax.tree.map(lambda x, g: x - 0.5 * g, model, gradient)
    return loss_of(adapted, batch[:, 1], **options)


def reverse_over_reverse(model: Any, direction: Any, tokens: Any, **options: Any) -> Any:
    gradient = jax.grad(lambda model: loss_of(model, tokens, **options))
    return jax.grad(lambda model: inner_product(gradient(model), direction))(model)


def forward_over_reverse(model: Any, direction: Any, tokens: Any, **options: Any) -> Any:
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


@cache
def expected() -> tuple[Any, Any]:
    """On one device: the product of the Hessian with a direction, and the parameters after a meta-step."""
    product = run(reverse_over_reverse, make_model(), make_model(1), tasks()[:, 0])
    state = rx.init_state(make_model(), OPTIMIZER, key=jax.random.key(0))
    return product, run(meta_step, state, tasks())


def assert_close(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.max(np.abs(y)) > 1e-3  # there is something to be wrong
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("product", [reverse_over_reverse, forward_over_reverse])
@pytest.mark.parametrize(("mesh", "option"), [("tensor8", "sequence"), ("2x2x2", "chunked")])
def test_hessian_products(mesh: str, option: str, product: Any) -> None:
    on = rx.make_mesh(**MESHES[mesh])
    shardings = rx.shard_rules(make_model(), on)
    model, direction = (eqx.filter_shard(make_model(seed), shardings) for seed in (0, 1))
    tokens = jax.device_put(tasks()[:, 0], rx.batch_sharding(on))
    assert_close(run(functools.partial(product, **OPTIONS[option]), model, direction, tokens), expected()[0])


@pytest.mark.parametrize(("mesh", "option"), CASES)
def test_a_step_of_meta_learning(mesh: str, option: str) -> None:
    on = rx.make_mesh(**MESHES[mesh])
    shardings = rx.shard_rules(make_model(), on)
    state = rx.init_state(eqx.filter_shard(make_model(), shardings), OPTIMIZER, key=jax.random.key(0))
    batch = jax.device_put(tasks(), NamedSharding(on, PartitionSpec(("data", "fsdp"))))
    found = run(functools.partial(meta_step, shardings=shardings, **OPTIONS[option]), state, batch)
    assert_close(found, expected()[1])
