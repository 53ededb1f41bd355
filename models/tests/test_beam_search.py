"""`beam_search` against greedy search, and what the model says of a text.

`tests/parity` compares it with that of transformers, which finds the best texts.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_long
from test_generate import (
    NEW,
    OPTIONS,
    PAD,
    ROWS,
    greedy,
    log_probabilities,
    model_of,
    padded,
)
from tiny_models import VOCABULARY, telling

from redco_eqx_models import beam_search

BEAMS = 4


def test_one_beam_is_greedy():
    """Whatever ends a search."""
    model = model_of("mistral")
    ids, mask = padded("left")
    texts = greedy("mistral")
    end = int(texts[0, 4])
    ended = np.cumsum(texts == end, axis=1) - (texts == end) > 0
    options: Any = {
        **OPTIONS,
        "eos_token_id": end,
        "num_beams": 1,
        "early_stopping": "never",
    }
    for penalty in (0.0, 3.0):
        found = beam_search(
            model, ids, attention_mask=mask, length_penalty=penalty, **options
        )
        np.testing.assert_array_equal(found.tokens[:, 0], np.where(ended, PAD, texts))


def test_a_row_without_tokens_harms_no_other():
    model = model_of("mistral")
    ids, mask = padded("left")
    options: Any = {**OPTIONS, "num_beams": BEAMS, "eos_token_id": range(12)}
    found = beam_search(
        model, np.where(mask == 1, ids, -100), attention_mask=mask, **options
    )
    mask[1] = 0
    gap = beam_search(model, ids, attention_mask=mask, **options)
    np.testing.assert_array_equal(gap.tokens[1], PAD)
    np.testing.assert_array_equal(gap.scores[1], -np.inf)
    np.testing.assert_array_equal(gap.tokens[2:], found.tokens[2:])


LOW = [
    ("t5", jnp.float16, 0.01),
    ("mistral", jnp.bfloat16, 0.05),
    *in_long(("bart", jnp.bfloat16, 0.05)),
]


@pytest.mark.parametrize(("name", "dtype", "rtol"), LOW)
def test_a_score_in_low_precision_is_what_the_model_says_of_the_text(name, dtype, rtol):
    """To the rounding of its dtype, with the cache and without; scores are summed in
    float32 always."""
    model = telling(name, dtype=dtype)
    ids, mask = padded("right") if name != "mistral" else (ROWS, np.ones_like(ROWS))
    found = beam_search(
        model, ids, attention_mask=mask, num_beams=BEAMS, length_penalty=0.7, **OPTIONS
    )
    assert found.scores.dtype == np.float32
    assert (np.diff(found.scores, axis=1) <= 0).all()
    source = []
    before = np.repeat(ids, BEAMS, 0)
    if name != "mistral":
        source = [before, np.repeat(mask, BEAMS, 0)]
        before = np.full((4 * BEAMS, 1), 0 if name == "t5" else 2)
    new = np.reshape(found.tokens, (-1, NEW))
    logs = np.asarray(
        log_probabilities(model, np.concatenate([before, new], axis=1), *source),
        np.float64,
    )
    logs = logs[:, before.shape[1] - 1 : -1]
    totals = np.take_along_axis(logs, new[..., None], axis=-1)[..., 0].sum(axis=1)
    np.testing.assert_allclose(np.ravel(found.scores), totals / NEW**0.7, rtol=rtol)
    assert found.tokens.max() < VOCABULARY
