"""The building blocks together, in a Gemma 2: gradients, and gradients of these, on
meshes and on one device.

In float64, where a tolerance tells rounding from anything else.
"""

import functools
from functools import cache
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_models
from helpers import filled, mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx

LENGTH, BATCH = 16, 8
SPLIT = {"sequence_parallel": True}


@cache
def make_model(seed: int = 0, **options: Any) -> Any:
    """A Gemma 2, whose scores have a cap: JAX's own attention takes its softmax in
    float32. Over 8 shards its 4 heads of keys and values stay whole. Arrays of other
    seeds serve as directions."""
    options_of: Any = {
        "attn_logit_softcapping": 3.0,
        "layer_types": ["full_attention"] * 2,
    }
    model = tiny_models.abstract("gemma2", stacked=True, **options_of)
    return tiny_models.restack(filled(model, jnp.float64, seed), **options)


def loss_of(model: Any, tokens: Any, *, num_chunks: int = 1) -> Any:
    hidden, _ = model.hidden_states(tokens[:, :-1])
    split = {"sequence_parallel": model.sequence_parallel}
    return rx.layers.cross_entropy(
        hidden, model.head, tokens[:, 1:], num_chunks=num_chunks, **split
    ).value


def adapted_loss(model: Any, batch: Any, **options: Any) -> Any:
    """The loss on the second half of a task after one step of SGD on the first, as in
    MAML."""
    gradient = eqx.filter_grad(loss_of)(model, batch[:, 0], **options)
    adapted = eqx.apply_updates(model, jax.tree.map(lambda g: -0.5 * g, gradient))
    return loss_of(adapted, batch[:, 1], **options)


@eqx.filter_jit
def hessian_product(model: Any, direction: Any, tokens: Any) -> Any:
    """Forward over reverse: the derivative of the gradient along a direction."""
    gradient = eqx.filter_grad(lambda model: loss_of(model, tokens))
    return eqx.filter_jvp(
        gradient, (model,), (eqx.filter(direction, eqx.is_inexact_array),)
    )[1]


def tasks() -> np.ndarray:
    return (
        np.random.default_rng(0)
        .integers(0, 64, (BATCH, 2, LENGTH + 1))
        .astype(np.int32)
    )


OPTIMIZER = optax.sgd(1.0)


def meta_step(state: Any, batch: Any, shardings: Any = None, **options: Any) -> Any:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return adapted_loss(model, batch, **options)

    return rx.train_step(
        state, batch, loss_fn=loss_fn, optimizer=OPTIMIZER, shardings=shardings
    )[0].params


def assert_close(found: Any, wanted: Any) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.max(np.abs(y)) > 1e-3  # there is something to be wrong
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("double")
def test_the_product_of_the_hessian_with_a_direction() -> None:
    on = mesh_of("2x2x2")
    split = {"remat": "full", **SPLIT}
    model, direction = (make_model(seed, **split) for seed in (0, 1))
    model, direction = (
        eqx.filter_shard(x, rx.shard_rules(x, on)) for x in (model, direction)
    )
    tokens = jax.device_put(tasks()[:, 0], rx.batch_sharding(on))
    found = hessian_product(model, direction, tokens)
    assert_close(found, hessian_product(make_model(), make_model(1), tasks()[:, 0]))


@cache
def expected() -> Any:
    """The parameters after a meta-step on one device."""
    return jax.jit(meta_step)(
        rx.init_state(make_model(), OPTIMIZER, key=jax.random.key(0)), tasks()
    )


WAYS = [("tensor8", SPLIT, 1), ("2x2x2", {"remat": "row_out"}, 2)]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("mesh", "options", "num_chunks"), WAYS)
def test_a_step_of_meta_learning(
    mesh: str, options: dict[str, Any], num_chunks: int
) -> None:
    on = mesh_of(mesh)
    model = make_model(**options)
    shardings = rx.shard_rules(model, on)
    state = rx.init_state(
        eqx.filter_shard(model, shardings), OPTIMIZER, key=jax.random.key(0)
    )
    batch = jax.device_put(tasks(), NamedSharding(on, PartitionSpec(("data", "fsdp"))))
    step = jax.jit(
        functools.partial(meta_step, shardings=shardings, num_chunks=num_chunks)
    )
    assert_close(step(state, batch), expected())
