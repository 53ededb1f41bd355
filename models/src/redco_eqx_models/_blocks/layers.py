"""Layers that all families share. They act on the last dim of arrays of any rank."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redco_eqx.types import Key

# The names are those of transformers' `activations.py`. `gelu` is exact there, and
# approximate by default in JAX. Three names mean the approximation by tanh (Hendrycks
# and Gimpel 2016).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "gelu_fast": jax.nn.gelu,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
}


class Linear(eqx.Module):
    """`x @ weight.T + bias`, with the weight stored as `(out, in)`."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None
    in_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        std: float = 0.02,
        key: Key,
    ):
        self.weight = std * jax.random.normal(key, (out_features, in_features))
        self.bias = jnp.zeros(out_features) if use_bias else None
        self.in_features = in_features
        self.out_features = out_features

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        x = jnp.einsum("...i,oi->...o", x, self.weight)
        if self.bias is None:
            return x
        return x + self.bias


def make_linears(
    key: Key, *sizes: tuple[int, int], use_bias: bool = True, std: float
) -> list[Linear]:
    """Return a Linear for each pair of sizes: the number of input features, and of
    output features."""
    keys = jax.random.split(key, len(sizes))
    return [
        Linear(*pair, use_bias=use_bias, std=std, key=key)
        for pair, key in zip(sizes, keys)
    ]


class Embedding(eqx.Module):
    """A table with one row per token or position. Padding adds rows beyond
    `num_embeddings`."""

    weight: Float[Array, "num size"]
    num_embeddings: int = eqx.field(static=True)
    embedding_size: int = eqx.field(static=True)

    def __init__(
        self, num_embeddings: int, embedding_size: int, *, std: float = 0.02, key: Key
    ):
        self.weight = std * jax.random.normal(key, (num_embeddings, embedding_size))
        self.num_embeddings = num_embeddings
        self.embedding_size = embedding_size

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch size"]:
        return jnp.take(self.weight, self.rows(ids), axis=0)

    def rows(self, ids: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
        """Return the rows for these ids. An id that is no token, because it is negative
        or in the padding, is moved out of the table.
        """
        num_rows = self.weight.shape[0]
        # In the dtype of small ids, such as int8, the sums below could overflow.
        ids = ids.astype(jnp.promote_types(ids.dtype, jnp.int32))
        # `jnp.take` returns NaN for ids outside the table, which shows the mistake. It
        # would count a negative id, such as a label of -100, from the end.
        beyond = jnp.where(ids < 0, ids - num_rows, ids + num_rows)
        return jnp.where((ids < 0) | (ids >= self.num_embeddings), beyond, ids)


class LayerNorm(eqx.Module):
    """Layer normalisation (Ba et al. 2016), with statistics in float32. Without
    `affine`, it has no arrays."""

    weight: Float[Array, " size"] | None
    bias: Float[Array, " size"] | None
    eps: float = eqx.field(static=True)

    def __init__(self, size: int, *, eps: float = 1e-5, affine: bool = True):
        self.weight = jnp.ones(size) if affine else None
        self.bias = jnp.zeros(size) if affine else None
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # Subtract the mean first. The mean of the squares less the square of the mean
        # would lose its digits where the mean is large.
        y = y - jnp.mean(y, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(variance + self.eps)
        if self.weight is not None and self.bias is not None:
            y = y * self.weight + self.bias
        return y.astype(x.dtype)


class RMSNorm(eqx.Module):
    """Root mean square normalisation (Zhang and Sennrich 2019), with statistics in
    float32. `offset` is added to the weight. In Gemma, it is 1.
    """

    weight: Float[Array, " size"]
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(self, size: int, *, eps: float = 1e-6, offset: float = 0.0):
        # With the offset, the factor is 1 at first.
        self.weight = jnp.full(size, 1 - offset)
        self.eps = eps
        self.offset = offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(y), axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(mean_square + self.eps)
        if self.offset:
            # transformers' Gemma multiplies in float32, and rounds once, at the end.
            return ((self.offset + self.weight) * y).astype(x.dtype)
        # transformers' LLaMA rounds before it multiplies.
        return self.weight.astype(x.dtype) * y.astype(x.dtype)


class TiedHead(eqx.Module):
    """A head that is built where `cross_entropy` needs it. Its weight and bias are
    elsewhere in the model: the weight is the embedding table, for example.

    - `cap`: bounds the logits smoothly, before the bias is added:
        `cap * tanh(logits / cap)`.
    """

    weight: Float[Array, "vocab size"]
    bias: Float[Array, " vocab"] | None = None
    cap: float | None = eqx.field(static=True, default=None)

    @property
    def in_features(self) -> int:
        """Size of the stream."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Size of the vocabulary."""
        return self.weight.shape[0]

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch vocab"]:
        logits = capped(jnp.einsum("...i,oi->...o", x, self.weight), self.cap)
        if self.bias is None:
            return logits
        return logits + self.bias


def capped(x: Float[Array, "*any"], cap: float | None) -> Float[Array, "*any"]:
    """Bound numbers smoothly to `cap` on both sides. `None` leaves them unchanged."""
    if cap is None:
        return x
    # Bello et al. 2016. Gemma 2 bounds its scores and its logits like this.
    return cap * jnp.tanh(x / cap)


def maybe(layer: Callable[[Array], Array] | None, x: Array) -> Array:
    """Apply a layer that a family may leave out (`None`)."""
    if layer is None:
        return x
    return layer(x)
