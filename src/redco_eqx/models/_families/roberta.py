"""RoBERTa (Liu et al. 2019): a BERT with other heads, whose positions are counted from its padding token."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redco_eqx._base.protocols import Key
from redco_eqx.models._blocks.context import Hidden
from redco_eqx.models._blocks.layers import ACTIVATIONS, LayerNorm, Linear, TiedHead, dropout, split_key
from redco_eqx.models._blocks.model import Model, Options
from redco_eqx.models._families.bert import POSITIONS, BertConfig, BertModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class RobertaConfig(BertConfig):
    """RoBERTa, base and large. In its position table, the rows up to `pad_token_id` are never read."""

    model_type: ClassVar[str] = "roberta"
    architecture: ClassVar[str] = "RobertaModel"

    vocab_size: int = 50265
    bos_token_id: int | None = 0
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pad_token_id is None:
            raise ValueError("RobertaConfig: pad_token_id is None, but positions are counted from it.")

    @property
    def position_offset(self) -> int:
        assert self.pad_token_id is not None
        return self.pad_token_id + 1


class RobertaLMHead(eqx.Module):
    """The head over the vocabulary: the embedding table, with its own bias."""

    dense: Linear
    layer_norm: LayerNorm
    bias: Float[Array, " vocab"]

    def __init__(self, config: RobertaConfig, *, key: Key):
        size = config.hidden_size
        self.dense = Linear(size, size, std=config.initializer_range, key=key)
        self.layer_norm = LayerNorm(size, eps=config.layer_norm_eps)
        self.bias = jnp.zeros(config.vocab_size)


class RobertaForMaskedLM(Model):
    """RoBERTa that predicts masked tokens."""

    roberta: BertModel
    lm_head: RobertaLMHead
    config: RobertaConfig = eqx.field(static=True)

    architecture: ClassVar[str | None] = "RobertaForMaskedLM"
    stacks: ClassVar[tuple[str, ...]] = ("roberta.encoder.layer",)
    ignored: ClassVar[tuple[str, ...]] = (POSITIONS, r"\bpooler\.")
    tied: ClassVar[Mapping[str, str]] = {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }

    def __init__(self, config: RobertaConfig, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        self.roberta = BertModel(config, pools=False, stacked=stacked, key=body_key, **options)
        self.lm_head = RobertaLMHead(config, key=head_key)

    @property
    def head(self) -> TiedHead:
        """The layer that computes the logits, in the form that `cross_entropy` takes."""
        return TiedHead(self.roberta.embeddings.word_embeddings.weight, self.lm_head.bias)

    def hidden_states(self, input_ids: Int[Array, "b t"], **options: Any) -> Hidden:
        """Return the input of the head. Arguments as for `BertModel.hidden_states`."""
        hidden = self.lm_head.dense(self.roberta.hidden_states(input_ids, **options))
        return self.lm_head.layer_norm(ACTIVATIONS["gelu"](hidden))

    def __call__(self, input_ids: Int[Array, "b t"], **options: Any) -> Float[Array, "b t vocab"]:
        """Compute logits of each token. Arguments as for `BertModel.hidden_states`."""
        return self.head(self.hidden_states(input_ids, **options))


class RobertaClassifier(eqx.Module):
    """A classifier that reads the first token of a text."""

    dense: Linear
    out_proj: Linear
    dropout: eqx.nn.Dropout

    def __init__(self, config: RobertaConfig, *, key: Key):
        dense_key, out_key = jax.random.split(key)
        size, std = config.hidden_size, config.initializer_range
        self.dense = Linear(size, size, std=std, key=dense_key)
        self.out_proj = Linear(size, len(config.labels.names), std=std, key=out_key)
        self.dropout = eqx.nn.Dropout(config.head_dropout)

    def __call__(self, x: Float[Array, "b size"], key: Key | None) -> Float[Array, "b labels"]:
        in_key, out_key = split_key(key, 2)
        x = jnp.tanh(self.dense(dropout(self.dropout, x, in_key)))
        return self.out_proj(dropout(self.dropout, x, out_key))


class RobertaForSequenceClassification(Model):
    """RoBERTa with an output per label, or one output for a regression."""

    roberta: BertModel
    classifier: RobertaClassifier
    config: RobertaConfig = eqx.field(static=True)

    architecture: ClassVar[str | None] = "RobertaForSequenceClassification"
    stacks: ClassVar[tuple[str, ...]] = ("roberta.encoder.layer",)
    prefixes: ClassVar[tuple[str, ...]] = ("roberta.",)
    ignored: ClassVar[tuple[str, ...]] = (POSITIONS, r"^lm_head\.", r"\bpooler\.")
    heads: ClassVar[tuple[str, ...]] = ("classifier",)

    def __init__(self, config: RobertaConfig, *, stacked: bool = False, key: Key, **options: Unpack[Options]):
        super().__init__(config, **options)
        body_key, head_key = jax.random.split(key)
        self.roberta = BertModel(config, pools=False, stacked=stacked, key=body_key, **options)
        self.classifier = RobertaClassifier(config, key=head_key)

    def __call__(
        self, input_ids: Int[Array, "b t"], *, key: Key | None = None, **options: Any
    ) -> Float[Array, "b labels"]:
        """Compute logits of each label, or the value of a regression. Arguments as for
        `BertModel.hidden_states`.
        """
        body_key, head_key = split_key(key, 2)
        hidden = self.roberta.hidden_states(input_ids, key=body_key, **options)
        return self.classifier(hidden[:, 0], head_key)
