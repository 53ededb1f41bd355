"""BERT (Devlin et al. 2019): without a head, with a head over the vocabulary, and with a head over labels."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks import layers
from redco_eqx.models._blocks.config import Config, Json, Labels
from redco_eqx.models._blocks.context import Context, Hidden, LayerCache, LayerOutput
from redco_eqx.models._blocks.encoder import EncoderLayers, encode_tokens
from redco_eqx.models._blocks.layers import (
    ACTIVATIONS,
    Embedding,
    Linear,
    TiedHead,
    add_and_norm,
    dropout,
    split_key,
)
from redco_eqx.models._blocks.model import Model, Options, make_layers
from redco_eqx.models._blocks.multihead import Dense, SelfAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(Config):
    """BERT, base and large. `labels` are the outputs of a classifier."""

    model_type: ClassVar[str] = "bert"
    architecture: ClassVar[str] = "BertModel"
    only: ClassVar[Mapping[str, Json]] = {
        "add_cross_attention": False,
        "is_decoder": False,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    labels: Labels = dataclasses.field(default_factory=Labels)

    @property
    def position_offset(self) -> int:
        """The first token's row in the table of positions."""
        return 0

    @property
    def max_positions(self) -> int:
        return self.max_position_embeddings - self.position_offset

    @property
    def head_dropout(self) -> float:
        """The dropout rate before a classifier."""
        return self.hidden_dropout_prob if self.classifier_dropout is None else self.classifier_dropout


POSITIONS = r"\bposition_ids$"
"""The key of a buffer in old files."""


class BertOutput(eqx.Module):
    """The end of attention and MLP: a projection, added to the stream, and a norm after it."""

    dense: Linear
    LayerNorm: layers.LayerNorm
    dropout: eqx.nn.Dropout

    def __init__(self, in_features: int, config: BertConfig, *, key: Key):
        self.dense = Linear(in_features, config.hidden_size, std=config.initializer_range, key=key)
        self.LayerNorm = layers.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = eqx.nn.Dropout(config.hidden_dropout_prob)

    def __call__(self, x: Hidden, hidden: Array, context: Context, key: Key | None, *, unit: int = 1) -> Hidden:
        return add_and_norm(x, context.row(hidden, self.dense, unit=unit), self.LayerNorm, self.dropout, key)


class BertAttention(eqx.Module):
    """Attention, and its end."""

    self: SelfAttention
    output: BertOutput

    def __init__(this, config: BertConfig, *, key: Key):  # pyright: ignore[reportSelfClsParameterName]
        self_key, output_key = jax.random.split(key)
        this.self = SelfAttention(
            config.hidden_size, config.num_attention_heads,
            dropout=config.attention_probs_dropout_prob, std=config.initializer_range, key=self_key,
        )  # fmt: skip
        this.output = BertOutput(config.hidden_size, config, key=output_key)


class BertLayer(eqx.Module):
    """Attention, then MLP."""

    attention: BertAttention
    intermediate: Dense
    output: BertOutput
    config: BertConfig = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: Key):
        attention_key, in_key, out_key = jax.random.split(key, 3)
        size, inner, std = config.hidden_size, config.intermediate_size, config.initializer_range
        self.attention = BertAttention(config, key=attention_key)
        self.intermediate = Dense(size, inner, std=std, key=in_key)
        self.output = BertOutput(inner, config, key=out_key)
        self.config = config

    def __call__(self, x: Hidden, context: Context, cache: LayerCache | None, key: Key | None) -> LayerOutput:
        heads_key, attention_key, mlp_key = split_key(key, 3)
        heads = self.attention.self(x, context, heads_key)
        x = self.attention.output(x, heads, context, attention_key, unit=self.config.head_size)
        (hidden,) = context.column(x, self.intermediate.dense)
        return self.output(x, ACTIVATIONS[self.config.hidden_act](hidden), context, mlp_key), cache


