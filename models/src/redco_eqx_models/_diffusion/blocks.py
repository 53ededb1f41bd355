"""Attention of pixels over each other and over a text, and the stages of a UNet and of
an autoencoder."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from redco_eqx.layers import column, row, scan_layers
from redco_eqx.types import Key, Remat
from redco_eqx_models._blocks.attention import Implementation, attend, split_heads
from redco_eqx_models._blocks.context import Hidden
from redco_eqx_models._blocks.dropout import split_key
from redco_eqx_models._blocks.layers import LayerNorm, Linear
from redco_eqx_models._diffusion.layers import (
    Conv,
    Downsample,
    GroupNorm,
    ResnetBlock,
    Upsample,
    make_linear,
)


def to_tokens(x: Float[Array, "b c h w"]) -> Float[Array, "b t c"]:
    """Flatten the pixels of an image, row by row."""
    return rearrange(x, "b c h w -> b (h w) c")


def to_image(
    x: Float[Array, "b t c"], like: Float[Array, "b _ h w"]
) -> Float[Array, "b c h w"]:
    """Restore an image with the height and width of `like`."""
    return rearrange(x, "b (h w) c -> b c h w", h=like.shape[2])


class Attention(eqx.Module):
    """Multi-head attention of some tokens over others, or over themselves."""

    to_q: Linear
    to_k: Linear
    to_v: Linear
    to_out: list[Linear]
    num_heads: int = eqx.field(static=True)

    def __init__(
        self,
        size: int,
        memory_size: int,
        num_heads: int,
        *,
        use_bias: bool = False,
        key: Key,
    ):
        q_key, k_key, v_key, out_key = jax.random.split(key, 4)
        self.to_q = make_linear(size, size, use_bias=use_bias, key=q_key)
        self.to_k = make_linear(memory_size, size, use_bias=use_bias, key=k_key)
        self.to_v = make_linear(memory_size, size, use_bias=use_bias, key=v_key)
        # A list of one, because its key in files is `to_out.0`. In diffusers, a dropout
        # comes after it.
        self.to_out = [make_linear(size, size, key=out_key)]
        self.num_heads = num_heads

    def read(
        self, x: Hidden, memory: Float[Array, "b s _"] | None, given: "Given"
    ) -> Hidden:
        """Compute the attention of the tokens `x` over `memory`, or over themselves
        without it."""
        unit = self.to_q.out_features // self.num_heads
        if memory is None:
            projected = column(x, self.to_q, self.to_k, self.to_v, unit=unit)
        else:
            # A text is short, so a layout may split keys and values by its features
            # alone: follow that layout.
            projected = self.to_q(x), self.to_k(memory), self.to_v(memory)
        q, k, v = (split_heads(y, unit) for y in projected)
        heads = attend(q, k, v, causal=False, implementation=given.attention)
        return row(rearrange(heads, "b t h d -> b t (h d)"), self.to_out[0], unit=unit)


class PixelAttention(Attention):
    """Self-attention of an autoencoder's pixels, in one head, added to the image."""

    group_norm: GroupNorm

    def __init__(self, channels: int, *, num_groups: int, eps: float, key: Key):
        super().__init__(channels, channels, 1, use_bias=True, key=key)
        self.group_norm = GroupNorm(num_groups, channels, eps=eps)

    def __call__(
        self, x: Float[Array, "b c h w"], given: "Given"
    ) -> Float[Array, "b c h w"]:
        tokens = to_tokens(self.group_norm(x))
        return x + to_image(self.read(tokens, None, given), x)


class GEGLU(eqx.Module):
    """A gated layer (Shazeer 2020). Files store both matrices as one; here they are
    separate, so that each is split evenly.
    """

    value: Linear
    gate: Linear

    def __init__(self, in_features: int, out_features: int, *, key: Key):
        value_key, gate_key = jax.random.split(key)
        self.value = make_linear(in_features, out_features, key=value_key)
        self.gate = make_linear(in_features, out_features, key=gate_key)

    def __call__(self, x: Float[Array, "b t in"]) -> Float[Array, "b t out"]:
        # In the matrix of files, the value comes first. LLaMA-like families have the
        # gate first.
        value, gate = column(x, self.value, self.gate)
        return value * jax.nn.gelu(gate, approximate=False)


