"""The UNet of Stable Diffusion 1 and 2 (Rombach et al. 2022), which predicts the noise
in an image, given a text."""

import dataclasses
from functools import partial
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redco_eqx.types import Key
from redco_eqx_models._blocks.dropout import split_key
from redco_eqx_models._blocks.model import Options
from redco_eqx_models._diffusion.blocks import (
    Given,
    MakeAttention,
    SpatialTransformer,
    Stage,
)
from redco_eqx_models._diffusion.layers import (
    Conv,
    GroupNorm,
    ResnetBlock,
    TimeEmbedding,
    sinusoids,
)
from redco_eqx_models._diffusion.model import ImageModel, StagesConfig, check_image

_DOWN = ("DownBlock2D", "CrossAttnDownBlock2D")
_UP = ("UpBlock2D", "CrossAttnUpBlock2D")


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNet2DConditionConfig(StagesConfig):
    """The configuration of a UNet. The defaults are those of Stable Diffusion 1, except
    `cross_attention_dim` (768 there).

    - `attention_head_dim`: the **number** of heads, despite its name: one for all
        stages, or one for each.
    - `layers_per_block`, `transformer_layers_per_block`, `cross_attention_dim`: also
        one for all stages, or one for each.
    """

    joined = {"proj": ("value", "gate")}
    model_type = "UNet2DConditionModel"
    # The defaults of the options that later models (SDXL, for example) brought.
    only = {
        **dict.fromkeys(
            (
                "addition_embed_type",
                "class_embed_type",
                "encoder_hid_dim",
                "encoder_hid_dim_type",
                "num_attention_heads",
                "num_class_embeds",
                "reverse_transformer_layers_per_block",
                "time_cond_proj_dim",
                "time_embedding_act_fn",
                "time_embedding_dim",
                "timestep_post_act",
            )
        ),
        **dict.fromkeys(
            (
                "center_input_sample",
                "class_embeddings_concat",
                "dual_cross_attention",
                "only_cross_attention",
                "resnet_skip_time_act",
            ),
            False,
        ),
        **dict.fromkeys(
            ("downsample_padding", "mid_block_scale_factor", "resnet_out_scale_factor"),
            1,
        ),
        **dict.fromkeys(("conv_in_kernel", "conv_out_kernel"), 3),
        "act_fn": "silu",
        "attention_type": "default",
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "resnet_time_scale_shift": "default",
        "time_embedding_type": "positional",
    }

    sample_size: int | tuple[int, ...] | None = None
    in_channels: int = 4
    out_channels: int = 4
    flip_sin_to_cos: bool = True
    freq_shift: int = 0
    down_block_types: tuple[str, ...] = (_DOWN[1], _DOWN[1], _DOWN[1], _DOWN[0])
    up_block_types: tuple[str, ...] = (_UP[0], _UP[1], _UP[1], _UP[1])
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int | tuple[int, ...] = 2
    dropout: float = 0.0
    norm_eps: float = 1e-5
    cross_attention_dim: int | tuple[int, ...] = 1280
    transformer_layers_per_block: int | tuple[int, ...] = 1
    attention_head_dim: int | tuple[int, ...] = 8
    use_linear_projection: bool = False

    def __post_init__(self) -> None:
        self.check_stages(down_block_types=_DOWN, up_block_types=_UP)
        for name in (
            "layers_per_block",
            "cross_attention_dim",
            "transformer_layers_per_block",
        ):
            self.per_stage(name)
        for channels, num_heads in zip(
            self.block_out_channels, self.per_stage("attention_head_dim")
        ):
            if channels % num_heads:
                raise self.error(
                    f"attention_head_dim={self.attention_head_dim} is the number of "
                    f"heads, not their size, but {channels} of block_out_channels is "
                    f"not a multiple of {num_heads}."
                )


