"""Transformations of an operation that keep its value, or change it in a known way."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Layer = Callable[..., Any]
"""`(weights, x, index) -> y`."""


def _custom_vjp(layer: Layer) -> Layer:
    wrapped = jax.custom_vjp(lambda *given: layer(*given))

    def forward(*given: Any) -> Any:
        return wrapped(*given), given

    def backward(given: Any, gradient: Any) -> Any:
        return *jax.vjp(lambda *some: layer(*some, given[2]), *given[:2])[1](
            gradient
        ), None

    wrapped.defvjp(forward, backward)
    return wrapped


def _custom_jvp(layer: Layer) -> Layer:
    wrapped = jax.custom_jvp(lambda *given: layer(*given))

    @wrapped.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(
            lambda *some: layer(*some, primals[2]), primals[:2], tangents[:2]
        )

    return wrapped


def _cond(layer: Layer) -> Layer:
    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        other = jax.tree.map(lambda w: 0.5 * w, weights)
        is_even = index[0, 0] % 2 == 0
        return jax.lax.cond(
            is_even, layer, lambda _, *rest: layer(other, *rest), weights, x, index
        )

    return wrapped


def _one_by_one(f: Any) -> Any:
    return lambda xs: jax.lax.map(f, xs)


def _halves(run: Any, layer: Layer) -> Layer:
    """Two halves of the batch, by `run`."""

    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        halves = x.reshape(2, -1, *x.shape[1:]), index.reshape(2, -1, index.shape[1])
        y = run(lambda half: layer(weights, *half))(halves)
        return y.reshape(x.shape[0], *y.shape[2:])

    return wrapped


def _members(run: Any, layer: Layer) -> Layer:
    """Weights of two scales, by `run`."""

    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        one = lambda scale: layer(jax.tree.map(lambda w: scale * w, weights), x, index)  # noqa: E731
        return run(one)(jnp.array([1.0, 0.5])).mean(0)

    return wrapped


WRAPPERS: dict[str, Callable[[Layer], Layer]] = {
    "none": lambda layer: layer,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "cond": _cond,
    "scan": partial(_members, _one_by_one),
    "chunks": partial(_halves, _one_by_one),
    "tasks": partial(_halves, jax.vmap),
    "ensemble": partial(_members, jax.vmap),
}
