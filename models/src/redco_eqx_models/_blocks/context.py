"""The inputs of a layer besides its activations: positions, masks, the cache, the split
of the stream."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, Unpack

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from redco_eqx.layers import column, embed, row
from redco_eqx.types import Key
from redco_eqx_models._blocks.attention import Bias, Implementation, Scoring, attend
from redco_eqx_models._blocks.dropout import dropout, drops
from redco_eqx_models._blocks.layers import ACTIVATIONS, Embedding


class Cache(eqx.Module):
    """The keys and values of the tokens so far. Slots fill from the left, at the same
    pace in all rows.

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
        of_arrays = [(0, 0), (0, 0), (0, num_slots), (0, 0), (0, 0)]
        of_slots = [(0, 0), (0, num_slots)]
        # Padding a mask adds `False`, and these slots are therefore empty.
        return Cache(
            key=jnp.pad(self.key, of_arrays),
            value=jnp.pad(self.value, of_arrays),
            mask=jnp.pad(self.mask, of_slots),
            positions=jnp.pad(self.positions, of_slots),
            length=self.length,
        )


class Memory(eqx.Module):
    """The encoder's output for the decoder: the keys and values of cross-attention,
    computed once.

    - `key`, `value`: `(layers, batch, source, key/value heads, head size)`; for the
        current layer, without the first dim.
    - `mask`: `(batch, source)`, false for padding.
    """

    key: Float[Array, "*layers b s k d"]
    value: Float[Array, "*layers b s k d"]
    mask: Bool[Array, "b s"]


LayerCache: TypeAlias = tuple[
    Float[Array, "layers b slots k d"],
    Float[Array, "layers b slots k d"],
    Int[Array, ""],
]
"""Keys and values of all layers, and the number of the current layer."""

Ids: TypeAlias = Int[Array, "b t"]
"""Tokens."""

Hidden: TypeAlias = Float[Array, "b t size"]
"""The stream between layers."""

