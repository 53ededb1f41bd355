"""One step of beam search: from the logits of the beams to the next beams and the complete texts."""

import dataclasses
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from redco_eqx.models._generate.top_k import top_k

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

    - `tokens`: `(batch, num_beams, max_new_tokens)`, int32, with the end token and then padding.
    - `scores`: `(batch, num_beams)`: the sum of the tokens' log-probabilities, over `length ** length_penalty`,
        with the end token counted; -inf if there are no more texts.
    """

    tokens: Int[Array, "b beams new"]
    scores: Float[Array, "b beams"]


class Beams(NamedTuple):
    """The texts that continue, most probable first. At the beginning, there is one without tokens.

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
    - `length_penalty`: the argument of `beam_search`; a different value needs no new compilation.
    - `is_open`: for each text, whether further steps can change its complete texts.
    """

    step: Int[Array, ""]
    length_penalty: Float[Array, ""]
    beams: Beams
    found: Hypotheses
    is_open: Bool[Array, " b"]


def begin(is_open: Bool[Array, " b"], length_penalty: Float[Array, ""], rules: Rules) -> Search:
    """Return the state before the first token. Rows that are not open stay empty. Scores have the penalty's
    dtype.
    """
    size, new, dtype = is_open.shape[0], rules.max_new_tokens, length_penalty.dtype
    beams = Beams(
        jnp.full((size, 1, new), rules.pad, jnp.int32),
        jnp.zeros((size, 1), dtype),
        jnp.full((size, 1, new), -1, jnp.int32),
    )
    tokens = jnp.full((size, rules.num_beams, new), rules.pad, jnp.int32)
    found = Hypotheses(tokens, jnp.full((size, rules.num_beams), -jnp.inf, dtype))
    return Search(jnp.zeros((), jnp.int32), length_penalty, beams, found, is_open)


def advance(search: Search, logits: Float[Array, "b beams vocab"], rules: Rules) -> Search:
    """Add one token, by the logits after each beam.

    The `num_beams` most probable continuations that do not end are the next beams. Continuations that end are
    compared with the complete texts so far, if they are among the `num_beams` most probable of all.
    """
    candidates, is_end = _continued(search.step, search.beams, logits, rules)
    step = search.step + 1
    rank = jnp.arange(is_end.shape[1], dtype=jnp.int32)

    order = jnp.argsort(is_end, axis=1, stable=True)[:, : rules.num_beams]
    going = candidates._replace(scores=jnp.where(is_end, -jnp.inf, candidates.scores))
    beams = Beams(*(_pick(x, order) for x in going))
    beams = beams._replace(path=beams.path.at[:, :, search.step].set(rank[: rules.num_beams]))

    enters = (is_end | (step == rules.max_new_tokens)) & (rank < rules.num_beams) & search.is_open[:, None]
    scores = candidates.scores / step**search.length_penalty
    found = _best(search.found, Hypotheses(candidates.tokens, jnp.where(enters, scores, -jnp.inf)))

    search = search._replace(step=step, beams=beams, found=found)
    return search._replace(is_open=search.is_open & ~_is_closed(search, rules))


def _continued(
    step: Int[Array, ""], beams: Beams, logits: Float[Array, "b beams vocab"], rules: Rules
) -> tuple[Beams, Bool[Array, "b candidates"]]:
    """Return the most probable continuations, in order, and a mask of those that end. They include `num_beams`
    that do not end, if there are as many.
    """
    vocabulary = logits.shape[-1]
    logits = logits.astype(beams.scores.dtype)
    scores = jax.nn.log_softmax(logits, axis=-1) + beams.scores[:, :, None]
    num = (1 + len(rules.ends)) * rules.num_beams
    scores, places = top_k(scores, min(num, scores[0].size))
    missing = [(0, 0), (0, max(0, rules.num_beams - scores.shape[1]))]  # in a tiny vocabulary
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
    """Return true if no better text is to be expected (transformers 5, `_check_early_stop_heuristic`)."""
    best, worst = search.beams.scores[:, 0], search.found.scores[:, -1]
    if rules.early_stopping is True:
        return (best == -jnp.inf) | (worst > -jnp.inf)
    length = search.step
    if rules.early_stopping == "never":
        length = jnp.where(search.length_penalty > 0, rules.max_new_tokens, length)
    # With fewer than `num_beams` texts the worst is -inf.
    return ~(best / length**search.length_penalty > worst)


def _pick(x: Array, order: Int[Array, "b chosen"]) -> Array:
    """Select the beams in `order` of each text."""
    return jax.vmap(lambda x, order: x[order])(x, order)
