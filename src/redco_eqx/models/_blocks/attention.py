"""Scaled dot-product attention over the heads of a layer, with masks and dropout of probabilities."""

from typing import Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from redco_eqx._parallel.attention import flash_attention
from redco_eqx._types import Key
from redco_eqx.models._blocks.layers import drops

Implementation: TypeAlias = Literal["xla", "cudnn"]


def split_heads(x: Float[Array, "b t width"], head_size: int) -> Float[Array, "b t h d"]:
    """Features as heads of `head_size` side by side."""
    return rearrange(x, "b t (h d) -> b t h d", d=head_size)


def attend(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k d"],
    *,
    mask: Bool[Array, "b 1 #t s"] | None = None,
    bias: Float[Array, "n h t s"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    implementation: Implementation | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: Key | None = None,
) -> Float[Array, "b t h d"]:
    """Scaled dot-product attention; `h` is a multiple of `k` (grouped queries share a key/value head).

    **Arguments:**

    - `mask`: which positions each query may see.
    - `bias`: added to the scores once they are scaled. Each of its rows is for as many neighbouring ones of the
        batch.
    - `causal`: which those are without a mask: the ones up to its own (`t` equals `s`), or all.
    - `scale`: of the scores; `1 / sqrt(d)` by default.
    - `implementation`: of `jax.nn.dot_product_attention`; by default `flash_attention` on GPUs, where neither
        mask, bias nor dropout is in its way, and otherwise `"xla"`.
    - `dropout`, `dropout_key`: applied to the probabilities in training mode, where a key is given.
    """
    if dropout is not None and not drops(dropout, dropout_key):
        dropout = None
    if bias is not None:
        bias = jnp.repeat(bias, query.shape[0] // bias.shape[0], axis=0).astype(query.dtype)
    if implementation is None and mask is None and bias is None and dropout is None:
        heads = flash_attention(query, key, value, causal=causal, scale=scale)
        if heads is not None:
            return heads
    # On CPU, JAX's own does not run in float16 ("F16_F16_F32 is not supported"): JAX 0.10.2 and 0.12.0, no
    # upstream issue known.
    if dropout is None and (query.dtype != jnp.float16 or implementation == "cudnn"):
        return jax.nn.dot_product_attention(
            query, key, value, bias,
            mask=mask, scale=scale, is_causal=mask is None and causal, implementation=implementation,
        )  # fmt: skip
    if mask is None:
        mask = jnp.ones((1, 1, query.shape[1], key.shape[1]), bool)
        mask = jnp.tril(mask) if causal else mask
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    query = rearrange(query, "b t (k g) d -> b t k g d", k=key.shape[2])
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=dtype)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + rearrange(bias, "b (k g) t s -> b k g t s", k=key.shape[2]).astype(dtype)
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], scores, jnp.finfo(dtype).min), axis=-1)
    weights = weights.astype(value.dtype)
    if dropout is not None:
        weights = dropout(weights, key=dropout_key)
    return rearrange(jnp.einsum("bkgts,bskd->btkgd", weights, value), "b t k g d -> b t (k g) d")
