"""Bad arguments of models and of the functions that generate: each is refused before
anything reads the weights, and the message names what it must.

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


@functools.cache
def text_to_text_model() -> Any:
    config = models.T5Config(
        vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
    )
    return abstract(lambda key: models.T5ForConditionalGeneration(config, key=key))


def make(**options: Any) -> Any:
    """Not under `filter_eval_shape`: options are refused before any array is made."""
    return models.LlamaForCausalLM(CONFIG, key=KEY, **options)


class OtherTensor:
    """A tensor of another library, with the attributes that arrays share."""

    shape = (1, 2)
    ndim = 2
    dtype = "int64"


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
    refused(
        "model-input_ids-lists",
        lambda: language_model()([[1, 2]]),
        "LlamaForCausalLM: input_ids ... a list ... np.array(ids)",
    ),
    refused(
        "model-input_ids-tensor",
        lambda: language_model()(OtherTensor()),
        "input_ids ... a OtherTensor ... np.array(ids)",
    ),
    refused(
        "model-attention_mask-lists",
        lambda: language_model()(TOKENS, attention_mask=[[1, 1]]),
        "attention_mask ... a list",
    ),
    refused(
        "model-attention_mask-tensor",
        lambda: language_model()(TOKENS, attention_mask=OtherTensor()),
        "attention_mask ... a OtherTensor",
    ),
    refused(
        "model-attention_mask-float",
        lambda: language_model()(
            TOKENS, attention_mask=np.zeros(TOKENS.shape, np.float32)
        ),
        "LlamaForCausalLM: attention_mask is float32 ... mask == 0",
    ),
    refused(
        "encoder_decoder-attention_mask-float",
        lambda: text_to_text_model()(
            TOKENS, TOKENS, attention_mask=np.ones(TOKENS.shape, np.float16)
        ),
        "T5ForConditionalGeneration: attention_mask is float16 ... mask != 0",
    ),
    refused(
        "generate-attention_mask-float",
        lambda: generate(attention_mask=np.ones((1, 2), np.float32)),
        "generate: attention_mask is float32",
    ),
    refused(
        "model-segments-lists",
        lambda: language_model().hidden_states(TOKENS, segments=[[1, 1]]),
        "segments ... a list",
    ),
    refused(
        "model-positions-lists",
        lambda: language_model().hidden_states(TOKENS, positions=[[0, 1]]),
        "positions ... a list",
    ),
    refused(
        "encoder_decoder-inputs-lists",
        lambda: text_to_text_model()([[1, 2]], TOKENS),
        "T5ForConditionalGeneration: inputs ... a list",
    ),
    refused(
        "encoder_decoder-decoder_input_ids-lists",
        lambda: text_to_text_model()(TOKENS, [[1, 2]]),
        "T5ForConditionalGeneration: decoder_input_ids ... a list",
    ),
    refused(
        "model-labels",
        lambda: language_model()(TOKENS, labels=TOKENS),
        "labels ... LlamaForCausalLM ... takes attention_mask, positions ... "
        "cross_entropy",
    ),
    refused(
        "model-position_ids",
        lambda: language_model().hidden_states(TOKENS, position_ids=TOKENS),
        "position_ids ... Pass it as positions",
    ),
    refused(
        "model-output_hidden_states",
        lambda: language_model()(TOKENS, output_hidden_states=True),
        "output_hidden_states ... Leave it out",
    ),
    refused(
        "encoder_decoder-labels",
        lambda: text_to_text_model()(TOKENS, TOKENS, labels=TOKENS),
        "labels ... T5ForConditionalGeneration ... decoder_attention_mask",
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


OPTIONS = [
    refused("remat-bool", lambda: make(remat=True), "remat=True ... 'full'"),
    refused("remat-name", lambda: make(remat="half"), "remat='half' ... 'products'"),
    refused(
        "attention-name",
        lambda: make(attention="flash_attention_2"),
        "attention='flash_attention_2' ... 'cudnn'",
    ),
]


@pytest.mark.parametrize(("call", "words"), OPTIONS)
def test_an_option_that_is_no_value_is_refused_with_the_model(
    call: Any, words: str
) -> None:
    assert_refused_early(call, ValueError, words)


@pytest.mark.parametrize(("call", "words"), FRACTIONS)
def test_a_fraction_for_a_number_is_refused(call: Any, words: str) -> None:
    assert_refused_early(call, ValueError, words)
