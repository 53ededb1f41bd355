"""Choose one token from the logits of one position."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from redco_eqx._base.protocols import Key
from redco_eqx.models._generate.top_k import top_k as largest


def sample(
    logits: Float[Array, "b vocab"],
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    key: Key | None,
) -> Int[Array, " b"]:
    """Return the most probable token of each row at temperature 0, or otherwise a token drawn with `key`.

    The order is that of Hugging Face's processors: the temperature, then `top_k`, then `top_p`. Among equal
    logits, the lower token id always comes first, so `top_k=1` is the same as `temperature=0`.
    """
    if temperature == 0:
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
    """Return the candidate tokens, most probable first: their logits, -inf for those that may not be drawn, and
    their ids.

    **Arguments:**

    - `top_k`: the largest number of candidates.
    - `top_p`: keep the smallest set of these whose probability reaches it (Holtzman et al. 2020, section 3.1);
        the most probable is always in it.
    """
    vocabulary = logits.shape[-1]
    scores, tokens = largest(logits, vocabulary if top_k is None else min(top_k, vocabulary))
    if top_p is not None and top_p < 1:
        probabilities = jax.nn.softmax(scores, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        scores = jnp.where(before < top_p, scores, -jnp.inf)
    return scores, tokens
