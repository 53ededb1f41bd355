"""Texts about images: a GPT-2 that reads the output of a ViT."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.config import BaseConfig, Json
from redco_eqx_models._blocks.context import Context, Hidden, Ids
from redco_eqx_models._blocks.encoder_decoder import EncoderDecoder
from redco_eqx_models._blocks.layers import Linear, maybe
from redco_eqx_models._blocks.model import Options
from redco_eqx_models._blocks.multihead import Dense
from redco_eqx_models._families.gpt2 import GPT2Config, GPT2LMHeadModel
from redco_eqx_models._families.vit import ViTConfig, ViTModel

_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionEncoderDecoderConfig(BaseConfig):
    """A ViT and a GPT-2, each with its own configuration. Missing special tokens come
    from the decoder's."""

    model_type = "vision-encoder-decoder"
    architecture = "VisionEncoderDecoderModel"
    only = {"tie_word_embeddings": False}
    has_positions = True

    encoder: ViTConfig = dataclasses.field(default_factory=ViTConfig)
    decoder: GPT2Config = dataclasses.field(default_factory=GPT2Config)
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    decoder_start_token_id: int | None = None

    def __post_init__(self) -> None:
        # The dataclass is frozen, but its values are not settled before the end of
        # this.
        decoder = dataclasses.replace(self.decoder, add_cross_attention=True)
        object.__setattr__(self, "decoder", decoder)
        for name in _TOKENS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.decoder, name))
        if self.decoder_start_token_id is None:
            object.__setattr__(
                self, "decoder_start_token_id", self.decoder.bos_token_id
            )

    @property
    def vocab_size(self) -> int:
        """Size of the decoder's vocabulary."""
        return self.decoder.vocab_size

    def entry(self, name: str, *default: Any) -> Any:
        """Return the decoder's entry."""
        return self.decoder.entry(name, *default)

    @classmethod
    def from_json(
        cls, raw: Mapping[str, Json], base: Any = None
    ) -> "VisionEncoderDecoderConfig":
        """Read both parts. Raises `ValueError` if the encoder is not a ViT or the
        decoder not a GPT-2."""
        decoder = raw.get("decoder")
        if isinstance(decoder, Mapping):
            # True in the file, which a GPT-2 read alone refuses.
            raw = {**raw, "decoder": {**decoder, "add_cross_attention": False}}
        return super().from_json(raw, base)

    def to_json(self) -> dict[str, Json]:
        """Return the entries of `config.json`."""
        decoder = {**self.decoder.to_json(), "is_decoder": True}
        own = {
            "decoder": decoder,
            "is_encoder_decoder": True,
            "tie_word_embeddings": False,
        }
        return super().to_json() | own


class VisionEncoderDecoderModel(EncoderDecoder):
    """A GPT-2 that reads a ViT, with a projection between them if they differ in width.

    Files have the encoder's pooler, which nothing uses. It is kept but not trained.
    """

    encoder: ViTModel
    decoder: GPT2LMHeadModel
    enc_to_dec_proj: Linear | None
    lm_head: None
    config: VisionEncoderDecoderConfig = eqx.field(static=True)

    stacks = ("encoder.encoder.layer", "decoder.transformer.h")
    fused = GPT2LMHeadModel.fused
    ignored = (r"\b(attn|crossattention)\.(masked_)?bias$",)
    tied = {"decoder.lm_head.weight": "decoder.transformer.wte.weight"}
    buffers = ("encoder.pooler.dense.weight", "encoder.pooler.dense.bias")

    def __init__(
        self,
        config: VisionEncoderDecoderConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        encoder_key, decoder_key, between_key = jax.random.split(key, 3)
        wide = config.encoder.hidden_size
        narrow = config.decoder.n_embd
        encoder = ViTModel(
            config.encoder, pools=False, stacked=stacked, key=encoder_key, **options
        )
        pooler = eqx.filter_eval_shape(
            lambda key: Dense(Linear(wide, wide, std=1.0, key=key)), key
        )
        # A broadcast zero takes no memory.
        pooler = jax.tree.map(lambda x: np.broadcast_to(np.float32(0), x.shape), pooler)
        self.encoder = eqx.tree_at(
            lambda e: e.pooler, encoder, pooler, is_leaf=lambda x: x is None
        )
        self.decoder = GPT2LMHeadModel(
            config.decoder, stacked=stacked, key=decoder_key, **options
        )
        std = config.decoder.initializer_range
        self.enc_to_dec_proj = None
        if wide != narrow:
            self.enc_to_dec_proj = Linear(wide, narrow, std=std, key=between_key)
        # The head is the decoder's own, see `head`.
        self.lm_head = None

    @property
    def head(self) -> PyTree:
        return self.decoder.head

    def example(self, batch_size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        tokens = self.decoder.example_tokens(batch_size)
        return *self.encoder.example(batch_size), tokens

    def encoder_states(
        self,
        inputs: Float[Array, "b c h w"],
        *,
        attention_mask: Array | None = None,
        key: Key | None = None,
    ) -> Float[Array, "b s size"]:
        if attention_mask is not None:
            raise ValueError("attention_mask: images have no padding. Leave it out.")
        hidden = self.encoder.hidden_states(inputs, key=key)
        return maybe(self.enc_to_dec_proj, hidden)

    def cross_projections(self, layer: PyTree) -> tuple[PyTree]:
        return (layer.crossattention.c_attn,)

    def embed(self, input_ids: Ids, context: Context, key: Key | None) -> Hidden:
        return self.decoder.embed(input_ids, context, key)

    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        return self.decoder.finish(x, key)
