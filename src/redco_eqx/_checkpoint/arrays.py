"""The arrays of a state: their names in a checkpoint, and checksums that do not depend
on their layout.

A checksum is computed on the devices that have the array, before a checkpoint is
written and after it is read. So it covers the whole path through host, network and
disk. It costs one pass over device memory, instead of reading the files a second time.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from redco_eqx._base.tree import AnyArray, from_arrays, is_key, to_arrays
from redco_eqx._checkpoint.record import ArrayInfo
from redco_eqx._sharding.mesh import (
    axes_of,
    from_callback,
    one_device_mesh,
    put_global,
    replicated,
)
from redco_eqx._step.state import TrainState

MODEL = ("model/", "model_state/")

_PREFIXES = {
    "params": "model",
    "frozen": "model",
    "model_state": "model_state",
    "opt_state": "optimizer",
}


def to_names(state: TrainState) -> dict[str, AnyArray]:
    """Return every array by its name in a checkpoint: `model/<path>`, trainable or not,
    `model_state/<path>`, `optimizer/<path>`, `step`, `key`."""
    names: dict[str, AnyArray] = {}
    for field, prefix in _PREFIXES.items():
        names |= {
            f"{prefix}/{path}": x
            for path, x in to_arrays(getattr(state, field)).items()
        }
    return {**names, "step": state.step, "key": state.key}


def from_names(like: TrainState, arrays: Mapping[str, AnyArray]) -> TrainState:
    """Return `like` with these arrays: the inverse of `to_names`."""
    parts: dict[str, Any] = {"step": arrays["step"], "key": arrays["key"]}
    for field, prefix in _PREFIXES.items():
        own = getattr(like, field)
        parts[field] = from_arrays(
            own, {path: arrays[f"{prefix}/{path}"] for path in to_arrays(own)}
        )
    return dataclasses.replace(like, **parts)


def storable(arrays: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Return the arrays in stored form: keys as their data, and without empty
    arrays."""
    return {
        name: jax.random.key_data(x) if is_key(x) else x
        for name, x in arrays.items()
        if x.size > 0
    }


def info_of(x: AnyArray, checksum: str = "") -> ArrayInfo:
    """Describe an array for the record."""
    impl = (
        str(jax.random.key_impl(x)) if isinstance(x, jax.Array) and is_key(x) else None
    )
    return ArrayInfo(str(x.dtype), tuple(x.shape), checksum, impl)


# Checksums and other sums over the pieces of an array.

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
        return bits_of(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype.itemsize <= 4 and not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32)
    if x.dtype.itemsize >= 4:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type(
        x, jnp.dtype(f"uint{jnp.finfo(x.dtype).bits}")
    ).astype(jnp.uint32)


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


def digest(x: Array, starts: Starts, shape: tuple[int, ...]) -> UInt32[Array, "3"]:
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
    words = [
        jnp.sum(x, dtype=jnp.uint32) for x in (hashes, mix(hashes + jnp.uint32(1)))
    ]
    return jnp.stack([*words, jnp.any(~jnp.isfinite(x)).astype(jnp.uint32)])


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

    def local(x: Array) -> Array:
        starts = tuple(
            0
            if names is None
            else jax.lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(size)
            for names, size in zip(axes, x.shape)
        )
        return of_piece(x, starts, shape)[None]

    every = PartitionSpec(tuple(mesh.axis_names))
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=every, check_vma=False)
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
    mesh = next(filter(None, meshes.values()), None) or one_device_mesh(
        jax.local_devices()[0]
    )
    specs = {}
    rows = []
    for name, x in arrays.items():
        x: Any = x if meshes[name] == mesh else put_global(x, replicated(mesh))
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
            first = tuple(
                slice(None if axis in axes_of(spec) else 1) for axis in mesh.axis_names
            )
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


def digests(arrays: Mapping[str, AnyArray]) -> tuple[dict[str, str], list[str]]:
    """Compute the checksum of each array (16 hexadecimal digits), and list the arrays
    that are not finite.

    All processes must call it."""
    rows = summed(digest, arrays).tolist()
    checksums = {name: f"{a:08x}{b:08x}" for name, (a, b, _) in zip(arrays, rows)}
    return checksums, [
        name for name, (_, _, nonfinite) in zip(arrays, rows) if nonfinite
    ]
