"""A training step of this library."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

import redco_eqx as rx

from .program import LEARNING_RATE, Program
from .settings import FAMILIES, Setting


def make_model(setting: Setting, config: Any, *, key: Any) -> Any:
    """The model of a setting, with parameters in its precision."""
    attention = None if setting.attention == "auto" else setting.attention
    model = FAMILIES[config.model_type](
        config, stacked=True, remat=setting.remat, attention=attention, key=key
    )
    if setting.precision == "bfloat16":
        model = rx.cast(model, jnp.bfloat16)
    return model


def make_loss(setting: Setting) -> Any:
    """The loss of the next tokens."""

    def loss_fn(model: Any, tokens: Any, key: Any) -> rx.Mean:
        if setting.precision == "mixed":
            # Inside the loss, so that the parameters and their gradients are float32.
            model = rx.cast(model, jnp.bfloat16)
        hidden, _ = model.hidden_states(tokens[:, :-1])
        return rx.layers.cross_entropy(
            hidden, model.head, tokens[:, 1:], num_chunks=setting.chunks
        )

    return loss_fn


def program(setting: Setting, config: Any, mesh: Mesh) -> Program:
    """The step of a setting, and its arguments."""
    make = functools.partial(make_model, setting, config)
    optimizer = optax.adamw(LEARNING_RATE)
    key = jax.random.key(0)
    abstract = eqx.filter_eval_shape(lambda key: make(key=key), key)
    shardings = rx.shard_rules(abstract, mesh)

    def lay(x: Any, sharding: NamedSharding | None) -> Any:
        if sharding is None:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    def make_state() -> rx.TrainState:
        model = rx.init_model(lambda key: make(key=key), mesh, key=key)
        return rx.init_state(model, optimizer, key=key)

    state = rx.init_state(jax.tree.map(lay, abstract, shardings), optimizer, key=key)
    step = functools.partial(
        rx.train_step,
        loss_fn=make_loss(setting),
        optimizer=optimizer,
        shardings=shardings,
    )
    return Program(
        step=rx.jit_step(step),
        make_state=make_state,
        abstract_state=state,
        batch=jax.ShapeDtypeStruct(
            (setting.batch, setting.length + 1),
            jnp.int32,
            sharding=rx.batch_sharding(mesh),
        ),
        loss_of=lambda metrics: metrics["loss"],
        num_parameters=sum(x.size for x in state.params.values()),
    )
