"""Sums over devices inside a `shard_map`, and their transposes, that every compiler accepts."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

Axes = str | Sequence[str]


def psum(x: Array, axes: Axes) -> Array:
    """`jax.lax.psum`; on CPU a bfloat16 sum is taken in float32."""
    return _in_float32_on_cpu(lambda x: jax.lax.psum(x, axes), x)


def vary(x: Array, axes: Axes) -> Array:
    """Marks `x` as different on each device along `axes`, so that its gradient is one `psum` over them."""
    return _in_float32_on_cpu(lambda x: jax.lax.pcast(x, axes, to="varying"), x)


def _in_float32_on_cpu(function: Callable[[Array], Array], x: Array) -> Array:
    # In a shard_map that leaves axes to the compiler, the CPU compiler aborts the process on a bfloat16 sum
    # ("Invalid binary instruction opcode copy"): jaxlib 0.10.2 and 0.12.0, no upstream issue known. Which
    # platform it is for is known when the program is lowered.
    if x.dtype != jnp.bfloat16:
        return function(x)
    return jax.lax.platform_dependent(
        x, cpu=lambda x: function(x.astype(jnp.float32)).astype(x.dtype), default=function
    )
