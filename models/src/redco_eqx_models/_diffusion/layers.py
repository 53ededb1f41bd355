"""Layers of images: convolutions, norms, residual blocks, changes of size, and the
diffusion time."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int

from redco_eqx.types import Key
from redco_eqx_models._blocks.dropout import dropout
from redco_eqx_models._blocks.layers import Linear, maybe


def make_linear(
    in_features: int, out_features: int, *, use_bias: bool = True, key: Key
) -> Linear:
    """Make a Linear whose initial weights have the variance that diffusers uses,
    `1 / (3 * in_features)`."""
    return Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        std=(3 * in_features) ** -0.5,
        key=key,
    )


class Conv(eqx.Module):
    """A convolution of images `(batch, channels, height, width)`, with the weight
    stored as in files.

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
        # The variance of torch's default initialization, which diffusers keeps.
        std = (3 * in_channels * size**2) ** -0.5
        self.weight = std * jax.random.normal(key, shape)
        self.bias = jnp.zeros(out_channels)
        self.kernel_size = (size, size)
        self.stride = stride
        if padding is None:
            padding = (size // 2, size // 2)
        self.padding = padding

    def __call__(self, x: Float[Array, "b in h w"]) -> Float[Array, "b out _ _"]:
        x = jax.lax.conv_general_dilated(
            x,
            self.weight,
            (self.stride, self.stride),
            (self.padding, self.padding),
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )
        return x + self.bias[:, None, None]


class GroupNorm(eqx.Module):
    """Group normalisation (Wu and He 2018) of images; statistics in float32."""

    weight: Float[Array, " channels"]
    bias: Float[Array, " channels"]
    num_groups: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, num_groups: int, num_channels: int, *, eps: float):
        self.weight = jnp.ones(num_channels)
        self.bias = jnp.zeros(num_channels)
        self.num_groups = num_groups
        self.eps = eps

    def __call__(
        self, x: Float[Array, "b channels h w"]
    ) -> Float[Array, "b channels h w"]:
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        y = rearrange(y, "b (g c) h w -> b g c h w", g=self.num_groups)
        y = y - jnp.mean(y, axis=(2, 3, 4), keepdims=True)
        variance = jnp.mean(jnp.square(y), axis=(2, 3, 4), keepdims=True)
        y = y * jax.lax.rsqrt(variance + self.eps)
        y = rearrange(y, "b g c h w -> b (g c) h w")
        y = y * self.weight[:, None, None] + self.bias[:, None, None]
        return y.astype(x.dtype)


def sinusoids(
    timesteps: Int[Array, " b"], size: int, *, flip_sin_to_cos: bool, freq_shift: int
) -> Float[Array, "b {size}"]:
    """Compute sines and cosines of each time at `size // 2` frequencies, from 1 down to
    about 1 / 10,000, in float32.

    The frequencies of denoising diffusion (Ho et al. 2020, appendix B) end at exactly 1
    / 10,000: that is a `freq_shift` of 1.

    **Arguments:**

    - `flip_sin_to_cos`: true if the cosines come first.
    - `freq_shift`: the number subtracted from the number of frequencies in the spacing
        of their exponents.
    """
    # `get_timestep_embedding` of diffusers' `embeddings.py`. In half precision, near
    # times of 1000 would not differ.
    num = size // 2
    numbers = jnp.arange(num, dtype=jnp.float32)
    frequencies = jnp.exp(-math.log(10_000) / (num - freq_shift) * numbers)
    angles = timesteps.astype(jnp.float32)[:, None] * frequencies
    parts = [jnp.sin(angles), jnp.cos(angles)]
    if flip_sin_to_cos:
        parts.reverse()
    return jnp.concatenate(parts, axis=-1)


class TimeEmbedding(eqx.Module):
    """An MLP over the sinusoids."""

    linear_1: Linear
    linear_2: Linear

    def __init__(self, in_features: int, size: int, *, key: Key):
        first_key, second_key = jax.random.split(key)
        self.linear_1 = make_linear(in_features, size, key=first_key)
        self.linear_2 = make_linear(size, size, key=second_key)

    def __call__(self, x: Float[Array, "b in"]) -> Float[Array, "b size"]:
        return self.linear_2(jax.nn.silu(self.linear_1(x)))


class ResnetBlock(eqx.Module):
    """Two convolutions, each after a norm and a nonlinearity, with the time embedding
    added between them.

    - `time_emb_proj`: `None` if there is no time embedding, as in an autoencoder.
    - `conv_shortcut`: `None` if the number of channels does not change.
    """

    norm1: GroupNorm
    conv1: Conv
    time_emb_proj: Linear | None
    norm2: GroupNorm
    conv2: Conv
    conv_shortcut: Conv | None
    dropout: eqx.nn.Dropout

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        time_size: int | None,
        num_groups: int,
        eps: float,
        dropout: float = 0.0,
        key: Key,
    ):
        first_key, time_key, second_key, shortcut_key = jax.random.split(key, 4)
        self.norm1 = GroupNorm(num_groups, in_channels, eps=eps)
        self.conv1 = Conv(in_channels, out_channels, 3, key=first_key)
        self.time_emb_proj = None
        if time_size is not None:
            self.time_emb_proj = make_linear(time_size, out_channels, key=time_key)
        self.norm2 = GroupNorm(num_groups, out_channels, eps=eps)
        self.conv2 = Conv(out_channels, out_channels, 3, key=second_key)
        self.conv_shortcut = None
        if in_channels != out_channels:
            self.conv_shortcut = Conv(in_channels, out_channels, 1, key=shortcut_key)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(
        self,
        x: Float[Array, "b in h w"],
        time: Float[Array, "b size"] | None,
        key: Key | None,
    ) -> Float[Array, "b out h w"]:
        y = self.conv1(jax.nn.silu(self.norm1(x)))
        if self.time_emb_proj is not None and time is not None:
            y = y + self.time_emb_proj(jax.nn.silu(time))[:, :, None, None]
        y = self.conv2(dropout(self.dropout, jax.nn.silu(self.norm2(y)), key))
        return maybe(self.conv_shortcut, x) + y


class Downsample(eqx.Module):
    """Halve the height and width, by a convolution of stride 2."""

    conv: Conv

    def __init__(self, channels: int, *, padding: tuple[int, int], key: Key):
        self.conv = Conv(channels, channels, 3, stride=2, padding=padding, key=key)

    def __call__(self, x: Float[Array, "b c _ _"]) -> Float[Array, "b c _ _"]:
        return self.conv(x)


class Upsample(eqx.Module):
    """Enlarge an image by nearest-neighbour interpolation, and apply a convolution."""

    conv: Conv

    def __init__(self, channels: int, *, key: Key):
        self.conv = Conv(channels, channels, 3, key=key)

    def __call__(
        self, x: Float[Array, "b c _ _"], size: tuple[int, int]
    ) -> Float[Array, "b c _ _"]:
        """Return the image resized to this height and width, each at most twice the
        original."""
        for dim, num in zip((2, 3), size):
            if num == 2 * x.shape[dim]:
                x = jnp.repeat(x, 2, axis=dim)
            else:
                # A stage that halves an odd size rounds up, so the way back is shorter.
                # The pixel is that of torch's `interpolate` with `mode="nearest"`.
                x = jnp.take(x, jnp.arange(num) * x.shape[dim] // num, axis=dim)
        return self.conv(x)
