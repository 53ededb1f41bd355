"""ViT (Dosovitskiy et al. 2021): without a head, and with a head over labels."""

import dataclasses
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from redco_eqx.types import Key
from redco_eqx_models._blocks.context import Context, Hidden
from redco_eqx_models._blocks.dropout import dropout, split_key
from redco_eqx_models._blocks.encoder import EncoderConfig, EncoderLayer, EncoderLayers
from redco_eqx_models._blocks.layers import LayerNorm, Linear
from redco_eqx_models._blocks.model import (
    Model,
    Options,
    make_layers,
    run_layers,
    splits_stream,
    whole_output,
)
from redco_eqx_models._blocks.multihead import Dense, pool_first


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(EncoderConfig):
    """ViT, base to huge, for square images of side `image_size`. `labels` are the
    outputs of a classifier."""

    model_type = "vit"
    architecture = "ViTModel"
    norm_first = True
    multiples = (("image_size", "patch_size"),)
    only = {"pooler_act": "tanh"}

    image_size: int = 224
    patch_size: int = 16
    num_channels: int = 3
    qkv_bias: bool = True

    @property
    def num_patches(self) -> int:
        """Number of patches of one image."""
        return (self.image_size // self.patch_size) ** 2


class PatchProjection(eqx.Module):
    """A convolution with a stride equal to its window: each patch of an image becomes a
    token."""

    weight: Float[Array, "out in height width"]
    bias: Float[Array, " out"]
    kernel_size: tuple[int, int] = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: Key):
        size = config.hidden_size
        patch = config.patch_size
        shape = (size, config.num_channels, patch, patch)
        self.weight = config.initializer_range * jax.random.normal(key, shape)
        self.bias = jnp.zeros(size)
        self.kernel_size = (patch, patch)

    def __call__(
        self, images: Float[Array, "b in height width"]
    ) -> Float[Array, "b t out"]:
        # Windows that do not overlap make the convolution a product with a matrix,
        # which runs faster, and which the layout can split.
        height, width = self.kernel_size
        patches = rearrange(
            images, "b c (i h) (j w) -> b (i j) (c h w)", h=height, w=width
        )
        matrix = rearrange(self.weight, "o c h w -> o (c h w)")
        return jnp.einsum("bti,oi->bto", patches, matrix) + self.bias


class ViTPatches(eqx.Module):
    """The patch projection, under the name that it has in model files."""

    projection: PatchProjection


class ViTEmbeddings(eqx.Module):
    """A class token before those of the patches, and positions."""

    cls_token: Float[Array, "1 1 size"]
    position_embeddings: Float[Array, "1 t size"]
    patch_embeddings: ViTPatches
    dropout: eqx.nn.Dropout
    config: ViTConfig = eqx.field(static=True)

    def __init__(self, config: ViTConfig, *, key: Key):
        token_key, position_key, patch_key = jax.random.split(key, 3)
        size = config.hidden_size
        std = config.initializer_range
        self.cls_token = std * jax.random.normal(token_key, (1, 1, size))
        self.position_embeddings = std * jax.random.normal(
            position_key, (1, config.num_patches + 1, size)
        )
        self.patch_embeddings = ViTPatches(PatchProjection(config, key=patch_key))
        self.dropout = eqx.nn.Dropout(config.hidden_dropout_prob)
        self.config = config

    def __call__(self, images: Float[Array, "b c h w"], key: Key | None) -> Hidden:
        expected = (
            self.config.num_channels,
            self.config.image_size,
            self.config.image_size,
        )
        if images.shape[1:] != expected:
            raise ValueError(
                f"pixel_values has shape {images.shape}, but it must be (batch, "
                f"channels, height, width) with {expected} for each image, as its "
                "configuration says."
            )
        patches = self.patch_embeddings.projection(images)
        first = jnp.broadcast_to(
            self.cls_token, (images.shape[0], 1, self.cls_token.shape[-1])
        )
        x = jnp.concatenate([first.astype(patches.dtype), patches], axis=1)
        return dropout(self.dropout, x + self.position_embeddings, key)


class ViTModel(Model):
    """ViT without a head: a call returns the hidden states, and `pool` reads the first
    of them."""

    embeddings: ViTEmbeddings
    encoder: EncoderLayers
    layernorm: LayerNorm
    pooler: Dense | None
    config: ViTConfig = eqx.field(static=True)

    stacks = ("encoder.layer",)
    outer = ("vit.",)
    dropped = (r"^classifier\.",)
    # A file of a classifier has no pooler.
    heads = ("pooler",)

    def __init__(
        self,
        config: ViTConfig,
        *,
        pools: bool = True,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        embeddings_key, layers_key, pooler_key = jax.random.split(key, 3)
        self.embeddings = ViTEmbeddings(config, key=embeddings_key)
        self.encoder = EncoderLayers(
            make_layers(EncoderLayer, config, stacked=stacked, key=layers_key)
        )
        self.layernorm = config.make_norm()
        self.pooler = None
        if pools:
            self.pooler = Dense(config.make_linear(config.hidden_size, key=pooler_key))

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        size = self.config.image_size
        return (
            jax.ShapeDtypeStruct(
                (batch_size, self.config.num_channels, size, size), jnp.float32
            ),
        )

    def hidden_states(
        self, pixel_values: Float[Array, "b c h w"], *, key: Key | None = None
    ) -> Hidden:
        """Return the output of the last layer, normalised: first the class token's,
        then the patches'.

        **Arguments:**

        - `pixel_values`: images as `image_processor` makes them.
        - `key`: for dropout, which needs a key and a model that is not in inference
            mode (`eqx.nn.inference_mode`).
        """
        embed_key, layers_key = split_key(key, 2)
        x = self.embeddings(pixel_values, embed_key)
        num_rows, num_tokens, _ = x.shape
        positions = jnp.broadcast_to(jnp.arange(num_tokens), (num_rows, num_tokens))
        is_split = splits_stream(self, num_rows, num_tokens)
        context = Context(positions, None, None, self.attention, is_split, causal=False)
        x, _ = run_layers(
            self.encoder.layer, x, context, None, remat=self.remat, key=layers_key
        )
        return whole_output(self, self.layernorm(x), context)

    def __call__(
        self, pixel_values: Float[Array, "b c h w"], *, key: Key | None = None
    ) -> Hidden:
        """Return `hidden_states`; the arguments are the same."""
        return self.hidden_states(pixel_values, key=key)

    def pool(self, hidden: Hidden) -> Float[Array, "b size"]:
        """Return a vector for the whole image."""
        return pool_first(self.pooler, hidden)


class ViTForImageClassification(Model):
    """ViT with one output per label."""

    vit: ViTModel
    classifier: Linear
    config: ViTConfig = eqx.field(static=True)

    architecture = "ViTForImageClassification"
    stacks = ("vit.encoder.layer",)
    prefixes = ("vit.",)
    dropped = (r"\bpooler\.",)
    heads = ("classifier",)

    def __init__(
        self,
        config: ViTConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        # Its head reads the class token itself, as in transformers.
        self.vit = ViTModel(
            config, pools=False, stacked=stacked, key=body_key, **options
        )
        self.classifier = config.make_linear(len(config.labels.names), key=head_key)

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        return self.vit.example(batch_size)

    def __call__(
        self, pixel_values: Float[Array, "b c h w"], *, key: Key | None = None
    ) -> Float[Array, "b labels"]:
        """Compute the logit of each label. The arguments are those of
        `ViTModel.hidden_states`."""
        return self.classifier(self.vit.hidden_states(pixel_values, key=key)[:, 0])
