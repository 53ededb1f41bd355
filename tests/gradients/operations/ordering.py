"""Sorts, top-k, quantiles, cumulative reductions."""

import jax
import jax.numpy as jnp

from operations._registry import one_of, operation, rows

AXIS = one_of(1, 2, 0)


@operation("ordering", axis=AXIS, descending=one_of(False, True))
def sort(weight, x, index, *, axis, descending):
    return jnp.sort(rows(x) * weight("scale", x.shape[-1]), axis=axis, descending=descending)


@operation("ordering", axis=AXIS)
def sort_by_key(weight, x, index, *, axis):
    """Values follow another array's order."""
    x = rows(x)
    keys = jax.lax.stop_gradient(x @ weight("key", x.shape[-1], x.shape[-1]))
    return x * weight("scale", x.shape[-1]) * 0.5 + jax.lax.sort((keys, x), dimension=axis, num_keys=1)[1]


@operation("ordering", axis=AXIS)
def argsort(weight, x, index, *, axis):
    x = rows(x) * weight("scale", x.shape[-1])
    return jnp.take_along_axis(x, jnp.argsort(-x, axis=axis), axis=axis)


@operation("ordering", k=one_of(2, 1, 4), along=one_of("channels", "length", "batch"))
def top_k(weight, x, index, *, k, along):
    x = rows(x) * weight("scale", x.shape[-1])
    if along == "channels":
        values, places = jax.lax.top_k(x, min(k, x.shape[-1]))
        return values * weight("table", x.shape[-1])[places]
    x = jnp.swapaxes(x, -1, 1 if along == "length" else 0)
    values = jax.lax.top_k(x, min(k, x.shape[-1]))[0]
    if along == "length":
        return jnp.swapaxes(values, -1, 1)
    return values.mean() + rows(jnp.swapaxes(x, -1, 0))


@operation("ordering", how=one_of("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), axis=AXIS,
           reverse=one_of(False, True))  # fmt: skip
def cumulative(weight, x, index, *, how, axis, reverse):
    x = rows(x) * weight("scale", x.shape[-1])
    return getattr(jax.lax, how)(1 + 0.1 * x if how == "cumprod" else x, axis=axis, reverse=reverse)


@operation("ordering", axis=AXIS, reverse=one_of(False, True))
def associative_scan(weight, x, index, *, axis, reverse):
    """A linear recurrence with gates."""
    gate, x = jax.nn.sigmoid(rows(x) @ weight("gate", x.shape[-1], x.shape[-1])), rows(x)

    def combine(one, two):
        return one[0] * two[0], one[1] * two[0] + two[1]

    return jax.lax.associative_scan(combine, (gate, x), axis=axis, reverse=reverse)[1]


@operation("ordering", how=one_of("median", "quantile", "max", "argmax"), axis=AXIS)
def selection(weight, x, index, *, how, axis):
    x = rows(x) * weight("scale", x.shape[-1])
    if how == "quantile":
        return x + jnp.quantile(x, 0.3, axis=axis, keepdims=True)
    if how == "argmax":
        return x + jnp.take_along_axis(x, jnp.argmax(x, axis=axis, keepdims=True), axis=axis)
    return x + getattr(jnp, how)(x, axis=axis, keepdims=True)
