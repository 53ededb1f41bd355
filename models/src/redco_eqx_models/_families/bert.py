"""BERT (Devlin et al. 2019) and RoBERTa (Liu et al. 2019): without a head, with a head
over the vocabulary, and with a head over labels.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from redco_eqx.types import Key
from redco_eqx_models._blocks import layers
from redco_eqx_models._blocks.config import Config
from redco_eqx_models._blocks.context import Context, Hidden, Ids
from redco_eqx_models._blocks.dropout import dropout, split_key
from redco_eqx_models._blocks.encoder import (
    EncoderConfig,
    EncoderLayer,
    EncoderLayers,
    encode_tokens,
)
from redco_eqx_models._blocks.layers import ACTIVATIONS, Embedding, Linear, TiedHead
from redco_eqx_models._blocks.model import Model, Options, make_layers
from redco_eqx_models._blocks.multihead import Dense, pool_first


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig(EncoderConfig, Config):
    """BERT, base and large. `labels` are the outputs of a classifier."""

    model_type = "bert"
    architecture = "BertModel"
    norm_first = False
    only = {
        "add_cross_attention": False,
        "is_decoder": False,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
    }

    vocab_size: int = 30522
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    classifier_dropout: float | None = None
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    pad_token_id: int | None = 0

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
        if self.classifier_dropout is None:
            return self.hidden_dropout_prob
        return self.classifier_dropout


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """RoBERTa, base and large. In its position table, the rows up to `pad_token_id` are
    never read."""

    model_type = "roberta"
    architecture = "RobertaModel"

    vocab_size: int = 50265
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_token_id is None:
            raise self.error("pad_token_id is None, but positions are counted from it.")

    @property
    def position_offset(self) -> int:
        # fairseq, where RoBERTa comes from, gives padding the row of its own number.
        assert self.pad_token_id is not None
        return self.pad_token_id + 1


POSITIONS = r"\bposition_ids$"
"""The key of a buffer in old files."""


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
        size = config.hidden_size
        std = config.initializer_range
        self.word_embeddings = Embedding(config.vocab_size, size, std=std, key=word_key)
        self.position_embeddings = Embedding(
            config.max_position_embeddings, size, std=std, key=position_key
        )
        self.token_type_embeddings = Embedding(
            config.type_vocab_size, size, std=std, key=type_key
        )
        self.LayerNorm = config.make_norm()
        self.dropout = eqx.nn.Dropout(config.hidden_dropout_prob)
        self.position_offset = config.position_offset

    def __call__(
        self,
        input_ids: Ids,
        types: Ids,
        positions: Ids | None,
        context: Context,
        key: Key | None,
    ) -> Hidden:
        if positions is None and self.position_offset and context.real is not None:
            # `create_position_ids_from_input_ids` of transformers' RoBERTa counts the
            # tokens that are not `pad_token_id`. It does not look at the mask.
            real = context.real & (input_ids != self.position_offset - 1)
            counted = jnp.cumsum(real, axis=-1, dtype=jnp.int32)
            # Count anew in each text of a row.
            is_first = context.real & (context.positions == 0)
            before = jnp.where(is_first, counted - real, 0)
            counted = counted - jax.lax.cummax(before, axis=1)
            # Padding gets position -1, and with the offset the row `pad_token_id`.
            positions = counted * real - 1
        if positions is None:
            positions = context.positions
        x = context.embed(self.word_embeddings, input_ids)
        x = x + self.token_type_embeddings(types)
        x = x + self.position_embeddings(positions + self.position_offset)
        return dropout(self.dropout, self.LayerNorm(x), key)


class BertModel(Model):
    """BERT or RoBERTa, by its configuration, without a head. `pooler` reads the first
    token."""

    embeddings: BertEmbeddings
    encoder: EncoderLayers
    pooler: Dense | None
    config: BertConfig = eqx.field(static=True)

    stacks = ("encoder.layer",)
    # Files of a model with a head have its body under one of these names.
    outer = ("bert.", "roberta.")
    ignored = (POSITIONS,)
    dropped = (r"^(cls|lm_head|classifier)\.",)
    heads = ("pooler",)

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
        self.embeddings = BertEmbeddings(config, key=embeddings_key)
        self.encoder = EncoderLayers(
            make_layers(EncoderLayer, config, stacked=stacked, key=layers_key)
        )
        self.pooler = None
        if pools:
            self.pooler = Dense(config.make_linear(config.hidden_size, key=pooler_key))

    def hidden_states(
        self,
        input_ids: Ids,
        *,
        attention_mask: Array | None = None,
        token_type_ids: Ids | None = None,
        positions: Ids | None = None,
        key: Key | None = None,
        segments: Ids | None = None,
    ) -> Hidden:
        """Return the output of the last layer.

        **Arguments:**

        - `input_ids`: tokens.
        - `attention_mask`: `(batch, t)`, 0 where a token is padding, on either side.
        - `token_type_ids`: the type of each token, such as 0 in the first sentence of a
            pair and 1 in the second; by default 0.
        - `positions`: by default counted from 0 at the first token that is not padding.
            A RoBERTa never counts its `pad_token_id`, also where the mask does not hide
            it.
        - `key`: for dropout, which needs a key and a model that is not in inference
            mode (`eqx.nn.inference_mode`).
        - `segments`: `(batch, t)`, for rows of several texts one after another: for
            each token the number of its text, other numbers for neighbours, and 0 for
            padding. A token sees only its own text, and positions begin anew in each.
        """
        if token_type_ids is None:
            token_type_ids = jnp.zeros_like(input_ids)
        embed = functools.partial(self.embeddings, input_ids, token_type_ids, positions)
        layers = self.encoder.layer
        return encode_tokens(
            self,
            input_ids,
            embed,
            layers,
            attention_mask=attention_mask,
            segments=segments,
            key=key,
        )

    def __call__(self, input_ids: Ids, **options: Any) -> Hidden:
        """Return `hidden_states`; the arguments are the same."""
        return self.hidden_states(input_ids, **options)

    def pool(self, hidden: Hidden) -> Float[Array, "b size"]:
        """Return a vector for the whole text."""
        return pool_first(self.pooler, hidden)


class MaskedLM(Model):
    """A model that predicts masked tokens. Its head is the embedding table, with its
    own bias."""

    def __init__(self, config: BertConfig, **options: Unpack[Options]):
        super().__init__(config, **options)

    @abc.abstractmethod
    def parts(self) -> tuple[BertModel, Linear, str, layers.LayerNorm, Array]:
        """Return the model without its head; then its head's projection, activation,
        norm and bias."""

    @property
    def head(self) -> TiedHead:
        """The layer that computes the logits, in the form that `cross_entropy`
        takes."""
        body, *_, bias = self.parts()
        return TiedHead(body.embeddings.word_embeddings.weight, bias)

    def hidden_states(self, input_ids: Ids, **options: Any) -> Hidden:
        """Return the input of the head. Arguments as for `BertModel.hidden_states`."""
        body, dense, activation, norm, _ = self.parts()
        hidden = dense(body.hidden_states(input_ids, **options))
        return norm(ACTIVATIONS[activation](hidden))

    def __call__(self, input_ids: Ids, **options: Any) -> Float[Array, "b t vocab"]:
        """Compute logits of each token. Arguments as for `BertModel.hidden_states`."""
        return self.head(self.hidden_states(input_ids, **options))


class BertTransform(eqx.Module):
    """The layers before the head over the vocabulary."""

    dense: Linear
    LayerNorm: layers.LayerNorm


class BertPredictions(eqx.Module):
    """The head over the vocabulary: the embedding table, with its own bias."""

    transform: BertTransform
    bias: Float[Array, " vocab"]


class BertHeads(eqx.Module):
    """The head over the vocabulary, under the name that it has in model files."""

    predictions: BertPredictions


class BertForMaskedLM(MaskedLM):
    """BERT that predicts masked tokens."""

    bert: BertModel
    cls: BertHeads
    config: BertConfig = eqx.field(static=True)

    architecture = "BertForMaskedLM"
    stacks = ("bert.encoder.layer",)
    ignored = (POSITIONS,)
    # The published models were also trained to predict the next sentence, with these.
    dropped = (r"\bpooler\.", r"^cls\.seq_relationship\.")
    # Old files have the bias under both names.
    tied = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }

    def __init__(
        self,
        config: BertConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        self.bert = BertModel(
            config, pools=False, stacked=stacked, key=body_key, **options
        )
        dense = config.make_linear(config.hidden_size, key=head_key)
        transform = BertTransform(dense, config.make_norm())
        self.cls = BertHeads(BertPredictions(transform, jnp.zeros(config.vocab_size)))

    def parts(self) -> tuple[BertModel, Linear, str, layers.LayerNorm, Array]:
        head = self.cls.predictions
        return (
            self.bert,
            head.transform.dense,
            self.config.hidden_act,
            head.transform.LayerNorm,
            head.bias,
        )


class BertForSequenceClassification(Model):
    """BERT with one output per label, or with one output for a regression."""

    bert: BertModel
    classifier: Linear
    dropout: eqx.nn.Dropout
    config: BertConfig = eqx.field(static=True)

    architecture = "BertForSequenceClassification"
    stacks = ("bert.encoder.layer",)
    prefixes = ("bert.",)
    ignored = (POSITIONS,)
    dropped = (r"^cls\.",)
    heads = ("classifier", "bert.pooler")

    def __init__(
        self,
        config: BertConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        self.bert = BertModel(config, stacked=stacked, key=body_key, **options)
        self.classifier = config.make_linear(len(config.labels.names), key=head_key)
        self.dropout = eqx.nn.Dropout(config.head_dropout)

    def __call__(
        self, input_ids: Ids, *, key: Key | None = None, **options: Any
    ) -> Float[Array, "b labels"]:
        """Compute logits of each label, or the value of a regression. Arguments as for
        `BertModel.hidden_states`.
        """
        _check_one_text(self, options)
        body_key, head_key = split_key(key, 2)
        hidden = self.bert.hidden_states(input_ids, key=body_key, **options)
        pooled = self.bert.pool(hidden)
        return self.classifier(dropout(self.dropout, pooled, head_key))


class RobertaLMHead(eqx.Module):
    """The head over the vocabulary: the embedding table, with its own bias."""

    dense: Linear
    layer_norm: layers.LayerNorm
    bias: Float[Array, " vocab"]


class RobertaForMaskedLM(MaskedLM):
    """RoBERTa that predicts masked tokens."""

    roberta: BertModel
    lm_head: RobertaLMHead
    config: RobertaConfig = eqx.field(static=True)

    architecture = "RobertaForMaskedLM"
    stacks = ("roberta.encoder.layer",)
    ignored = (POSITIONS,)
    dropped = (r"\bpooler\.",)
    tied = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def __init__(
        self,
        config: RobertaConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        self.roberta = BertModel(
            config, pools=False, stacked=stacked, key=body_key, **options
        )
        dense = config.make_linear(config.hidden_size, key=head_key)
        self.lm_head = RobertaLMHead(
            dense, config.make_norm(), jnp.zeros(config.vocab_size)
        )

    def parts(self) -> tuple[BertModel, Linear, str, layers.LayerNorm, Array]:
        head = self.lm_head
        # `RobertaLMHead` of transformers has this activation, whatever `hidden_act` is.
        return self.roberta, head.dense, "gelu", head.layer_norm, head.bias


class RobertaClassifier(eqx.Module):
    """A classifier that reads the first token of a text."""

    dense: Linear
    out_proj: Linear
    dropout: eqx.nn.Dropout

    def __call__(
        self, x: Float[Array, "b size"], key: Key | None
    ) -> Float[Array, "b labels"]:
        in_key, out_key = split_key(key, 2)
        x = jnp.tanh(self.dense(dropout(self.dropout, x, in_key)))
        return self.out_proj(dropout(self.dropout, x, out_key))


class RobertaForSequenceClassification(Model):
    """RoBERTa with one output per label, or with one output for a regression."""

    roberta: BertModel
    classifier: RobertaClassifier
    config: RobertaConfig = eqx.field(static=True)

    architecture = "RobertaForSequenceClassification"
    stacks = ("roberta.encoder.layer",)
    prefixes = ("roberta.",)
    ignored = (POSITIONS,)
    dropped = (r"^lm_head\.", r"\bpooler\.")
    heads = ("classifier",)

    def __init__(
        self,
        config: RobertaConfig,
        *,
        stacked: bool = False,
        key: Key,
        **options: Unpack[Options],
    ):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        self.roberta = BertModel(
            config, pools=False, stacked=stacked, key=body_key, **options
        )
        dense_key, out_key = jax.random.split(head_key)
        dense = config.make_linear(config.hidden_size, key=dense_key)
        out_proj = config.make_linear(len(config.labels.names), key=out_key)
        self.classifier = RobertaClassifier(
            dense, out_proj, eqx.nn.Dropout(config.head_dropout)
        )

    def __call__(
        self, input_ids: Ids, *, key: Key | None = None, **options: Any
    ) -> Float[Array, "b labels"]:
        """Compute logits of each label, or the value of a regression. Arguments as for
        `BertModel.hidden_states`.
        """
        _check_one_text(self, options)
        body_key, head_key = split_key(key, 2)
        hidden = self.roberta.hidden_states(input_ids, key=body_key, **options)
        return self.classifier(hidden[:, 0], head_key)


def _check_one_text(model: Model, options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for rows of several texts, of which a classifier would read
    the first text alone."""
    if options.get("segments") is not None:
        raise ValueError(
            f"{type(model).__name__}: segments is given, but the classifier reads the "
            "first token of a row, which is that of its first text alone. Leave "
            "segments out, with one text in a row and an attention_mask."
        )
