"""The beginning of a text: checks of its arguments, the tokens that end it, and the
model's first logits."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from redco_eqx_models._blocks.context import Cache, Memory
from redco_eqx_models._blocks.decoder import Decoder
from redco_eqx_models._blocks.encoder_decoder import EncoderDecoder
from redco_eqx_models._blocks.model import check_arrays, unstack

Tokens: TypeAlias = Array | np.ndarray
Token: TypeAlias = int | np.integer
Step: TypeAlias = Callable[..., tuple[Array, Cache | None]]
"""`step(tokens, cache=cache)` returns hidden states and the new cache, as
`DecoderLM.hidden_states` does."""


class Prompt(eqx.Module):
    """The input for each text.

    - `tokens`, `real`: `(batch, prompt)`, the tokens that the decoder reads before the
        first new token, and a mask of those that are not padding.
    - `source`, `source_mask`: the encoder's input; `None` without an encoder.
    """

    tokens: Int[Array, "b p"]
    real: Bool[Array, "b p"]
    source: Array | None = None
    source_mask: Bool[Array, "b s"] | None = None

    @property
    def is_empty(self) -> Bool[Array, " b"]:
        """True for each text that is only padding."""
        # With an encoder, padding is in its input. The decoder's always begins with a
        # token.
        real = self.real if self.source_mask is None else self.source_mask
        return ~jnp.any(real, axis=1)


def read_prompt(
    name: str,
    model: Decoder,
    inputs: Tokens,
    attention_mask: Tokens | None,
    decoder_input_ids: Tokens | None,
    max_new_tokens: int,
) -> Prompt:
    """Make the prompt from the arguments of the function `name`. Raise `ValueError` if
    the arguments are not valid for this function.
    """
    if not isinstance(model, Decoder):
        raise TypeError(
            f"{name}: model must be one that writes text (DecoderLM, EncoderDecoder), "
            f"but is a {type(model).__name__}. For a state, pass state.model first."
        )
    check_arrays(
        name,
        inputs=inputs,
        attention_mask=attention_mask,
        decoder_input_ids=decoder_input_ids,
    )
    if not (max_new_tokens >= 1 and max_new_tokens % 1 == 0):
        raise ValueError(
            f"{name}: max_new_tokens={max_new_tokens}, but it must be an integer, at "
            "least 1."
        )
    tokens = inputs
    if not isinstance(model, EncoderDecoder) or jnp.ndim(inputs) != 4:
        _check_tokens(name, "inputs", model, inputs, attention_mask)
    elif attention_mask is not None:
        raise ValueError(
            f"{name}: attention_mask is for texts, but inputs has shape "
            f"{jnp.shape(inputs)}."
        )
    if isinstance(model, EncoderDecoder):
        size = jnp.shape(inputs)[0]
        tokens = decoder_input_ids
        if tokens is None:
            tokens = _start(name, model, size)
        _check_tokens(name, "decoder_input_ids", model, tokens, None)
        if jnp.shape(tokens)[0] != size:
            raise ValueError(
                f"{name}: decoder_input_ids has {jnp.shape(tokens)[0]} rows, but "
                f"inputs {size}. Pass one each."
            )
    elif decoder_input_ids is not None:
        raise ValueError(
            f"{name}: decoder_input_ids is for models with an encoder. Pass inputs "
            "alone."
        )
    max_positions = model.config.max_positions
    length = jnp.shape(tokens)[1]
    if max_positions is not None and length + max_new_tokens > max_positions:
        raise ValueError(
            f"{name}: a prompt of {length} and max_new_tokens={max_new_tokens} make "
            f"{length + max_new_tokens} tokens, but the model's table has "
            f"{max_positions} positions. Ask for fewer tokens, or shorten the prompt."
        )
    mask = None
    if attention_mask is not None:
        mask = jnp.asarray(attention_mask) != 0
    all_real = jnp.ones(jnp.shape(tokens), bool)
    tokens = jnp.asarray(tokens)
    if isinstance(model, EncoderDecoder):
        return Prompt(tokens, all_real, jnp.asarray(inputs), mask)
    return Prompt(tokens, all_real if mask is None else mask)


def _check_tokens(
    name: str, argument: str, model: Decoder, ids: Tokens, mask: Tokens | None
) -> None:
    shape = jnp.shape(ids)
    dtype = jnp.result_type(ids)
    if mask is not None and jnp.shape(mask) != shape:
        raise ValueError(
            f"{name}: attention_mask has shape {jnp.shape(mask)}, but inputs {shape}."
        )
    if not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{name}: {argument} has dtype {dtype}, but tokens are integers."
        )
    if len(shape) != 2 or shape[1] == 0:
        raise ValueError(
            f"{name}: {argument} has shape {shape}, but it must be (batch, length), "
            "with at least one token."
        )
    if not _is_known(ids) or not _is_known(mask):
        return
    ids = np.asarray(ids)
    size = model.config.vocab_size
    is_real = np.ones(shape, bool)
    if mask is not None:
        is_real = np.asarray(mask) != 0
    outside = np.argwhere(((ids < 0) | (ids >= size)) & is_real)
    if len(outside):
        row, place = map(int, outside[0])
        raise ValueError(
            f"{name}: {argument}[{row}, {place}] is {ids[row, place]}, but the model's "
            f"tokens are 0 to {size - 1}. Use the model's own tokenizer, or mask the "
            "padding with attention_mask."
        )


def _is_known(x: Tokens | None) -> bool:
    """Return true if this process has the numbers of an array: it is not traced, and
    no part of it is on the devices of another process."""
    if isinstance(x, Tracer):
        return False
    return not isinstance(x, jax.Array) or x.is_fully_addressable


def _start(name: str, model: EncoderDecoder, size: int) -> Tokens:
    """Return, for each row, the token that precedes the first one."""
    start = model.config.generation_tokens["decoder_start_token_id"]
    if start is None:
        raise ValueError(
            f"{name}: the model's files have no decoder_start_token_id. Pass "
            "decoder_input_ids, (batch, length): the beginning of each text."
        )
    return np.full((size, 1), start, np.int32)


def special_tokens(
    name: str, model: Decoder, eos_token_id: Any, pad_token_id: Token | None
) -> tuple[tuple[int, ...], int]:
    """Return the tokens that end a text, and the one that follows the end. Raise
    `ValueError` if those that the caller of the function `name` passed are not tokens.
    """
    given = model.config.generation_tokens
    size = model.config.vocab_size
    ends = given["eos_token_id"] if eos_token_id is None else eos_token_id
    if ends is None or np.size(ends) == 0:
        # NumPy makes floats of an empty sequence.
        ends = np.zeros(0, int)
    ends = np.ravel(ends)
    is_token = ends.dtype.kind in "iu" and np.all((ends >= 0) & (ends < size))
    if eos_token_id is not None and not is_token:
        raise ValueError(
            f"{name}: eos_token_id={eos_token_id!r}, but it must be a token, from 0 to "
            f"{size - 1}, or several."
        )
    # transformers pads with the first end token too, if there is no padding token.
    pads = [x for x in (pad_token_id, given["pad_token_id"], *ends, 0) if x is not None]
    return tuple(map(int, ends)), int(pads[0])


def prefill(
    model: Decoder, prompt: Prompt, num_slots: int
) -> tuple[Array, Cache, Step]:
    """Return the logits after each row's last real token, the cache of the prompt with
    `num_slots` empty slots, and the function that runs the model from there, with its
    layers in a list.
    """
    real = prompt.real
    size, length = prompt.tokens.shape
    memory = _memory(model, prompt)
    step = _step(model, memory)
    tokens = _without_padding(prompt.tokens, real)
    # The cache has the dtype of the stream, which nothing but a trace can tell.
    dtype = jax.eval_shape(lambda: step(tokens)[0]).dtype
    # First only slots for the prompt, because attention reads all slots. The prompt
    # needs none of the others.
    cache = model.init_cache(size, length, dtype)
    hidden, cache = step(tokens, attention_mask=real, cache=cache)
    # The call passed a cache, so it returned one.
    assert cache is not None
    # Padding may be on either side, so the last real token is not always the last one.
    last = jnp.max(jnp.where(real, jnp.arange(length), 0), axis=1)
    hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    # Logits only for these tokens: those of the whole prompt would be large.
    logits = model.logits(hidden)
    return logits, cache.with_room(num_slots), _step(_unstacked(model), memory)


def _memory(model: Decoder, prompt: Prompt) -> Memory | None:
    if not isinstance(model, EncoderDecoder):
        return None
    """Return the encoder's output in the form that the decoder reads."""
    source = prompt.source
    assert source is not None
    mask = prompt.source_mask
    if mask is not None:
        source = _without_padding(source, mask)
    return model.encode(source, attention_mask=mask)


def _step(model: Any, memory: Memory | None) -> Step:
    """Return the function that runs the model on tokens and a cache."""
    if memory is None:
        return model.hidden_states
    return partial(model.decode, memory=memory)


def _unstacked(model: Decoder) -> Decoder:
    """Return the model with its layers in a list. A scan inside of a loop copies each
    layer at each step."""
    if isinstance(model.layers, list):
        return model
    return eqx.tree_at(attrgetter(model.stacks[-1]), model, unstack(model.layers))


def _without_padding(
    tokens: Int[Array, "b p"], real: Bool[Array, "b p"]
) -> Int[Array, "b p"]:
    """Replace padding, which need not be in the vocabulary: a NaN would spread from its
    slot."""
    return jnp.where(real, tokens, 0).astype(jnp.int32)
