"""Models that write text: they map tokens to logits, with or without a cache."""

import abc
import dataclasses
from operator import attrgetter
from typing import Any, Unpack

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx._base.protocols import Key
from redco_eqx._base.tree import is_array
from redco_eqx.models._blocks.config import BaseConfig
from redco_eqx.models._blocks.context import Cache, Context, Hidden, Memory, check_tokens, make_context
from redco_eqx.models._blocks.layers import Linear, split_key
from redco_eqx.models._blocks.model import Model, Options, count_layers, run_layers
from redco_eqx.models._blocks.vocabulary import only_tokens


class Decoder(Model):
    """A model that returns logits of the next token. A family defines its embedding, its layers and its output.

    The layers are at the last path of `stacks`. `lm_head` is `None` if the head is the embedding table, which
    the first entry of `tied` names. The other fields are those of `Model`.
    """

    lm_head: eqx.AbstractVar[PyTree]

    def __init__(
        self, config: BaseConfig, **options: Unpack[Options]
    ):  # otherwise type checkers derive one from the field
        super().__init__(config, **options)

    @abc.abstractmethod
    def embed(self, input_ids: Int[Array, "b t"], context: Context, key: Key | None) -> Hidden:
        """Return the input of the first layer."""

    @abc.abstractmethod
    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        """Turn the output of the last layer into the input of the head."""

    def bias(
        self, query: Int[Array, "r t"], key: Int[Array, "r s"], batch_size: int
    ) -> Float[Array, "n h t s"] | None:
        """Return the bias on the scores of self-attention in all layers, from the positions of the tokens. By
        default there is none. See `relative_bias`.
        """
        return None

    @property
    def layers(self) -> PyTree:
        """The layers: a list, or one layer whose arrays have a leading dim for the layer number."""
        return attrgetter(self.stacks[-1])(self)

    @property
    def head(self) -> PyTree:
        """The layer that computes the logits, or the embedding table if it is also the head.

        Use it for a loss that does not need all logits in memory:
        `cross_entropy(model.hidden_states(ids)[0], model.head, labels)`.
        """
        head = self.lm_head
        if head is None:
            head = attrgetter(next(iter(self.tied.values())))(self)
        cap = self.config.entry("final_logit_softcapping")
        return only_tokens(head, self.config.vocab_size, cap) if self.vocabulary else head

    def logits(self, hidden: Float[Array, "*batch size"]) -> Float[Array, "*batch vocab"]:
        """Apply the head to hidden states."""
        head = self.head
        return jnp.einsum("...i,oi->...o", hidden, head) if is_array(head) else head(hidden)

    def init_cache(self, batch_size: int, num_slots: int, dtype: DTypeLike = jnp.float32) -> Cache:
        """Make an empty cache with room for `num_slots` tokens in each row."""
        size = self.config.kv_heads, self.config.head_size
        zeros = jnp.zeros((count_layers(self.layers), batch_size, num_slots, *size), dtype)
        slots = jnp.zeros((batch_size, num_slots), jnp.int32)
        return Cache(zeros, zeros, slots != 0, slots, jnp.zeros((), jnp.int32))

    def _run(
        self,
        input_ids: Int[Array, "b t"],
        memory: Memory | None,
        *,
        attention_mask: Array | None,
        positions: Int[Array, "b t"] | None,
        cache: Cache | None,
        key: Key | None,
        sums: Array | None = None,
    ) -> tuple[Hidden, Cache | None, Any]:
        """Return the input of the head, the cache with these tokens added, and `sums` of `run_layers`."""
        check_tokens(input_ids, attention_mask, self.config.max_positions, cache)
        # Without a cache and positions, all rows have the same positions except for padding, so one bias serves
        # them all.
        alike = jnp.arange(input_ids.shape[1])[None] if cache is None and positions is None else None
        context, cache = make_context(
            input_ids, attention_mask, positions, cache,
            window=self.config.window, windowed=self.config.windowed, implementation=self.attention,
            sequence_parallel=self.sequence_parallel and cache is None,
        )  # fmt: skip
        own = context.positions if alike is None else alike
        bias = self.bias(own, own if cache is None else cache.positions, len(input_ids))
        context = dataclasses.replace(context, bias=bias, memory=memory)
        embed_key, layers_key, finish_key = split_key(key, 3)
        x = self.embed(input_ids, context, embed_key)
        x, pieces = run_layers(self.layers, x, context, cache, remat=self.remat, key=layers_key, sums=sums)
        if cache is not None:
            cache = dataclasses.replace(cache, key=pieces[0], value=pieces[1])
        return self.finish(x, finish_key), cache, None if sums is None else pieces[-1]


def make_head(config: Any, size: int, *, std: float, key: Key) -> Linear | None:
    """Return a head over the vocabulary, or `None` if the configuration ties it to the embedding table."""
    if config.tie_word_embeddings:
        return None
    return Linear(size, config.vocab_size, use_bias=False, std=std, key=key)


class DecoderLM(Decoder):
    """A decoder-only language model."""

    def __init__(self, config: BaseConfig, **options: Unpack[Options]):
        super().__init__(config, **options)

    def hidden_states(
        self,
        input_ids: Int[Array, "b t"],
        *,
        attention_mask: Array | None = None,
        positions: Int[Array, "b t"] | None = None,
        cache: Cache | None = None,
        key: Key | None = None,
    ) -> tuple[Hidden, Cache | None]:
        """Return the input of the head, and the cache with these tokens added. Arguments as for calling the
        model.
        """
        return self._run(
            input_ids, None, attention_mask=attention_mask, positions=positions, cache=cache, key=key
        )[:2]

    def __call__(
        self,
        input_ids: Int[Array, "b t"],
        *,
        attention_mask: Array | None = None,
        positions: Int[Array, "b t"] | None = None,
        cache: Cache | None = None,
        key: Key | None = None,
    ) -> Any:
        """Compute the logits of the next token after each token.

        **Arguments:**

        - `input_ids`: tokens.
        - `attention_mask`: `(batch, t)`, 0 where a token is padding, on either side. Or `(batch, t, slots)`,
            the slots of the cache that each token sees, including those of these tokens (without a cache: the
            tokens of this call). With `positions`, texts that branch can then lie side by side in one row.
        - `positions`: by default counted from 0 at the first token that is not padding.
        - `cache`: the cache of the tokens before these, from `init_cache` or an earlier call.
        - `key`: for dropout, which needs a key and a model that is not in inference mode
            (`eqx.nn.inference_mode`).

        **Returns:**

        Logits of shape `(batch, t, vocab)`; with a cache, the pair of logits and the new cache.
        """
        hidden, new = self.hidden_states(
            input_ids, attention_mask=attention_mask, positions=positions, cache=cache, key=key
        )
        return self.logits(hidden) if cache is None else (self.logits(hidden), new)
