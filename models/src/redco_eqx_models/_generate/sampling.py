"""Choose one token from the logits of one position; the largest entries of rows that
may be split."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from redco_eqx.layers import activation_axes
from redco_eqx.types import Key


def largest(
    x: Float[Array, "b *choices"], k: int
) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """Return the `k` largest entries of each row, in order, and their indices among all
    its choices, counted row by row.

    Among equal entries, the first comes first, on every mesh. Over `tensor`, each shard
    takes the largest entries of its part of the last dim, and only these are gathered:
    on each device, at most `8 * tensor * k` bytes for a row. If that is more than the
    row, the row itself is gathered. Over the batch, nothing is communicated.

    **Arguments:**

    - `x`: float32. The leading dim is the batch.
    - `k`: at most the number of choices.
    """
    axes = activation_axes(x, num_rows=x.shape[0], num_heads=x.shape[-1])
    if axes is None or axes.mesh.size == 1:
        values, places = jax.lax.top_k(jax.lax.collapse(x, 1), k)
        return values, places
    last = x.shape[-1]
    num_shards = axes.num_head_shards
    num_own = math.prod(x.shape[1:]) // num_shards
    # Each value is sent with its index.
    is_cut = num_shards > 1 and 2 * min(k, num_own) < num_own
    mesh = axes.mesh
    rows = axes.rows

    def body(x: Array) -> tuple[Array, Array]:
        flat = jax.lax.collapse(x, 1)
        values, places = jax.lax.top_k(flat, min(k, flat.shape[1]))
        if is_cut:
            own = x.shape[-1]
            before, place = jnp.divmod(places, own)
            places = before * last + jax.lax.axis_index("tensor") * own + place
        return values, places

    # Without this, the compiler gathers the rows of all devices for a top-k: jaxlib
    # 0.10.2 and 0.12.0, no upstream issue known (on GPUs values of a split dim were
    # wrong, too: jax-ml/jax#19271).
    cut = "tensor" if is_cut else None
    values, places = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=PartitionSpec(rows, *[None] * (x.ndim - 2), cut),
        out_specs=(PartitionSpec(rows, cut), PartitionSpec(rows, cut)),
    )(x)
    if not is_cut:
        return values, places
    whole = NamedSharding(mesh, PartitionSpec(rows))
    values = jax.lax.with_sharding_constraint(values, whole)
    places = jax.lax.with_sharding_constraint(places, whole)
    # By the value and then by the place, so that of equal values the first place comes
    # first, whichever shard it is on. The sort is ascending.
    negated, places = jax.lax.sort((-values, places), dimension=1, num_keys=2)
    return -negated[:, :k], places[:, :k]


def sample(
    logits: Float[Array, "b vocab"],
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    key: Key | None,
) -> Int[Array, " b"]:
    """Return the most probable token of each row at temperature 0, or otherwise a token
    drawn with `key`.

    The order is that of Hugging Face's processors: the temperature, then `top_k`, then
    `top_p`. Among equal logits, the lower token id always comes first, so `top_k=1` is
    the same as `temperature=0`.
    """
    if temperature == 0:
        # `argmax` takes the first of equal logits, as `largest` does.
        return jnp.argmax(logits, axis=-1)
    assert key is not None
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # With the largest logit at 0, a small temperature cannot overflow.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    if top_k is None and (top_p is None or top_p == 1):
        return jax.random.categorical(key, logits)
    scores, tokens = candidates(logits, top_k=top_k, top_p=top_p)
    choice = jax.random.categorical(key, scores)
    return jnp.take_along_axis(tokens, choice[:, None], axis=1)[:, 0]


def candidates(
    logits: Float[Array, "b vocab"], *, top_k: int | None, top_p: float | None
) -> tuple[Float[Array, "b k"], Int[Array, "b k"]]:
    """Return the candidate tokens, most probable first: their logits, -inf for those
    that may not be drawn, and their ids.

    **Arguments:**

    - `top_k`: the largest number of candidates.
    - `top_p`: keep the smallest set of these whose probability reaches it (Holtzman et
        al. 2020, section 3.1); the most probable is always in it.
    """
    vocabulary = logits.shape[-1]
    num_candidates = vocabulary
    if top_k is not None:
        num_candidates = min(top_k, vocabulary)
    scores, tokens = largest(logits, num_candidates)
    if top_p is not None and top_p < 1:
        # The probabilities after `top_k` add up to 1, as in transformers, where each
        # processor sees the logits that the one before it left.
        probabilities = jax.nn.softmax(scores, axis=-1)
        # Without a token's own probability, so the first one always stays.
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        scores = jnp.where(before < top_p, scores, -jnp.inf)
    return scores, tokens
