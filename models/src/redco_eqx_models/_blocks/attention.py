"""Scaled dot-product attention over the heads of a layer, with the masks of caches and
the dropout of models."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from redco_eqx.layers import attention
from redco_eqx.types import Key
from redco_eqx_models._blocks.dropout import drops

Implementation: TypeAlias = Literal["xla", "cudnn", "splash"]

Bias: TypeAlias = Float[Array, "n h t s"] | Callable[..., Float[Array, "n h t s"]]
"""Numbers added to the scores of attention, or the function that computes them, see
`redco_eqx.layers.attention`. Each row applies to the same number of neighbouring
rows."""


class Scoring(TypedDict, total=False):
    """The arguments of `attend` that a layer chooses.

    - `scale`: the factor on the scores; one over the root of the head size by default.
    - `cap`: bounds the scores smoothly, as in Gemma 2; by default nothing does.
    - `dropout`, `dropout_key`: applied to the probabilities in training mode, if there
        is a key.
    """

    scale: float | None
    cap: float | None
    dropout: eqx.nn.Dropout
    dropout_key: Key | None


def split_heads(
    x: Float[Array, "b t width"], head_size: int
) -> Float[Array, "b t h d"]:
    """Split the features into adjacent heads of `head_size`."""
    return rearrange(x, "b t (h d) -> b t h d", d=head_size)


def attend(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k d"],
    *,
    mask: Bool[Array, "b 1 #t s"] | None = None,
    segments: Int[Array, "b t"] | tuple[Array, Array] | None = None,
    window: int | None = None,
    has_window: Bool[Array, ""] | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    scale: float | None = None,
    cap: float | None = None,
    implementation: Implementation | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: Key | None = None,
) -> Float[Array, "b t h d"]:
    """Compute scaled dot-product attention, by `redco_eqx.layers.attention`. `h` is a
    multiple of `k` (grouped queries share a key/value head).

    **Arguments:**

    - `mask`: the positions that each query may see, in place of `segments`, `window`
        and `causal`. It takes memory for all pairs of tokens.
    - `causal`: true if, without a mask, a query sees only the positions up to its own
        (`t` equals `s`).
    - `dropout`, `dropout_key`: applied to the probabilities in training mode, if there
        is a key.
    - The others are as for `redco_eqx.layers.attention`.

    Raises `ValueError` for a cap with `"cudnn"`, which has none.
    """
    if cap is not None and implementation == "cudnn":
        raise ValueError(
            "attention='cudnn' cannot bound scores, which this model needs. Leave it "
            "out."
        )
    rate = None
    if dropout is not None and drops(dropout, dropout_key):
        rate = float(dropout.p)
    if implementation == "cudnn" and rate is not None:
        # cuDNN's has no dropout in JAX.
        implementation = None
    hides = mask is not None or segments is not None
    if implementation == "cudnn" and (hides or bias is not None):
        return _by_cudnn(query, key, value, mask, segments, bias, causal, scale)
    if mask is not None:
        shape = (*mask.shape[:2], query.shape[1], key.shape[1])
        hidden = jnp.where(mask, 0.0, -jnp.inf).astype(query.dtype)
        hidden = jnp.broadcast_to(hidden, shape)
        causal = False
        bias = hidden if bias is None else _of_rows(bias, query, key) + hidden
    return attention(
        query,
        key,
        value,
        causal=causal,
        window=window,
        has_window=has_window,
        segments=segments,
        bias=bias,
        cap=cap,
        scale=scale,
        dropout=rate,
        dropout_key=dropout_key,
        implementation=implementation,
    )


def _of_rows(
    bias: Bias, query: Float[Array, "b t h d"], key: Float[Array, "b s k d"]
) -> Float[Array, "b h t s"]:
    """Return the bias of each row, for all pairs of tokens."""
    if callable(bias):
        bias = bias(*map(jnp.arange, (query.shape[1], key.shape[1], query.shape[2])))
    num_rows = query.shape[0] // bias.shape[0]
    return jnp.repeat(bias, num_rows, axis=0).astype(query.dtype)


def _by_cudnn(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k d"],
    mask: Bool[Array, "b 1 #t s"] | None,
    segments: Any,
    bias: Bias | None,
    causal: bool,
    scale: float | None,
) -> Float[Array, "b t h d"]:
    """Compute attention by cuDNN in a model that was made with `attention="cudnn"`,
    with masks and biases of all pairs of tokens."""
    if segments is not None:
        pair = segments if isinstance(segments, tuple) else (segments, segments)
        is_same = (pair[0][:, :, None] == pair[1][:, None, :])[:, None]
        mask = is_same
        if causal:
            mask = is_same & jnp.tril(jnp.ones(is_same.shape[2:], bool))
    own_bias = None if bias is None else _of_rows(bias, query, key)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        own_bias,
        mask=mask,
        scale=scale,
        is_causal=mask is None and causal,
        implementation="cudnn",
    )