LayerOutput: TypeAlias = tuple[Hidden, LayerCache | None]
"""The stream after a layer, and the cache with the layer's keys and values added."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """The information about the tokens that every layer needs besides its activations,
    and the operations that use it.

    - `positions`: `(batch, t)`, by default counted from the first token that is not
        padding.
    - `mask`: `(batch, 1, t, slots)`, the slots that each token may see, for caches and
        for a mask given by hand; `None` if `causal`, `segments` and `window` decide.
    - `length`: the number of slots filled before these tokens; `None` without a cache.
    - `implementation`: the implementation of attention; see `attend`.
    - `sequence_parallel`: true if the stream is split over `tensor` along the tokens,
        see `scan_layers`.
    - `causal`: true if a token sees only the tokens up to itself (a decoder), false if
        it sees all (an encoder).
    - `bias`: `(n, heads, t, slots)`, added to the scores of self-attention in every
        layer, or a function that computes it for a block of tokens. Each row applies to
        the same number of neighbouring rows of the batch. Comes from `relative_bias`;
        `None` for no bias.
    - `memory`: the keys and values that `cross_attend` reads; `None` without an
        encoder.
    - `layer`: the number of the current layer, from 0.
    - `window_mask`, `windowed`: the mask of some layers in place of `mask`, and for
        each layer whether it has this mask, or `window`; `None` if all have the same.
    - `segments`: `(batch, t)`, for each token the number of its text, which is all that
        it sees; 0 for padding.
    - `window`: the number of tokens that a token sees, with itself.
    - `real`: `(batch, t)`, false for padding; `None` if there is none.
    """

    positions: Int[Array, "b t"]
    mask: Bool[Array, "b 1 #t s"] | None
    length: Int[Array, ""] | None
    implementation: Implementation | None = dataclasses.field(metadata={"static": True})
    sequence_parallel: bool = dataclasses.field(
        default=False, metadata={"static": True}
    )
    causal: bool = dataclasses.field(default=True, metadata={"static": True})
    bias: Bias | None = None
    memory: Memory | None = None
    layer: Int[Array, ""] | None = None
    window_mask: Bool[Array, "b 1 #t s"] | None = None
    windowed: tuple[bool, ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    real: Bool[Array, "b t"] | None = None
    segments: Int[Array, "b t"] | None = None
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def embed(self, table: Embedding, ids: Ids) -> Hidden:
        """Look up rows of a table that may be split over the vocabulary, by
        `redco_eqx.embed`."""
        return embed(
            table.weight, table.rows(ids), sequence_parallel=self.sequence_parallel
        )

    def column(
        self,
        x: Float[Array, "b t in"],
        *layers: Callable[[Array], Array],
        unit: int = 1,
    ) -> tuple[Array, ...]:
        """Compute the outputs of sibling projections, by `redco_eqx.column`."""
        return column(x, *layers, unit=unit, sequence_parallel=self.sequence_parallel)

    def mlp(
        self,
        x: Hidden,
        first: Callable[[Array], Array],
        activation: str,
        last: Callable[[Array], Array],
        layer: eqx.nn.Dropout | None = None,
        key: Key | None = None,
    ) -> Hidden:
        """Apply two projections with an activation between them, and dropout after it
        if there is any."""
        (hidden,) = self.column(x, first)
        hidden = ACTIVATIONS[activation](hidden)
        if layer is not None:
            hidden = dropout(layer, hidden, key)
        return self.row(hidden, last)

    def row(
        self,
        x: Float[Array, "b t _"] | Sequence[Float[Array, "b t _"]],
        layer: Callable[[Array], Array] | Sequence[Callable[[Array], Array]],
        *,
        unit: int = 1,
    ) -> Float[Array, "b t out"]:
        """Apply the projection that closes a column split, or the sum of several, by
        `redco_eqx.row`."""
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
        """Add branches to the stream: pairs of an input and the projection that closes
        it. They share one sum over `tensor`. If dropout is active, each has its own
        dropout, and is summed separately.
        """
        if any(drops(layer, key) for key in keys):
            # Dropout of a sum is not the sum of dropouts, so the sums over `tensor`
            # cannot be joined.
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
        **scoring: Unpack[Scoring],
    ) -> tuple[Float[Array, "b t width"], LayerCache | None]:
        """Compute attention of these tokens over themselves and the cache. Return the
        outputs of the heads side by side, and the cache with these tokens added.

        The options are `scale`, the factor on the scores (one over the root of the head
        size by default); `cap`, which bounds the scores smoothly; and `dropout` of the
        probabilities, with its `dropout_key`.
        """
        if cache is not None:
            keys, values, layer = cache
            # JAX takes only start indices of one dtype.
            start = [jnp.asarray(i, jnp.int32) for i in (layer, 0, self.length, 0, 0)]
            new_keys = key[None].astype(keys.dtype)
            new_values = value[None].astype(values.dtype)
            keys = jax.lax.dynamic_update_slice(keys, new_keys, start)
            values = jax.lax.dynamic_update_slice(values, new_values, start)
            cache = (keys, values, layer)
            # Shapes are static, so attention reads all slots, and the mask hides the
            # empty ones.
            key = jax.lax.dynamic_index_in_dim(keys, layer, keepdims=False)
            value = jax.lax.dynamic_index_in_dim(values, layer, keepdims=False)
            key = key.astype(query.dtype)
            value = value.astype(query.dtype)
        mask = self.mask
        window_mask = self.window_mask
        has_window = None
        if self.windowed is not None:
            # In a scan, the number of the layer is traced: both masks exist, and the
            # layer selects one.
            has_window = jnp.asarray(self.windowed)[self.layer]
        if mask is not None and window_mask is not None and has_window is not None:
            mask = jnp.where(has_window, window_mask, mask)
        output = attend(
            query,
            key,
            value,
            mask=mask,
            segments=self.segments,
            window=self.window,
            has_window=None if self.window is None else has_window,
            bias=self.bias,
            causal=self.causal,
            implementation=self.implementation,
            **scoring,
        )
        return rearrange(output, "b t h d -> b t (h d)"), cache

    def cross_attend(
        self, query: Float[Array, "b t h d"], **scoring: Unpack[Scoring]
    ) -> Float[Array, "b t width"]:
        """Compute attention of these tokens over the encoder's. Return the outputs of
        the heads side by side. The options are those of `Context.attend`.
        """
        if self.memory is None:
            raise ValueError(
                "cross_attend: there is no memory. Pass what `encode` returns to "
                "`decode`."
            )
        memory = self.memory
        output = attend(
            query,
            memory.key.astype(query.dtype),
            memory.value.astype(query.dtype),
            segments=(
                jnp.ones(query.shape[:2], jnp.int32),
                memory.mask.astype(jnp.int32),
            ),
            causal=False,
            implementation=self.implementation,
            **scoring,
        )
        return rearrange(output, "b t h d -> b t (h d)")
