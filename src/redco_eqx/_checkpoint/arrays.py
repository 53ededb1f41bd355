"""The arrays of a state: their names in a checkpoint, and checksums that do not depend on their layout.

A checksum is computed where the array is, before a checkpoint is written and after it is read, so that it
covers the whole way over host, network and disk, and costs one pass over device memory instead of a second
reading of the files.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped, UInt32

from redco_eqx._base.protocols import AnyArray
from redco_eqx._base.tree import is_key, leaves_with_paths, to_arrays
from redco_eqx._checkpoint.record import ArrayInfo
from redco_eqx._step.state import TrainState

MODEL = ("model/", "model_state/")


def to_names(state: TrainState) -> dict[str, AnyArray]:
    """Every array by its name in a checkpoint: `model/<path>`, trainable or not, `model_state/<path>`,
    `optimizer/<path>`, `step`, `key`."""
    return {
        **{f"model/{path}": x for path, x in state.params.items()},
        **{f"model/{path}": x for path, x in state.frozen.items()},
        **{f"model_state/{path}": x for path, x in state.model_state.items()},
        **{f"optimizer/{path}": x for path, x in to_arrays(state.opt_state).items()},
        "step": state.step,
        "key": state.key,
    }


def from_names(like: TrainState, arrays: Mapping[str, AnyArray]) -> TrainState:
    """The inverse of `to_names`: `like` with these arrays."""

    def part(prefix: str, own: dict[str, AnyArray]) -> dict[str, AnyArray]:
        return {path: arrays[f"{prefix}/{path}"] for path in own}

    opt_leaves = [arrays[f"optimizer/{path}"] for path, _ in leaves_with_paths(like.opt_state)]
    return dataclasses.replace(
        like,
        params=part("model", like.params),
        frozen=part("model", like.frozen),
        model_state=part("model_state", like.model_state),
        opt_state=jax.tree.unflatten(jax.tree.structure(like.opt_state), opt_leaves),
        step=arrays["step"],
        key=arrays["key"],
    )


def storable(arrays: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """The arrays as they are stored: of keys their data, and none that is empty."""
    return {name: jax.random.key_data(x) if is_key(x) else x for name, x in arrays.items() if x.size > 0}


def info_of(x: AnyArray, checksum: str = "") -> ArrayInfo:
    """Describe an array for the record."""
    impl = str(jax.random.key_impl(x)) if isinstance(x, jax.Array) and is_key(x) else None
    return ArrayInfo(str(x.dtype), tuple(x.shape), checksum, impl)


# Checksums, and other numbers that add up over the pieces of an array.

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


@functools.lru_cache(maxsize=16)
def _everywhere(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], of_local: Callable[[Array], Array]
) -> Callable[[tuple[AnyArray, ...]], Shaped[Array, "devices arrays n"]]:
    """Numbers of what each device holds of each array, made known to all devices at once."""
    axes = tuple(mesh.axis_names)

    def local(pieces: tuple[Array, ...]) -> Array:
        return jax.lax.all_gather(jnp.stack([of_local(x) for x in pieces]), axes)

    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    )


def _on_meshes(arrays: Mapping[str, AnyArray]) -> dict[Mesh, dict[str, PartitionSpec]]:
    """The arrays that lie on a mesh, by it, with their layouts."""
    found: dict[Mesh, dict[str, PartitionSpec]] = {}
    for name, x in arrays.items():
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            found.setdefault(sharding.mesh, {})[name] = sharding.spec
    return found


def _by_axes(
    rows: Shaped[np.ndarray, "devices n"], mesh: Mesh, spec: PartitionSpec
) -> tuple[Shaped[np.ndarray, "*axes n"], Shaped[np.ndarray, "*pieces n"]]:
    """The numbers of all devices, and those of the first one of each piece, by the axes of the mesh."""
    axes = {axis for names in spec for axis in (names if isinstance(names, tuple) else (names,))}
    table = rows.reshape(*mesh.devices.shape, -1)
    return table, table[tuple(slice(None if axis in axes else 1) for axis in mesh.axis_names)]


def summed(of_piece: OfPiece, arrays: Mapping[str, AnyArray]) -> Shaped[np.ndarray, "arrays n"]:
    """`of_piece` of each array, added up over its pieces. A collective call on several processes."""
    pieces, found = {}, {}
    on_meshes = _on_meshes(arrays)
    for mesh, specs in on_meshes.items():
        pieces[mesh] = [_per_device(of_piece, mesh, specs[x], arrays[x].shape)(arrays[x]) for x in specs]
    for mesh, specs in on_meshes.items():
        one_row = (PartitionSpec(tuple(mesh.axis_names)),) * len(specs)
        table = np.asarray(_everywhere(mesh, one_row, _first_row)(tuple(pieces[mesh])))
        for i, (name, spec) in enumerate(specs.items()):
            _, first = _by_axes(table[:, i], mesh, spec)
            found[name] = first.reshape(-1, first.shape[-1]).sum(axis=0, dtype=table.dtype)
    for name in arrays.keys() - found.keys():  # each process has one of its own
        found[name] = np.asarray(_of_whole(of_piece, jnp.asarray(arrays[name])))[0]
    return np.stack([found[name] for name in arrays]) if found else np.zeros((0, 1))


def _first_row(x: Shaped[Array, "1 n"]) -> Shaped[Array, " n"]:
    return x[0]


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
    comparison. Arrays that lie on no mesh are left out.
    """
    begun = [
        (mesh, specs, _everywhere(mesh, tuple(specs.values()), _word)(tuple(arrays[name] for name in specs)))
        for mesh, specs in _on_meshes(arrays).items()
    ]

    def unlike() -> list[str]:
        names = []
        for mesh, specs, words in begun:
            for i, (name, spec) in enumerate(specs.items()):
                table, first = _by_axes(np.asarray(words)[:, i], mesh, spec)
                names += [name] if np.any(table != first) else []
        return names

    return unlike


def _word(x: Array) -> UInt32[Array, "1"]:
    """A checksum of a piece, in hardly more than the time to read it."""
    bits = bits_of(x).reshape(-1)
    weights = 2 * jax.lax.iota(jnp.uint32, bits.size) + 1
    return jnp.sum(bits * weights, dtype=jnp.uint32)[None]
