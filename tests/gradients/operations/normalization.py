"""Norms over channels, groups, length and the batch; norms of weights."""

import math

import jax
import jax.numpy as jnp

from operations._registry import one_of, operation, rows


def standardized(x, axes):
    mean = x.mean(axes, keepdims=True)
    return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(axes, keepdims=True) + 1e-3)


@operation("normalization", over=one_of("batch", "layer", "instance", "all"), where=one_of("before", "after"))
def norm(weight, x, index, *, over, where):
    x = x @ weight("weight", x.shape[-1], 8) if where == "after" else x
    inner = tuple(range(1, x.ndim - 1))
    axes = {"batch": (0, *inner), "layer": (-1,), "instance": inner, "all": (0, *inner, x.ndim - 1)}[over]
    return standardized(x, axes) * weight("scale", x.shape[-1]) + weight("bias", x.shape[-1])


@operation("normalization", groups=one_of(2, 4, 3))
def group_norm(weight, x, index, *, groups):
    groups = math.gcd(groups, x.shape[-1])
    parts = x.reshape(*x.shape[:-1], groups, -1)
    y = standardized(parts, (*range(1, x.ndim - 1), parts.ndim - 1)).reshape(x.shape)
    return y * weight("scale", x.shape[-1])


@operation("normalization", axis=one_of(0, 1), order=one_of(2, 1))
def weight_norm(weight, x, index, *, axis, order):
    direction = weight("direction", x.shape[-1], 16)
    size = jnp.linalg.norm(direction, ord=order, axis=axis, keepdims=True)
    return x @ (direction / size) * weight("size", 16)


@operation("normalization", axis=one_of(-1, 0, 1), log=one_of(False, True))
def softmax(weight, x, index, *, axis, log):
    x = rows(x) @ weight("weight", x.shape[-1], 8)
    return (jax.nn.log_softmax if log else jax.nn.softmax)(x, axis=axis)


@operation("normalization", temperature=one_of(1.0, 0.3))
def contrast(weight, x, index, *, temperature):
    """Every example against every other, normalised over the batch."""
    z = rows(x).mean(1) @ weight("weight", x.shape[-1], 8)
    z = z / jnp.sqrt((z**2).sum(-1, keepdims=True) + 1e-3)
    logs = jax.nn.log_softmax(z @ z.T / temperature, axis=-1)
    return rows(x) + jnp.diagonal(logs)[:, None, None]


@operation("normalization", how=one_of("std", "var", "logsumexp", "prod"), axis=one_of(0, 1, -1))
def statistic(weight, x, index, *, how, axis):
    x = rows(x) * weight("scale", x.shape[-1])
    if how == "logsumexp":
        return x + jax.nn.logsumexp(x, axis=axis, keepdims=True)
    return x + getattr(jnp, how)(1 + 0.1 * x, axis=axis, keepdims=True)
