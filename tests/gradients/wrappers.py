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
        return jax.lax.cond(
            index[0, 0] % 2 == 0, layer, lambda _, *rest: layer(other, *rest), weights, x, index
        )

    return wrapped


def _scan(layer: Layer) -> Layer:
    """Twice, with weights of two scales."""

    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        def step(total: Any, scale: Any) -> Any:
            return total + scale, layer(jax.tree.map(lambda w: scale * w, weights), x, index)

        return jax.lax.scan(step, 0.0, jnp.array([1.0, 0.5]))[1].mean(0)

    return wrapped


def _chunks(layer: Layer) -> Layer:
    """One half of the batch after the other."""

    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        halves = x.reshape(2, -1, *x.shape[1:]), index.reshape(2, -1, index.shape[1])
        y = jax.lax.map(lambda half: layer(weights, *half), halves)
        return y.reshape(x.shape[0], *y.shape[2:])

    return wrapped


def _tasks(layer: Layer) -> Layer:
    """Two tasks side by side, by `vmap`."""

    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        halves = x.reshape(2, -1, *x.shape[1:]), index.reshape(2, -1, index.shape[1])
        y = jax.vmap(layer, (None, 0, 0))(weights, *halves)
        return y.reshape(x.shape[0], *y.shape[2:])

    return wrapped


def _ensemble(layer: Layer) -> Layer:
    """Two sets of weights side by side, by `vmap`."""

    def wrapped(weights: Any, x: Any, index: Any) -> Any:
        scales = jnp.array([1.0, 0.5])
        return jax.vmap(lambda s: layer(jax.tree.map(lambda w: s * w, weights), x, index))(scales).mean(0)

    return wrapped


WRAPPERS: dict[str, Callable[[Layer], Layer]] = {
    "none": lambda layer: layer,
    "checkpoint": jax.checkpoint,
    "jit": jax.jit,
    "custom_vjp": _custom_vjp,
    "custom_jvp": _custom_jvp,
    "cond": _cond,
    "scan": _scan,
    "chunks": _chunks,
    "tasks": _tasks,
    "ensemble": _ensemble,
}
