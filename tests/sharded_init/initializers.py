"""Models to be born, for the tests of `init_model`; and a program, one of two processes
that create some."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from redco_eqx import init_model, initialize_distributed, make_mesh, to_arrays
from redco_eqx._sharding.mesh import one_device_mesh

LAYERS = 3


def stacked(make: Any) -> Any:
    return lambda key: eqx.filter_vmap(make)(jax.random.split(key, LAYERS))


def block(*, dtype: Any = jnp.float32, key: Array) -> dict[str, Any]:
    """Layers of Equinox, with biases, in a dtype."""
    keys = jax.random.split(key)
    return {
        "attention": eqx.nn.MultiheadAttention(
            8, 64, use_query_bias=True, dtype=dtype, key=keys[0]
        ),
        "norm": eqx.nn.LayerNorm(64, dtype=dtype),
        "mlp": eqx.nn.MLP(64, 64, 2048, 1, dtype=dtype, key=keys[1]),
    }


def make_initialised(key: Any) -> dict[str, Array]:
    """By the initialisers of JAX, each in a dtype."""
    given = jax.nn.initializers
    makers: dict[str, Any] = {
        "constant": (given.constant(0.3), jnp.float32),
        "glorot": (given.glorot_uniform(), jnp.float32),
        "he": (given.he_normal(), jnp.bfloat16),
        "normal": (given.normal(), jnp.bfloat16),
        "zeros": (given.zeros, jnp.bfloat16),
    }
    keys = jax.random.split(key, len(makers))
    return {
        name: make(key, (64, 128), dtype)
        for (name, (make, dtype)), key in zip(makers.items(), keys)
    }


# Elementwise after their draw.
SPREAD: dict[str, Any] = {
    "block": lambda key: block(key=key),
    "block bfloat16 stacked": stacked(lambda key: block(dtype=jnp.bfloat16, key=key)),
    "initialisers stacked": stacked(make_initialised),
    "embedding": lambda key: eqx.nn.Embedding(512, 64, key=key),
    "conv stacked": stacked(lambda key: eqx.nn.Conv2d(32, 64, 3, key=key)),
    "jitted": eqx.filter_jit(lambda key: eqx.nn.Linear(64, 2048, key=key)),
    "changed": lambda key: (
        jnp.tril(2 * jax.random.normal(key, (128, 64)).T) / jnp.sqrt(3.0)
    ),
}


def normalised(key: Any) -> Array:
    weight = draw(key)
    return weight / jnp.linalg.norm(weight)


def mixed(key: Any) -> Array:
    """Much of what else a layer's initialisation may do."""
    first, second = jax.random.split(key)
    weight = jnp.cumsum(jnp.sort(jax.random.normal(first, (64, 64)), axis=1), axis=0)
    weight = jnp.where(
        jnp.tril(jnp.ones((64, 64), bool)),
        weight,
        jnp.tanh(weight.T) @ jnp.ones((64, 64)),
    )
    parts = jnp.split(jax.random.permutation(second, weight), 2)
    return jnp.concatenate([parts[1], parts[0][::-1]]).reshape(32, 2, 64)


def draw(key: Any) -> Array:
    return jax.random.normal(key, (64, 64))


orthogonal = jax.nn.initializers.orthogonal()

# Not elementwise.
OTHERS: dict[str, Any] = {
    "orthogonal stacked": stacked(lambda key: orthogonal(key, (32, 64))),
    "normalised": normalised,
    "mixed": mixed,
    "one draw": lambda key: jnp.sort(jax.random.normal(key, (LAYERS, 64, 64))),
    "rbg": lambda key: draw(rbg(key)),
    "rbg stacked": lambda key: jax.vmap(draw)(jax.random.split(rbg(key), LAYERS)),
    "loop": lambda key: jax.lax.map(draw, jax.random.split(key, LAYERS)),
}


def rbg(key: Any) -> Any:
    data = jax.random.key_data(key)
    return jax.random.wrap_key_data(jnp.concatenate([data, data]), impl="rbg")


def everything(key: Any) -> dict[str, Any]:
    """A model with arrays of each kind."""
    keys = jax.random.split(key, 6)
    return {
        "block": SPREAD["block bfloat16 stacked"](keys[0]),
        "changed": SPREAD["changed"](keys[0]),
        "initialised": SPREAD["initialisers stacked"](keys[1]),
        "orthogonal": OTHERS["orthogonal stacked"](keys[2]),
        "mixed": OTHERS["mixed"](keys[3]),
        "rbg": OTHERS["rbg stacked"](keys[4]),
        "loop": OTHERS["loop"](keys[5]),
        "small": jnp.arange(3),
        "keys": keys,
    }


JITTED = eqx.filter_jit(block)


def make_and_print(key: Any) -> Any:
    jax.debug.callback(lambda: None)
    return SPREAD["embedding"](key)


def bits(x: Any) -> np.ndarray:
    return np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )


def main() -> None:
    initialize_distributed()
    assert len(jax.devices()) == 4
    mesh = make_mesh(tensor=2, fsdp=2)
    alone = one_device_mesh(jax.local_devices()[0])
    for maker in (everything, make_and_print):
        born, expected = (
            to_arrays(init_model(maker, on, key=jax.random.key(0)))
            for on in (mesh, alone)
        )
        assert any(not x.is_fully_replicated for x in born.values())
        for path, x in born.items():
            assert x.sharding.mesh == mesh, path
            for shard in x.addressable_shards:
                assert np.array_equal(
                    bits(shard.data), bits(expected[path])[shard.index]
                ), path


if __name__ == "__main__":
    main()