class UNet2DConditionModel(ImageModel):
    """A UNet: stages that reduce images, a middle stage, and stages that enlarge the
    images again and also read the outputs of the first stages.
    """

    conv_in: Conv
    time_embedding: TimeEmbedding
    down_blocks: list[Stage]
    mid_block: Stage
    up_blocks: list[Stage]
    conv_norm_out: GroupNorm
    conv_out: Conv
    config: UNet2DConditionConfig = eqx.field(static=True)

    def __init__(
        self,
        config: UNet2DConditionConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, stacked=stacked, **options)
        in_key, time_key, down_key, mid_key, up_key, out_key = jax.random.split(key, 6)
        channels = config.block_out_channels
        num_groups = config.norm_num_groups
        time_size = 4 * channels[0]
        num_stages = len(channels)
        make_resnet = partial(
            ResnetBlock,
            time_size=time_size,
            num_groups=num_groups,
            eps=config.norm_eps,
            dropout=config.dropout,
        )
        make_attention = partial(
            SpatialTransformer,
            num_groups=num_groups,
            is_linear=config.use_linear_projection,
        )

        def attention_of(stage: int) -> MakeAttention:
            names = (
                "cross_attention_dim",
                "attention_head_dim",
                "transformer_layers_per_block",
            )
            sizes = (config.per_stage(name)[stage] for name in names)
            return partial(make_attention, channels[stage], *sizes)

        num_layers = config.per_stage("layers_per_block")
        self.conv_in = Conv(config.in_channels, channels[0], 3, key=in_key)
        self.time_embedding = TimeEmbedding(channels[0], time_size, key=time_key)
        # Channels of the outputs that the way up reads.
        self.down_blocks = []
        skipped = [channels[0]]
        for i, key in enumerate(jax.random.split(down_key, num_stages)):
            num_in = [channels[max(i - 1, 0)], *[channels[i]] * (num_layers[i] - 1)]
            attention = None
            if config.down_block_types[i] == _DOWN[1]:
                attention = attention_of(i)
            padding = (1, 1) if i < num_stages - 1 else None
            block = Stage(
                num_in, channels[i], make_resnet, attention, padding=padding, key=key
            )
            self.down_blocks.append(block)
            skipped += [channels[i]] * (num_layers[i] + (padding is not None))
        last = channels[-1]
        attention = attention_of(num_stages - 1)
        self.mid_block = Stage(
            [last] * 2, last, make_resnet, attention, is_middle=True, key=mid_key
        )
        self.up_blocks = []
        before = last
        for i, key in zip(
            reversed(range(num_stages)), jax.random.split(up_key, num_stages)
        ):
            # One more residual block than on the way down, which reads the smaller
            # image or, in the stage of the largest images, the output of `conv_in`.
            from_below = (before, *[channels[i]] * num_layers[i])
            num_in = [num + skipped.pop() for num in from_below]
            before = channels[i]
            attention = None
            # The kinds of stages on the way up are listed from the smallest images on.
            if config.up_block_types[num_stages - 1 - i] == _UP[1]:
                attention = attention_of(i)
            block = Stage(
                num_in, before, make_resnet, attention, enlarges=i > 0, key=key
            )
            self.up_blocks.append(block)
        self.conv_norm_out = GroupNorm(num_groups, channels[0], eps=config.norm_eps)
        self.conv_out = Conv(channels[0], config.out_channels, 3, key=out_key)

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        # Side of the latents: the last stage has 8 x 8.
        size = 2 ** (self.config.num_layers + 2)
        (num_features, *_) = self.config.per_stage("cross_attention_dim")
        return (
            jax.ShapeDtypeStruct(
                (batch_size, self.config.in_channels, size, size), jnp.float32
            ),
            jax.ShapeDtypeStruct((batch_size,), jnp.int32),
            jax.ShapeDtypeStruct((batch_size, 77, num_features), jnp.float32),
        )

    def __call__(
        self,
        sample: Float[Array, "b c h w"],
        timesteps: Int[Array, " b"],
        encoder_hidden_states: Float[Array, "b t d"],
        *,
        key: Key | None = None,
    ) -> Float[Array, "b _ h w"]:
        """Predict the noise in images, or the other target that the model was trained
        on.

        **Arguments:**

        - `sample`: latents, with `in_channels` channels.
        - `timesteps`: the noise level of each image.
        - `encoder_hidden_states`: the output of the text encoder.
        - `key`: for dropout, which needs a key and a model that is not in inference
            mode (`eqx.nn.inference_mode`).

        **Raises:** `ValueError` for a wrong number of channels, or of features of the
        text.
        """
        config = self.config
        check_image("sample", sample, config.in_channels)
        sizes = set(config.per_stage("cross_attention_dim"))
        if {encoder_hidden_states.shape[-1]} != sizes:
            raise ValueError(
                f"encoder_hidden_states has shape {encoder_hidden_states.shape}, but "
                "its last dim must be "
                f"cross_attention_dim={config.cross_attention_dim}."
            )
        # In diffusers too, the sinusoids are float32, and are rounded to the dtype of
        # the images before the MLP.
        time = sinusoids(
            timesteps,
            config.block_out_channels[0],
            flip_sin_to_cos=config.flip_sin_to_cos,
            freq_shift=config.freq_shift,
        )
        time = self.time_embedding(time.astype(sample.dtype))
        given = Given(time, encoder_hidden_states, self.attention, self.remat)
        down_key, mid_key, up_key = split_key(key, 3)
        x = self.conv_in(sample)
        skips = [x]
        for block, own in zip(
            self.down_blocks, split_key(down_key, len(self.down_blocks))
        ):
            skips += block.down(x, given, own)
            x = skips[-1]
        x = self.mid_block.down(x, given, mid_key)[-1]
        for block, own in zip(self.up_blocks, split_key(up_key, len(self.up_blocks))):
            taken = [skips.pop() for _ in block.resnets]
            size = None
            if skips:
                # The size of the image that the next stage reads beside this one. It is
                # odd if a stage on the way down rounded up.
                size = (skips[-1].shape[2], skips[-1].shape[3])
            x = block.up(x, taken, given, size, own)
        return self.conv_out(jax.nn.silu(self.conv_norm_out(x)))
