"""Scaled dot-product attention over the heads of a layer, with masks and dropout of the
probabilities."""

import functools
from typing import Literal, TypeAlias, TypedDict

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from redco_eqx.layers import ActivationAxes, activation_axes
from redco_eqx.types import Key
from redco_eqx_models._blocks.dropout import drops
from redco_eqx_models._blocks.layers import capped

Implementation: TypeAlias = Literal["xla", "cudnn"]


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
    bias: Float[Array, "n h t s"] | None = None,
    causal: bool = True,
    scale: float | None = None,
    cap: float | None = None,
    implementation: Implementation | None = None,
    dropout: eqx.nn.Dropout | None = None,
    dropout_key: Key | None = None,
) -> Float[Array, "b t h d"]:
    """Compute scaled dot-product attention. `h` is a multiple of `k` (grouped queries
    share a key/value head).

    **Arguments:**

    - `mask`: the positions that each query may see.
    - `bias`: added to the scores after scaling. Each of its rows applies to the same
        number of neighbouring rows of the batch.
    - `causal`: true if, without a mask, a query sees only the positions up to its own
        (`t` equals `s`).
    - `scale`: the factor on the scores; `1 / sqrt(d)` by default.
    - `cap`: bounds the scores smoothly, see `capped`.
    - `implementation`: as for `jax.nn.dot_product_attention`. By default,
        `flash_attention` on GPUs if there is no mask, bias, cap or dropout, and `"xla"`
        otherwise.
    - `dropout`, `dropout_key`: applied to the probabilities in training mode, if there
        is a key.

    Raises `ValueError` for a cap with `"cudnn"`, which has none.
    """
    if cap is not None and implementation == "cudnn":
        raise ValueError(
            "attention='cudnn' cannot bound scores, which this model needs. Leave it "
            "out."
        )
    if dropout is not None and not drops(dropout, dropout_key):
        dropout = None
    # JAX's own attention has neither dropout nor a cap.
    is_plain = dropout is None and cap is None
    if bias is not None:
        num_rows = query.shape[0] // bias.shape[0]
        bias = jnp.repeat(bias, num_rows, axis=0).astype(query.dtype)
    if implementation is None and mask is None and bias is None and is_plain:
        heads = flash_attention(query, key, value, causal=causal, scale=scale)
        if heads is not None:
            return heads
    # JAX's own attention does not run in float16 on CPU ("F16_F16_F32 is not
    # supported"): JAX 0.10.2 and 0.12.0, no upstream issue known.
    if is_plain and (query.dtype != jnp.float16 or implementation == "cudnn"):
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask=mask,
            scale=scale,
            is_causal=mask is None and causal,
            implementation=implementation,
        )
    if mask is None:
        mask = jnp.ones((1, 1, query.shape[1], key.shape[1]), bool)
        if causal:
            mask = jnp.tril(mask)
    # Vaswani et al. 2017, equation 1.
    factor: float = query.shape[-1] ** -0.5
    if scale is not None:
        factor = scale
    # transformers takes the softmax in float32 too. It rounds the scores to the dtype
    # of the query first. Here the product keeps them in float32.
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    # The heads of a group are neighbours, as in `repeat_kv` of transformers: heads 0 to
    # g - 1 share key/value head 0.
    num_kv_heads = key.shape[2]
    query = rearrange(query, "b t (k g) d -> b t k g d", k=num_kv_heads)
    scores = jnp.einsum("btkgd,bskd->bkgts", query, key, preferred_element_type=dtype)
    # The order is that of Gemma 2 in transformers: scale, cap, mask.
    scores = capped(scores * factor, cap)
    if bias is not None:
        bias = rearrange(bias, "b (k g) t s -> b k g t s", k=num_kv_heads)
        scores = scores + bias.astype(dtype)
    # The lowest finite number, not minus infinity: a row that sees nothing, as padding
    # on the left, has equal weights then, and not NaN, whose gradients would spread.
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    if dropout is not None:
        # As in transformers, the weights that remain do not add up to 1 again.
        weights = dropout(weights, key=dropout_key)
    heads = jnp.einsum("bkgts,bskd->btkgd", weights, value)
    return rearrange(heads, "b t k g d -> b t (k g) d")


# cuDNN's flash attention on GPUs: each device computes its own rows and heads.


def flash_attention(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k d"],
    *,
    causal: bool,
    scale: float | None,
) -> Float[Array, "b t h d"] | None:
    """Compute self-attention with cuDNN, which never stores the scores of all pairs of
    tokens. Return `None` if cuDNN cannot do it.

    It needs a GPU of compute capability 8.0 (Ampere) or later, bfloat16 or float16, and
    a head size that cuDNN supports. Rows must divide evenly over `data` and `fsdp`, and
    heads over `tensor`. The mesh of the arrays says which devices the program is for,
    so the arrays must be on a mesh.

    It can be differentiated once, in reverse mode, but not with `jax.jvp` or a second
    time.

    **Arguments:**

    - `causal`: true if a token sees only the tokens up to itself.
    - `scale`: the factor on the scores; `1 / sqrt(d)` by default.
    """
    if query.dtype not in (jnp.bfloat16, jnp.float16) or query.shape[1] != key.shape[1]:
        return None
    axes = activation_axes(
        query, key, value, num_rows=query.shape[0], num_heads=key.shape[2]
    )
    if axes is None or not _splits_evenly(axes):
        return None
    device = axes.mesh.abstract_device
    if device is None or device.platform != "gpu":
        return None
    own = functools.partial(
        jax.nn.dot_product_attention,
        scale=scale,
        is_causal=causal,
        implementation="cudnn",
    )
    try:
        # JAX checks the version of cuDNN and the heads while it traces.
        jax.eval_shape(own, query, key, value)
    except RuntimeError:
        # JAX raises this if there is no cuDNN here, or none for such heads.
        return None
    if not _is_recent(device.device_kind):
        return None
    if axes.mesh.size == 1:
        return own(query, key, value)
    # Rows and heads do not depend on each other, so nothing is communicated.
    spec = PartitionSpec(axes.rows, None, axes.heads)
    return jax.shard_map(
        own, mesh=axes.mesh, in_specs=(spec, spec, spec), out_specs=spec
    )(query, key, value)


def _splits_evenly(axes: ActivationAxes) -> bool:
    """Return true if rows and heads divide evenly, and no other axis of the mesh has a
    say."""
    splits_heads = axes.heads is not None or "tensor" not in axes.mesh.shape
    others = set(axes.mesh.axis_names) - {*(axes.rows or ()), "tensor"}
    return axes.rows is not None and splits_heads and not others


def _is_recent(device_kind: str) -> bool:
    """Return true for an NVIDIA GPU of compute capability 8.0 or later, which cuDNN's
    flash attention needs."""
    for present in jax.devices():
        if present.device_kind == device_kind:
            return int(present.compute_capability.partition(".")[0]) >= 8
    # For a planned device that is not present, only its name is known.
    return "V100" not in device_kind
