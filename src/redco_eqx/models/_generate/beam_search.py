"""`beam_search`: search for the most probable texts with a limited number of beams."""

import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from redco_eqx._sharding.mesh import in_own_context
from redco_eqx.models._blocks.context import Cache
from redco_eqx.models._blocks.decoder import Decoder
from redco_eqx.models._generate.beams import Beams, EarlyStopping, Hypotheses, Rules, Search, advance, begin
from redco_eqx.models._generate.prompt import Prompt, Tokens, prefill, read_prompt, special_tokens


@in_own_context
def beam_search(
    model: Decoder,
    inputs: Tokens,
    *,
    attention_mask: Tokens | None = None,
    decoder_input_ids: Tokens | None = None,
    max_new_tokens: int,
    num_beams: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> Hypotheses:
    """Search for the best-scoring texts that follow each row of `inputs`, with the beam search of transformers
    5.

    It is compiled once, like `generate`, and can be a `predict_fn` in the same way. The beams of a row share
    one cache: it stores the prompt, or the encoder's output, once, nothing is reordered, and each beam sees the
    slots of its own tokens. If a `tensor` axis splits the vocabulary, a step communicates, besides the layers'
    traffic, two numbers per beam, and `8 * tensor` bytes for each of the `(1 + ends) * num_beams`
    candidates of a row. Over the batch it communicates nothing.

    ```python
    found = models.beam_search(model, prompts, max_new_tokens=8, num_beams=4)
    best, scores = found.tokens[:, 0], found.scores[:, 0]
    ```

    **Arguments:**

    - `model`, `inputs`, `attention_mask`, `decoder_input_ids`, `max_new_tokens`, `eos_token_id`,
        `pad_token_id`: as for `generate`.
    - `num_beams`: the number of texts to follow. With 1, the search is greedy, whatever `early_stopping` says.
    - `length_penalty`: the score of a text is the sum of its log-probabilities, divided by its number of new
        tokens to this power. A value above 0 favours long texts, a value below 0 short ones.
    - `early_stopping`: when a row with `num_beams` complete texts ends. `True`: at once. `False`: when its best
        beam, if it ended now, would not be among the best texts. `"never"`: when its best beam could not get
        among them, however it continues (as in Flax's beam search in transformers 4).

    **Returns:**

    `Hypotheses(tokens, scores)`, of shapes `(batch, num_beams, max_new_tokens)` and `(batch, num_beams)`, best
    first: the best text of each row is `tokens[:, 0]`.

    **Raises:**

    `ValueError`, before anything is compiled, for an argument out of its range, shapes that do not fit, a token
    outside the vocabulary (as for `generate`), or a text longer than the table of positions.
    """
    check_options(num_beams, length_penalty, early_stopping)
    prompt = read_prompt("beam_search", model, inputs, attention_mask, decoder_input_ids, max_new_tokens)
    ends, pad = special_tokens(model, eos_token_id, pad_token_id)
    early_stopping = True if num_beams == 1 else early_stopping
    rules = Rules(max_new_tokens, num_beams, early_stopping, ends, pad)
    return _search(model, prompt, jnp.asarray(length_penalty, float), rules)


def check_options(num_beams: int, length_penalty: float, early_stopping: object) -> None:
    """Raise `ValueError` for options out of their range."""
    if not num_beams >= 1:
        raise ValueError(f"beam_search: num_beams={num_beams}, but it must be at least 1.")
    if not math.isfinite(length_penalty):
        raise ValueError(f"beam_search: length_penalty={length_penalty}, but it must be finite.")
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(
            f"beam_search: early_stopping={early_stopping!r}, but it must be True, False or 'never'."
        )


@eqx.filter_jit
def _search(model: Decoder, prompt: Prompt, length_penalty: Float[Array, ""], rules: Rules) -> Hypotheses:
    logits, cache, run = prefill(model, prompt, rules.max_new_tokens * rules.num_beams)
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    search = begin(~prompt.is_empty, length_penalty.astype(dtype), rules)
    search = advance(search, logits[:, None], rules)
    lengths = jnp.sum(prompt.real, axis=1, keepdims=True, dtype=jnp.int32)

    def body(carry: tuple[Search, Cache]) -> tuple[Search, Cache]:
        search, cache = carry
        last, beams = search.step - 1, search.beams
        tokens = jax.lax.dynamic_index_in_dim(beams.tokens, last, axis=2, keepdims=False)
        hidden, cache = run(
            tokens,
            attention_mask=_visible(prompt.real, beams),
            positions=jnp.broadcast_to(lengths + last, tokens.shape),
            cache=cache,
        )
        assert cache is not None  # because the call passed one
        return advance(search, model.logits(hidden), rules), cache

    def unfinished(carry: tuple[Search, Cache]) -> Array:
        search, _ = carry
        return (search.step < rules.max_new_tokens) & jnp.any(search.is_open)

    search, _ = jax.lax.while_loop(unfinished, body, (search, cache))
    return search.found


def _visible(real: Bool[Array, "b p"], beams: Beams) -> Bool[Array, "b beams slots"]:
    """Return the slots that the last token of each beam sees: the prompt's, and at each step that of its own
    token.

    After the prompt come the tokens of all beams at the first step, then at the second, and so on.
    """
    size, num_beams, _ = beams.path.shape
    prompt = jnp.broadcast_to(real[:, None], (size, num_beams, real.shape[1]))
    own = beams.path[..., None] == jnp.arange(num_beams)
    return jnp.concatenate([prompt, own.reshape(size, num_beams, -1)], axis=2)
