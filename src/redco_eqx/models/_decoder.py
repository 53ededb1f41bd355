"""What the decoder-only families share: positions, masks, the cache, and the run through the layers."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redco_eqx._parallel import Remat
from redco_eqx._scan_layers import scan_layers
from redco_eqx._tree import is_array
from redco_eqx._types import Key
from redco_eqx.models._attention import Implementation, attend
from redco_eqx.models._layers import split


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far. Slots are filled from the left, in all rows alike.

    - `key`, `value`: `(layers, batch, slots, key/value heads, head size)`.
    - `mask`: `(batch, slots)`, false where a slot is empty or padding.
    - `length`: number of slots filled, int32.
    """

    key: Any
    value: Any
    mask: Any
    length: Any

    @classmethod
    def empty(
        cls, *, num_layers: int, batch_size: int, num_slots: int, num_heads: int, head_size: int, dtype: Any
    ) -> "Cache":
        """A cache with room for `num_slots` tokens in each row."""
        zeros = jnp.zeros((num_layers, batch_size, num_slots, num_heads, head_size), dtype)
        return cls(zeros, zeros, jnp.zeros((batch_size, num_slots), bool), jnp.zeros((), jnp.int32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer needs to know about the tokens besides their activations.

    - `positions`: `(batch, t)`, counted from the first token that is not padding.
    - `mask`: `(batch, 1, t, slots)`, which slots each token may see; `None` where causality says it all.
    - `length`: number of slots filled before these tokens; `None` without a cache.
    - `implementation`: of `jax.nn.dot_product_attention`.
    - `sequence_parallel`: whether the stream is split over `tensor` along the tokens, see `scan_layers`.
    """

    positions: Int[Array, "b t"]
    mask: Bool[Array, "b 1 t s"] | None
    length: Int[Array, ""] | None
    implementation: Implementation | None = dataclasses.field(metadata={"static": True})
    sequence_parallel: bool = dataclasses.field(default=False, metadata={"static": True})


def check_tokens(input_ids: Any, attention_mask: Any, max_positions: int | None) -> None:
    """Refuses, by `ValueError`, tokens that are not `(batch, t)`, a mask of another shape, a text too long."""
    if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids is {input_ids.dtype}{list(input_ids.shape)}, but it must be integers, (batch, length). "
            "A single text is input_ids[None]."
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {attention_mask.shape}, but it must be that of input_ids, "
            f"{input_ids.shape}: 1 for each token, 0 for padding."
        )
    if max_positions is not None and input_ids.shape[1] > max_positions:
        raise ValueError(
            f"input_ids has {input_ids.shape[1]} tokens a row, but the model has a table of {max_positions} "
            "positions. Cut the texts, or pass them in parts."
        )


def make_context(
    input_ids: Int[Array, "b t"],
    attention_mask: Array | None,
    positions: Int[Array, "b t"] | None,
    cache: Cache | None,
    *,
    window: int | None,
    implementation: Implementation | None,
    sequence_parallel: bool = False,
) -> tuple[Context, Bool[Array, "b s"] | None]:
    """The context of some tokens, and the cache's mask with these tokens added.

    **Arguments:**

    - `attention_mask`: `(batch, t)`, 0 for padding, on either side.
    - `positions`: given by the caller, or counted from the mask.
    - `window`: how many tokens back, itself included, a token may see.
    """
    size, num_tokens = input_ids.shape
    given = jnp.ones((size, num_tokens), bool) if attention_mask is None else attention_mask.astype(bool)
    if cache is None:
        valid, length, first = given, None, jnp.zeros((), jnp.int32)
    else:
        first = length = cache.length
        valid = jax.lax.dynamic_update_slice_in_dim(cache.mask, given, first, axis=1)
    counted = jnp.maximum(jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, 0)
    own = jax.lax.dynamic_slice_in_dim(counted, first, num_tokens, axis=1)
    if cache is None and attention_mask is None and window is None:
        mask = None
    else:
        causal = jnp.arange(valid.shape[1]) <= first + jnp.arange(num_tokens)[:, None]
        mask = causal[None, None] & valid[:, None, None, :]
        if window is not None:  # by position: padding may lie between two slots
            mask &= counted[:, None, None, :] > own[:, None, :, None] - window
    context = Context(own if positions is None else positions, mask, length, implementation, sequence_parallel)
    return context, None if cache is None else valid


def attend_in(
    context: Context,
    query: Float[Array, "b t h d"],
    key: Float[Array, "b t k d"],
    value: Float[Array, "b t k d"],
    cache: tuple[Array, Array] | None,
    *,
    scale: float | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: Key | None = None,
) -> tuple[Float[Array, "b t h d"], tuple[Array, Array] | None]:
    """Attention of these tokens over themselves and one layer's cache, and that cache with them added."""
    if cache is not None:
        assert context.length is not None
        key, value = (
            jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), context.length, axis=1)
            for old, new in zip(cache, (key, value))
        )
        cache = (key, value)
        key, value = key.astype(query.dtype), value.astype(query.dtype)
    output = attend(
        query,
        key,
        value,
        mask=context.mask,
        scale=scale,
        implementation=context.implementation,
        dropout=dropout,
        dropout_key=dropout_key,
    )
    return output, cache


def make_layers(make_layer: Callable[[Key], Any], num_layers: int, *, stacked: bool, key: Key) -> Any:
    """`num_layers` layers: a list, or one layer whose arrays have a leading dim that numbers them."""
    keys = jax.random.split(key, num_layers)
    return eqx.filter_vmap(make_layer)(keys) if stacked else [make_layer(k) for k in keys]


