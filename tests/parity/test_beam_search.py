"""Beam search token for token as transformers has it, and its scores."""

import itertools
from typing import Any

import numpy as np
import pytest
from comparison import TOLERANCE, texts, torch_inputs

from redco_eqx.models import beam_search, load_pretrained

NEW, BEAMS, PAD = 12, 4, 5
PENALTIES = (-1.0, 0.5, 2.0)
KINDS = (False, True, "never")


def expected(there: Any, ids: np.ndarray, mask: np.ndarray | None, **options: Any) -> Any:
    """Tokens `(batch, BEAMS, NEW)` and scores `(batch, BEAMS)` by transformers."""
    inputs = torch_inputs(ids, np.ones_like(ids) if mask is None else mask, counts_positions=True)
    found = there.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, num_beams=BEAMS, num_return_sequences=BEAMS,
        pad_token_id=PAD, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    tokens = found.sequences[:, ids.shape[1] :].numpy()
    tokens = np.pad(tokens, ((0, 0), (0, NEW - tokens.shape[1])), constant_values=PAD)
    return tokens.reshape(len(ids), BEAMS, NEW), found.sequences_scores.numpy().reshape(len(ids), BEAMS)


@pytest.mark.parametrize("name", ["gpt2", "gptj", "opt_125m", "llama_llama3", "mistral", "qwen3"])
def test_beams_equal_those_of_transformers(name, directory, reference):
    there, model = reference(name), load_pretrained(directory(name), stacked=True)

    def compare(padding: str, ends: list[int], **options: Any) -> np.ndarray:
        ids, mask = texts(padding)
        tokens, scores = expected(there, ids, mask, eos_token_id=ends or None, **options)
        found = beam_search(
            model, ids, attention_mask=mask, max_new_tokens=NEW, num_beams=BEAMS,
            eos_token_id=ends, pad_token_id=PAD, **options,
        )  # fmt: skip
        np.testing.assert_array_equal(found.tokens, tokens, err_msg=f"{padding} {ends} {options}")
        np.testing.assert_allclose(found.scores, scores, rtol=TOLERANCE)
        return tokens

    for padding in ("none", "left"):
        unended = compare(padding, [], length_penalty=1.0, early_stopping=False)
        ends = sorted({int(unended[i]) for i in [(0, 0, 4), (0, 3, 1), (1, 1, 3), (2, 2, 6)]})
        results = {
            compare(padding, ends, early_stopping=kind, length_penalty=penalty).tobytes()
            for kind, penalty in itertools.product(KINDS, PENALTIES)
        }
        assert len(results) >= 3, "the options make no difference"
