"""The inputs of a layer besides its activations: positions, masks, the cache, the split of the stream."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from redco_eqx._base.protocols import Key
from redco_eqx._parallel.linear import column, row
from redco_eqx._parallel.vocabulary import embed
from redco_eqx.models._blocks.attention import Implementation, attend
from redco_eqx.models._blocks.layers import Embedding, dropout, drops


class Cache(eqx.Module):
    """The keys and values of the tokens so far. Slots fill from the left, in step in all rows.

    - `key`, `value`: `(layers, batch, slots, key/value heads, head size)`.
    - `mask`: `(batch, slots)`, false for an empty slot or padding.
    - `positions`: `(batch, slots)`, the position of the token in each slot, int32.
    - `length`: the number of filled slots, int32.
    """

    key: Float[Array, "layers b slots k d"]
    value: Float[Array, "layers b slots k d"]
    mask: Bool[Array, "b slots"]
    positions: Int[Array, "b slots"]
    length: Int[Array, ""]

    def with_room(self, num_slots: int) -> "Cache":
        """Return the cache with `num_slots` more empty slots."""
        key, value = (
            jnp.pad(x, [(0, 0), (0, 0), (0, num_slots), (0, 0), (0, 0)]) for x in (self.key, self.value)
        )
        mask, positions = (jnp.pad(x, [(0, 0), (0, num_slots)]) for x in (self.mask, self.positions))
        return Cache(key, value, mask, positions, self.length)


class Memory(eqx.Module):
    """The encoder's output for the decoder: the keys and values of cross-attention, computed once.

    - `key`, `value`: `(layers, batch, source, key/value heads, head size)`; for the current layer, without the
        first dim.
    - `mask`: `(batch, source)`, false for padding.
    """

    key: Float[Array, "*layers b s k d"]
    value: Float[Array, "*layers b s k d"]
    mask: Bool[Array, "b s"]


LayerCache: TypeAlias = tuple[
    Float[Array, "layers b slots k d"], Float[Array, "layers b slots k d"], Int[Array, ""]
]
"""Keys and values of all layers, and the number of the current layer."""

Hidden: TypeAlias = Float[Array, "b t size"]
"""The stream between layers."""

LayerOutput: TypeAlias = tuple[Hidden, LayerCache | None]
"""The stream after a layer, and the cache with the layer's keys and values added."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The token information that every layer needs besides its activations, and the operations that use it.

    - `positions`: `(batch, t)`, by default counted from the first token that is not padding.
    - `mask`: `(batch, 1, t, slots)`, the slots that each token may see; `None` if `causal` alone decides.
    - `length`: the number of slots filled before these tokens; `None` without a cache.
    - `implementation`: the implementation of attention, see `attend`.
    - `sequence_parallel`: true if the stream is split over `tensor` along the tokens, see `scan_layers`.
    - `causal`: true if a token sees only the tokens up to itself (a decoder), false if it sees all (an
        encoder).
    - `bias`: `(n, heads, t, slots)`, added to the scores of self-attention in every layer. Each row applies to
        the same number of neighbouring rows of the batch. Comes from `relative_bias`; `None` for no bias.
    - `memory`: the keys and values that `cross_attend` reads; `None` without an encoder.
    - `layer`: the number of the current layer, from 0.
    - `window_mask`, `windowed`: the mask of some layers in place of `mask`, and for each layer whether it has
        this mask; `None` if all have the same.
    - `real`: `(batch, t)`, false for padding; `None` if there is none.
    """

    positions: Int[Array, "b t"]
    mask: Bool[Array, "b 1 #t s"] | None
    length: Int[Array, ""] | None
    implementation: Implementation | None = dataclasses.field(metadata={"static": True})
    sequence_parallel: bool = dataclasses.field(default=False, metadata={"static": True})
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    bias: Float[Array, "n h t s"] | None = None
    memory: Memory | None = None
    layer: Int[Array, ""] | None = None
    window_mask: Bool[Array, "b 1 #t s"] | None = None
    windowed: tuple[bool, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    real: Bool[Array, "b t"] | None = None

    def embed(self, table: Embedding, ids: Int[Array, "b t"]) -> Hidden:
        """Look up rows of a table that may be split over the vocabulary, by `redco_eqx.embed`."""
        return embed(table.weight, table.rows(ids), sequence_parallel=self.sequence_parallel)

    def column(
        self, x: Float[Array, "b t in"], *layers: Callable[[Array], Array], unit: int = 1
    ) -> tuple[Array, ...]:
        """Compute the outputs of sibling projections, by `redco_eqx.column`."""
        return column(x, *layers, unit=unit, sequence_parallel=self.sequence_parallel)

    def row(
        self,
        x: Float[Array, "b t _"] | Sequence[Float[Array, "b t _"]],
        layer: Callable[[Array], Array] | Sequence[Callable[[Array], Array]],
        *,
        unit: int = 1,
    ) -> Float[Array, "b t out"]:
        """Apply the projection that closes a column split, or the sum of several, by `redco_eqx.row`."""
        return row(x, layer, unit=unit, sequence_parallel=self.sequence_parallel)

    def add(
        self,
        x: Hidden,
        branches: Sequence[tuple[Float[Array, "b t _"], Callable[[Array], Array]]],
        layer: eqx.nn.Dropout,
        keys: Sequence[Key | None],
        *,
        unit: int = 1,
    ) -> Hidden:
        """Add branches to the stream: pairs of an input and the projection that closes it. They share one sum
        over `tensor`. If dropout is active, each has its own dropout, and is summed separately.
        """
        if any(drops(layer, key) for key in keys):
            for (hidden, close), key in zip(branches, keys, strict=True):
                x = x + dropout(layer, self.row(hidden, close, unit=unit), key)
            return x
        hidden, closing = zip(*branches)
        return x + self.row(hidden, closing, unit=unit)

    def attend(
        self,
        query: Float[Array, "b t h d"],
        key: Float[Array, "b t k d"],
        value: Float[Array, "b t k d"],
        cache: LayerCache | None,
        *,
        scale: float | None = None,
        cap: float | None = None,
        dropout: eqx.nn.Dropout | None = None,
        dropout_key: Key | None = None,
    ) -> tuple[Float[Array, "b t width"], LayerCache | None]:
        """Compute attention of these tokens over themselves and the cache. Return the outputs of the heads side
        by side, and the cache with these tokens added. The options are those of `attend`.
        """
        if cache is not None:
            keys, values, layer = cache
            at = [jnp.asarray(i, jnp.int32) for i in (layer, 0, self.length, 0, 0)]
            keys, values = (
                jax.lax.dynamic_update_slice(old, new[None].astype(old.dtype), at)
                for old, new in ((keys, key), (values, value))
            )
            cache = (keys, values, layer)
            key, value = (
                jax.lax.dynamic_index_in_dim(x, layer, keepdims=False).astype(query.dtype)
                for x in (keys, values)
            )
        mask = self.mask
        if mask is not None and self.window_mask is not None and self.windowed is not None:
            mask = jnp.where(jnp.asarray(self.windowed)[self.layer], self.window_mask, mask)
        output = attend(
            query, key, value,
            mask=mask, bias=self.bias, causal=self.causal, scale=scale, cap=cap,
            implementation=self.implementation, dropout=dropout, dropout_key=dropout_key,
        )  # fmt: skip
        return rearrange(output, "b t h d -> b t (h d)"), cache

    def cross_attend(
        self,
        query: Float[Array, "b t h d"],
        *,
        scale: float | None = None,
        dropout: eqx.nn.Dropout | None = None,
        dropout_key: Key | None = None,
    ) -> Float[Array, "b t width"]:
        """Compute attention of these tokens over the encoder's. Return the outputs of the heads side by side.
        The options are those of `attend`.
        """
        if self.memory is None:
            raise ValueError("cross_attend: there is no memory. Pass what `encode` returns to `decode`.")
        memory = self.memory
        output = attend(
            query, memory.key.astype(query.dtype), memory.value.astype(query.dtype),
            mask=memory.mask[:, None, None], causal=False, scale=scale,
            implementation=self.implementation, dropout=dropout, dropout_key=dropout_key,
        )  # fmt: skip
        return rearrange(output, "b t h d -> b t (h d)")


def check_tokens(
    input_ids: Array, attention_mask: Array | None, max_positions: int | None, cache: Cache | None = None
) -> None:
    """Raise `ValueError` if tokens are not `(batch, t)`, a mask has the wrong shape, or a text is too long."""
    if input_ids.ndim != 2 or not jnp.issubdtype(input_ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids is {input_ids.dtype}{list(input_ids.shape)}, but it must be integers, (batch, length). "
            "A single text is input_ids[None]."
        )
    num_slots = input_ids.shape[1] if cache is None else cache.mask.shape[1]
    shape, by_token = input_ids.shape, (*input_ids.shape, num_slots)
    if attention_mask is not None and attention_mask.shape not in (shape, by_token):
        raise ValueError(
            f"attention_mask has shape {attention_mask.shape}, but it must be that of input_ids, "
            f"{shape}: 1 for each token, 0 for padding. Or {by_token}: what each token sees."
        )
    is_branching = attention_mask is not None and attention_mask.ndim == 3
    if max_positions is not None and shape[1] > max_positions and not is_branching:
        raise ValueError(
            f"input_ids has {shape[1]} tokens a row, but the model has a table of {max_positions} "
            "positions. Truncate the texts, or pass them in parts."
        )


def make_context(
    input_ids: Int[Array, "b t"],
    attention_mask: Array | None,
    positions: Int[Array, "b t"] | None,
    cache: Cache | None,
    *,
    window: int | None = None,
    windowed: tuple[bool, ...] | None = None,
    implementation: Implementation | None,
    sequence_parallel: bool = False,
    causal: bool = True,
) -> tuple[Context, Cache | None]:
    """Make the context of some tokens, and the cache with these tokens but without their keys and values, which
    the layers add.

    **Arguments:**

    - `attention_mask`: `(batch, t)`, 0 for padding, on either side; or `(batch, t, slots)`, the slots (without
        a cache: the tokens of this call) that each token sees.
    - `positions`: positions of the tokens; by default counted from the mask.
    - `window`: the number of tokens back, itself included, that a token may see.
    - `windowed`: for each layer, whether it has the window; by default all have it.
    - `causal`: whether a token sees only the tokens up to itself, or, without a cache, all.
    """
    size, num_tokens = input_ids.shape
    given = jnp.ones((size, num_tokens), bool)
    if attention_mask is not None and attention_mask.ndim == 2:
        given = attention_mask.astype(bool)
    num_before = 0 if cache is None else jnp.sum(cache.mask, axis=1, keepdims=True, dtype=jnp.int32)
    if window is not None and attention_mask is None and positions is None and cache is None:
        window = window if window < num_tokens else None  # a window as long as the text hides nothing
    if positions is None:
        positions = jnp.maximum(num_before + jnp.cumsum(given, axis=1, dtype=jnp.int32) - 1, 0)
    if cache is None:
        valid, slot_positions, length, first = given, positions, None, jnp.zeros((), jnp.int32)
    else:
        first = length = cache.length
        valid, slot_positions = (
            jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), first, axis=1)
            for old, new in ((cache.mask, given), (cache.positions, positions))
        )
        cache = Cache(cache.key, cache.value, valid, slot_positions, first + num_tokens)
    if attention_mask is not None and attention_mask.ndim == 3:
        mask = attention_mask.astype(bool)[:, None]
    elif cache is None and attention_mask is None and window is None:
        mask = None
    elif not causal:
        mask = valid[:, None, None, :]
    else:
        before = jnp.arange(valid.shape[1]) <= first + jnp.arange(num_tokens)[:, None]
        mask = before[None, None] & valid[:, None, None, :]
    near = mask
    if mask is not None and window is not None:  # by position, because padding may lie between two slots
        near = mask & (slot_positions[:, None, None, :] > positions[:, None, :, None] - window)
    context = Context(
        positions, near if windowed is None else mask, length, implementation, sequence_parallel, causal,
        window_mask=near, windowed=windowed, real=given,
    )  # fmt: skip
    return context, cache
