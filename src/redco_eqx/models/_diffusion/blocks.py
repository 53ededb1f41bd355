"""The stages of a UNet and of an autoencoder: residual blocks and attention at one image size."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redco_eqx._base.protocols import Key
from redco_eqx._parallel.linear import Remat
from redco_eqx._parallel.scan import scan_layers
from redco_eqx.models._blocks.attention import Implementation
from redco_eqx.models._blocks.layers import split_key
from redco_eqx.models._diffusion.attention import PixelAttention
from redco_eqx.models._diffusion.resnet import Downsample, ResnetBlock, Upsample
from redco_eqx.models._diffusion.transformer import SpatialTransformer

AnyAttention: TypeAlias = SpatialTransformer | PixelAttention
MakeResnet: TypeAlias = Callable[[int, int, Key], ResnetBlock]
"""`(channels in, channels out, key) -> block`."""
MakeAttention: TypeAlias = Callable[[Key], AnyAttention]


@dataclasses.dataclass(frozen=True)
class Given:
    """The inputs of every stage besides the image.

    - `time`, `text`: the features that condition the denoising; `None` in an autoencoder.
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
        """Apply a residual block to the image (and an earlier image beside it), and then the attention. Both
        are recomputed together.
        """

        def one(layer: tuple, x: Array) -> Array:
            resnet, attention, skip = layer
            x = x if skip is None else jnp.concatenate([x, skip], axis=1)
            x = resnet(x, self.time, key)
            return x if attention is None else attention(x, self.text, self.attention)

        return scan_layers(one, [(resnet, attention, skip)], x, remat=self.remat)

    def resize(
        self, layer: Downsample | Upsample, x: Float[Array, "b c _ _"], *size: tuple[int, int]
    ) -> Float[Array, "b c _ _"]:
        """Make a smaller image, or a larger one of this size. Keep all its channels whole, because other layers
        read it, too.
        """
        return scan_layers(lambda layer, x: layer(x, *size), [layer], x, remat=self.remat)


class DownBlock(eqx.Module):
    """Residual blocks, each followed by attention if the stage has it. All stages except the last then halve
    the size."""

    resnets: list[ResnetBlock]
    attentions: list[AnyAttention] | None
    downsamplers: list[Downsample] | None

    def __init__(
        self,
        num_in: Sequence[int],
        num_out: int,
        make_resnet: MakeResnet,
        make_attention: MakeAttention | None,
        *,
        padding: tuple[int, int] | None,
        key: Key,
    ):
        self.resnets, self.attentions, last_key = _make(num_in, num_out, make_resnet, make_attention, key)
        self.downsamplers = None
        if padding is not None:
            self.downsamplers = [Downsample(num_out, padding=padding, key=last_key)]

    def __call__(
        self, x: Float[Array, "b c h w"], given: Given, key: Key | None
    ) -> list[Float[Array, "b _ _ _"]]:
        """Return the output of each residual block (with its attention), and the smaller image last."""
        outputs: list[Array] = []
        for resnet, attention, own in _layers(self.resnets, self.attentions, key):
            x = given.run(resnet, attention, x, own)
            outputs.append(x)
        if self.downsamplers is not None:
            outputs.append(given.resize(self.downsamplers[0], x))
        return outputs


class MidBlock(eqx.Module):
    """Two residual blocks, with attention between them if the stage has it."""

    resnets: list[ResnetBlock]
    attentions: list[AnyAttention] | None

    def __init__(
        self, channels: int, make_resnet: MakeResnet, make_attention: MakeAttention | None, *, key: Key
    ):
        first_key, attention_key, second_key = jax.random.split(key, 3)
        self.resnets = [make_resnet(channels, channels, key) for key in (first_key, second_key)]
        self.attentions = None if make_attention is None else [make_attention(attention_key)]

    def __call__(self, x: Float[Array, "b c h w"], given: Given, key: Key | None) -> Float[Array, "b c h w"]:
        first_key, second_key = split_key(key, 2)
        first, second = self.resnets
        x = given.run(first, None if self.attentions is None else self.attentions[0], x, first_key)
        return given.run(second, None, x, second_key)


class UpBlock(eqx.Module):
    """Residual blocks, each followed by attention if the stage has it. All stages except the last then enlarge
    the image."""

    resnets: list[ResnetBlock]
    attentions: list[AnyAttention] | None
    upsamplers: list[Upsample] | None

    def __init__(
        self,
        num_in: Sequence[int],
        num_out: int,
        make_resnet: MakeResnet,
        make_attention: MakeAttention | None,
        *,
        is_last: bool,
        key: Key,
    ):
        self.resnets, self.attentions, last_key = _make(num_in, num_out, make_resnet, make_attention, key)
        self.upsamplers = None if is_last else [Upsample(num_out, key=last_key)]

    def __call__(
        self,
        x: Float[Array, "b c h w"],
        skips: Sequence[Float[Array, "b _ h w"] | None],
        given: Given,
        size: tuple[int, int] | None,
        key: Key | None,
    ) -> Float[Array, "b _ _ _"]:
        """Return the image at the given `size`, after residual blocks that each read one of `skips`."""
        for (resnet, attention, own), skip in zip(
            _layers(self.resnets, self.attentions, key), skips, strict=True
        ):
            x = given.run(resnet, attention, x, own, skip)
        if self.upsamplers is None:
            return x
        size = (2 * x.shape[2], 2 * x.shape[3]) if size is None else size
        return given.resize(self.upsamplers[0], x, size)


def _make(
    num_in: Sequence[int],
    num_out: int,
    make_resnet: MakeResnet,
    make_attention: MakeAttention | None,
    key: Key,
) -> tuple[list[ResnetBlock], list[AnyAttention] | None, Key]:
    """Make the layers of a stage, one per number of input channels, and return the remaining key with
    them.
    """
    resnets_key, attentions_key, last_key = jax.random.split(key, 3)
    keys = jax.random.split(resnets_key, len(num_in))
    resnets = [make_resnet(num, num_out, key) for num, key in zip(num_in, keys)]
    keys = jax.random.split(attentions_key, len(num_in))
    return resnets, None if make_attention is None else [make_attention(key) for key in keys], last_key


def _layers(
    resnets: list[ResnetBlock], attentions: list[AnyAttention] | None, key: Key | None
) -> list[tuple[ResnetBlock, AnyAttention | None, Key | None]]:
    """Return each residual block, its attention, and a key for it."""
    num = len(resnets)
    return list(zip(resnets, attentions or [None] * num, split_key(key, num), strict=True))
