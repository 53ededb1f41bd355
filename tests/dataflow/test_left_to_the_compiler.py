"""Losses from `split_activations` whose activations a step leaves to the compiler."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import abstract, filled, mesh_of

import redco_eqx as rx

SGD = optax.sgd(0.1)


def summed_up(layer: Any, x: Any) -> Any:
    """Tokens could be split for the product, but are then gathered to be summed up."""
    return jnp.cumsum(jnp.tanh(jax.vmap(layer)(x)), axis=0)


def through_host(layer: Any, x: Any) -> Any:
    """A loop whose body calls the host."""

    def trip(y: Any, _: Any) -> Any:
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        held = jax.lax.stop_gradient(y)
        on_host = jax.pure_callback(lambda a: a, shape, held, vmap_method="expand_dims")
        return jnp.tanh(jax.vmap(layer)(y)) + on_host, None

    return jax.lax.scan(trip, x, None, length=3)[0]


def mean_square(apply: Any, model: Any, batch: Any, key: Any) -> Any:
    return (jax.vmap(partial(apply, model))(batch) ** 2).mean()


LEFT: dict[str, Any] = {
    "sends_more": (summed_up, "with activations split, a device would send 6.4 KiB"),
    "unknown_in_a_loop": (through_host, "a loop repeats pure_callback"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_would_send_more_or_an_unknown_number_is_left_to_the_compiler(
    case: str,
) -> None:
    """The step is that of the plain loss, and says why; so does `explain`."""
    apply, reason = LEFT[case]
    mesh = mesh_of("data2xtensor4")
    loss_fn = partial(mean_square, apply)
    model = filled(abstract(lambda key: eqx.nn.Linear(30, 30, key=key)), jnp.float32, 0)
    batch = np.ones((8, 64, 30), np.float32)
    marked = rx.split_activations(loss_fn)
    plain = rx.explain(model, mesh, loss_fn=loss_fn, batch=batch)
    found = rx.explain(model, mesh, loss_fn=marked, batch=batch)
    assert plain.with_activations is None
    assert found.communication == plain.communication
    assert f"the activations are left to the compiler: {reason}" in str(found)
    state = rx.init_state(
        eqx.filter_shard(model, found.shardings), SGD, key=jax.random.key(1)
    )
    step = partial(rx.train_step, optimizer=SGD, shardings=found.shardings)
    with pytest.warns(
        rx.errors.ShardingWarning, match=f"left to the compiler: .*{reason}"
    ):
        split = jax.make_jaxpr(partial(step, loss_fn=marked))(state, batch)
    assert str(split) == str(
        jax.make_jaxpr(partial(step, loss_fn=loss_fn))(state, batch)
    )
