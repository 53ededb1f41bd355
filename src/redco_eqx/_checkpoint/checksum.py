"""Numbers of an array that do not depend on how the array lies on devices: its checksum.

That is computed where the array is, before a checkpoint is written and after it is read, so that it covers the
whole way over host, network and disk, and costs one pass over device memory instead of a second reading of
the files.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from redco_eqx._types import AnyArray

Starts: TypeAlias = tuple[int | UInt32[Array, ""], ...]
"""Where in an array a piece begins, for each dim."""

OfPiece: TypeAlias = Callable[[Array, Starts, tuple[int, ...]], Shaped[Array, " n"]]
"""From a piece, its starts, and the shape of the whole, to numbers that add up over all pieces."""


def mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Each word as one that looks random."""
    # The finalizer of MurmurHash3 (Appleby, public domain): one-to-one on 32 bits.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def bits_of(x: Array) -> UInt32[Array, "..."]:
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


def indices(dims: tuple[int, ...], starts: Starts, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """The row-major index, from 1, of each element of a piece, modulo 2**32.

    **Arguments:**

    - `dims`: of the piece; those beyond the dims of the array number the parts of one element.
    - `starts`, `shape`: where it begins in the whole array, and the shape of that.
    """
    index = jnp.ones(dims, jnp.uint32)
    stride = 1
    for dim in reversed(range(len(dims))):
        inside = dim < len(shape)
        start = jnp.asarray(starts[dim], jnp.uint32) if inside else jnp.uint32(0)
        position = jax.lax.broadcasted_iota(jnp.uint32, dims, dim) + start
        index = index + position * jnp.uint32(stride % 2**32)
        stride *= shape[dim] if inside else dims[dim]
    return index


def digest(x: Array, starts: Starts, shape: tuple[int, ...]) -> UInt32[Array, "3"]:
    """Two words of a checksum, and whether there is NaN or infinity in `x`: of a piece of an array.

    With `bits` an element's bits and `i` its row-major index, `h = mix(bits ^ mix(i + 1))`; the words are the
    sums of `h` and of `mix(h + 1)`, modulo 2**32, so those of pieces add up to those of the whole. A change of
    a single element always changes the first. Arguments as for `indices`.
    """
    bits = bits_of(x)
    hashes = mix(bits ^ mix(indices(bits.shape, starts, shape)))
    is_float = jnp.issubdtype(x.dtype, jnp.inexact)
    nonfinite = ~jnp.all(jnp.isfinite(x)) if is_float else jnp.zeros((), bool)
    return jnp.stack(
        [
            jnp.sum(hashes, dtype=jnp.uint32),
            jnp.sum(mix(hashes + jnp.uint32(1)), dtype=jnp.uint32),
            nonfinite.astype(jnp.uint32),
        ]
    )


@functools.lru_cache(maxsize=4096)
def _per_device(
    of_piece: OfPiece, mesh: Mesh, spec: PartitionSpec, shape: tuple[int, ...]
) -> Callable[[AnyArray], Shaped[Array, "devices n"]]:
    """The numbers of the piece on each device. No device waits for another: there can be a thousand leaves, and
    so many collectives at once can block a CPU."""
    axes = (*spec, *[None] * (len(shape) - len(spec)))

    def local(x: Array) -> Array:
        starts = tuple(
            0 if names is None else jax.lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(size)
            for names, size in zip(axes, x.shape)
        )
        return of_piece(x, starts, shape)[None]

    every = PartitionSpec(tuple(mesh.axis_names))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=every, check_vma=False))


@functools.partial(jax.jit, static_argnums=0)
def _of_whole(of_piece: OfPiece, x: Array) -> Shaped[Array, "1 n"]:
    return of_piece(x, (0,) * x.ndim, x.shape)[None]


