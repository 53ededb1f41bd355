"""The transformer of a UNet: pixels attend to each other and to a text."""

import equinox as eqx
import jax
from jaxtyping import Array, Float

from redco_eqx._base.protocols import Key
from redco_eqx._parallel.linear import column, row
from redco_eqx.models._blocks.attention import Implementation
from redco_eqx.models._blocks.layers import LayerNorm, Linear
from redco_eqx.models._diffusion.attention import Attention, to_image, to_tokens
from redco_eqx.models._diffusion.layers import Conv, GroupNorm, make_linear


class GEGLU(eqx.Module):
    """A gated layer (Shazeer 2020). Files store both matrices as one; here they are separate, so that each is
    split evenly.
    """

    value: Linear
    gate: Linear

    def __init__(self, in_features: int, out_features: int, *, key: Key):
        value_key, gate_key = jax.random.split(key)
        self.value = make_linear(in_features, out_features, key=value_key)
        self.gate = make_linear(in_features, out_features, key=gate_key)

    def __call__(self, x: Float[Array, "b t in"]) -> Float[Array, "b t out"]:
        value, gate = column(x, self.value, self.gate)
        return value * jax.nn.gelu(gate, approximate=False)


class FeedForward(eqx.Module):
    """A GEGLU four times as wide, and a projection back. Files number the two with an unused dropout between
    them.
    """

    net: tuple[GEGLU, None, Linear]

    def __init__(self, size: int, *, key: Key):
        in_key, out_key = jax.random.split(key)
        self.net = (GEGLU(size, 4 * size, key=in_key), None, make_linear(4 * size, size, key=out_key))

    def __call__(self, x: Float[Array, "b t size"]) -> Float[Array, "b t size"]:
        opening, _, closing = self.net
        return row(opening(x), closing)


class TransformerBlock(eqx.Module):
    """Self-attention, attention over the text, and an MLP, each with a norm before it, added to the stream."""

    norm1: LayerNorm
    attn1: Attention
    norm2: LayerNorm
    attn2: Attention
    norm3: LayerNorm
    ff: FeedForward

    def __init__(self, size: int, text_size: int, num_heads: int, *, key: Key):
        self_key, text_key, mlp_key = jax.random.split(key, 3)
        self.norm1, self.norm2, self.norm3 = LayerNorm(size), LayerNorm(size), LayerNorm(size)
        self.attn1 = Attention(size, size, num_heads, key=self_key)
        self.attn2 = Attention(size, text_size, num_heads, key=text_key)
        self.ff = FeedForward(size, key=mlp_key)

    def __call__(
        self,
        x: Float[Array, "b t size"],
        text: Float[Array, "b s text_size"],
        implementation: Implementation | None,
    ) -> Float[Array, "b t size"]:
        x = x + self.attn1.read(self.norm1(x), None, implementation)
        x = x + self.attn2.read(self.norm2(x), text, implementation)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(eqx.Module):
    """Transformer blocks over the pixels of an image, between two projections, added to the image.

    - `proj_in`, `proj_out`: Linear layers, or convolutions of one pixel: the same numbers in a different shape.
    """

    norm: GroupNorm
    proj_in: Linear | Conv
    transformer_blocks: list[TransformerBlock]
    proj_out: Linear | Conv

    def __init__(
        self,
        channels: int,
        text_size: int,
        num_heads: int,
        *,
        num_layers: int,
        num_groups: int,
        is_linear: bool,
        key: Key,
    ):
        in_key, out_key, *keys = jax.random.split(key, 2 + num_layers)

        def project(key: Key) -> Linear | Conv:
            return (
                make_linear(channels, channels, key=key) if is_linear else Conv(channels, channels, 1, key=key)
            )

        self.norm = GroupNorm(num_groups, channels, eps=1e-6)
        self.proj_in = project(in_key)
        self.transformer_blocks = [TransformerBlock(channels, text_size, num_heads, key=key) for key in keys]
        self.proj_out = project(out_key)

    def __call__(
        self,
        x: Float[Array, "b c h w"],
        text: Float[Array, "b s text_size"],
        implementation: Implementation | None,
    ) -> Float[Array, "b c h w"]:
        y = self.norm(x)
        y = self.proj_in(to_tokens(y)) if isinstance(self.proj_in, Linear) else to_tokens(self.proj_in(y))
        for block in self.transformer_blocks:
            y = block(y, text, implementation)
        if isinstance(self.proj_out, Linear):
            return x + to_image(self.proj_out(y), x)
        return x + self.proj_out(to_image(y, x))
