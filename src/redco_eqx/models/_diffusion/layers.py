"""Convolutions and group normalisation of images, and the Linear layers between them, stored as in files."""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.layers import Linear


def make_linear(in_features: int, out_features: int, *, use_bias: bool = True, key: Key) -> Linear:
    """Make a Linear whose initial weights have the variance that diffusers uses, `1 / (3 * in_features)`."""
    return Linear(in_features, out_features, use_bias=use_bias, std=(3 * in_features) ** -0.5, key=key)


class Conv(eqx.Module):
    """A convolution of images `(batch, channels, height, width)`, with the weight stored as in files.

    - `padding`: rows and columns of zeros before and after, equal in both dims.
    """

    weight: Float[Array, "out in height width"]
    bias: Float[Array, " out"]
    kernel_size: tuple[int, int] = eqx.field(static=True)
    stride: int = eqx.field(static=True)
    padding: tuple[int, int] = eqx.field(static=True)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        size: int,
        *,
        stride: int = 1,
        padding: tuple[int, int] | None = None,
        key: Key,
    ):
        shape = (out_channels, in_channels, size, size)
        self.weight = (3 * in_channels * size**2) ** -0.5 * jax.random.normal(key, shape)
        self.bias = jnp.zeros(out_channels)
        self.kernel_size = (size, size)
        self.stride = stride
        self.padding = (size // 2, size // 2) if padding is None else padding

    def __call__(self, x: Float[Array, "b in h w"]) -> Float[Array, "b out _ _"]:
        x = jax.lax.conv_general_dilated(
            x, self.weight, (self.stride, self.stride), (self.padding, self.padding),
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )  # fmt: skip
        return x + self.bias[:, None, None]


class GroupNorm(eqx.Module):
    """Group normalisation (Wu and He 2018) of images; statistics in float32."""

    weight: Float[Array, " channels"]
    bias: Float[Array, " channels"]
    num_groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, num_groups: int, num_channels: int, *, eps: float):
        self.weight, self.bias = jnp.ones(num_channels), jnp.zeros(num_channels)
        self.num_groups, self.eps = num_groups, eps

    def __call__(self, x: Float[Array, "b channels h w"]) -> Float[Array, "b channels h w"]:
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = rearrange(y, "b (g c) h w -> b g c h w", g=self.num_groups)
        y = y - jnp.mean(y, axis=(2, 3, 4), keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=(2, 3, 4), keepdims=True) + self.eps)
        y = rearrange(y, "b g c h w -> b (g c) h w")
        return (y * self.weight[:, None, None] + self.bias[:, None, None]).astype(x.dtype)
