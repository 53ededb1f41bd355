"""The small layers that the models of the zoo share."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import HEADS, LAYERS, NUM_STACKED, D, F

norm = partial(eqx.nn.LayerNorm, D)
rms_norm = partial(eqx.nn.RMSNorm, D, use_bias=False)


def named(key: Any, /, *, bias: bool = True, **sizes: Any) -> dict[str, Any]:
    """A Linear under each name, of so many inputs and outputs."""
    keys = jax.random.split(key, len(sizes))
    return {
        name: eqx.nn.Linear(size[0], size[1], bias, key=k)
        for (name, size), k in zip(sizes.items(), keys)
    }


def mlp(key: Any, *, depth: int = 1, num_out: int = D) -> eqx.nn.MLP:
    return eqx.nn.MLP(D, num_out, F, depth, activation=jax.nn.gelu, key=key)


def each(layer: Any, x: Any) -> Any:
    """A layer applied to every token."""
    return jax.vmap(layer)(x)


def repeated(make: Any, key: Any, num: int = LAYERS) -> Any:
    """A list of layers."""
    return [make(k) for k in jax.random.split(key, num)]


def stack(make: Any, key: Any, num: int = NUM_STACKED) -> Any:
    return eqx.filter_vmap(make)(jax.random.split(key, num))


def through(layers: Any, apply: Callable[[Any, Any], Any], x: Any) -> Any:
    """`x` after the layers of a list, or of a stack that a scan runs."""
    if isinstance(layers, list):
        for layer in layers:
            x = apply(layer, x)
        return x
    arrays, rest = eqx.partition(layers, eqx.is_array)
    return jax.lax.scan(
        lambda x, one: (apply(eqx.combine(one, rest), x), None), x, arrays
    )[0]


def rotate(x: Any) -> Any:
    """Rotary positions over the last dim of (time, heads, head dim)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[0])[:, None] * 10.0 ** -jnp.arange(half)
    sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(
    q,
    k,
    v,
    *,
    causal: bool = False,
    rotary: bool = False,
    scale: bool = True,
    bias: Any = None,
) -> Any:
    """Attention of (time, heads * head dim) arrays, of which keys and values may have
    fewer heads."""
    q = q.reshape(len(q), HEADS, -1)
    k, v = (x.reshape(len(x), -1, q.shape[-1]) for x in (k, v))
    if rotary:
        q, k = rotate(q), rotate(k)
    k, v = (jnp.repeat(x, HEADS // x.shape[1], axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k) / (
        math.sqrt(q.shape[-1]) if scale else 1.0
    )
    scores = scores if bias is None else scores + bias
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(len(q), -1)


def attention(layers: Any, x: Any, source: Any = None, **options: Any) -> Any:
    """By the four layers of queries, keys, values and outputs, of `x` to itself or to a
    source."""
    q, k, v, out = layers
    source = x if source is None else source
    return each(out, attend(each(q, x), each(k, source), each(v, source), **options))
