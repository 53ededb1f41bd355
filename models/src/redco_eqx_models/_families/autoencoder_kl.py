"""The autoencoder of Stable Diffusion (Rombach et al. 2022): images to small latents,
and back."""

import dataclasses
from functools import partial
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redco_eqx.types import Key
from redco_eqx_models._blocks.layers import maybe
from redco_eqx_models._blocks.model import Options
from redco_eqx_models._diffusion.blocks import Given, MakeResnet, PixelAttention, Stage
from redco_eqx_models._diffusion.layers import Conv, GroupNorm, ResnetBlock
from redco_eqx_models._diffusion.model import ImageModel, StagesConfig, check_image

EPS = 1e-6
"""The number added to the variance in all norms, as in diffusers' `vae.py`. It is not
in the configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoencoderKLConfig(StagesConfig):
    """The configuration of an autoencoder, by default of one stage, as in diffusers;
    Stable Diffusion's has four.

    - `scaling_factor`: the factor on latents before diffusion. Neither `encode` nor
        `decode` applies it.
    """

    model_type = "AutoencoderKL"
    only = {
        "act_fn": "silu",
        "latents_mean": None,
        "latents_std": None,
        "shift_factor": None,
    }

    sample_size: int | tuple[int, ...] = 32
    in_channels: int = 3
    out_channels: int = 3
    latent_channels: int = 4
    down_block_types: tuple[str, ...] = ("DownEncoderBlock2D",)
    up_block_types: tuple[str, ...] = ("UpDecoderBlock2D",)
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    scaling_factor: float = 0.18215
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True

    def __post_init__(self) -> None:
        self.check_stages(
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
        )

    @property
    def downscale(self) -> int:
        """The number of pixels of an image per latent, in height and in width."""
        return 2 ** (self.num_layers - 1)


class Encoder(eqx.Module):
    """Map images to the mean and logarithm of the variance of their latents, side by
    side."""

    conv_in: Conv
    down_blocks: list[Stage]
    mid_block: Stage
    conv_norm_out: GroupNorm
    conv_out: Conv

    def __init__(self, config: AutoencoderKLConfig, *, key: Key):
        in_key, mid_key, out_key, *keys = jax.random.split(key, 3 + config.num_layers)
        channels = config.block_out_channels
        last = config.num_layers - 1
        self.conv_in = Conv(config.in_channels, channels[0], 3, key=in_key)
        self.down_blocks = []
        make_resnet = _resnet_maker(config)
        for i, key in enumerate(keys):
            num_in = [
                channels[max(i - 1, 0)],
                *[channels[i]] * (config.layers_per_block - 1),
            ]
            # Zeros only on the right and below: with a padding of 0, `Downsample2D` of
            # diffusers adds them before the convolution. The UNet has them on all
            # sides.
            padding = None if i == last else (0, 1)
            self.down_blocks.append(
                Stage(num_in, channels[i], make_resnet, None, padding=padding, key=key)
            )
        self.mid_block = _make_mid_block(config, mid_key)
        self.conv_norm_out = GroupNorm(config.norm_num_groups, channels[-1], eps=EPS)
        self.conv_out = Conv(channels[-1], 2 * config.latent_channels, 3, key=out_key)

    def __call__(
        self, images: Float[Array, "b c h w"], given: Given
    ) -> Float[Array, "b moments _ _"]:
        x = self.conv_in(images)
        for block in self.down_blocks:
            x = block.down(x, given, None)[-1]
        x = self.mid_block.down(x, given, None)[-1]
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))


class Decoder(eqx.Module):
    """Map latents to images."""

    conv_in: Conv
    mid_block: Stage
    up_blocks: list[Stage]
    conv_norm_out: GroupNorm
    conv_out: Conv

    def __init__(self, config: AutoencoderKLConfig, *, key: Key):
        in_key, mid_key, out_key, *keys = jax.random.split(key, 3 + config.num_layers)
        channels = config.block_out_channels[::-1]
        last = config.num_layers - 1
        self.conv_in = Conv(config.latent_channels, channels[0], 3, key=in_key)
        self.mid_block = _make_mid_block(config, mid_key)
        self.up_blocks = []
        make_resnet = _resnet_maker(config)
        for i, key in enumerate(keys):
            # As in diffusers, one more residual block than in the encoder's stages.
            num_in = [channels[max(i - 1, 0)], *[channels[i]] * config.layers_per_block]
            self.up_blocks.append(
                Stage(
                    num_in, channels[i], make_resnet, None, enlarges=i != last, key=key
                )
            )
        self.conv_norm_out = GroupNorm(config.norm_num_groups, channels[-1], eps=EPS)
        self.conv_out = Conv(channels[-1], config.out_channels, 3, key=out_key)

    def __call__(
        self, latents: Float[Array, "b c h w"], given: Given
    ) -> Float[Array, "b _ _ _"]:
        x = self.mid_block.down(self.conv_in(latents), given, None)[-1]
        for block in self.up_blocks:
            x = block.up(x, [None] * len(block.resnets), given, None, None)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))


class AutoencoderKL(ImageModel):
    """A variational autoencoder. It draws no random numbers: the caller draws from the
    output of `encode`."""

    encoder: Encoder
    decoder: Decoder
    quant_conv: Conv | None
    post_quant_conv: Conv | None
    config: AutoencoderKLConfig = eqx.field(static=True)

    # The names of the attention in old files, which diffusers renames too when it loads
    # them.
    renamed = {
        r"\.query\.": ".to_q.",
        r"\.key\.": ".to_k.",
        r"\.value\.": ".to_v.",
        r"\.proj_attn\.": ".to_out.0.",
    }
    windowed = (r"\.attentions\.0\.to_(q|k|v|out\.0)\.weight$",)

    def __init__(
        self,
        config: AutoencoderKLConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, stacked=stacked, **options)
        encoder_key, decoder_key, after_key, before_key = jax.random.split(key, 4)
        latent = config.latent_channels
        self.encoder = Encoder(config, key=encoder_key)
        self.decoder = Decoder(config, key=decoder_key)
        self.quant_conv = self.post_quant_conv = None
        if config.use_quant_conv:
            self.quant_conv = Conv(2 * latent, 2 * latent, 1, key=after_key)
        if config.use_post_quant_conv:
            self.post_quant_conv = Conv(latent, latent, 1, key=before_key)

    @property
    def _given(self) -> Given:
        return Given(None, None, self.attention, self.remat)

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        size = 8 * self.config.downscale
        return (
            jax.ShapeDtypeStruct(
                (batch_size, self.config.in_channels, size, size), jnp.float32
            ),
        )

    def __call__(self, images: Float[Array, "b c h w"]) -> Float[Array, "b _ h w"]:
        """Return images reconstructed from the mean of their latents."""
        return self.decode(self.encode(images)[0])

    def encode(
        self, images: Float[Array, "b c h w"]
    ) -> tuple[Float[Array, "b latent _ _"], Float[Array, "b latent _ _"]]:
        """Return the mean and the logarithm of the variance of each latent; the latter
        is clipped to -30 and 20.

        **Arguments:**

        - `images`: from -1 to 1.

        **Raises:** `ValueError` for a wrong number of channels, or a height or width
        that is not a multiple of `config.downscale`.
        """
        check_image("images", images, self.config.in_channels, self.config.downscale)
        x = maybe(self.quant_conv, self.encoder(images, self._given))
        mean, log_variance = jnp.split(x, 2, axis=1)
        # `DiagonalGaussianDistribution` of diffusers has these bounds.
        return mean, jnp.clip(log_variance, -30, 20)

    def decode(self, latents: Float[Array, "b latent h w"]) -> Float[Array, "b c _ _"]:
        """Decode latents into images with values from about -1 to 1.

        **Raises:** `ValueError` for a wrong number of channels.
        """
        check_image("latents", latents, self.config.latent_channels)
        return self.decoder(maybe(self.post_quant_conv, latents), self._given)


def _resnet_maker(config: AutoencoderKLConfig) -> MakeResnet:
    return partial(
        ResnetBlock, time_size=None, num_groups=config.norm_num_groups, eps=EPS
    )


def _make_mid_block(config: AutoencoderKLConfig, key: Key) -> Stage:
    channels = config.block_out_channels[-1]
    make_attention = partial(
        PixelAttention, channels, num_groups=config.norm_num_groups, eps=EPS
    )
    attention = None
    if config.mid_block_add_attention:
        attention = make_attention
    return Stage(
        [channels] * 2,
        channels,
        _resnet_maker(config),
        attention,
        is_middle=True,
        key=key,
    )
