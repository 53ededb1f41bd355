"""Pooling, resizing, padding, rolls, flips, joins, splits: everything that moves elements about."""

import jax
import jax.numpy as jnp

from operations._registry import one_of, operation, rows


@operation("reshaping", how=one_of("max", "mean", "min"), size=one_of(2, 3), stride=one_of(2, 1),
           padding=one_of("SAME", "VALID"))  # fmt: skip
def pool(weight, x, index, *, how, size, stride, padding):
    x = x * weight("scale", x.shape[-1])
    rank = x.ndim - 2
    windows, strides = (1, *(min(size, n) for n in x.shape[1:-1]), 1), (1, *[stride] * rank, 1)
    if how == "mean":
        return jax.lax.reduce_window(x, 0.0, jax.lax.add, windows, strides, padding) / size**rank
    if how == "max":
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, windows, strides, padding)
    return jax.lax.reduce_window(x, jnp.inf, jax.lax.min, windows, strides, padding)


@operation("reshaping", method=one_of("linear", "nearest", "cubic", "lanczos3"), ratio=one_of(2, 0.5, 1.5))
def resize(weight, x, index, *, method, ratio):
    x = x @ weight("weight", x.shape[-1], 8)
    shape = (x.shape[0], *(max(1, int(n * ratio)) for n in x.shape[1:-1]), 8)
    return jax.image.resize(x, shape, method)


@operation("reshaping", mode=one_of("constant", "reflect", "edge", "wrap", "interior", "negative"))
def pad(weight, x, index, *, mode):
    x = x * weight("scale", x.shape[-1])
    if mode in ("interior", "negative"):
        config = (1, 0, 1) if mode == "interior" else (-1, 2, 0)
        return jax.lax.pad(x, 0.0, [(0, 0, 0), *[config] * (x.ndim - 2), (0, 0, 0)])
    return jnp.pad(x, [(0, 0), *[(1, 2)] * (x.ndim - 2), (0, 0)], mode=mode)


@operation("reshaping", axis=one_of(1, 2, 0), by=one_of(1, 3, -2), of=one_of("x", "weight"))
def roll(weight, x, index, *, axis, by, of):
    x = rows(x)
    if of == "x":
        return jnp.roll(x * weight("scale", x.shape[-1]), by, axis=axis)
    return x @ jnp.roll(weight("weight", x.shape[-1], 16), by, axis=min(axis, 1))


@operation(
    "reshaping", axis=one_of(1, 2, 0), how=one_of("flip", "concatenate", "stack", "repeat", "tile", "split")
)
def join(weight, x, index, *, axis, how):
    x = rows(x) @ weight("weight", x.shape[-1], 8)
    if how == "flip":
        return jnp.flip(x, axis) * weight("scale", 8)
    if how == "split":
        return x + sum(
            part.mean(axis, keepdims=True) * (i + 1) for i, part in enumerate(jnp.array_split(x, 3, axis))
        )
    if how == "concatenate":
        y = jnp.concatenate([x, 2 * x, jnp.tanh(x)], axis)
    elif how == "stack":
        y = jnp.stack([x, jnp.tanh(x)], axis).reshape(
            *(n * (2 if i == axis else 1) for i, n in enumerate(x.shape))
        )
    else:
        y = (
            jnp.repeat(x, 2, axis)
            if how == "repeat"
            else jnp.tile(x, [2 if i == axis else 1 for i in range(3)])
        )
    return y[: x.shape[0]] + y[-x.shape[0] :]


@operation("reshaping", how=one_of("slices", "interleave", "shuffle", "transpose", "batch_to_length"))
def rearranged(weight, x, index, *, how):
    x = rows(x) @ weight("weight", x.shape[-1], 8)
    b, length, c = x.shape
    if how == "slices":
        return x[:, ::2] if length % 2 else x[:, ::2, :4] * x[:, 1::2, 4:]
    if how == "interleave":
        return jnp.stack([x, -x * weight("scale", 8)], 2).reshape(b, 2 * length, c)
    if how == "shuffle":
        return x.reshape(b, length, 2, 4).swapaxes(2, 3).reshape(b, length, 8) * weight("scale", 8)
    if how == "transpose":
        return x.swapaxes(1, 2) * weight("scale", length)
    mixed = weight("mix", 2 * length, 2 * length) @ x.reshape(b // 2, 2 * length, c)
    return mixed.reshape(b, length, c)


@operation("reshaping", by=one_of(1, 2))
def shift(weight, x, index, *, by):
    """Neighbours along length and along the batch, whose edges lie on other devices."""
    x = rows(x) * weight("scale", x.shape[-1])
    before = jnp.concatenate([jnp.zeros_like(x[:by]), x[:-by]])
    return x + 0.5 * before + 0.25 * jnp.diff(x, axis=0, prepend=x[:1])
