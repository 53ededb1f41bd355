"""The same step of a LLaMA, written by hand in JAX: arrays in a dict, one scan, nothing
of this library."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .program import LEARNING_RATE, Program
from .settings import Setting


def program(setting: Setting, config: Any, mesh: Mesh) -> Program:
    dtype = jnp.bfloat16 if setting.precision == "bfloat16" else jnp.float32
    optimizer = optax.adamw(LEARNING_RATE)
    whole = NamedSharding(mesh, PartitionSpec())
    is_half = setting.precision != "float32"
    is_gpu = mesh.devices.flat[0].platform == "gpu"
    implementation = "cudnn" if is_half and is_gpu else "xla"
    if setting.attention != "auto":
        implementation = setting.attention
    loss_fn = make_loss(setting, config, implementation)

    def init() -> Any:
        params = jax.tree.map(
            lambda x: x.astype(dtype), _init(config, jax.random.key(0))
        )
        return params, optimizer.init(params)

    def step(state: Any, tokens: Any) -> tuple[Any, Any]:
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def lay(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)

    return Program(
        step=jax.jit(step, donate_argnums=0),
        make_state=jax.jit(init, out_shardings=whole),
        abstract_state=jax.tree.map(lay, jax.eval_shape(init)),
        batch=jax.ShapeDtypeStruct(
            (setting.batch, setting.length + 1), jnp.int32, sharding=whole
        ),
        loss_of=lambda loss: loss,
        num_parameters=sum(x.size for x in jax.tree.leaves(jax.eval_shape(init)[0])),
    )


def make_loss(setting: Setting, config: Any, implementation: Any) -> Any:
    angles = _angles(setting.length, config.head_size)

    def loss_fn(params: Any, tokens: Any) -> Any:
        if setting.precision == "mixed":
            params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        x = params["embed"][tokens[:, :-1]]

        def layer(x: Any, own: Any) -> tuple[Any, None]:
            return _layer(own, x, config, angles, implementation), None

        if setting.remat == "full":
            # Inside a scan, the compiler cannot merge the two passes anyway.
            layer = jax.checkpoint(layer, prevent_cse=False)
        x, _ = jax.lax.scan(layer, x, params["layers"])
        logits = (_norm(x, params["norm"], config) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    return loss_fn


def _init(config: Any, key: Any) -> Any:
    size = config.hidden_size
    inner = config.intermediate_size
    num = config.num_hidden_layers
    shapes = {
        **dict.fromkeys(("q", "k", "v", "o"), (num, size, size)),
        **dict.fromkeys(("gate", "up"), (num, size, inner)),
        "down": (num, inner, size),
    }
    keys = iter(jax.random.split(key, len(shapes) + 2))
    layers = {
        name: 0.02 * jax.random.normal(next(keys), shape)
        for name, shape in shapes.items()
    }
    layers |= {
        name: jnp.ones((num, size)) for name in ("before_attention", "before_mlp")
    }
    return {
        "embed": 0.02 * jax.random.normal(next(keys), (config.vocab_size, size)),
        "layers": layers,
        "norm": jnp.ones(size),
        "head": 0.02 * jax.random.normal(next(keys), (size, config.vocab_size)),
    }


def _layer(own: Any, x: Any, config: Any, angles: Any, implementation: Any) -> Any:
    shape = (*x.shape[:2], config.num_attention_heads, config.head_size)
    given = _norm(x, own["before_attention"], config)
    q, k, v = ((given @ own[name]).reshape(shape) for name in ("q", "k", "v"))
    heads = jax.nn.dot_product_attention(
        _turn(q, angles),
        _turn(k, angles),
        v,
        is_causal=True,
        implementation=implementation,
    )
    x = x + heads.reshape(x.shape) @ own["o"]
    given = _norm(x, own["before_mlp"], config)
    hidden = jax.nn.silu(given @ own["gate"]) * (given @ own["up"])
    return x + hidden @ own["down"]


def _norm(x: Any, weight: Any, config: Any) -> Any:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide**2, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(mean_square + config.rms_norm_eps)
    return (wide * scale).astype(x.dtype) * weight


def _angles(length: int, size: int) -> Any:
    frequencies = 10000.0 ** (-np.arange(0, size, 2) / size)
    # The two features of a pair are in different halves of a head, as in LLaMA's files.
    of_features = np.concatenate([frequencies, frequencies])
    return np.outer(np.arange(length), of_features).astype(np.float32)


def _turn(x: Any, angles: Any) -> Any:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    across = jnp.concatenate([-second, first], axis=-1)
    cos = jnp.cos(angles)[:, None]
    sin = jnp.sin(angles)[:, None]
    return (x.astype(jnp.float32) * cos + across * sin).astype(x.dtype)
