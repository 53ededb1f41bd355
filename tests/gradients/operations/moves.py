"""Pooling, padding, rolls, joins, sorts, cumulative sums: what moves elements about, or
picks some."""

import jax
import jax.numpy as jnp
from gradients.operations._registry import (
    either,
    mixed,
    one_of,
    operation,
    rows,
    scaled,
)

AXIS = one_of(1, 2, 0)


@operation(
    "moves",
    how=one_of("max", "mean", "min"),
    size=one_of(2, 3),
    stride=one_of(2, 1),
    padding=one_of("SAME", "VALID"),
)
def pool(weight, x, index, *, how, size, stride, padding):
    x = x * weight("scale", x.shape[-1])
    rank = x.ndim - 2
    windows = (1, *(min(size, n) for n in x.shape[1:-1]), 1)
    strides = (1, *[stride] * rank, 1)
    start = {"mean": 0.0, "max": -jnp.inf, "min": jnp.inf}[how]
    reduce = {"mean": jax.lax.add, "max": jax.lax.max, "min": jax.lax.min}[how]
    return jax.lax.reduce_window(x, start, reduce, windows, strides, padding)


@operation(
    "moves", mode=one_of("constant", "reflect", "edge", "wrap", "interior", "negative")
)
def pad(weight, x, index, *, mode):
    x = x * weight("scale", x.shape[-1])
    if mode in ("interior", "negative"):
        config = (1, 0, 1) if mode == "interior" else (-1, 2, 0)
        return jax.lax.pad(x, 0.0, [(0, 0, 0), *[config] * (x.ndim - 2), (0, 0, 0)])
    return jnp.pad(x, [(0, 0), *[(1, 2)] * (x.ndim - 2), (0, 0)], mode=mode)


@operation("moves", rows, axis=AXIS, by=one_of(1, 3, -2), of=one_of("x", "weight"))
def roll(weight, x, index, *, axis, by, of):
    if of == "x":
        return jnp.roll(x * weight("scale", x.shape[-1]), by, axis=axis)
    return x @ jnp.roll(weight("weight", x.shape[-1], 16), by, axis=min(axis, 1))


@operation(
    "moves",
    mixed,
    axis=AXIS,
    how=one_of("flip", "concatenate", "stack", "repeat", "split"),
)
def join(weight, x, index, *, axis, how):
    if how == "flip":
        return jnp.flip(x, axis) * weight("scale", 8)
    if how == "split":
        parts = jnp.array_split(x, 3, axis)
        return x + sum(
            part.mean(axis, keepdims=True) * (i + 1) for i, part in enumerate(parts)
        )
    if how == "concatenate":
        y = jnp.concatenate([x, 2 * x, jnp.tanh(x)], axis)
    elif how == "stack":
        shape = (n * (2 if i == axis else 1) for i, n in enumerate(x.shape))
        y = jnp.stack([x, jnp.tanh(x)], axis).reshape(*shape)
    else:
        y = jnp.repeat(x, 2, axis)
    return y[: x.shape[0]] + y[-x.shape[0] :]


@operation(
    "moves",
    mixed,
    how=one_of("slices", "interleave", "shuffle", "transpose", "batch_to_length"),
)
def rearranged(weight, x, index, *, how):
    b, length, c = x.shape
    if how == "slices":
        return x[:, ::2] if length % 2 else x[:, ::2, :4] * x[:, 1::2, 4:]
    if how == "interleave":
        return jnp.stack([x, -x * weight("scale", 8)], 2).reshape(b, 2 * length, c)
    if how == "shuffle":
        return x.reshape(b, length, 2, 4).swapaxes(2, 3).reshape(b, length, 8) * weight(
            "scale", 8
        )
    if how == "transpose":
        return x.swapaxes(1, 2) * weight("scale", length)
    mixed = weight("mix", 2 * length, 2 * length) @ x.reshape(b // 2, 2 * length, c)
    return mixed.reshape(b, length, c)


@operation("moves", scaled, by=one_of(1, 2))
def shift(weight, x, index, *, by):
    """Neighbours along length and along the batch, whose edges lie on other devices."""
    before = jnp.concatenate([jnp.zeros_like(x[:by]), x[:-by]])
    return x + 0.5 * before + 0.25 * jnp.diff(x, axis=0, prepend=x[:1])


@operation("moves", scaled, axis=AXIS, descending=either)
def sort(weight, x, index, *, axis, descending):
    return jnp.sort(x, axis=axis, descending=descending)


@operation("moves", scaled, k=one_of(2, 1, 4), along=one_of("channels", "length"))
def top_k(weight, x, index, *, k, along):
    if along == "channels":
        values, places = jax.lax.top_k(x, min(k, x.shape[-1]))
        return values * weight("table", x.shape[-1])[places]
    x = jnp.swapaxes(x, -1, 1)
    return jnp.swapaxes(jax.lax.top_k(x, min(k, x.shape[-1]))[0], -1, 1)


@operation(
    "moves",
    scaled,
    how=one_of("cumsum", "cumprod", "cummax", "cumlogsumexp"),
    axis=AXIS,
    reverse=either,
)
def cumulative(weight, x, index, *, how, axis, reverse):
    return getattr(jax.lax, how)(
        1 + 0.1 * x if how == "cumprod" else x, axis=axis, reverse=reverse
    )


@operation("moves", rows, axis=AXIS, reverse=either)
def associative_scan(weight, x, index, *, axis, reverse):
    """A linear recurrence with gates."""
    gate = jax.nn.sigmoid(x @ weight("gate", x.shape[-1], x.shape[-1]))

    def combine(one, two):
        return one[0] * two[0], one[1] * two[0] + two[1]

    return jax.lax.associative_scan(combine, (gate, x), axis=axis, reverse=reverse)[1]
