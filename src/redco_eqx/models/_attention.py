"""Attention over the heads of a layer, with masks, a window, a cache, and dropout of probabilities."""

from typing import Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jaxtyping import Array, Bool, Float

from redco_eqx._types import Key

Implementation: TypeAlias = Literal["xla", "cudnn"]


def split_heads(x: Float[Array, "b t width"], num_heads: int) -> Float[Array, "b t h d"]:
    return rearrange(x, "b t (h d) -> b t h d", h=num_heads)


def merge_heads(x: Float[Array, "b t h d"]) -> Float[Array, "b t width"]:
    return rearrange(x, "b t h d -> b t (h d)")


def attend(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k d"],
    *,
    mask: Bool[Array, "b 1 t s"] | None = None,
    scale: float | None = None,
    implementation: Implementation | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: Key | None = None,
) -> Float[Array, "b t h d"]:
    """Scaled dot-product attention; `h` is a multiple of `k` (grouped queries share a key/value head).

    **Arguments:**

    - `mask`: which positions each query may see; without one, those up to its own (`t` equals `s`).
    - `scale`: of the scores; `1 / sqrt(d)` by default.
    - `implementation`: of `jax.nn.dot_product_attention`.
    - `dropout`, `dropout_key`: applied to the probabilities in training mode, where a key is given.
    """
    if dropout is None or dropout_key is None or dropout.inference or dropout.p == 0:
        return jax.nn.dot_product_attention(
            query, key, value, mask=mask, scale=scale, is_causal=mask is None, implementation=implementation
        )
    if mask is None:
        mask = jnp.tril(jnp.ones((1, 1, query.shape[1], key.shape[1]), bool))
    groups = query.shape[2] // key.shape[2]
    key, value = (repeat(x, "b s k d -> b s (k g) d", g=groups) for x in (key, value))
    scores = jnp.einsum("bthd,bshd->bhts", query, key, preferred_element_type=jnp.float32)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
    weights = dropout(weights.astype(value.dtype), key=dropout_key)
    return jnp.einsum("bhts,bshd->bthd", weights, value)
