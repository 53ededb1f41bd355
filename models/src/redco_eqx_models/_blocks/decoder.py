"""Models that write text: from tokens to logits, with or without a cache; and padding
of their vocabulary."""

import abc
import dataclasses
import re
from operator import attrgetter
from typing import Any, TypedDict, TypeVar, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from redco_eqx.types import Key
from redco_eqx_models._blocks.attention import Bias
from redco_eqx_models._blocks.config import BaseConfig
from redco_eqx_models._blocks.context import Cache, Context, Hidden, Ids, Memory
from redco_eqx_models._blocks.dropout import split_key
from redco_eqx_models._blocks.layers import Embedding, Linear, TiedHead
from redco_eqx_models._blocks.lora import LoRA
from redco_eqx_models._blocks.model import (
    Model,
    Options,
    check_names,
    count_layers,
    make_context,
    run_layers,
    whole_output,
)
from redco_eqx_models._leaves import path_of

M = TypeVar("M", bound=Model)


def pad_vocabulary(model: M, multiple: int) -> M:
    """Add rows of zeros to the model's embedding table and head, up to a multiple of
    `multiple`.

    The logits of the added rows are minus infinity, so these rows are never chosen, do
    not count in a cross-entropy, and have zero gradients. `save_pretrained` does not
    write them. For example, GPT-2's 50257 rows are not divisible by any usual axis
    size, but 50304 rows are divisible by 64.

    ```python
    def make_model(key):
        config = models.GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4)
        return models.pad_vocabulary(models.GPT2LMHeadModel(config, key=key), 64)

    model = rx.init_model(make_model, mesh, key=key)        # 320 rows, divisible by 4
    ```

    **Arguments:**

    - `model`: a decoder-only language model, abstract or not. To make a new model with
        padding: `init_model(lambda key: pad_vocabulary(GPT2LMHeadModel(config,
        key=key), 128), ...)`.
    - `multiple`: for example, a multiple of the number of devices along `tensor`. 1
        adds nothing.

    **Raises:**

    `ValueError` if `multiple` is not positive, or the model's class does not name its
    `vocabulary`.
    """
    check_can_pad(type(model), multiple)
    num_rows = -(-model.config.vocab_size // multiple) * multiple

    def is_module(x: Any) -> bool:
        return isinstance(x, Embedding | Linear)

    def one(keypath: Any, x: Any) -> Any:
        if is_module(x) and is_vocabulary(model, path_of(keypath)):
            return _with_rows(x, num_rows)
        return x

    return jax.tree_util.tree_map_with_path(one, model, is_leaf=is_module)


def check_can_pad(family: type[Model], multiple: int) -> None:
    """Raise `ValueError` for a multiple or a class of models that `pad_vocabulary` does
    not take."""
    if multiple < 1:
        raise ValueError(
            f"pad_vocabulary: multiple={multiple}, but it must be positive."
        )
    if not family.vocabulary:
        raise ValueError(
            f"pad_vocabulary: {family.__name__} does not name the modules that have a "
            "row for each token (`vocabulary`); decoder-only models do."
        )


def is_vocabulary(model: Model, module: str) -> bool:
    """Return true if the arrays of the module at this path have a row per token."""
    return any(re.search(pattern, module) for pattern in model.vocabulary)


def only_tokens(
    head: Linear | LoRA | Float[Array, "rows size"], num_tokens: int, cap: float | None
) -> Linear | TiedHead | Float[Array, "rows size"]:
    """Return a head, or the table that is one, with capped logits, and with logits of
    minus infinity beyond the number of tokens.
    """
    if isinstance(head, LoRA):
        # `cross_entropy` takes a head with one weight. In the dtype of a half-precision
        # base, the sum would lose most of a small branch.
        head = head.merge(wide=True)
    if isinstance(head, Linear):
        weight, bias = head.weight, head.bias
    else:
        weight, bias = head, None
    num_rows = weight.shape[0]
    if num_rows == num_tokens and cap is None:
        return head
    if num_rows != num_tokens:
        if bias is None:
            bias = jnp.zeros(num_rows, weight.dtype)
        # Rows of zeros have logits of 0, which would count in the softmax. The bias is
        # added after the cap, so that the cap does not bound minus infinity.
        bias = jnp.where(jnp.arange(num_rows) < num_tokens, bias, -jnp.inf)
    return TiedHead(weight, bias, cap)


def _with_rows(module: Any, num_rows: int) -> Any:
    def longer(x: Any) -> Any:
        shape = (num_rows, *x.shape[1:])
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, x.dtype)
        return jnp.pad(x, [(0, num_rows - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])

    longer_module = jax.tree.map(longer, module)
    if isinstance(module, Embedding):
        # A table keeps the number of its rows that are tokens.
        return longer_module
    return _changed(longer_module, out_features=num_rows)


def _changed(module: Any, **fields: Any) -> Any:
    """Return a module with other values of fields: also of static ones, which
    `eqx.tree_at` does not reach."""
    new = object.__new__(type(module))
    for field in dataclasses.fields(module):
        if field.name in fields:
            value = fields[field.name]
        else:
            value = getattr(module, field.name)
        # Modules are frozen after `__init__`, which did not run here.
        object.__setattr__(new, field.name, value)
    return new


class Reading(TypedDict, total=False):
    """The other arguments of a model that writes text, see `DecoderLM`."""

    attention_mask: Array | None
    positions: Ids | None
    cache: Cache | None
    key: Key | None
    segments: Ids | None


class Decoder(Model):
    """A model that returns logits of the next token. A family defines its embedding,
    its layers and its output.

    The layers are at the last path of `stacks`. `lm_head` is `None` if the head is the
    embedding table, which the first entry of `tied` names. The other fields are those
    of `Model`.
    """

    lm_head: eqx.AbstractVar[PyTree]

    # Without it, type checkers derive one from the field.
    def __init__(self, config: BaseConfig, **options: Unpack[Options]):
        super().__init__(config, **options)

    @abc.abstractmethod
    def embed(self, input_ids: Ids, context: Context, key: Key | None) -> Hidden:
        """Return the input of the first layer."""

    @abc.abstractmethod
    def finish(self, x: Hidden, key: Key | None) -> Hidden:
        """Turn the output of the last layer into the input of the head."""

    def bias(
        self, query: Int[Array, "r t"], key: Int[Array, "r s"], batch_size: int
    ) -> Bias | None:
        """Return the bias on the scores of self-attention in all layers, from the
        positions of the tokens. By default there is none. See `relative_bias`.
        """
        return None

    @property
    def layers(self) -> PyTree:
        """The layers: a list, or one layer whose arrays have a leading dim for the
        layer number."""
        return attrgetter(self.stacks[-1])(self)

    @property
    def head(self) -> PyTree:
        """The layer that computes the logits, or the embedding table if it is also the
        head.

        Use it for a loss that does not need all logits in memory:
        `cross_entropy(model.hidden_states(ids)[0], model.head, labels)`.
        """
        head = self.lm_head
        if head is None:
            head = attrgetter(next(iter(self.tied.values())))(self)
        if not self.vocabulary:
            return head
        # Only Gemma has this entry.
        cap = self.config.entry("final_logit_softcapping", None)
        return only_tokens(head, self.config.vocab_size, cap)

    def logits(
        self, hidden: Float[Array, "*batch size"]
    ) -> Float[Array, "*batch vocab"]:
        """Apply the head to hidden states."""
        head = self.head
        if isinstance(head, jax.Array | np.ndarray):
            return jnp.einsum("...i,oi->...o", hidden, head)
        return head(hidden)

    def init_cache(
        self, batch_size: int, num_slots: int, dtype: DTypeLike = jnp.float32
    ) -> Cache:
        """Make an empty cache of `num_slots` slots, one for each token of a row."""
        num_layers = count_layers(self.layers)
        size = self.config.kv_heads, self.config.head_size
        # Zeros, not uninitialized memory: the weight of an empty slot is 0, but 0 times
        # a NaN is a NaN.
        zeros = jnp.zeros((num_layers, batch_size, num_slots, *size), dtype)
        slots = jnp.zeros((batch_size, num_slots), jnp.int32)
        return Cache(zeros, zeros, slots != 0, slots, jnp.zeros((), jnp.int32))

    def _run(
        self,
        input_ids: Ids,
        memory: Memory | None,
        *,
        attention_mask: Array | None = None,
        positions: Ids | None = None,
        cache: Cache | None = None,
        key: Key | None = None,
        segments: Ids | None = None,
        sums: Array | None = None,
    ) -> tuple[Hidden, Cache | None, Any]:
        """Return the input of the head, the cache with these tokens added, and the
        `sums` from `run_layers`."""
        if memory is not None:
            check_one_text(self, segments)
        context, cache = make_context(
            self, input_ids, attention_mask, positions, cache, texts=segments
        )
        query_positions = context.positions
        if cache is None and positions is None:
            # All rows have the same positions except for padding, so one bias serves
            # them all.
            query_positions = jnp.arange(input_ids.shape[1])[None]
        key_positions = query_positions if cache is None else cache.positions
        bias = self.bias(query_positions, key_positions, len(input_ids))
        context = dataclasses.replace(context, bias=bias, memory=memory)
        embed_key, layers_key, finish_key = split_key(key, 3)
        x = self.embed(input_ids, context, embed_key)
        x, pieces = run_layers(
            self.layers, x, context, cache, remat=self.remat, key=layers_key, sums=sums
        )
        if cache is not None:
            cache = dataclasses.replace(cache, key=pieces[0], value=pieces[1])
        if sums is not None:
            sums = pieces[-1]
        hidden = whole_output(self, self.finish(x, finish_key), context)
        return hidden, cache, sums


def check_one_text(model: Model, segments: Ids | None) -> None:
    """Raise `ValueError` for rows of several texts of a model with cross-attention."""
    if segments is not None:
        raise ValueError(
            f"{type(model).__name__}: segments is for models that only read or only "
            "write. Cross-attention does not tell the texts in a row apart. Leave "
            "segments out, with one text in a row and an attention_mask."
        )


def make_head(
    config: Any, size: int, *, use_bias: bool = False, std: float, key: Key
) -> Linear | None:
    """Return a head over the vocabulary, or `None` if the configuration ties it to the
    embedding table."""
    if config.tie_word_embeddings:
        return None
    return Linear(size, config.vocab_size, use_bias=use_bias, std=std, key=key)


class DecoderLM(Decoder):
    """A decoder-only language model."""

    def __init__(self, config: BaseConfig, **options: Unpack[Options]):
        super().__init__(config, **options)

    def hidden_states(
        self, input_ids: Ids, **reading: Unpack[Reading]
    ) -> tuple[Hidden, Cache | None]:
        """Return the input of the head, and the cache with these tokens added.
        Arguments as for calling the model.
        """
        check_names(self, reading, Reading.__annotations__)
        return self._run(input_ids, None, **reading)[:2]

    def __call__(self, input_ids: Ids, **reading: Unpack[Reading]) -> Any:
        """Compute the logits of the next token after each token.

        **Arguments:**

        - `input_ids`: tokens.
        - `attention_mask`: `(batch, t)`, 0 where a token is padding, on either side. Or
            `(batch, t, slots)`, the slots of the cache that each token sees, including
            those of these tokens (without a cache: the tokens of this call). With
            `positions`, texts that branch can then lie side by side in one row.
        - `positions`: by default counted from 0 at the first token that is not padding.
        - `cache`: the cache of the tokens before these, from `init_cache` or an earlier
            call.
        - `key`: for dropout, which needs a key and a model that is not in inference
            mode (`eqx.nn.inference_mode`).
        - `segments`: `(batch, t)`, for rows of several texts one after another: for
            each token the number of its text, other numbers for neighbours, and 0 for
            padding. A token sees only its own text, and positions begin anew in each.

        **Returns:**

        Logits of shape `(batch, t, vocab)`; with a cache, the pair of logits and the
        new cache.
        """
        hidden, cache = self.hidden_states(input_ids, **reading)
        logits = self.logits(hidden)
        if cache is None:
            return logits
        return logits, cache
