"""The example of LoRA: what it refuses, what it learns, and what it leaves behind."""

import pytest

pytest.importorskip("transformers", exc_type=ImportError)

import code_data
import jax
from lora import main as lora
from refusals import assert_ends_with_one_line
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import redco_eqx as rx
from redco_eqx import models

KEY = jax.random.key(0)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--targets", "c_attn"], "no projections named ['c_attn']"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--data", "/nowhere"], "/nowhere"),
        (["--tensor", "3"], "must divide the number of devices"),
    ],
)
def test_bad_input_ends_with_one_line_before_anything_is_trained(flags, words, monkeypatch):
    monkeypatch.setattr(lora, "tune", None)
    assert_ends_with_one_line(lora.main, ["--quick", *flags], words)


def test_an_adapted_model_nears_the_fully_trained_one_and_is_a_plain_checkpoint(tmp_path):
    results = lora.main(["--quick", "--length", "64", "--output", str(tmp_path)])
    trained, parameters = results["trained"]
    assert trained < parameters / 5
    (before, *_, in_full), bigram = results["full"]
    scores, reference = results["branches"]
    assert scores[0] == pytest.approx(before, rel=1e-5)
    assert reference == in_full
    assert scores[-1] < bigram
    assert before - scores[-1] > (before - in_full) / 2 > 0.1
    assert results["merged"] == (pytest.approx(scores[-1], rel=1e-5), scores[-1])

    # The file has the merged weights, and the branches are beside it for whoever wants to keep the base.
    model = models.load_pretrained(tmp_path)
    assert sum(x.size for x in rx.to_arrays(model).values()) == parameters
    branches = load_file(tmp_path / "branches" / "adapter_model.safetensors")
    assert sum(x.size for x in branches.values()) == trained
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    test = code_data.encode(tokenizer, code_data.signatures(code_data.modules(10)[1]), 64)
    state = rx.init_state(model, key=KEY)
    functions = {"collate_fn": lora.collate_fn, "loss_fn": lora.loss_fn, "batch_size": 8}
    assert rx.evaluate(state, test, **functions)["loss"] == pytest.approx(results["merged"][0], rel=1e-5)