def summed(of_piece: OfPiece, arrays: Mapping[str, AnyArray]) -> Shaped[np.ndarray, "arrays n"]:
    """`of_piece` of each array, added up over its pieces. A collective call on several processes."""
    pieces: dict[str, Array] = {}
    for name, x in arrays.items():
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            pieces[name] = _per_device(of_piece, sharding.mesh, sharding.spec, x.shape)(x)
        else:
            pieces[name] = _of_whole(of_piece, jnp.asarray(x))
    some = next(iter(pieces.values()), jnp.zeros((1, 0)))
    rows = np.zeros((len(arrays), some.shape[1]), some.dtype)
    for i, (name, x) in enumerate(arrays.items()):
        found = {shard.device: shard.data for shard in pieces[name].addressable_shards}
        if isinstance(x, jax.Array) and len(found) > 1:
            owners = {shard.device for shard in x.addressable_shards if shard.replica_id == 0}
            found = {device: data for device, data in found.items() if device in owners}
        elif pieces[name].is_fully_addressable and jax.process_index() != 0:
            continue  # each process has one of its own
        for data in found.values():
            rows[i] += np.asarray(data)[0]
    if jax.process_count() > 1:
        rows = np.asarray(np.sum(multihost_utils.process_allgather(rows), axis=0, dtype=rows.dtype))
    return rows


def digests(arrays: Mapping[str, AnyArray]) -> tuple[dict[str, str], list[str]]:
    """The checksum of each array, 16 hexadecimal digits, and the names of those that are not finite.

    A collective call on several processes.
    """
    rows = summed(digest, arrays).tolist()
    checksums = {name: f"{a:08x}{b:08x}" for name, (a, b, _) in zip(arrays, rows)}
    return checksums, [name for name, (_, _, nonfinite) in zip(arrays, rows) if nonfinite]


def unlike_replicas(arrays: Mapping[str, AnyArray]) -> Callable[[], list[str]]:
    """Begins to compare the copies of each array that devices hold. A collective call, which does not wait.

    The result is called for the names of the arrays that have two different copies, and waits for the
    comparison. Arrays that do not lie on the mesh of the first one are left out.
    """
    layout = {name: getattr(x, "sharding", None) for name, x in arrays.items()}
    layout = {
        name: x for name, x in layout.items() if isinstance(x, NamedSharding) and isinstance(x.mesh, Mesh)
    }
    meshes = [x.mesh for x in layout.values()]
    specs = {name: x.spec for name, x in layout.items() if x.mesh == meshes[0]}
    if not specs:
        return list
    differs = _compare_replicas(meshes[0], tuple(specs.values()))(tuple(arrays[name] for name in specs))
    return lambda: [name for name, is_unlike in zip(specs, np.asarray(differs)) if is_unlike]


@functools.lru_cache(maxsize=16)
def _compare_replicas(
    mesh: Mesh, specs: tuple[PartitionSpec, ...]
) -> Callable[[tuple[AnyArray, ...]], Shaped[Array, " arrays"]]:
    def local(pieces: tuple[Array, ...]) -> Shaped[Array, " arrays"]:
        words = jnp.stack([_word(x) for x in pieces])
        differs = jnp.zeros(len(specs), jnp.int32)
        split = [
            {axis for names in spec for axis in (names if isinstance(names, tuple) else (names,))}
            for spec in specs
        ]
        free = [tuple(axis for axis in mesh.axis_names if axis not in axes) for axes in split]
        for axes in sorted(set(free) - {()}):  # in one order, as all processes meet in each comparison
            is_unlike = jax.lax.pmax(words, axes) != jax.lax.pmin(words, axes)
            differs = jnp.where(jnp.asarray([x == axes for x in free]), is_unlike, differs)
        return jax.lax.pmax(differs, mesh.axis_names)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    )


def _word(x: Array) -> UInt32[Array, ""]:
    """A checksum of a piece, in hardly more than the time to read it."""
    bits = bits_of(x).reshape(-1)
    return jnp.sum(bits * (2 * jax.lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)
