"""Fourier transforms along whole dims: a split one makes the CPU compiler's program fail when it runs."""

from collections.abc import Callable

import jax
import jax.extend.core as jex_core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from redco_eqx._program.rewrite import manual_axes


def replace_fft(equation: jex_core.JaxprEqn, mesh: Mesh | AbstractMesh) -> Callable[..., Array] | None:
    """What takes the place of `equation`, if it is an FFT: the same, of whole dims.

    Over a split dim the compiler's program ends in an internal error on CPU (jaxlib 0.10.2: `fft_thunk.cc`), or
    the partitioner aborts (`fft_handler.cc`). In a `shard_map` nothing is done.
    """
    if equation.primitive.name != "fft" or manual_axes(equation):
        return None
    num_dims = len(equation.params["fft_lengths"])  # the last ones

    def whole(x: Array) -> Array:
        entries = [PartitionSpec.UNCONSTRAINED] * (x.ndim - num_dims) + [None] * num_dims
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))

    return lambda x: whole(equation.primitive.bind(whole(x), **equation.params))
