"""Greedy and beam search of models with an encoder, token for token as transformers has it."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from comparison import TOLERANCE, texts
from references import ENCODERS, TEXT, VOCABULARY

from redco_eqx.models import beam_search, generate, load_pretrained

NEW, BEAMS, PAD = 12, 4, 5
PENALTIES = (-1.0, 0.5, 2.0)
KINDS = (False, True, "never")
NAMES = ("t5", "t5_gated_untied", "bart", "vit_gpt2")


@functools.cache
def make_reference(name: str) -> Any:
    """The model of transformers. With a tied head it would say one token over and over."""
    model = ENCODERS[name].make()
    model.generation_config.forced_eos_token_id = None
    with torch.no_grad():
        if name in ("t5", "bart"):
            table = model.get_input_embeddings().weight
            table.copy_(2 * torch.nn.functional.normalize(table, dim=1))
        if name == "t5":
            for key, p in model.decoder.block.named_parameters():
                is_own = "EncDec" not in key and "relative" not in key and ".q." not in key
                p.mul_(2 if p.ndim == 2 and is_own else 1)
        if name == "bart":
            model.final_logits_bias.mul_(0.3)
            model.model.decoder.embed_positions.weight.mul_(4)
            for p in model.model.decoder.layers.parameters():
                p.mul_(0.5 if p.ndim == 2 else 1)
    return model


@pytest.fixture(scope="module", params=NAMES)
def pair(request: Any, tmp_path_factory: Any) -> tuple[Any, Any]:
    """A model of transformers, and ours of what it has written."""
    path = tmp_path_factory.mktemp(request.param)
    make_reference(request.param).save_pretrained(path)
    return make_reference(request.param), load_pretrained(path, stacked=True)


def reads_images(model: Any) -> bool:
    return model.config.model_type == "vision-encoder-decoder"


def paddings(model: Any) -> tuple[str, ...]:
    """Those on which the reference is right."""
    return ENCODERS["vit_gpt2" if reads_images(model) else model.config.model_type].padding


def inputs_of(model: Any, padding: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Images; or texts and their mask."""
    if reads_images(model):
        return np.random.default_rng(2).normal(size=(3, 3, 16, 16)).astype(np.float32), None
    return texts(padding)


def expected(there: Any, inputs: np.ndarray, mask: np.ndarray | None, num_before: int, **options: Any) -> Any:
    """New tokens `(batch * sequences, NEW)` by transformers, and their scores if it gives them."""
    if inputs.ndim == 4:
        options["pixel_values"] = torch.tensor(inputs)
    else:
        mask = np.ones_like(inputs) if mask is None else mask
        options["input_ids"], options["attention_mask"] = (torch.tensor(x).long() for x in (inputs, mask))
    found = there.generate(
        max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, return_dict_in_generate=True,
        output_scores=True, **options,
    )  # fmt: skip
    tokens = found.sequences[:, num_before:].numpy()
    tokens = np.pad(tokens, ((0, 0), (0, NEW - tokens.shape[1])), constant_values=PAD)
    scores = getattr(found, "sequences_scores", None)
    return tokens, None if scores is None else scores.numpy()


def test_greedy_tokens_equal_those_of_transformers(pair):
    there, model = pair
    said: set[int] = set()
    for padding in paddings(model):
        ids, mask = inputs_of(model, padding)
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
    ids, mask = inputs_of(model, "right")
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
        ids, mask = inputs_of(model, padding)
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
    ids, mask = inputs_of(model, "right")
    if mask is None:
        pytest.skip("images have no padding")
    assert ids.shape[1] == TEXT
    options: Any = {"max_new_tokens": NEW, "num_beams": BEAMS, "eos_token_id": ()}
    with_mask = beam_search(model, ids, attention_mask=mask, **options).tokens
    without = beam_search(model, ids, **options).tokens
    np.testing.assert_array_equal(with_mask[0], without[0])  # the row that has none
    assert not np.array_equal(with_mask[2], without[2])
    other = np.where(mask == 1, ids, -100)
    np.testing.assert_array_equal(beam_search(model, other, attention_mask=mask, **options).tokens, with_mask)