class BertEmbeddings(eqx.Module):
    """Embeddings of token, position and segment."""

    word_embeddings: Embedding
    position_embeddings: Embedding
    token_type_embeddings: Embedding
    LayerNorm: layers.LayerNorm
    dropout: eqx.nn.Dropout
    position_offset: int = eqx.field(static=True)

    def __init__(self, config: BertConfig, *, key: Key):
        word_key, position_key, type_key = jax.random.split(key, 3)
        size, std = config.hidden_size, config.initializer_range
        self.word_embeddings = Embedding(config.vocab_size, size, std=std, key=word_key)
        self.position_embeddings = Embedding(config.max_position_embeddings, size, std=std, key=position_key)
        self.token_type_embeddings = Embedding(config.type_vocab_size, size, std=std, key=type_key)
        self.LayerNorm = layers.LayerNorm(size, eps=config.layer_norm_eps)
        self.dropout = eqx.nn.Dropout(config.hidden_dropout_prob)
        self.position_offset = config.position_offset

    def __call__(
        self, input_ids: Int[Array, "b t"], types: Int[Array, "b t"], context: Context, key: Key | None
    ) -> Hidden:
        x = context.embed(self.word_embeddings, input_ids) + self.token_type_embeddings(types)
        x = x + self.position_embeddings(context.positions + self.position_offset)
        return dropout(self.dropout, self.LayerNorm(x), key)


