"""Transformations of an operation that keep its value, or change it in a known way."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Layer = Callable[[Any, Any, Any], Any]
"""`(weights, x, index) -> y`."""


def _custom_vjp(layer: Layer) -> Layer:
    @jax.custom_vjp
    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        return layer(weights, x, index)

    def forward(weights: Any, x: Any, index: Any) -> Any:
        return wrapped(weights, x, index), (weights, x, index)

    def backward(residual: Any, gradient: Any) -> Any:
        weights, x, index = residual
        return *jax.vjp(lambda weights, x: layer(weights, x, index), weights, x)[1](gradient), None

    wrapped.defvjp(forward, backward)
    return wrapped


def _custom_jvp(layer: Layer) -> Layer:
    @jax.custom_jvp
    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        return layer(weights, x, index)

    @wrapped.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        weights, x, index = primals
        return jax.jvp(lambda weights, x: layer(weights, x, index), (weights, x), tangents[:2])

    return wrapped


def _cond(layer: Layer) -> Layer:
    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        other = jax.tree.map(lambda w: 0.5 * w, weights)
        is_even = index[0, 0] % 2 == 0
        return jax.lax.cond(is_even, layer, lambda _, *rest: layer(other, *rest), weights, x, index)

    return wrapped


def _one_by_one(f: Any) -> Any:
    return lambda xs: jax.lax.map(f, xs)


def _halves(run: Any) -> Callable[[Layer], Layer]:
    """Two halves of the batch, by `run`."""

    def wrap(layer: Layer) -> Layer:
        def wrapped(weights: Any, x: Any, index: Any) -> Any:
            halves = x.reshape(2, -1, *x.shape[1:]), index.reshape(2, -1, index.shape[1])
            y = run(lambda half: layer(weights, *half))(halves)
            return y.reshape(x.shape[0], *y.shape[2:])

        return wrapped

    return wrap


def _members(run: Any) -> Callable[[Layer], Layer]:
    """Weights of two scales, by `run`."""

    def wrap(layer: Layer) -> Layer:
        def wrapped(weights: Any, x: Any, index: Any) -> Any:
            one = lambda scale: layer(jax.tree.map(lambda w: scale * w, weights), x, index)  # noqa: E731
            return run(one)(jnp.array([1.0, 0.5])).mean(0)

        return wrapped

    return wrap


WRAPPERS: dict[str, Callable[[Layer], Layer]] = {
    "none": lambda layer: layer,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "cond": _cond,
    "scan": _members(_one_by_one),
    "chunks": _halves(_one_by_one),
    "tasks": _halves(jax.vmap),
    "ensemble": _members(jax.vmap),
}
