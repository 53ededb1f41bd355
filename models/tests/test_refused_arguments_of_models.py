"""Bad arguments of the functions that generate: each is refused before anything reads
the weights, and the message names what it must.

Each id is the function, the argument and what is wrong with it.
"""

import functools
from typing import Any

import numpy as np
import pytest
from fit_helpers import linear_state
from helpers import KEY, abstract, assert_refused_early, refused

import redco_eqx_models

models: Any = redco_eqx_models  # no type checker warns of the bad arguments
pytestmark = pytest.mark.usefixtures("annotations_unchecked")

HEADS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
CONFIG = models.LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, **HEADS)
TOKENS = np.ones((1, 2), np.int32)


@functools.cache
def language_model() -> Any:
    """Without weights: bad arguments are refused before anything reads them."""
    return abstract(lambda key: models.LlamaForCausalLM(CONFIG, key=key))


def generate(inputs: Any = TOKENS, **more: Any) -> Any:
    return models.generate(language_model(), inputs, **{"max_new_tokens": 2, **more})


def beam_search(inputs: Any = TOKENS, **more: Any) -> Any:
    return models.beam_search(language_model(), inputs, max_new_tokens=2, **more)


OF_ANOTHER_TYPE = [
    refused(
        "generate-model-state",
        lambda: models.generate(linear_state(), np.ones((4, 2)), max_new_tokens=2),
        "generate: model ... state.model",
    ),
    refused(
        "generate-inputs-str",
        lambda: generate("hello"),
        "inputs ... a str ... tokenizer(",
    ),
    refused(
        "generate-inputs-list_of_str",
        lambda: generate(["hello", "you"]),
        "inputs ... a list ... tokenizer(",
    ),
    refused(
        "generate-inputs-lists",
        lambda: generate([[1, 2], [3, 4]]),
        "inputs ... a list ... np.array(ids)",
    ),
    refused(
        "generate-inputs-lists_of_unequal_length",
        lambda: generate([[1, 2], [3]]),
        "inputs ... a list ... padding",
    ),
    refused(
        "beam_search-inputs-lists",
        lambda: beam_search([[1]], num_beams=2),
        "beam_search: inputs ... np.array(ids)",
    ),
]


@pytest.mark.parametrize(("call", "words"), OF_ANOTHER_TYPE)
def test_an_argument_of_another_type_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, TypeError, words)


FRACTIONS = [
    refused(
        "generate-max_new_tokens-float",
        lambda: generate(max_new_tokens=2.5),
        "max_new_tokens=2.5 ... an integer",
    ),
    refused(
        "generate-top_k-float",
        lambda: generate(temperature=1.0, top_k=2.5, key=KEY),
        "top_k=2.5 ... an integer",
    ),
    refused(
        "beam_search-num_beams-float",
        lambda: beam_search(num_beams=2.5),
        "num_beams=2.5 ... an integer",
    ),
]


@pytest.mark.parametrize(("call", "words"), FRACTIONS)
def test_a_fraction_for_a_number_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, ValueError, words)
