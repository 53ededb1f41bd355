"""Greedy and beam search of models with an encoder, token for token as transformers has it."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from comparison import TOLERANCE, texts
from references import TEXT, VOCABULARY, randomise

from redco_eqx.models import beam_search, generate, load_pretrained

NEW, BEAMS, PAD = 12, 4, 5
PENALTIES = (-1.0, 0.5, 2.0)
KINDS = (False, True, "never")

_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,  # more than the encoder has fail there
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 0,
}
CONFIGS: dict[str, Any] = {
    "t5": transformers.T5Config(**_T5),
    "t5_v1_1": transformers.T5Config(**_T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "bart": transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=40,
        max_position_embeddings=48,
        decoder_start_token_id=2,
        forced_eos_token_id=None,
    ),
}


@functools.cache
def reference(name: str) -> Any:
    """The model of transformers."""
    model = transformers.AutoModelForSeq2SeqLM.from_config(CONFIGS[name])
    randomise(model)
    with torch.no_grad():
        if name == "t5":  # its head reads what was divided by sqrt(d_model)
            model.shared.weight.mul_(32**0.5)
        if name == "bart":  # normalised after each layer, it would say one token over and over
            shared, decoder = model.model.shared.weight, model.model.decoder
            shared.copy_(2 * torch.nn.functional.normalize(shared, dim=1))
            decoder.embed_positions.weight.mul_(4)
            for key, p in decoder.layers.named_parameters():
                p.mul_((0.15 if "encoder_attn.out_proj" in key else 0.5) if p.ndim == 2 else 1)
    return model.eval()


@pytest.fixture(scope="module", params=list(CONFIGS))
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, Any]:
    """A model of transformers, and ours of what it has written."""
    path = tmp_path_factory.mktemp(request.param)
    reference(request.param).save_pretrained(path)
    return reference(request.param), load_pretrained(path, stacked=True)


def expected(there: Any, ids: np.ndarray, mask: np.ndarray | None, num_before: int, **options: Any) -> Any:
    """New tokens `(batch * sequences, NEW)` by transformers, and their scores if it gives them."""
    mask = np.ones_like(ids) if mask is None else mask
    found = there.generate(
        input_ids=torch.tensor(ids, dtype=torch.long), attention_mask=torch.tensor(mask, dtype=torch.long),
        max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, return_dict_in_generate=True, output_scores=True,
        **options,
    )  # fmt: skip
    tokens = found.sequences[:, num_before:].numpy()
    tokens = np.pad(tokens, ((0, 0), (0, NEW - tokens.shape[1])), constant_values=PAD)
    scores = getattr(found, "sequences_scores", None)
    return tokens, None if scores is None else scores.numpy()


def paddings(model: Any) -> list[str]:
    """BART of transformers counts the positions of padding, so that on the left it moves the text."""
    return ["none", "right"] if model.config.model_type == "bart" else ["none", "left", "right"]


def test_greedy_tokens_equal_those_of_transformers(pair):
    there, model = pair
    said: set[int] = set()
    for padding in paddings(model):
        ids, mask = texts(padding)
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": PAD}
        unended, _ = expected(there, ids, mask, 1, eos_token_id=None)
        said |= set(unended.ravel().tolist())
        np.testing.assert_array_equal(generate(model, ids, eos_token_id=(), **options), unended)
        end = int(unended[1, 4])
        ended, _ = expected(there, ids, mask, 1, eos_token_id=end)
        np.testing.assert_array_equal(generate(model, ids, eos_token_id=end, **options), ended)
    assert len(said) >= 5, "the same token over and over shows little"


def test_a_text_begins_with_what_is_given(pair):
    there, model = pair
    ids, mask = texts("right")
    start = np.random.default_rng(1).integers(3, VOCABULARY, (len(ids), 4)).astype(np.int32)
    start[:, 0] = model.config.decoder_start_token_id
    given: Any = {"decoder_input_ids": torch.tensor(start, dtype=torch.long), "eos_token_id": None}
    options: Any = {"attention_mask": mask, "decoder_input_ids": start, "eos_token_id": ()}
    tokens, _ = expected(there, ids, mask, 4, **given)
    np.testing.assert_array_equal(generate(model, ids, max_new_tokens=NEW, **options), tokens)
    tokens, _ = expected(there, ids, mask, 4, num_beams=BEAMS, **given)
    found = beam_search(model, ids, max_new_tokens=NEW, num_beams=BEAMS, **options)
    np.testing.assert_array_equal(found.tokens[:, 0], tokens)


def test_beams_equal_those_of_transformers(pair):
    there, model = pair

    def compare(padding: str, ends: list[int], **options: Any) -> np.ndarray:
        ids, mask = texts(padding)
        tokens, scores = expected(
            there, ids, mask, 1,
            eos_token_id=ends or None, num_beams=BEAMS, num_return_sequences=BEAMS, **options,
        )  # fmt: skip
        found = beam_search(
            model, ids, attention_mask=mask, max_new_tokens=NEW, num_beams=BEAMS,
            eos_token_id=ends, pad_token_id=PAD, **options,
        )  # fmt: skip
        tokens = tokens.reshape(len(ids), BEAMS, NEW)
        np.testing.assert_array_equal(found.tokens, tokens, err_msg=f"{padding} {ends} {options}")
        np.testing.assert_allclose(np.ravel(found.scores), scores, rtol=TOLERANCE)
        return tokens

    for padding in paddings(model):
        unended = compare(padding, [], length_penalty=1.0, early_stopping=False)
        ends = sorted({int(unended[i]) for i in [(0, 0, 4), (0, 3, 1), (1, 1, 3), (2, 2, 6)]})
        results = {
            compare(padding, ends, early_stopping=kind, length_penalty=penalty).tobytes()
            for kind, penalty in itertools.product(KINDS, PENALTIES)
        }
        assert len(results) >= 3, "the options make no difference"


def test_what_the_padding_hides_is_seen_without_a_mask(pair):
    _, model = pair
    ids, mask = texts("right")
    assert mask is not None
    assert ids.shape[1] == TEXT
    options: Any = {"max_new_tokens": NEW, "num_beams": BEAMS, "eos_token_id": ()}
    with_mask = beam_search(model, ids, attention_mask=mask, **options).tokens
    without = beam_search(model, ids, **options).tokens
    np.testing.assert_array_equal(with_mask[0], without[0])  # the row that has none
    assert not np.array_equal(with_mask[2], without[2])
    other = np.where(mask == 1, ids, -100)
    np.testing.assert_array_equal(beam_search(model, other, attention_mask=mask, **options).tokens, with_mask)
