"""What a text begins with: its checks, the tokens that end it, and the model's first answer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from redco_eqx.models._blocks.config import Config
from redco_eqx.models._blocks.context import Cache
from redco_eqx.models._blocks.decoder import DecoderLM


def check_prompt(
    name: str,
    model: DecoderLM,
    input_ids: Array | np.ndarray,
    attention_mask: Array | np.ndarray | None,
    max_new_tokens: int,
) -> None:
    """Refuses, by `ValueError`, what is not a batch of tokens with its mask, or has no room. `name` asks."""
    shape, dtype = jnp.shape(input_ids), jnp.result_type(input_ids)
    if not max_new_tokens >= 1:
        raise ValueError(f"{name}: max_new_tokens={max_new_tokens}, but it must be at least 1.")
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{name}: input_ids has dtype {dtype}, but tokens are integers.")
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(
            f"{name}: input_ids has shape {shape}, but it must be (batch, prompt), with at least one token."
        )
    if attention_mask is not None and jnp.shape(attention_mask) != shape:
        raise ValueError(
            f"{name}: attention_mask has shape {jnp.shape(attention_mask)}, but it must be that of "
            f"input_ids, {shape}."
        )
    room = model.config.max_positions
    if room is not None and shape[1] + max_new_tokens > room:
        raise ValueError(
            f"{name}: a prompt of {shape[1]} and max_new_tokens={max_new_tokens} make "
            f"{shape[1] + max_new_tokens} tokens, but the model's table has {room} positions. Ask for fewer "
            "tokens, or shorten the prompt."
        )


def special_tokens(
    config: Config, eos_token_id: int | Sequence[int] | None, pad_token_id: int | None
) -> tuple[tuple[int, ...], int]:
    """The tokens that end a text, and the one that follows the end."""
    ends = config.eos_token_id if eos_token_id is None else eos_token_id
    ends = (ends,) if isinstance(ends, int) else tuple(ends or ())
    pad = config.pad_token_id if pad_token_id is None else pad_token_id
    if pad is None:
        pad = ends[0] if ends else 0
    return ends, pad


def real_tokens(
    input_ids: Array | np.ndarray, attention_mask: Array | np.ndarray | None
) -> tuple[Int[Array, "b p"], Bool[Array, "b p"]]:
    """The prompt, and which of its tokens are no padding."""
    ids = jnp.asarray(input_ids)
    if attention_mask is None:
        return ids, jnp.ones(ids.shape, bool)
    return ids, jnp.asarray(attention_mask) != 0


def prefill(
    model: DecoderLM, input_ids: Int[Array, "b p"], real: Bool[Array, "b p"], num_slots: int
) -> tuple[Array, Cache]:
    """The logits after each row's last real token, and the cache of the prompt with `num_slots` empty slots."""
    size, length = input_ids.shape
    # Padding need not be in the vocabulary, and a NaN would not stay in its slot.
    input_ids = jnp.where(real, input_ids, 0).astype(jnp.int32)
    dtype = jax.eval_shape(lambda: model.hidden_states(input_ids)[0]).dtype
    hidden, cache = model.hidden_states(
        input_ids, attention_mask=real, cache=model.init_cache(size, length, dtype)
    )
    assert cache is not None  # as one was given
    last = jnp.max(jnp.where(real, jnp.arange(length), 0), axis=1)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return model.logits(hidden), cache.with_room(num_slots)
