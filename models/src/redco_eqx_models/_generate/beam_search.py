"""`beam_search`: search for the most probable texts with a limited number of beams."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
from redco_eqx_models._generate.sampling import largest
from redco_eqx_models._own_mesh import on_own_mesh

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclasses.dataclass(frozen=True)
class Rules:
    """The arguments of `beam_search` that are compiled in."""

    max_new_tokens: int
    num_beams: int
    early_stopping: EarlyStopping
    ends: tuple[int, ...]
    pad: int


class Hypotheses(NamedTuple):
    """The complete texts of a beam search, best first.

    - `tokens`: `(batch, num_beams, max_new_tokens)`, int32, with the end token and then
        padding.
    - `scores`: `(batch, num_beams)`: the sum of the tokens' log-probabilities, over
        `length ** length_penalty`, with the end token counted; -inf if there are no
        more texts.
    """

    tokens: Int[Array, "b beams new"]
    scores: Float[Array, "b beams"]


class Beams(NamedTuple):
    """The texts that continue, most probable first. At the beginning, there is one
    without tokens.

    - `tokens`: the tokens so far, and then padding.
    - `scores`: sums of log-probabilities; -inf for a beam that does not exist.
    - `path`: the beam that each token belonged to at its step, and then -1.
    """

    tokens: Int[Array, "b beams new"]
    scores: Float[Array, "b beams"]
    path: Int[Array, "b beams new"]


class Search(NamedTuple):
    """The state of a search.

    - `step`: number of tokens of each beam.
    - `length_penalty`: the argument of `beam_search`; a different value needs no new
        compilation.
    - `is_open`: for each text, whether further steps can change its complete texts.
    """

    step: Int[Array, ""]
    length_penalty: Float[Array, ""]
    beams: Beams
    found: Hypotheses
    is_open: Bool[Array, " b"]


def begin(
    is_open: Bool[Array, " b"], length_penalty: Float[Array, ""], rules: Rules
) -> Search:
    """Return the state before the first token. Rows that are not open stay empty.
    Scores have the penalty's dtype.
    """
    size = is_open.shape[0]
    new = rules.max_new_tokens
    dtype = length_penalty.dtype
    beams = Beams(
        jnp.full((size, 1, new), rules.pad, jnp.int32),
        jnp.zeros((size, 1), dtype),
        jnp.full((size, 1, new), -1, jnp.int32),
    )
    tokens = jnp.full((size, rules.num_beams, new), rules.pad, jnp.int32)
    found = Hypotheses(tokens, jnp.full((size, rules.num_beams), -jnp.inf, dtype))
    return Search(jnp.zeros((), jnp.int32), length_penalty, beams, found, is_open)


def advance(
    search: Search, logits: Float[Array, "b beams vocab"], rules: Rules
) -> Search:
    """Add one token, based on the logits after each beam.

    The `num_beams` most probable continuations that do not end become the next beams.
    Continuations that end are compared with the complete texts so far, if they are
    among the `num_beams` most probable of all.
    """
    candidates, is_end = _continued(search.step, search.beams, logits, rules)
    step = search.step + 1
    rank = jnp.arange(is_end.shape[1], dtype=jnp.int32)

    # False sorts before true, and a stable sort keeps the order by score: first the
    # candidates that go on.
    order = jnp.argsort(is_end, axis=1, stable=True)[:, : rules.num_beams]
    going = candidates._replace(scores=jnp.where(is_end, -jnp.inf, candidates.scores))
    beams = Beams(*(_pick(x, order) for x in going))
    path = beams.path.at[:, :, search.step].set(rank[: rules.num_beams])
    beams = beams._replace(path=path)

    # As in transformers, a text that ends counts only if it is among the best
    # `num_beams` of all candidates, and so does one that reaches the limit.
    is_complete = is_end | (step == rules.max_new_tokens)
    enters = is_complete & (rank < rules.num_beams) & search.is_open[:, None]
    # Wu et al. 2016, section 7, divide by a longer formula. transformers takes the
    # length to a power.
    scores = candidates.scores / step**search.length_penalty
    scores = jnp.where(enters, scores, -jnp.inf)
    found = _best(search.found, Hypotheses(candidates.tokens, scores))

    search = search._replace(step=step, beams=beams, found=found)
    return search._replace(is_open=search.is_open & ~_is_closed(search, rules))


def _continued(
    step: Int[Array, ""],
    beams: Beams,
    logits: Float[Array, "b beams vocab"],
    rules: Rules,
) -> tuple[Beams, Bool[Array, "b candidates"]]:
    """Return the most probable continuations, in order, and a mask of those that end.
    They include `num_beams` that do not end, if there are as many.
    """
    vocabulary = logits.shape[-1]
    logits = logits.astype(beams.scores.dtype)
    scores = jax.nn.log_softmax(logits, axis=-1) + beams.scores[:, :, None]
    # Each beam may end in as many ways as there are end tokens. Then `num_beams` others
    # are left. This is `beams_to_keep` of transformers.
    num = (1 + len(rules.ends)) * rules.num_beams
    scores, places = largest(scores, min(num, scores.shape[1] * vocabulary))
    # A tiny vocabulary has fewer continuations than there are beams.
    missing = [(0, 0), (0, max(0, rules.num_beams - scores.shape[1]))]
    scores = jnp.pad(scores, missing, constant_values=-jnp.inf)
    parent, token = jnp.divmod(jnp.pad(places, missing), vocabulary)
    tokens = _pick(beams.tokens, parent).at[:, :, step].set(token.astype(jnp.int32))
    is_end = jnp.isin(token, jnp.asarray(rules.ends, jnp.int32))
    return Beams(tokens, scores, _pick(beams.path, parent)), is_end


def _best(found: Hypotheses, new: Hypotheses) -> Hypotheses:
    """Merge both, and keep as many as before. Of equal ones the older comes first."""
    tokens, scores = (jnp.concatenate(pair, axis=1) for pair in zip(found, new))
    order = jnp.argsort(-scores, axis=1, stable=True)[:, : found.scores.shape[1]]
    return Hypotheses(_pick(tokens, order), _pick(scores, order))


def _is_closed(search: Search, rules: Rules) -> Bool[Array, " b"]:
    """Return true if no better text is to be expected (transformers 5,
    `_check_early_stop_heuristic`)."""
    best = search.beams.scores[:, 0]
    worst = search.found.scores[:, -1]
    if rules.early_stopping is True:
        # Minus infinity stands for a beam or a text that does not exist.
        return (best == -jnp.inf) | (worst > -jnp.inf)
    length = search.step
    if rules.early_stopping == "never":
        # Scores are negative. Divided by a larger number, they are better.
        length = jnp.where(search.length_penalty > 0, rules.max_new_tokens, length)
    # With fewer than `num_beams` texts the worst is -inf. The negation also closes a
    # row whose best score is NaN.
    return ~(best / length**search.length_penalty > worst)


def _pick(x: Array, order: Int[Array, "b chosen"]) -> Array:
    """Select the beams in `order` of each text."""
    return jax.vmap(lambda x, order: x[order])(x, order)


@on_own_mesh
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
    eos_token_id: Token | Sequence[Token] | Tokens | None = None,
    pad_token_id: Token | None = None,
) -> Hypotheses:
    """Search for the best-scoring texts that follow each row of `inputs`, with the beam
    search of transformers 5.

    It is compiled once, like `generate`, and can be a `predict_fn` in the same way. The
    beams of a row share one cache: it stores the prompt, or the encoder's output, once,
    nothing is reordered, and each beam sees the slots of its own tokens. If a `tensor`
    axis splits the vocabulary, a step communicates, besides the layers' traffic, two
    numbers per beam, and `8 * tensor` bytes for each of the `(1 + ends) * num_beams`
    candidates of a row. It communicates nothing over the batch.

    ```python
    found = models.beam_search(model, prompts, max_new_tokens=8, num_beams=4)
    best, scores = found.tokens[:, 0], found.scores[:, 0]
    ```

    **Arguments:**

    - `model`, `inputs`, `attention_mask`, `decoder_input_ids`, `max_new_tokens`,
        `eos_token_id`, `pad_token_id`: as for `generate`.
    - `num_beams`: the number of texts to follow. With 1, the search is greedy, and
        `early_stopping` has no effect.
    - `length_penalty`: the score of a text is the sum of its log-probabilities, divided
        by its number of new tokens to this power. A value above 0 favours long texts, a
        value below 0 short ones.
    - `early_stopping`: when a row with `num_beams` complete texts ends. `True`: at
        once. `False`: when its best beam, if it ended now, would not be among the best
        texts. `"never"`: when its best beam cannot become one of the best texts,
        however it continues (as in Flax's beam search in transformers 4).

    **Returns:**

    `Hypotheses(tokens, scores)`, of shapes `(batch, num_beams, max_new_tokens)` and
    `(batch, num_beams)`, best first: the best text of each row is `tokens[:, 0]`.

    **Raises:**

    `ValueError`, before anything is compiled, for an argument out of its range, shapes
    that do not fit, a token outside the vocabulary (as for `generate`), or a text
    longer than the table of positions.
    """
    check_options(num_beams, length_penalty, early_stopping)
    prompt = read_prompt(
        "beam_search", model, inputs, attention_mask, decoder_input_ids, max_new_tokens
    )
    ends, pad = special_tokens("beam_search", model, eos_token_id, pad_token_id)
    if num_beams == 1:
        # Only so is one beam the same as `generate`, which ends with the first text.
        early_stopping = True
    rules = Rules(int(max_new_tokens), int(num_beams), early_stopping, ends, pad)
    return _search(model, prompt, jnp.asarray(length_penalty, float), rules)


def check_options(
    num_beams: int, length_penalty: float, early_stopping: object
) -> None:
    """Raise `ValueError` for options out of their range."""
    if not (num_beams >= 1 and num_beams % 1 == 0):
        raise ValueError(
            f"beam_search: num_beams={num_beams}, but it must be an integer, at least "
            "1."
        )
    if not math.isfinite(length_penalty):
        raise ValueError(
            f"beam_search: length_penalty={length_penalty}, but it must be finite."
        )
    if not isinstance(early_stopping, bool) and early_stopping != "never":
        raise ValueError(
            f"beam_search: early_stopping={early_stopping!r}, but it must be True, "
            "False or 'never'."
        )


@eqx.filter_jit
def _search(
    model: Decoder, prompt: Prompt, length_penalty: Float[Array, ""], rules: Rules
) -> Hypotheses:
    # All beams of a row lie in one row of the cache, each token in a slot of its own.
    logits, cache, run = prefill(model, prompt, rules.max_new_tokens * rules.num_beams)
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    search = begin(~prompt.is_empty, length_penalty.astype(dtype), rules)
    search = advance(search, logits[:, None], rules)
    lengths = jnp.sum(prompt.real, axis=1, keepdims=True, dtype=jnp.int32)

    def body(carry: tuple[Search, Cache]) -> tuple[Search, Cache]:
        search, cache = carry
        last = search.step - 1
        beams = search.beams
        tokens = jax.lax.dynamic_index_in_dim(
            beams.tokens, last, axis=2, keepdims=False
        )
        positions = jnp.broadcast_to(lengths + last, tokens.shape)
        mask = _visible(prompt.real, beams)
        hidden, cache = run(
            tokens, attention_mask=mask, positions=positions, cache=cache
        )
        # The call passed a cache, so it returned one.
        assert cache is not None
        return advance(search, model.logits(hidden), rules), cache

    def unfinished(carry: tuple[Search, Cache]) -> Array:
        search, _ = carry
        return (search.step < rules.max_new_tokens) & jnp.any(search.is_open)

    search, _ = jax.lax.while_loop(unfinished, body, (search, cache))
    return search.found


def _visible(real: Bool[Array, "b p"], beams: Beams) -> Bool[Array, "b beams slots"]:
    """Return the slots that the last token of each beam sees: the prompt's, and at each
    step that of its own token.

    After the prompt come the tokens of all beams at the first step, then at the second,
    and so on.
    """
    size, num_beams, _ = beams.path.shape
    prompt = jnp.broadcast_to(real[:, None], (size, num_beams, real.shape[1]))
    # A step that has not come has the path -1, which is no beam.
    own = beams.path[..., None] == jnp.arange(num_beams)
    return jnp.concatenate([prompt, jax.lax.collapse(own, 2)], axis=2)
