"""`generate`: text from a model, one token at a time with a cache."""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from redco_eqx.types import Key
from redco_eqx_models._blocks.context import Cache
from redco_eqx_models._blocks.decoder import Decoder
from redco_eqx_models._generate.prompt import (
    Prompt,
    Token,
    Tokens,
    prefill,
    read_prompt,
    special_tokens,
)
from redco_eqx_models._generate.sampling import sample
from redco_eqx_models._own_mesh import on_own_mesh

_Carry: TypeAlias = tuple[
    Int[Array, ""], Int[Array, "b"], Bool[Array, "b"], Int[Array, "b n"], Cache
]
"""Step, token, a mask of the rows that have ended, output, cache."""


@on_own_mesh
def generate(
    model: Decoder,
    inputs: Tokens,
    *,
    attention_mask: Tokens | None = None,
    decoder_input_ids: Tokens | None = None,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: Token | Sequence[Token] | Tokens | None = None,
    pad_token_id: Token | None = None,
    key: Key | None = None,
) -> Int[Array, "batch max_new_tokens"]:
    """Generate the tokens that follow each row of `inputs` or, with an encoder, a text
    about it. The default is greedy.

    It is compiled once per shape and set of options, by itself or inside your own
    `jax.jit`. To use it as a `predict_fn` with a sharded model: `lambda model, batch,
    key: generate(model, batch["tokens"], ...)`.

    Stacked layers are taken apart before the loop, because a scan in the loop would
    copy them for each token. This takes the memory of a second copy of the layers, and
    the compile time grows with the number of layers. A model whose layers are a list
    (`stacked=False`) needs no copy.

    ```python
    tokens = models.generate(
        model, prompts, max_new_tokens=8, temperature=0.8, top_p=0.95, key=key
    )
    ```

    **Arguments:**

    - `model`: any `DecoderLM` or `EncoderDecoder`. No dropout is applied.
    - `inputs`: integer tokens, `(batch, prompt)`, or images,
        `(batch, channels, height, width)`, for an encoder that reads them. The encoder
        runs once, and so does the computation of the decoder's keys and values from it.
    - `attention_mask`: `(batch, prompt)`, 0 where a token is padding, on either side.
        The new tokens of a row follow its last real one, and depend on that row alone.
        The output for a row without real tokens is padding.
    - `decoder_input_ids`: `(batch, length)`, for a model with an encoder: the beginning
        of the text, which is not in the output. The default is `decoder_start_token_id`
        of the model's `generation_config.json`, or else of its configuration.
    - `max_new_tokens`: the number of new tokens in each row, including padding. The
        loop stops early when every row has ended. A table of positions limits the
        number of tokens, including the prompt. Rotary embeddings have no limit, but the
        text gets worse beyond the length used in training.
    - `temperature`: divides the logits. 0 takes the most probable token.
    - `top_k`: draw from the `top_k` most probable tokens.
    - `top_p`: draw from the fewest tokens whose probability reaches `top_p` (after
        `top_k`).
    - `eos_token_id`: the tokens that end a row, one or several. By default, those in
        the model's `generation_config.json`, or else in its configuration; `()` for
        none. The end token is in the output.
    - `pad_token_id`: the token after the end. The default comes from the same places,
        or else is the first end token, or else 0. Nothing else is read from
        `generation_config.json`: only the arguments say how tokens are drawn.
    - `key`: for drawing. Step i draws with `fold_in(key, i)`, so a longer text begins
        with the shorter one.

    **Returns:**

    The new tokens, `(batch, max_new_tokens)`, int32.

    **Raises:**

    `ValueError`, before anything is compiled, for an argument out of its range,
    sampling without a key, `top_k` or `top_p` at temperature 0 (where they would do
    nothing), shapes that do not fit, a token or an end token outside the vocabulary
    (except under a trace, which cannot see tokens), or a text longer than the table of
    positions.
    """
    _check_options(temperature, top_k, top_p, key)
    prompt = read_prompt(
        "generate", model, inputs, attention_mask, decoder_input_ids, max_new_tokens
    )
    ends, pad = special_tokens("generate", model, eos_token_id, pad_token_id)
    # As Python's numbers, because the compiled program is looked up by its options, and
    # an array of JAX has no hash.
    top_k = None if top_k is None else int(top_k)
    top_p = None if top_p is None else float(top_p)
    options = _Options(int(max_new_tokens), float(temperature), top_k, top_p, ends, pad)
    return _generate(model, prompt, key, options)


@dataclasses.dataclass(frozen=True)
class _Options:
    """The options that are compiled in."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    ends: tuple[int, ...]
    pad: int


@eqx.filter_jit
def _generate(
    model: Decoder, prompt: Prompt, key: Key | None, options: _Options
) -> Int[Array, "b n"]:
    logits, cache, run = prefill(model, prompt, options.max_new_tokens)

    def choose(logits: Array, step: Int[Array, ""]) -> Array:
        step_key = None
        if key is not None:
            # By the number of the step, so that a longer text draws the same numbers.
            step_key = jax.random.fold_in(key, step)
        token = sample(
            logits,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            key=step_key,
        )
        return token.astype(jnp.int32)

    def write(
        output: Array, token: Array, ended: Array, step: Int[Array, ""]
    ) -> tuple[Array, Array]:
        output = output.at[:, step].set(jnp.where(ended, options.pad, token))
        return output, ended | jnp.isin(token, jnp.asarray(options.ends, jnp.int32))

    def body(carry: _Carry) -> _Carry:
        step, token, ended, output, cache = carry
        hidden, cache = run(token[:, None], cache=cache)
        # The call passed a cache, so it returned one.
        assert cache is not None
        token = choose(model.logits(hidden[:, 0]), step)
        output, ended = write(output, token, ended, step)
        return step + 1, token, ended, output, cache

    def unfinished(carry: _Carry) -> Array:
        step, _, ended, _, _ = carry
        return (step < options.max_new_tokens) & ~jnp.all(ended)

    # The shape of the output is static, whenever the rows end.
    output = jnp.full((len(logits), options.max_new_tokens), options.pad, jnp.int32)
    step = jnp.zeros((), jnp.int32)
    # The prompt has already given the logits of the first token, so the loop begins at
    # the second. A row that is only padding has ended from the start.
    token = choose(logits, step)
    output, ended = write(output, token, prompt.is_empty, step)
    carry = (step + 1, token, ended, output, cache)
    return jax.lax.while_loop(unfinished, body, carry)[3]


def _check_options(
    temperature: float, top_k: int | None, top_p: float | None, key: Key | None
) -> None:
    if not temperature >= 0:
        raise ValueError(
            f"generate: temperature={temperature}, but it must be 0 (greedy) or "
            "positive."
        )
    if top_k is not None and not (top_k >= 1 and top_k % 1 == 0):
        raise ValueError(
            f"generate: top_k={top_k}, but it must be an integer, at least 1, or None "
            "for all."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(
            f"generate: top_p={top_p}, but it must be above 0 and at most 1."
        )
    if temperature == 0:
        for name, value in {"top_k": top_k, "top_p": top_p}.items():
            if value is not None:
                raise ValueError(
                    f"generate: {name}={value} does nothing at temperature 0. Pass a "
                    "temperature, such as 1.0, and a key, or leave it out."
                )
    elif key is None:
        raise ValueError(
            f"generate: temperature={temperature} draws tokens, but key is None. Pass "
            "key=jax.random.key(0), or temperature=0."
        )