class FeedForward(eqx.Module):
    """A GEGLU four times as wide, and a projection back. Files number the two with an
    unused dropout between them.
    """

    net: tuple[GEGLU, None, Linear]

    def __init__(self, size: int, *, key: Key):
        in_key, out_key = jax.random.split(key)
        self.net = (
            GEGLU(size, 4 * size, key=in_key),
            None,
            make_linear(4 * size, size, key=out_key),
        )

    def __call__(self, x: Hidden) -> Hidden:
        opening, _, closing = self.net
        return row(opening(x), closing)


class TransformerBlock(eqx.Module):
    """Self-attention, attention over the text, and an MLP, each with a norm before it,
    added to the stream."""

    norm1: LayerNorm
    attn1: Attention
    norm2: LayerNorm
    attn2: Attention
    norm3: LayerNorm
    ff: FeedForward

    def __init__(self, size: int, text_size: int, num_heads: int, *, key: Key):
        self_key, text_key, mlp_key = jax.random.split(key, 3)
        self.norm1 = LayerNorm(size)
        self.norm2 = LayerNorm(size)
        self.norm3 = LayerNorm(size)
        self.attn1 = Attention(size, size, num_heads, key=self_key)
        self.attn2 = Attention(size, text_size, num_heads, key=text_key)
        self.ff = FeedForward(size, key=mlp_key)

    def __call__(self, x: Hidden, given: "Given") -> Hidden:
        x = x + self.attn1.read(self.norm1(x), None, given)
        x = x + self.attn2.read(self.norm2(x), given.text, given)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(eqx.Module):
    """Transformer blocks over the pixels of an image, between two projections, added to
    the image.

    - `proj_in`, `proj_out`: Linear layers, or convolutions of one pixel: the same
        numbers in a different shape.
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
        num_layers: int,
        *,
        num_groups: int,
        is_linear: bool,
        key: Key,
    ):
        in_key, out_key, *keys = jax.random.split(key, 2 + num_layers)

        def project(key: Key) -> Linear | Conv:
            if is_linear:
                return make_linear(channels, channels, key=key)
            return Conv(channels, channels, 1, key=key)

        # `Transformer2DModel` of diffusers has this epsilon, whatever `norm_eps` is.
        self.norm = GroupNorm(num_groups, channels, eps=1e-6)
        self.proj_in = project(in_key)
        self.transformer_blocks = [
            TransformerBlock(channels, text_size, num_heads, key=key) for key in keys
        ]
        self.proj_out = project(out_key)

    def __call__(
        self, x: Float[Array, "b c h w"], given: "Given"
    ) -> Float[Array, "b c h w"]:
        y = self.norm(x)
        if isinstance(self.proj_in, Conv):
            y = to_tokens(self.proj_in(y))
        else:
            y = self.proj_in(to_tokens(y))
        for block in self.transformer_blocks:
            y = block(y, given)
        if isinstance(self.proj_out, Conv):
            return x + self.proj_out(to_image(y, x))
        return x + to_image(self.proj_out(y), x)


AnyAttention: TypeAlias = SpatialTransformer | PixelAttention
MakeResnet: TypeAlias = Callable[..., ResnetBlock]
"""`(channels in, channels out, key=key) -> block`."""
MakeAttention: TypeAlias = Callable[..., AnyAttention]
"""`(key=key) -> block`."""


@dataclasses.dataclass(frozen=True)
class Given:
    """The inputs of every stage besides the image.

    - `time`, `text`: the features that condition the denoising; `None` in an
        autoencoder.
    - `attention`, `remat`: options for running the model, see `Options`.
    """

    time: Float[Array, "b size"] | None
    text: Float[Array, "b s text_size"] | None
    attention: Implementation | None
    remat: Remat

    def run(
        self,
        resnet: ResnetBlock,
        attention: AnyAttention | None,
        x: Float[Array, "b in h w"],
        key: Key | None,
        skip: Float[Array, "b skipped h w"] | None = None,
    ) -> Float[Array, "b out h w"]:
        """Apply a residual block to the image (and an earlier image beside it), and
        then the attention. Both are recomputed together.
        """

        def one(layer: tuple, x: Array) -> Array:
            resnet, attention, skip = layer
            if skip is not None:
                x = jnp.concatenate([x, skip], axis=1)
            x = resnet(x, self.time, key)
            if attention is not None:
                x = attention(x, self)
            return x

        # As a list of one layer: `scan_layers` gathers the weights when the layer
        # begins, and applies `remat`.
        return scan_layers(one, [(resnet, attention, skip)], x, remat=self.remat)

    def resize(
        self,
        layer: Downsample | Upsample,
        x: Float[Array, "b c _ _"],
        *size: tuple[int, int],
    ) -> Float[Array, "b c _ _"]:
        """Make a smaller image, or a larger one of this size. Keep all its channels
        whole, because other layers read it, too.
        """
        return scan_layers(
            lambda layer, x: layer(x, *size), [layer], x, remat=self.remat
        )


class Stage(eqx.Module):
    """Residual blocks at one size of images, each followed by attention if the stage
    has it. In the middle, the last has none. On the way down, all stages except the
    last then halve the size. On the way up, they enlarge it.
    """

    resnets: list[ResnetBlock]
    attentions: list[AnyAttention] | None
    downsamplers: list[Downsample] | None
    upsamplers: list[Upsample] | None

    def __init__(
        self,
        num_in: Sequence[int],
        num_out: int,
        make_resnet: MakeResnet,
        make_attention: MakeAttention | None,
        *,
        padding: tuple[int, int] | None = None,
        enlarges: bool = False,
        is_middle: bool = False,
        key: Key,
    ):
        resnets_key, attentions_key, last_key = jax.random.split(key, 3)
        keys = jax.random.split(resnets_key, len(num_in))
        self.resnets = [
            make_resnet(num, num_out, key=key) for num, key in zip(num_in, keys)
        ]
        self.attentions = self.downsamplers = self.upsamplers = None
        if make_attention is not None:
            num_attentions = len(num_in)
            if is_middle:
                # In diffusers' `UNetMidBlock2D`, a residual block comes before the
                # first attention, and one after each.
                num_attentions -= 1
            keys = jax.random.split(attentions_key, num_attentions)
            self.attentions = [make_attention(key=key) for key in keys]
        # Lists of one, because the keys in files are `downsamplers.0` and
        # `upsamplers.0`.
        if padding is not None:
            self.downsamplers = [Downsample(num_out, padding=padding, key=last_key)]
        if enlarges:
            self.upsamplers = [Upsample(num_out, key=last_key)]

    def down(
        self, x: Float[Array, "b c h w"], given: Given, key: Key | None
    ) -> list[Float[Array, "b _ _ _"]]:
        """Return the output of each residual block (with its attention), and the
        smaller image last."""
        outputs: list[Array] = []
        for resnet, attention, own in self._layers(key):
            x = given.run(resnet, attention, x, own)
            outputs.append(x)
        if self.downsamplers is not None:
            outputs.append(given.resize(self.downsamplers[0], x))
        return outputs

    def up(
        self,
        x: Float[Array, "b c h w"],
        skips: Sequence[Float[Array, "b _ h w"] | None],
        given: Given,
        size: tuple[int, int] | None,
        key: Key | None,
    ) -> Float[Array, "b _ _ _"]:
        """Return the image at the given `size`, after residual blocks that each read
        one of `skips`."""
        for (resnet, attention, own), skip in zip(
            self._layers(key), skips, strict=True
        ):
            x = given.run(resnet, attention, x, own, skip)
        if self.upsamplers is None:
            return x
        if size is None:
            size = (2 * x.shape[2], 2 * x.shape[3])
        return given.resize(self.upsamplers[0], x, size)

    def _layers(
        self, key: Key | None
    ) -> list[tuple[ResnetBlock, AnyAttention | None, Key | None]]:
        # A residual block without an attention after it is paired with `None`.
        keys = split_key(key, len(self.resnets))
        return list(itertools.zip_longest(self.resnets, self.attentions or [], keys))
