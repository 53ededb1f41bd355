"""Greedy and beam search, token for token as transformers has them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from comparison import TOLERANCE, texts
from references import DECODERS, REFERENCES, VOCABULARY

from redco_eqx_models import beam_search, generate, load_pretrained

NEW, BEAMS, PAD = 12, 4, 5
PENALTIES = (-1.0, 0.5, 2.0)
OPTIONS: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": PAD}


@pytest.fixture
def pair(request: Any, tmp_path: Any) -> tuple[str, Any, Any]:
    """Name, a model of transformers, and ours of its files."""
    name = request.param
    there = REFERENCES[name].make()
    there.generation_config.forced_eos_token_id = None
    if name in ("t5_gated_untied", "vit_gpt2"):  # another than the one in config.json
        there.generation_config.decoder_start_token_id = 7
    if name == "bart":  # with a tied head it would say one token over and over
        with torch.no_grad():
            table = there.get_input_embeddings().weight
            table.copy_(2 * torch.nn.functional.normalize(table, dim=1))
            there.final_logits_bias.mul_(0.3)
            there.model.decoder.embed_positions.weight.mul_(4)
            for p in there.model.decoder.layers.parameters():
                p.mul_(0.5 if p.ndim == 2 else 1)
    there.save_pretrained(tmp_path)
    return name, there, load_pretrained(tmp_path, stacked=True)


def prompts_of(name: str, padding: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Images; or texts and their mask."""
    if "image" in REFERENCES[name].reads:
        return np.random.default_rng(2).normal(size=(3, 3, 16, 16)).astype(
            np.float32
        ), None
    return texts(padding if padding in REFERENCES[name].padding else "right")


def expected_of(
    there: Any,
    prompts: np.ndarray,
    mask: np.ndarray | None,
    num_before: int,
    **more: Any,
) -> tuple[np.ndarray, Any]:
    """New tokens `(batch * sequences, NEW)` by transformers, and their scores if it
    gives them."""
    if prompts.ndim == 4:
        more["pixel_values"] = torch.tensor(prompts)
    else:
        mask = np.ones_like(prompts) if mask is None else mask
        more["input_ids"], more["attention_mask"] = (
            torch.tensor(x).long() for x in (prompts, mask)
        )
    there.generation_config.eos_token_id = more.pop("eos_token_id", None)
    found = there.generate(
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **OPTIONS,
        **more,
    )
    tokens = found.sequences[:, num_before:].numpy()
    tokens = np.pad(tokens, ((0, 0), (0, NEW - tokens.shape[1])), constant_values=PAD)
    scores = getattr(found, "sequences_scores", None)
    return tokens, None if scores is None else scores.numpy()


@pytest.mark.parametrize(
    "pair", [*DECODERS, "t5_gated_untied", "bart", "vit_gpt2"], indirect=True
)
def test_greedy_tokens_equal_those_of_transformers(pair):
    name, there, model = pair
    prompts, mask = prompts_of(name, "left")
    begin = prompts.shape[1] if name in DECODERS else 1
    endless, _ = expected_of(there, prompts, mask, begin)
    assert len(np.unique(endless)) >= 3, "the same token over and over shows little"
    ends = [int(endless[1, 4]), 1]
    ended, _ = expected_of(there, prompts, mask, begin, eos_token_id=ends)
    assert (ended[1] == PAD).any()
    found = generate(model, prompts, attention_mask=mask, eos_token_id=ends, **OPTIONS)
    np.testing.assert_array_equal(found, ended)
    if name == "gpt2":
        prompts, _ = texts()
        endless, _ = expected_of(there, prompts, None, begin)
        np.testing.assert_array_equal(
            generate(model, prompts, eos_token_id=(), **OPTIONS), endless
        )


@pytest.mark.parametrize(
    "pair", ["gpt2", "mistral", "t5_gated_untied", "bart", "vit_gpt2"], indirect=True
)
def test_beams_equal_those_of_transformers(pair):
    name, there, model = pair
    prompts, mask = prompts_of(name, "left")
    begin = prompts.shape[1] if name in DECODERS else 1
    given = {}
    if name == "bart":  # a text may begin with what is given
        start = (
            np.random.default_rng(1)
            .integers(3, VOCABULARY, (len(prompts), 4))
            .astype(np.int32)
        )
        start[:, 0] = model.config.decoder_start_token_id
        begin = 4
        given = {"decoder_input_ids": start}

    def search_there(ends: list[int], **options: Any) -> tuple[np.ndarray, Any]:
        options |= {
            "eos_token_id": ends or None,
            "num_beams": BEAMS,
            "num_return_sequences": BEAMS,
        }
        options |= {key: torch.tensor(x).long() for key, x in given.items()}
        tokens, scores = expected_of(there, prompts, mask, begin, **options)
        return tokens.reshape(len(prompts), BEAMS, NEW), scores

    def compare(ends: list[int], **options: Any) -> np.ndarray:
        tokens, scores = search_there(ends, **options)
        more = {**OPTIONS, **options, **given}
        found = beam_search(
            model,
            prompts,
            attention_mask=mask,
            num_beams=BEAMS,
            eos_token_id=ends,
            **more,
        )
        np.testing.assert_array_equal(found.tokens, tokens, err_msg=f"{ends} {options}")
        np.testing.assert_allclose(np.ravel(found.scores), scores, rtol=TOLERANCE)
        return tokens

    unended, _ = search_there([], length_penalty=1.0, early_stopping=False)
    ends = sorted(
        {int(unended[i]) for i in [(0, 0, 4), (0, 3, 1), (1, 1, 3), (2, 2, 6)]}
    )
    kinds = (False, True, "never") if name == "gpt2" else (False,)
    results = {
        compare(ends, early_stopping=kind, length_penalty=penalty).tobytes()
        for kind, penalty in itertools.product(kinds, PENALTIES)
    }
    assert len(results) >= 2, "the options make no difference"
    if name == "gpt2":
        compare([], length_penalty=1.0, early_stopping=False)
