"""Fourier transforms, cut by hand: a split dim makes the CPU compiler's program fail.

- An FFT over a split dim ends in an internal error when it runs (`fft_thunk.cc`, about the order of dims in
  memory; the same check as in jax-ml/jax#22484): jaxlib 0.10.2 and 0.12.0.
- Or the partitioner aborts (`fft_handler.cc`, openxla/xla#45402): jaxlib 0.10.2, no longer 0.11.0.
- One over another dim gathers a split batch (openxla/xla#24): jaxlib 0.10.2, no longer 0.12.0.
"""

from collections.abc import Callable

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array

from redco_eqx._program.rewrite import manual_axes
from redco_eqx._sharding.mesh import BATCH_AXES, axis_size


def replace_fft(equation: JaxprEqn, mesh: Mesh | AbstractMesh) -> Callable[..., Array] | None:
    """What takes the place of `equation`, if it is an FFT: the same, of dims that are whole on each device.

    The leading dim is split over the batch, unless it is transformed or does not divide. In a `shard_map`
    nothing is done.
    """
    if equation.primitive.name != "fft" or manual_axes(equation):
        return None
    num_dims = len(equation.params["fft_lengths"])  # the last ones
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)

    def in_order(x: Array) -> Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    def part(x: Array) -> Array:
        # Alike from both ends, because the transpose of an FFT is one too.
        return in_order(equation.primitive.bind(in_order(x), **equation.params))

    def transform(x: Array) -> Array:
        is_split = axes and x.ndim > num_dims and x.shape[0] % axis_size(mesh, axes) == 0
        spec = PartitionSpec(axes if is_split else None)
        return jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    return transform