class BertModel(Model):
    """BERT or RoBERTa, by its configuration, without a head. `pooler` reads the first token."""

    embeddings: BertEmbeddings
    encoder: EncoderLayers
    pooler: Dense | None
    config: BertConfig = eqx.field(static=True)

    stacks: ClassVar[tuple[str, ...]] = ("encoder.layer",)
    outer: ClassVar[tuple[str, ...]] = ("bert.", "roberta.")
    ignored: ClassVar[tuple[str, ...]] = (POSITIONS, r"^(cls|lm_head|classifier)\.")
    heads: ClassVar[tuple[str, ...]] = ("pooler",)

    def __init__(
        self,
        config: BertConfig,
        *,
        pools: bool = True,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        embeddings_key, layers_key, pooler_key = jax.random.split(key, 3)
        size, std = config.hidden_size, config.initializer_range
        self.embeddings = BertEmbeddings(config, key=embeddings_key)
        self.encoder = EncoderLayers(make_layers(BertLayer, config, stacked=stacked, key=layers_key))
        self.pooler = Dense(size, size, std=std, key=pooler_key) if pools else None

    def hidden_states(
        self,
        input_ids: Int[Array, "b t"],
        *,
        attention_mask: Array | None = None,
        token_type_ids: Int[Array, "b t"] | None = None,
        positions: Int[Array, "b t"] | None = None,
        key: Key | None = None,
    ) -> Hidden:
        """Return the output of the last layer.

        **Arguments:**

        - `input_ids`: tokens.
        - `attention_mask`: `(batch, t)`, 0 where a token is padding, on either side.
        - `token_type_ids`: the segment of each token; by default 0.
        - `positions`: by default counted from 0 at the first token that is not padding.
        - `key`: for dropout, which needs a key and a model that is not in inference mode
            (`eqx.nn.inference_mode`).
        """
        types = jnp.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        return encode_tokens(
            self, input_ids, functools.partial(self.embeddings, input_ids, types), self.encoder.layer,
            attention_mask=attention_mask, positions=positions,
            max_positions=self.config.max_positions, key=key,
        )  # fmt: skip

    def __call__(self, input_ids: Int[Array, "b t"], **options: Any) -> Hidden:
        """Return `hidden_states`; the arguments are the same."""
        return self.hidden_states(input_ids, **options)

    def pool(self, hidden: Hidden) -> Float[Array, "b size"]:
        """Return a vector for the whole text."""
        if self.pooler is None:
            raise ValueError("pool: this model has no pooler, because its head does not use one.")
        return jnp.tanh(self.pooler.dense(hidden[:, 0]))


class BertTransform(eqx.Module):
    """The layers before the head over the vocabulary."""

    dense: Linear
    LayerNorm: layers.LayerNorm

    def __init__(self, config: BertConfig, *, key: Key):
        size = config.hidden_size
        self.dense = Linear(size, size, std=config.initializer_range, key=key)
        self.LayerNorm = layers.LayerNorm(size, eps=config.layer_norm_eps)


class BertPredictions(eqx.Module):
    """The head over the vocabulary: the embedding table, with its own bias."""

    transform: BertTransform
    bias: Float[Array, " vocab"]

    def __init__(self, config: BertConfig, *, key: Key):
        self.transform = BertTransform(config, key=key)
        self.bias = jnp.zeros(config.vocab_size)


class BertHeads(eqx.Module):
    """The head over the vocabulary, under its name in files."""

    predictions: BertPredictions


class BertForMaskedLM(Model):
    """BERT that predicts masked tokens."""

    bert: BertModel
    cls: BertHeads
    config: BertConfig = eqx.field(static=True)

    architecture: ClassVar[str | None] = "BertForMaskedLM"
    stacks: ClassVar[tuple[str, ...]] = ("bert.encoder.layer",)
    ignored: ClassVar[tuple[str, ...]] = (POSITIONS, r"\bpooler\.", r"^cls\.seq_relationship\.")
    tied: ClassVar[Mapping[str, str]] = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(self, config: BertConfig, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        self.bert = BertModel(config, pools=False, stacked=stacked, key=body_key, **options)
        self.cls = BertHeads(BertPredictions(config, key=head_key))

    @property
    def head(self) -> TiedHead:
        """The layer that computes the logits, in the form that `cross_entropy` takes."""
        return TiedHead(self.bert.embeddings.word_embeddings.weight, self.cls.predictions.bias)

    def hidden_states(self, input_ids: Int[Array, "b t"], **options: Any) -> Hidden:
        """Return the input of the head. Arguments as for `BertModel.hidden_states`."""
        transform = self.cls.predictions.transform
        hidden = transform.dense(self.bert.hidden_states(input_ids, **options))
        return transform.LayerNorm(ACTIVATIONS[self.config.hidden_act](hidden))

    def __call__(self, input_ids: Int[Array, "b t"], **options: Any) -> Float[Array, "b t vocab"]:
        """Compute logits of each token. Arguments as for `BertModel.hidden_states`."""
        return self.head(self.hidden_states(input_ids, **options))


class BertForSequenceClassification(Model):
    """BERT with an output per label, or one output for a regression."""

    bert: BertModel
    classifier: Linear
    dropout: eqx.nn.Dropout
    config: BertConfig = eqx.field(static=True)

    architecture: ClassVar[str | None] = "BertForSequenceClassification"
    stacks: ClassVar[tuple[str, ...]] = ("bert.encoder.layer",)
    prefixes: ClassVar[tuple[str, ...]] = ("bert.",)
    ignored: ClassVar[tuple[str, ...]] = (POSITIONS, r"^cls\.")
    heads: ClassVar[tuple[str, ...]] = ("classifier", "bert.pooler")

    def __init__(self, config: BertConfig, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        size, std = config.hidden_size, config.initializer_range
        self.bert = BertModel(config, stacked=stacked, key=body_key, **options)
        self.classifier = Linear(size, len(config.labels.names), std=std, key=head_key)
        self.dropout = eqx.nn.Dropout(config.head_dropout)

    def __call__(
        self, input_ids: Int[Array, "b t"], *, key: Key | None = None, **options: Any
    ) -> Float[Array, "b labels"]:
        """Compute logits of each label, or the value of a regression. Arguments as for
        `BertModel.hidden_states`.
        """
        body_key, head_key = split_key(key, 2)
        pooled = self.bert.pool(self.bert.hidden_states(input_ids, key=body_key, **options))
        return self.classifier(dropout(self.dropout, pooled, head_key))
