"""False friends: names, shapes and leaves that look like something else."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._entry import COL, ROW, WHOLE, D, Entry, F, linear, pairs, squared_loss


class KeyAndValue(eqx.Module):
    """A PRNG key named `key`, keys that could be split, an int `k`, a value head named `value`."""

    key: jax.Array
    keys: jax.Array
    k: int
    q: str
    trunk: eqx.nn.Linear
    value: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.key, self.keys, self.k, self.q = k3, jax.random.split(k3, 4), 3, "greedy"
        self.trunk, self.value = linear(8, F, k1), linear(F, 1, k2)

    def __call__(self, x):
        noise = jax.random.normal(self.key, (8,)) + jax.random.normal(self.keys[self.k], (8,))
        return self.value(jnp.tanh(self.trunk(x + 0.01 * noise)))


class TwinCritics(eqx.Module):
    """SAC: `q1` and `q2` are whole networks, and no queries."""

    actor: eqx.nn.MLP
    q1: eqx.nn.MLP
    q2: eqx.nn.MLP

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.actor = eqx.nn.MLP(8, 4, F, 2, activation=jnp.tanh, key=k1)
        self.q1 = eqx.nn.MLP(12, 1, F, 2, activation=jnp.tanh, key=k2)
        self.q2 = eqx.nn.MLP(12, 1, F, 2, activation=jnp.tanh, key=k3)

    def __call__(self, x):
        pair = jnp.concatenate([x, self.actor(x)])
        return jnp.concatenate([self.q1(pair), self.q2(pair)])


class Buffers(eqx.Module):
    """Every kind of leaf that is no parameter."""

    up: eqx.nn.Linear
    down: eqx.nn.Linear
    table: np.ndarray
    ids: jax.Array
    weight_ids: np.ndarray
    mask: jax.Array
    activation: Callable[[Any], Any]
    flag: bool
    name: str
    nothing: Any
    rate: float

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.up, self.down = linear(D, F, k1), linear(F, D, k2)
        self.table = np.linspace(0.5, 1.5, 8 * D, dtype=np.float32).reshape(8, D)
        self.ids = jnp.arange(64).reshape(8, 8)
        self.weight_ids = np.arange(8)
        self.mask = jnp.arange(D) % 2 == 0
        self.activation = jax.nn.gelu
        self.flag, self.name, self.nothing, self.rate = True, "buffers", None, 0.5

    def __call__(self, x):
        x = (
            jnp.where(self.mask, x, self.rate * x)
            * jnp.asarray(self.table)[jnp.asarray(self.weight_ids)[self.ids[3, 2] % 8]]
        )
        return self.down(self.activation(self.up(x))) if self.flag else x


class ActorCritic(eqx.Module):
    trunk: eqx.nn.Linear
    policy: eqx.nn.Linear
    value: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.trunk = linear(8, F, k1)
        self.policy, self.value = linear(F, 4, k2), linear(F, 1, k3)

    def __call__(self, x):
        h = jnp.tanh(self.trunk(x))
        return jnp.concatenate([self.policy(h), self.value(h)])


ENTRIES = [
    Entry(
        "friend_key",
        KeyAndValue,
        pairs(8, out=(1,)),
        squared_loss(),
        {
            "key": WHOLE,
            "keys": WHOLE,
            "trunk.*": COL,
            "value.weight": ROW,
            "value.bias": WHOLE,
        },
        1,
        "trunk and value are a pair",
        activation_sizes=(1,),
    ),
    Entry(
        "friend_twin_critics",
        TwinCritics,
        pairs(8, out=(2,)),
        squared_loss(),
        {
            "*.layers.0.*": COL,
            "*.layers.1.weight": ROW,
            "*.layers.1.bias": WHOLE,
            "actor.layers.2.*": COL,
            "q?.layers.2.*": WHOLE,
        },
        3,
        "each network has three Linears: column, row, column; a critic's third has one output: whole",
        activation_sizes=(F,),
    ),
    Entry(
        "friend_buffers",
        Buffers,
        pairs(D),
        squared_loss(),
        {
            "up.*": COL,
            "down.weight": ROW,
            "down.bias": WHOLE,
            "table": WHOLE,
            "ids": WHOLE,
            "weight_ids": WHOLE,
            "mask": WHOLE,
        },
        1,
        "tables, integers and masks divide, and are not split",
        activation_sizes=(D,),
    ),
    Entry(
        "friend_actor_critic",
        ActorCritic,
        pairs(8, out=(5,)),
        squared_loss(),
        {
            "trunk.*": COL,
            "policy.weight": ROW,
            "policy.bias": WHOLE,
            "value.weight": ROW,
            "value.bias": WHOLE,
        },
        2,
        "two heads close what one trunk opens: one small all-reduce each",
        activation_sizes=(4, 1),
    ),
]
