"""CLIP's text encoder (Radford et al. 2021), and OpenCLIP's: the text encoders of
Stable Diffusion."""

import dataclasses
import functools
from typing import Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.config import Config
from redco_eqx_models._blocks.context import (
    Context,
    Hidden,
    Ids,
    LayerCache,
    LayerOutput,
)
from redco_eqx_models._blocks.encoder import encode_tokens
from redco_eqx_models._blocks.layers import Embedding, LayerNorm, Linear
from redco_eqx_models._blocks.model import Model, Options, make_layers
from redco_eqx_models._blocks.multihead import MultiHeadAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class CLIPTextConfig(Config):
    """The text half of CLIP; Stable Diffusion 2 has OpenCLIP's, with 23 layers and
    exact `gelu`."""

    model_type = "clip_text_model"
    architecture = "CLIPTextModel"
    has_positions = True

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    attention_dropout: float = 0.0
    initializer_factor: float = 1.0
    bos_token_id: int | None = 49406
    eos_token_id: int | tuple[int, ...] | None = 49407
    pad_token_id: int | None = 1


class CLIPTextEmbeddings(eqx.Module):
    """Embeddings of tokens and positions. Positions are counted from 0, including
    padding."""

    token_embedding: Embedding
    position_embedding: Embedding

    def __init__(self, config: CLIPTextConfig, *, key: Key):
        token_key, position_key = jax.random.split(key)
        size = config.hidden_size
        std = 0.02 * config.initializer_factor
        self.token_embedding = Embedding(
            config.vocab_size, size, std=std, key=token_key
        )
        self.position_embedding = Embedding(
            config.max_position_embeddings, size, std=std, key=position_key
        )

    def __call__(self, input_ids: Ids, context: Context, _: Key | None) -> Hidden:
        x = context.embed(self.token_embedding, input_ids)
        # Not `context.positions`, which do not count padding.
        positions = jnp.broadcast_to(jnp.arange(input_ids.shape[1]), input_ids.shape)
        return x + self.position_embedding(positions)


class CLIPMLP(eqx.Module):
    """Two projections with an activation between them."""

    fc1: Linear
    fc2: Linear


class CLIPEncoderLayer(eqx.Module):
    """Attention, then MLP, each with a norm before it, added to the stream."""

    self_attn: MultiHeadAttention
    layer_norm1: LayerNorm
    mlp: CLIPMLP
    layer_norm2: LayerNorm
    config: CLIPTextConfig = eqx.field(static=True)

    def __init__(self, config: CLIPTextConfig, *, key: Key):
        attention_key, fc1_key, fc2_key = jax.random.split(key, 3)
        size = config.hidden_size
        inner = config.intermediate_size
        factor = config.initializer_factor
        std = size**-0.5 * (2 * config.num_hidden_layers) ** -0.5 * factor
        self.self_attn = MultiHeadAttention(
            size,
            config.num_attention_heads,
            dropout=config.attention_dropout,
            std=std,
            key=attention_key,
        )
        self.layer_norm1 = LayerNorm(size, eps=config.layer_norm_eps)
        self.mlp = CLIPMLP(
            Linear(size, inner, std=(2 * size) ** -0.5 * factor, key=fc1_key),
            Linear(inner, size, std=std, key=fc2_key),
        )
        self.layer_norm2 = LayerNorm(size, eps=config.layer_norm_eps)
        self.config = config

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        y, cache = self.self_attn(self.layer_norm1(x), context, cache, key)
        x = x + y
        y = context.mlp(
            self.layer_norm2(x), self.mlp.fc1, self.config.hidden_act, self.mlp.fc2
        )
        return x + y, cache


class CLIPEncoder(eqx.Module):
    """The layers, under their name in files."""

    layers: PyTree


class CLIPTextTransformer(eqx.Module):
    """The whole text encoder, under the name that it has in model files."""

    embeddings: CLIPTextEmbeddings
    encoder: CLIPEncoder
    final_layer_norm: LayerNorm


class CLIPTextModel(Model):
    """CLIP's text encoder: a call returns the hidden states."""

    text_model: CLIPTextTransformer
    config: CLIPTextConfig = eqx.field(static=True)

    stacks = ("text_model.encoder.layers",)
    vocabulary = (r"\.token_embedding$",)
    prefixes = ("text_model.",)
    # A buffer of old files, and the image half of a file of the whole CLIP.
    ignored = (
        r"\bposition_ids$",
        r"^vision_model\.",
        r"^visual_projection\.",
        r"^logit_scale$",
    )
    dropped = (r"^text_projection\.",)

    def __init__(
        self,
        config: CLIPTextConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        embeddings_key, layers_key = jax.random.split(key)
        self.text_model = CLIPTextTransformer(
            CLIPTextEmbeddings(config, key=embeddings_key),
            CLIPEncoder(
                make_layers(CLIPEncoderLayer, config, stacked=stacked, key=layers_key)
            ),
            LayerNorm(config.hidden_size, eps=config.layer_norm_eps),
        )

    def __call__(
        self,
        input_ids: Ids,
        *,
        attention_mask: Array | None = None,
        key: Key | None = None,
    ) -> Hidden:
        """Return the output of the last layer, normalised. A token sees only the tokens
        up to itself.

        **Arguments:**

        - `input_ids`: tokens. Stable Diffusion was trained on texts padded to 77
            tokens, without a mask.
        - `attention_mask`: `(batch, t)`, 0 where a token is padding.
        - `key`: for dropout, which needs a key and a model that is not in inference
            mode (`eqx.nn.inference_mode`).
        """
        embed = functools.partial(self.text_model.embeddings, input_ids)
        layers = self.text_model.encoder.layers
        x = encode_tokens(
            self,
            input_ids,
            embed,
            layers,
            attention_mask=attention_mask,
            causal=True,
            key=key,
        )
        return self.text_model.final_layer_norm(x)
