"""The share of updates that rounding loses, in parameters of fewer than 32 bits."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from redco_eqx._base.protocols import Mean

LARGE = 2**20
"""The number of elements from which an array is counted by a sample."""

MOST_SHARDS = 64
"""A sample stays on its devices if its dim has at most so many shards (and a power of
two)."""

LARGEST_STRIDE = 64


def with_gradient(
    grads: dict[str, Array],
) -> tuple[dict[str, Array], dict[str, Bool[Array, "..."]]]:
    """Return the gradients, and whether each sampled element of the narrow ones is not
    zero.

    Use the gradients that are returned: the flags are computed before them. Without
    that order, the compiler keeps all gradients until the flags are computed, after the
    update, which costs a quarter of the memory of a step.
    """
    flags = {path: _sample(g) != 0 for path, g in grads.items() if _is_narrow(g)}
    if not flags:
        return grads, flags
    narrow = {path: grads[path] for path in flags}
    narrow, flags = jax.lax.optimization_barrier((narrow, flags))
    return {**grads, **narrow}, flags


def rounded_away(
    params: dict[str, Array],
    new_params: dict[str, Array],
    updates: dict[str, Any],
    has_gradient: dict[str, Bool[Array, "..."]],
) -> Mean | None:
    """Return the share of updates that rounding loses; `None` if no parameter has fewer
    than 32 bits.

    An update is lost if it is not zero, but the parameter stays the same number:
    bfloat16 has 8 bits of precision, so it loses every update below about 1/500 of a
    parameter. Elements whose gradient is zero do not count (rows of a table that the
    batch does not use, factors before a factor that is still zero): they may have an
    update by weight decay alone, which is smaller than any other.

    The counts are sums of integers over the same elements on every mesh, so they are
    equal on every mesh.

    **Arguments:**

    - `has_gradient`: from `with_gradient`, for the parameters of fewer than 32 bits.
    """
    if not has_gradient:
        return None
    lost = count = jnp.zeros((), jnp.float32)
    for path, flags in has_gradient.items():
        if updates[path] is None:  # optax leaves this parameter as it is
            continue
        moves = flags & (_sample(updates[path]) != 0)
        stays = _sample(new_params[path]) == _sample(params[path])
        count += _number_of(moves)
        lost += _number_of(moves & stays)
    return Mean(lost, count)


def _is_narrow(x: Array) -> bool:
    return jnp.finfo(x.dtype).bits < 32


def _sample(x: Array) -> Array:
    """Return every k-th row or column of a large array, and all of a small one.

    The old parameters would otherwise be kept beside the new ones, and the update could
    not be made in place. The dim becomes two, of which the first is split as it was. So
    no device sends anything.
    """
    if x.size < LARGE or x.ndim < 2:
        return x
    strides = {dim: _stride(x.shape[dim]) for dim in (x.ndim - 2, x.ndim - 1)}
    dim = max(strides, key=lambda dim: strides[dim])
    stride = strides[dim]
    in_two = x.reshape(*x.shape[:dim], -1, stride, *x.shape[dim + 1 :])
    return jax.lax.index_in_dim(in_two, 0, dim + 1, keepdims=False)


def _stride(size: int) -> int:
    """Return the largest power of two that leaves a multiple of `MOST_SHARDS` elements,
    at least 1."""
    stride = 1
    while stride < LARGEST_STRIDE and size % (2 * stride * MOST_SHARDS) == 0:
        stride *= 2
    return stride


def _number_of(flags: Bool[Array, "..."]) -> Float[Array, ""]:
    """Count what is true, as a sum of integers: it is exact, and so the same on every
    mesh."""
    if flags.size < 2**31:
        return jnp.sum(flags, dtype=jnp.int32).astype(jnp.float32)
    # Of a stack: the layers alone.
    each = jnp.sum(flags, axis=tuple(range(1, flags.ndim)), dtype=jnp.int32)
    return jnp.sum(each.astype(jnp.float32))
