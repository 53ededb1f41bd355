"""Attention that never stores the scores of all pairs of tokens, with one meaning on
every platform: a kernel of JAX where one fits, blocks of queries everywhere else."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from redco_eqx._base.protocols import Key
from redco_eqx._parallel.kernels import (
    Call,
    Implementation,
    Segments,
    kernel_for,
    run_kernel,
)

BiasFunction: TypeAlias = Callable[
    [Int[Array, " q"], Int[Array, " s"], Int[Array, " heads"]],
    Float[Array, "n heads_or_1 q s"],
]
"""A function that returns what is added to the scores of a block of queries and keys,
from their places in the text and the numbers of the heads."""


@jax.named_scope("redco_eqx.attention")
def attention(
    query: Float[Array, "batch length heads size"],
    key: Float[Array, "batch source kv_heads size"],
    value: Float[Array, "batch source kv_heads value_size"],
    *,
    causal: bool,
    window: int | None = None,
    has_window: Bool[Array, ""] | None = None,
    segments: Int[Array, "batch length"] | Segments | None = None,
    bias: Float[Array, "n heads_or_1 length source"] | BiasFunction | None = None,
    cap: float | None = None,
    scale: float | None = None,
    dropout: float | None = None,
    dropout_key: Key | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "batch length heads value_size"]:
    """Compute scaled dot-product attention. Memory grows with the length of the texts,
    not with its square.

    The result is the same on every platform and mesh, up to rounding. Rows and heads do
    not depend on each other, so nothing is communicated: rows stay split over `data`
    and `fsdp`, and heads over `tensor`, as [`column`][] leaves them.

    ```python
    heads = rx.layers.attention(q, k, v, causal=True)
    ```

    The platform of the mesh decides how it is computed:

    - On GPUs, `"cudnn"`, flash attention of cuDNN, in bfloat16 or float16 on Ampere or
        later, for as many queries as keys, without segments, bias, cap, dropout or a
        window to both sides.
    - On TPUs, `"splash"`, JAX's kernel for TPUs, in bfloat16 or float32, for at least
        512 queries and keys, without bias or dropout.
    - Anywhere else, and wherever these cannot, `"xla"`, in blocks of queries. Arrays on
        no mesh have it too, and rows or heads that do not divide evenly over the mesh.

    `"xla"` is exact. It takes all queries at once as long as each head has at most
    1024 * 1024 pairs of queries and keys in a row. Beyond that, it takes one block of
    queries after another, and computes the scores of a block again for the gradient.

    **Arguments:**

    - `query`, `key`, `value`: `heads` is a multiple of `kv_heads`. Neighbouring heads
        share a key/value head (grouped queries). `source` may differ from `length`
        (cross-attention).
    - `causal`: true if a token sees no token after it.
    - `window`: a token sees the tokens at a distance of less than `window`; its own
        counts. With `causal`, these are the last `window` tokens.
    - `has_window`: false turns the window off. For layers in a scan, of which only some
        have a window.
    - `segments`: for each token the number of its text. A token sees only its own text.
        Give padding the number 0 and the texts 1, 2, ...: padding is then a text of its
        own, which no other text sees, wherever it is in the row. For keys of other
        tokens, pass the pair of the queries' and the keys' numbers. A query without a
        key gives zeros.
    - `bias`: added to the scores after `scale` and `cap`. Minus infinity hides a pair.
        Either a function `(query_positions, key_positions, heads) -> scores`, which is
        called for each block with the indices of its queries, keys and heads, or an
        array. An array takes memory for all pairs of tokens. Both have the shape
        `(n, heads, queries, keys)`; each of the `n` rows applies to the same number of
        neighbouring rows of the batch, and `heads` may be 1.
    - `cap`: bounds the scores smoothly, by `cap * tanh(scores / cap)`.
    - `scale`: the factor on the scores; `size ** -0.5` by default.
    - `dropout`: the part of the probabilities that becomes 0; the others are divided by
        `1 - dropout`. The choice depends on `dropout_key` alone, not on the mesh.
    - `dropout_key`: the key for `dropout`.
    - `implementation`: one of these names, in place of the choice by platform.
        Kernels (`"cudnn"`, `"splash"`) have a first derivative in reverse mode, and no
        other. Pass `"xla"` for `jax.jvp` and for second derivatives.

    **Returns:**

    The outputs of the heads, in the dtype of `value`. The softmax is in float32.

    **Raises:**

    `ValueError` for shapes that do not fit, a window that is not positive, dropout
    without a key, and a kernel that is named but cannot compute this, with the reason.
    With kernels, a second derivative raises `ValueError` too.
    """
    _check_shapes(query, key, value)
    _check_window(window, has_window)
    is_self = query.shape[1] == key.shape[1]
    if (causal or window is not None) and not is_self:
        raise ValueError(
            f"attention: {query.shape[1]} queries and {key.shape[1]} keys, but causal "
            "and window compare their places in one text. Pass causal=False and "
            "window=None, or hide pairs by a bias of minus infinity."
        )
    if window is not None and window >= key.shape[1]:
        # It hides nothing.
        window = None
        has_window = None
    pair = _paired_segments(segments, query, key)
    if bias is not None and not callable(bias):
        _check_bias(bias, query, key)
    if dropout is not None:
        _check_dropout(dropout, dropout_key)
    # Vaswani et al. 2017, equation 1.
    factor: float = query.shape[-1] ** -0.5
    if scale is not None:
        factor = scale
    call = Call(
        causal=causal,
        window=window,
        has_window=has_window,
        segments=pair,
        is_one_text=is_self and not isinstance(segments, tuple),
        has_bias=bias is not None,
        cap=cap,
        scale=factor,
        has_dropout=bool(dropout),
    )
    kernel = kernel_for(query, key, value, call, implementation)
    if kernel is not None:
        return run_kernel(kernel, query, key, value, call)
    if not dropout:
        dropout_key = None
    return _in_blocks(query, key, value, call, bias, dropout or 0.0, dropout_key)


# XLA's attention, in blocks of queries.

MOST_PAIRS = 1024 * 1024
"""Pairs of a query and a key, of one head in one row, whose scores are small enough to
be computed, and stored for the gradient, all at once."""

SMALLEST_BLOCK = 128
"""Queries in a block, at least: enough rows to fill a matrix unit."""


def block_size(length: int, source: int) -> int:
    """Return the number of queries in a block. It depends on the lengths alone, so that
    numbers are the same on every mesh."""
    if length * source <= MOST_PAIRS:
        return length
    blocks = MOST_PAIRS // source // SMALLEST_BLOCK
    return max(blocks, 1) * SMALLEST_BLOCK


def _in_blocks(
    query: Float[Array, "b t h d"],
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k e"],
    call: Call,
    bias: Float[Array, "n h_or_1 t s"] | BiasFunction | None,
    dropout: float,
    dropout_key: Key | None,
) -> Float[Array, "b t h e"]:
    length = query.shape[1]
    source = key.shape[1]
    positions = jnp.arange(length)
    own_segments = None
    key_segments = None
    if call.segments is not None:
        own_segments, key_segments = call.segments
    bias_function = None
    bias_array = None
    if callable(bias):
        bias_function = bias
    else:
        bias_array = bias
    of_block = functools.partial(
        _attend,
        call=call,
        bias_function=bias_function,
        dropout=dropout,
        dropout_key=dropout_key,
    )
    size = block_size(length, source)
    if size >= length:
        return of_block(
            query,
            positions,
            own_segments,
            bias_array,
            key,
            value,
            jnp.arange(source),
            key_segments,
        )
    dtypes = key.dtype, value.dtype
    # The loop adds up the gradients of keys and values over the blocks, in the dtype in
    # which they come in.
    key = key.astype(jnp.promote_types(key.dtype, jnp.float32))
    value = value.astype(jnp.promote_types(value.dtype, jnp.float32))
    num_seen = _num_seen(size, source, call)

    # Scores are computed again in the backward pass. Inside a loop, the compiler cannot
    # merge that with the forward pass.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one(block: tuple) -> Array:
        own_query, own_positions, segments, own_bias = block
        start = jnp.zeros((), own_positions.dtype)
        if num_seen < source:
            # Only the keys in a window of the queries.
            first = own_positions[0] - (call.window or 1) + 1
            start = jnp.clip(first, 0, source - num_seen)

        def seen(x: Array, axis: int) -> Array:
            if num_seen == source:
                return x
            return jax.lax.dynamic_slice_in_dim(x, start, num_seen, axis)

        if own_bias is not None:
            own_bias = seen(own_bias, 3)
        seen_segments = None
        if key_segments is not None:
            seen_segments = seen(key_segments, 1)
        return of_block(
            own_query,
            own_positions,
            segments,
            own_bias,
            seen(key, 1).astype(dtypes[0]),
            seen(value, 1).astype(dtypes[1]),
            start + jnp.arange(num_seen),
            seen_segments,
        )

    blocks = (
        _cut(query, 1, size),
        _cut(positions, 0, size),
        _cut(own_segments, 1, size),
        _cut(bias_array, 2, size),
    )
    heads = rearrange(jax.lax.map(one, blocks), "n b q h e -> b (n q) h e")
    return heads[:, :length]


def _num_seen(size: int, source: int, call: Call) -> int:
    """Return the number of keys that a block of queries can see at most."""
    if call.window is None or call.has_window is not None:
        return source
    before = call.window - 1
    after = 0 if call.causal else before
    return min(before + size + after, source)


def _cut(x: Array | None, dim: int, size: int) -> Array | None:
    """Cut a dim into blocks, which become the leading dim. The last one is filled up
    with zeros."""
    if x is None:
        return None
    num_blocks = -(-x.shape[dim] // size)
    missing = num_blocks * size - x.shape[dim]
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, missing)
    x = jnp.pad(x, padding)
    shape = (*x.shape[:dim], num_blocks, size, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def _attend(
    query: Float[Array, "b q h d"],
    query_positions: Int[Array, " q"],
    query_segments: Int[Array, "b q"] | None,
    bias: Float[Array, "n h_or_1 q s"] | None,
    key: Float[Array, "b s k d"],
    value: Float[Array, "b s k e"],
    key_positions: Int[Array, " s"],
    key_segments: Int[Array, "b s"] | None,
    *,
    call: Call,
    bias_function: BiasFunction | None,
    dropout: float,
    dropout_key: Key | None,
) -> Float[Array, "b q h e"]:
    """Compute attention of a block of queries over these keys, with all their
    scores."""
    num_rows = query.shape[0]
    num_heads = query.shape[2]
    num_kv_heads = key.shape[2]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    # The heads of a group are neighbours: heads 0 to g - 1 share key/value head 0.
    query = rearrange(query, "b q (k g) d -> b q k g d", k=num_kv_heads)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key, preferred_element_type=dtype)
    # The order is that of Gemma 2: scale, cap, bias, mask.
    scores = scores * call.scale
    if call.cap is not None:
        scores = call.cap * jnp.tanh(scores / call.cap)
    if bias_function is not None:
        bias = bias_function(query_positions, key_positions, jnp.arange(num_heads))
    visible = _visible(
        query_positions, query_segments, key_positions, key_segments, call
    )
    if bias is not None:
        bias = _of_rows(bias, num_rows, num_kv_heads).astype(dtype)
        scores = scores + bias
        is_shown = bias > -jnp.inf
        visible = is_shown if visible is None else visible & is_shown
    if visible is not None:
        # The lowest finite number, not minus infinity, whose softmax over a row that
        # sees nothing would be NaN.
        scores = jnp.where(visible, scores, jnp.finfo(dtype).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if visible is not None and not call.sees_itself:
        # A query that sees nothing has equal weights up to here.
        weights = jnp.where(visible, weights, 0)
    weights = weights.astype(value.dtype)
    if dropout_key is not None:
        kept = _kept(
            dropout_key,
            num_rows,
            num_heads,
            query_positions,
            len(key_positions),
            dropout,
        )
        kept = rearrange(kept, "b (k g) q s -> b k g q s", k=num_kv_heads)
        weights = jnp.where(kept, weights / (1 - dropout), 0)
    heads = jnp.einsum("bkgqs,bske->bqkge", weights, value)
    return rearrange(heads, "b q k g e -> b q (k g) e")


def _of_rows(
    bias: Float[Array, "n h_or_1 q s"], num_rows: int, num_kv_heads: int
) -> Float[Array, "n_or_b kv_heads_or_1 group q s"]:
    """Return the bias of each row, with its heads in their groups."""
    if bias.shape[0] > 1:
        bias = jnp.repeat(bias, num_rows // bias.shape[0], axis=0)
    if bias.shape[1] == 1:
        return bias[:, :, None]
    return rearrange(bias, "n (k g) q s -> n k g q s", k=num_kv_heads)


def _visible(
    query_positions: Int[Array, " q"],
    query_segments: Int[Array, "b q"] | None,
    key_positions: Int[Array, " s"],
    key_segments: Int[Array, "b s"] | None,
    call: Call,
) -> Bool[Array, "b_or_1 1 1 q s"] | None:
    """Return true where a query sees a key; `None` if all see all."""
    behind = query_positions[:, None] - key_positions
    visible = None
    if call.causal:
        visible = behind >= 0
    if call.window is not None:
        is_near = jnp.abs(behind) < call.window
        if call.has_window is not None:
            is_near = is_near | ~call.has_window
        visible = is_near if visible is None else visible & is_near
    if visible is not None:
        visible = visible[None, None, None]
    if query_segments is not None and key_segments is not None:
        is_same = query_segments[:, :, None] == key_segments[:, None, :]
        is_same = is_same[:, None, None]
        visible = is_same if visible is None else visible & is_same
    return visible


def _kept(
    key: Key,
    num_rows: int,
    num_heads: int,
    query_positions: Int[Array, " q"],
    num_keys: int,
    dropout: float,
) -> Bool[Array, "b h q s"]:
    """Return true for the probabilities that dropout keeps."""
    # A key of its own for each row, head and query, so that the numbers of a query do
    # not depend on the others in its block. Bits under a `vmap` over keys of RBG differ
    # from those outside of it, so the key is read as one of threefry, which its first
    # half is.
    words = jax.random.key_data(key)[:2]
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys = each(key, jnp.arange(num_rows))
    keys = jax.vmap(each, in_axes=(0, None))(keys, jnp.arange(num_heads))
    of_queries = jax.vmap(jax.vmap(each, in_axes=(0, None)), in_axes=(0, None))
    keys = of_queries(keys, query_positions)

    def draw(key: Key) -> Array:
        return jax.random.bernoulli(key, 1 - dropout, (num_keys,))

    return jax.vmap(jax.vmap(jax.vmap(draw)))(keys)


# Checks of the arguments.


def _check_shapes(query: Array, key: Array, value: Array) -> None:
    shapes = (
        f"query has shape {tuple(query.shape)}, key {tuple(key.shape)} and value "
        f"{tuple(value.shape)}"
    )
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        raise ValueError(
            f"attention: {shapes}, but each must be (batch, length, heads, size). "
            "Split the features into heads first; a single text is query[None]."
        )
    if key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"attention: {shapes}, but key and value must have the same rows, length "
            "and heads."
        )
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"attention: {shapes}, but query and key must have the same number of rows "
            "and the same head size."
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"attention: {shapes}, but the number of heads of query, {query.shape[2]}, "
            f"must be a multiple of those of key, {key.shape[2]}."
        )


def _check_window(window: int | None, has_window: Array | None) -> None:
    if window is None:
        if has_window is not None:
            raise ValueError("attention: has_window is passed without a window.")
        return
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            f"attention: window={window!r}, but it must be a positive int, the number "
            "of tokens in the window with the token itself. None sees all tokens."
        )


def _paired_segments(
    segments: Array | Segments | None, query: Array, key: Array
) -> Segments | None:
    """Return the segments of queries and of keys. Raise `ValueError` if they do not
    fit."""
    if segments is None:
        return None
    pair = segments if isinstance(segments, tuple) else (segments, segments)
    if len(pair) != 2:
        raise ValueError(
            f"attention: segments is a tuple of {len(pair)}, but it must be an array, "
            "or the pair of those of queries and of keys."
        )
    for name, own, x in zip(("queries", "keys"), pair, (query, key)):
        if own.shape != x.shape[:2] or not jnp.issubdtype(own.dtype, jnp.integer):
            raise ValueError(
                f"attention: segments of the {name} is {own.dtype}{list(own.shape)}, "
                f"but it must be integers of shape {tuple(x.shape[:2])}, the number of "
                "its text for each token, and 0 for padding."
            )
    return pair


def _check_bias(bias: Array, query: Array, key: Array) -> None:
    num_rows, length, num_heads, _ = query.shape
    wanted = (length, key.shape[1])
    fits = bias.ndim == 4 and bias.shape[2:] == wanted
    # A batch may have no rows.
    fits = fits and num_rows % max(bias.shape[0], 1) == 0
    if not fits or bias.shape[1] not in (1, num_heads):
        raise ValueError(
            f"attention: bias has shape {tuple(bias.shape)}, but it must be (n, heads, "
            f"queries, keys): n divides {num_rows} rows, heads is {num_heads} or 1, "
            f"and the rest is {wanted}."
        )


def _check_dropout(dropout: float, dropout_key: Key | None) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(
            f"attention: dropout={dropout!r}, but it must be at least 0 and less than "
            "1."
        )
    if dropout and dropout_key is None:
        raise ValueError(
            f"attention: dropout={dropout!r} without a dropout_key. Pass a key, or "
            "dropout=None outside of training."
        )
