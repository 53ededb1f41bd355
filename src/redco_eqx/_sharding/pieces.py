"""Sums over the pieces of an array on a mesh, and checksums that do not depend on the
layout."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from redco_eqx._base.tree import AnyArray
from redco_eqx._sharding.mesh import (
    axes_of,
    from_callback,
    one_device_mesh,
    put_global,
    replicated,
)

Starts: TypeAlias = tuple[int | UInt32[Array, ""], ...]
"""For each dim, the index in the array at which a piece begins."""


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Turn each word into a random-looking one."""
    # The finalizer of MurmurHash3 (Appleby, public domain): one-to-one on 32 bits.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def bits_of(x: Array) -> UInt32[Array, "..."]:
    """Return the bits of each element as one uint32, or as several along additional
    trailing dims."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        # `bitcast_convert_type` takes no complex numbers.
        return bits_of(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype.itemsize <= 4 and not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32)
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    # By `bits`, because NumPy stores a number of 4 bits in a byte.
    as_wide = jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    return jax.lax.bitcast_convert_type(x, as_wide).astype(jnp.uint32)


def indices(
    dims: tuple[int, ...], starts: Starts, shape: tuple[int, ...]
) -> UInt32[Array, "..."]:
    """Compute the row-major index, from 1, of each element of a piece, modulo 2**32.

    **Arguments:**

    - `dims`: the shape of the piece. Dims beyond those of the array number the parts of
        one element.
    - `starts`: the indices at which the piece begins in the whole array.
    - `shape`: the shape of the whole array.
    """
    inside = dims[len(shape) :]
    starts = (*starts, *[0] * len(inside))
    shape = (*shape, *inside)
    index = jnp.ones(dims, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(dims))):
        position = jax.lax.broadcasted_iota(jnp.uint32, dims, dim) + jnp.asarray(
            starts[dim], jnp.uint32
        )
        index = index + position * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    return index


def piece_checksum(
    x: Array, starts: Starts, shape: tuple[int, ...]
) -> UInt32[Array, "3"]:
    """Compute two checksum words of a piece `x` of an array, and 1 if `x` has NaN or
    infinity, else 0.

    If `bits` are the bits of an element and `i` is its row-major index,
    `h = mix(bits ^ mix(i + 1))`. The words are the sums of `h` and of `mix(h + 1)`,
    modulo 2**32, so the words of all pieces add up to those of the whole array. A
    change of a single element always changes the first word. The arguments are those of
    `indices`.
    """
    bits = bits_of(x)
    hashes = mix(bits ^ mix(indices(bits.shape, starts, shape)))
    others = mix(hashes + jnp.uint32(1))
    is_nonfinite = (~jnp.isfinite(x)).astype(jnp.uint32)
    if bits.shape != x.shape:
        is_nonfinite = jnp.max(is_nonfinite, initial=0)
        is_nonfinite = jnp.broadcast_to(is_nonfinite, bits.shape)
    # In one reduction, because XLA computes the hashes again for each one that reads
    # them: three take 3.4 times as long on a CPU.
    zeros = (jnp.uint32(0),) * 3
    words = (hashes, others, is_nonfinite)
    return jnp.stack(jax.lax.reduce(words, zeros, _add_words, tuple(range(bits.ndim))))


def _add_words(
    one: tuple[Array, Array, Array], other: tuple[Array, Array, Array]
) -> tuple[Array, Array, Array]:
    return one[0] + other[0], one[1] + other[1], jnp.maximum(one[2], other[2])


@functools.lru_cache(maxsize=4096)
def _per_device(
    of_piece: Callable[..., Array],
    mesh: Mesh,
    spec: PartitionSpec,
    shape: tuple[int, ...],
) -> Callable[[AnyArray], Shaped[Array, "devices n"]]:
    """Make a function that computes the numbers of the piece on each device.

    No device waits for another, because there can be a thousand leaves, and that many
    collectives at once can block a CPU.
    """
    axes = (*spec, *[None] * (len(shape) - len(spec)))

    def start(names: Any, size: int) -> int | Array:
        """The index at which the piece of this device begins along a dim."""
        if names is None:
            return 0
        return jax.lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(size)

    def on_device(x: Array) -> Array:
        return of_piece(x, tuple(map(start, axes, x.shape)), shape)[None]

    every = PartitionSpec(tuple(mesh.axis_names))
    return jax.jit(
        jax.shard_map(
            on_device, mesh=mesh, in_specs=spec, out_specs=every, check_vma=False
        )
    )


def over_pieces(
    of_piece: Callable[..., Array],
    arrays: Mapping[str, AnyArray],
    own: np.ndarray | None = None,
) -> Callable[[], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Begin to compute `of_piece` on each device. All processes must call it; it does
    not wait.

    `of_piece` takes a piece, its starts and the shape of the whole array, and returns a
    vector of numbers. Return a function that waits. For each array, that function
    returns the numbers of all devices, and those of the first device of each piece, by
    the axes of the mesh. The mesh is that of the first array that has one; an array on
    another mesh is put there, whole. Each process also passes its numbers `own`, which
    has the length of a result of `of_piece`. They come back under the name `""`.
    """
    if not arrays:
        return dict
    meshes: Any = {
        name: getattr(getattr(x, "sharding", None), "mesh", None)
        for name, x in arrays.items()
    }
    mesh = next(filter(None, meshes.values()), None)
    if mesh is None:
        mesh = one_device_mesh(jax.local_devices()[0])
    specs = {}
    rows = []
    for name, given in arrays.items():
        x: Any = given
        if meshes[name] != mesh:
            x = put_global(given, replicated(mesh))
        if x.sharding.memory_kind == "pinned_host":
            # JAX computes nothing with an array in the memory of the host.
            x = jax.device_put(x, NamedSharding(mesh, x.sharding.spec))
        specs[name] = x.sharding.spec
        rows.append(_per_device(of_piece, mesh, x.sharding.spec, x.shape)(x))
    if own is not None:
        specs[""] = PartitionSpec(tuple(mesh.axis_names))
        shape = (mesh.size, own.size)
        by_device = NamedSharding(mesh, specs[""])
        rows.append(from_callback(shape, by_device, lambda _: own[None]))
    # All rows are exchanged in one collective.
    table = jax.jit(jnp.stack, out_shardings=replicated(mesh))(rows)

    def wait() -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found = {}
        for numbers, (name, spec) in zip(jax.device_get(table), specs.items()):
            # Along an axis that does not split the array, all devices have copies.
            ends = [None if axis in axes_of(spec) else 1 for axis in mesh.axis_names]
            first = tuple(map(slice, ends))
            by_axes = numbers.reshape(*mesh.devices.shape, -1)
            found[name] = by_axes, by_axes[first]
        return found

    return wait


def summed(
    of_piece: Callable[..., Array], arrays: Mapping[str, AnyArray]
) -> np.ndarray:
    """Compute `of_piece` for each array, summed over its pieces. All processes must
    call it."""
    pieces = [
        first.reshape(-1, first.shape[-1])
        for _, first in over_pieces(of_piece, arrays)().values()
    ]
    return np.array([numbers.sum(axis=0, dtype=numbers.dtype) for numbers in pieces])


def array_checksums(arrays: Mapping[str, AnyArray]) -> tuple[dict[str, str], list[str]]:
    """Compute the checksum of each array (16 hexadecimal digits), and list the arrays
    that are not finite.

    All processes must call it."""
    rows = summed(piece_checksum, arrays).tolist()
    checksums = {}
    nonfinite = []
    for name, (first, second, is_nonfinite) in zip(arrays, rows):
        checksums[name] = f"{first:08x}{second:08x}"
        if is_nonfinite:
            nonfinite.append(name)
    return checksums, nonfinite
