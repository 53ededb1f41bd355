"""Encoders: every token sees all others."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks import layers
from redco_eqx_models._blocks.attention import Bias
from redco_eqx_models._blocks.config import BaseConfig, Labels
from redco_eqx_models._blocks.context import (
    Context,
    Hidden,
    LayerCache,
    LayerOutput,
)
from redco_eqx_models._blocks.dropout import dropout, split_key
from redco_eqx_models._blocks.layers import ACTIVATIONS, Linear, make_linears, maybe
from redco_eqx_models._blocks.model import (
    Model,
    make_context,
    run_layers,
    whole_output,
)
from redco_eqx_models._blocks.multihead import Dense, HeadsAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(BaseConfig):
    """The entries of BERT and ViT, base to huge. `labels` are the outputs of a
    classifier."""

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    labels: Labels = dataclasses.field(default_factory=Labels)

    norm_first: ClassVar[bool]
    """True if norms come before attention and MLP, as in ViT, and not after them, as in
    BERT."""

    def make_norm(self) -> layers.LayerNorm:
        """Return a new norm of the stream."""
        return layers.LayerNorm(self.hidden_size, eps=self.layer_norm_eps)

    def make_linear(self, out_features: int, *, key: Key) -> Linear:
        """Return a new projection of the stream."""
        return Linear(
            self.hidden_size, out_features, std=self.initializer_range, key=key
        )


class EncoderOutput(eqx.Module):
    """The end of attention and MLP: a projection, added to the stream, and in BERT a
    norm."""

    dense: Linear
    LayerNorm: layers.LayerNorm | None
    dropout: eqx.nn.Dropout

    def __init__(self, in_features: int, config: EncoderConfig, *, key: Key):
        self.dense = Linear(
            in_features, config.hidden_size, std=config.initializer_range, key=key
        )
        # ViT has its norms in `EncoderLayer`, under other names.
        self.LayerNorm = None if config.norm_first else config.make_norm()
        self.dropout = eqx.nn.Dropout(config.hidden_dropout_prob)

    def __call__(
        self,
        x: Hidden,
        hidden: Array,
        context: Context,
        key: Key | None,
        *,
        unit: int = 1,
    ) -> Hidden:
        x = x + dropout(self.dropout, context.row(hidden, self.dense, unit=unit), key)
        return maybe(self.LayerNorm, x)


class SelfAttention(HeadsAttention):
    """Attention as in BERT and ViT: a module beside it has the output projection."""

    query: Linear
    key: Linear
    value: Linear

    names = ("query", "key", "value")

    def __init__(self, config: EncoderConfig, *, key: Key):
        sizes = [(config.hidden_size, config.hidden_size)] * 3
        bias = config.entry("qkv_bias", True)
        projections = make_linears(
            key, *sizes, use_bias=bias, std=config.initializer_range
        )
        self.query, self.key, self.value = projections
        self.dropout = eqx.nn.Dropout(config.attention_probs_dropout_prob)
        self.num_heads = config.num_attention_heads


class EncoderAttention(eqx.Module):
    """Attention, which is `self` in files of BERT and `attention` in those of ViT, and
    its end."""

    self: SelfAttention | None
    attention: SelfAttention | None
    output: EncoderOutput

    def __init__(this, config: EncoderConfig, *, key: Key):  # pyright: ignore[reportSelfClsParameterName]
        heads_key, output_key = jax.random.split(key)
        heads = SelfAttention(config, key=heads_key)
        this.self = this.attention = None
        if config.norm_first:
            this.attention = heads
        else:
            this.self = heads
        this.output = EncoderOutput(config.hidden_size, config, key=output_key)


class EncoderLayer(eqx.Module):
    """Attention, then MLP, each with a norm before or after it, added to the stream."""

    attention: EncoderAttention
    intermediate: Dense
    output: EncoderOutput
    layernorm_before: layers.LayerNorm | None
    layernorm_after: layers.LayerNorm | None
    config: EncoderConfig = eqx.field(static=True)

    def __init__(self, config: EncoderConfig, *, key: Key):
        attention_key, in_key, out_key = jax.random.split(key, 3)
        self.attention = EncoderAttention(config, key=attention_key)
        self.intermediate = Dense(
            config.make_linear(config.intermediate_size, key=in_key)
        )
        self.output = EncoderOutput(config.intermediate_size, config, key=out_key)
        self.layernorm_before = self.layernorm_after = None
        if config.norm_first:
            # `layernorm_after` comes after attention, and before the MLP.
            self.layernorm_before = config.make_norm()
            self.layernorm_after = config.make_norm()
        self.config = config

    def __call__(
        self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None
    ) -> LayerOutput:
        heads_key, attention_key, mlp_key = split_key(key, 3)
        attention = self.attention.self or self.attention.attention
        assert attention is not None
        y = maybe(self.layernorm_before, x)
        heads, cache = attention.heads(y, context, cache, heads_key)
        x = self.attention.output(
            x, heads, context, attention_key, unit=self.config.head_size
        )
        y = maybe(self.layernorm_after, x)
        (hidden,) = context.column(y, self.intermediate.dense)
        hidden = ACTIVATIONS[self.config.hidden_act](hidden)
        return self.output(x, hidden, context, mlp_key), cache


class EncoderLayers(eqx.Module):
    """The layers, under their name in files of BERT's kind."""

    layer: PyTree


def encode_tokens(
    model: Model,
    input_ids: Int[Array, "b s"],
    embed: Callable[[Context, Key | None], Float[Array, "b s size"]],
    layers: PyTree,
    *,
    attention_mask: Array | None,
    positions: Int[Array, "b s"] | None = None,
    segments: Int[Array, "b s"] | None = None,
    bias: Bias | None = None,
    causal: bool = False,
    key: Key | None,
) -> Float[Array, "b s size"]:
    """Return the output of the last layer of an encoder of text.

    **Arguments:**

    - `model`: its `Options` say how to run the layers.
    - `input_ids`: tokens.
    - `embed`, `layers`: a function that computes the input of the first layer, and the
        layers.
    - `attention_mask`: `(batch, s)`, 0 where a token is padding, on either side.
    - `positions`: by default counted from 0 at the first token that is not padding, or
        of its text.
    - `segments`: `(batch, s)`, for each token the number of its text, 0 for padding, in
        place of `attention_mask`.
    - `bias`: added to the scores in all layers.
    - `causal`: true if a token sees only the tokens up to itself.
    - `key`: for dropout.
    """
    context, _ = make_context(
        model, input_ids, attention_mask, positions, causal=causal, texts=segments
    )
    context = dataclasses.replace(context, bias=bias)
    embed_key, layers_key = split_key(key, 2)
    x = embed(context, embed_key)
    x, _ = run_layers(layers, x, context, None, remat=model.remat, key=layers_key)
    return whole_output(model, x, context)
