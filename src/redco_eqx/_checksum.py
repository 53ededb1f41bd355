"""A checksum of an array that does not depend on how the array lies on devices.

It is computed where the array is, before a checkpoint is written and after it is read, so that it covers the
whole way over host, network and disk, and costs one pass over device memory instead of a second reading of
the files.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32


def _mix(x: Any) -> Any:
    # The finalizer of MurmurHash3 (Appleby, public domain): one-to-one on 32 bits.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def bits_of(x: Any) -> UInt32[Array, "..."]:
    """The bits of each element as one uint32, or as several in further trailing dims."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return bits_of(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize <= 4:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    size = jnp.finfo(x.dtype).bits
    return jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{size}")).astype(jnp.uint32)


@jax.jit
def digest(x: Any) -> tuple[Any, Any, Any]:
    """Two words of a checksum, uint32 each, and whether `x` is finite everywhere.

    With `bits` the elements' bits and `i` their row-major indices, `h = mix(bits ^ mix(i + 1))`; the words are
    the sums of `h` and of `mix(h + 1)`, modulo 2**32. A change of a single element always changes the first.
    """
    bits = bits_of(x)
    index = jnp.ones(bits.shape, jnp.uint32)
    stride = 1
    for dim in reversed(range(bits.ndim)):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= bits.shape[dim]
    hashes = _mix(bits ^ _mix(index))
    finite = jnp.all(jnp.isfinite(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.ones((), bool)
    first = jnp.sum(hashes, dtype=jnp.uint32)
    return first, jnp.sum(_mix(hashes + jnp.uint32(1)), dtype=jnp.uint32), finite


def digests(arrays: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The checksum of each array, 16 hexadecimal digits, and the names of those that are not finite.

    A collective call if the arrays lie on several processes.
    """
    found = jax.device_get({name: digest(x) for name, x in arrays.items()})
    checksums = {name: f"{int(a):08x}{int(b):08x}" for name, (a, b, _) in found.items()}
    return checksums, [name for name, (_, _, finite) in found.items() if not finite]
