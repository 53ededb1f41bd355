"""Residual blocks of convolutions, and the layers between them that change the size of images."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.layers import Linear, dropout
from redco_eqx.models._diffusion.layers import Conv, GroupNorm, make_linear


class ResnetBlock(eqx.Module):
    """Two convolutions, each after a norm and a nonlinearity, with the time added between them.

    - `time_emb_proj`: `None` without a time, as in an autoencoder.
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
        self.time_emb_proj = None if time_size is None else make_linear(time_size, out_channels, key=time_key)
        self.norm2 = GroupNorm(num_groups, out_channels, eps=eps)
        self.conv2 = Conv(out_channels, out_channels, 3, key=second_key)
        keeps = in_channels == out_channels
        self.conv_shortcut = None if keeps else Conv(in_channels, out_channels, 1, key=shortcut_key)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(
        self, x: Float[Array, "b in h w"], time: Float[Array, "b size"] | None, key: Key | None
    ) -> Float[Array, "b out h w"]:
        y = self.conv1(jax.nn.silu(self.norm1(x)))
        if self.time_emb_proj is not None and time is not None:
            y = y + self.time_emb_proj(jax.nn.silu(time))[:, :, None, None]
        y = self.conv2(dropout(self.dropout, jax.nn.silu(self.norm2(y)), key))
        return (x if self.conv_shortcut is None else self.conv_shortcut(x)) + y


class Downsample(eqx.Module):
    """Halve the height and width, by a convolution of stride 2."""

    conv: Conv

    def __init__(self, channels: int, *, padding: tuple[int, int], key: Key):
        self.conv = Conv(channels, channels, 3, stride=2, padding=padding, key=key)

    def __call__(self, x: Float[Array, "b c _ _"]) -> Float[Array, "b c _ _"]:
        return self.conv(x)


class Upsample(eqx.Module):
    """Enlarge an image by nearest neighbours, and apply a convolution."""

    conv: Conv

    def __init__(self, channels: int, *, key: Key):
        self.conv = Conv(channels, channels, 3, key=key)

    def __call__(self, x: Float[Array, "b c _ _"], size: tuple[int, int]) -> Float[Array, "b c _ _"]:
        """Return the image at this height and width, which are at most twice its own."""
        for dim, num in zip((2, 3), size):
            if num == 2 * x.shape[dim]:
                x = jnp.repeat(x, 2, axis=dim)
            else:
                x = jnp.take(x, jnp.arange(num) * x.shape[dim] // num, axis=dim)
        return self.conv(x)