def run_layers(
    layers: Any,
    x: Float[Array, "b t size"],
    context: Context,
    cache: Cache | None,
    *,
    num_layers: int,
    remat: Remat,
    key: Key | None,
) -> tuple[Float[Array, "b t size"], Any]:
    """All layers, each called as `layer(x, context, cache, key)`, and what they put into the cache."""
    keys = None if key is None else jax.random.split(key, num_layers)
    pieces = None if cache is None else (cache.key, cache.value)

    def one(layer: Any, x: Array, given: Any) -> tuple[Array, Any]:
        piece, key = given
        return layer(x, context, piece, key)

    return scan_layers(
        one,
        layers,
        x,
        inputs=(pieces, keys),
        remat=remat,
        sequence_parallel=context.sequence_parallel,
    )


class DecoderLM(eqx.Module):
    """A decoder-only language model. A family says how it embeds, what its layers are, and how it ends.

    - `config`: as read from `config.json`.
    - `remat`: what the backward pass recomputes, see `scan_layers`.
    - `attention`: implementation of `jax.nn.dot_product_attention`.
    - `sequence_parallel`: whether the stream between layers is split over `tensor` along the tokens, see
        `scan_layers`. Their number must divide. Not with a cache.
    """

    config: eqx.AbstractVar[Any]
    remat: eqx.AbstractVar[Remat]
    attention: eqx.AbstractVar[Implementation | None]
    sequence_parallel: eqx.AbstractVar[bool]

    stacks: ClassVar[tuple[str, ...]]
    """Paths below which the layers lie, as a list or stacked."""
    fused: ClassVar[tuple[str, ...]] = ()
    """Patterns (`re.search`) of the paths of arrays whose last two dims are one in files."""
    prefixes: ClassVar[tuple[str, ...]] = ()
    """With what the keys of the bare model, as some files have them, become paths."""
    ignored: ClassVar[tuple[str, ...]] = ()
    """Patterns of keys that old files have and that are no parameters."""
    tied: ClassVar[Mapping[str, str]] = {}
    """Heads that the model leaves out when the configuration ties them: whose table each is."""

    @property
    @abc.abstractmethod
    def layers(self) -> Any:
        """The layers: a list, or one whose arrays have a leading dim that numbers them."""

    @abc.abstractmethod
    def embed(
        self, input_ids: Int[Array, "b t"], context: Context, key: Key | None
    ) -> Float[Array, "b t size"]:
        """What enters the first layer."""

    @abc.abstractmethod
    def finish(self, x: Float[Array, "b t size"]) -> Float[Array, "b t size"]:
        """What the head reads, from what leaves the last layer."""

    @property
    @abc.abstractmethod
    def head(self) -> Any:
        """The layer that gives the logits, or the table of the embedding that is the head too.

        For a loss that need not hold all logits: `cross_entropy(model.hidden_states(ids)[0], model.head,
        labels)`.
        """

    def logits(self, hidden: Float[Array, "*batch size"]) -> Float[Array, "*batch vocab"]:
        """What the head gives for `hidden_states`."""
        return jnp.einsum("...i,oi->...o", hidden, self.head) if is_array(self.head) else self.head(hidden)

    def hidden_states(
        self,
        input_ids: Int[Array, "b t"],
        *,
        attention_mask: Array | None = None,
        positions: Int[Array, "b t"] | None = None,
        cache: Cache | None = None,
        key: Key | None = None,
    ) -> tuple[Float[Array, "b t size"], Cache | None]:
        """What the head reads, and the cache with these tokens added. Arguments as for calling the model."""
        check_tokens(input_ids, attention_mask, self.config.max_positions)
        context, mask = make_context(
            input_ids, attention_mask, positions, cache,
            window=self.config.window, implementation=self.attention,
            sequence_parallel=self.sequence_parallel and cache is None,
        )  # fmt: skip
        embed_key, layers_key = split(key, 2)
        x = self.embed(input_ids, context, embed_key)
        x, pieces = run_layers(
            self.layers, x, context, cache,
            num_layers=self.config.num_layers, remat=self.remat, key=layers_key,
        )  # fmt: skip
        if cache is not None:
            cache = Cache(*pieces, mask=mask, length=cache.length + input_ids.shape[1])
        return self.finish(x), cache

    def __call__(
        self,
        input_ids: Int[Array, "b t"],
        *,
        attention_mask: Array | None = None,
        positions: Int[Array, "b t"] | None = None,
        cache: Cache | None = None,
        key: Key | None = None,
    ) -> Any:
        """The logits of the next token after each token.

        **Arguments:**

        - `input_ids`: tokens.
        - `attention_mask`: `(batch, t)`, 0 where a token is padding, on either side.
        - `positions`: by default counted from 0 at the first token that is not padding.
        - `cache`: of the tokens before these, from `init_cache` or an earlier call.
        - `key`: for dropout, which is applied only where a key is given and the model is not in inference
            mode (`eqx.nn.inference_mode`).

        **Returns:**

        Logits of shape `(batch, t, vocab)`; with a cache, the pair of them and the new cache.
        """
        hidden, new = self.hidden_states(
            input_ids, attention_mask=attention_mask, positions=positions, cache=cache, key=key
        )
        return self.logits(hidden) if cache is None else (self.logits(hidden), new)

    def init_cache(self, batch_size: int, num_slots: int, dtype: Any = jnp.float32) -> Cache:
        """An empty cache with room for `num_slots` tokens in each row."""
        config = self.config
        return Cache.empty(
            num_layers=config.num_layers,
            batch_size=batch_size,
            num_slots=num_slots,
            num_heads=config.kv_heads,
            head_size=config.head_size,
            dtype=dtype,
        )
