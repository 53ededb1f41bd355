"""BERT and RoBERTa on tables of texts: what they learn, what lies there afterwards, what is refused."""

import json
from typing import Any

import jax
import pytest
import text_tables
import transformers
from glue import main as example
from refusals import assert_ends_with_one_line

from redco_eqx import models

TINY = ["--quick", "--length", "32", "--text", "first", "second"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A directory in the form of a task with pairs of sentences."""
    directory = tmp_path_factory.mktemp("tables")
    for split, num in (("train", 320), ("dev", 64)):
        rows = [row | {"score": float(row["score"])} for row in text_tables.rows(num, num)]
        text_tables.write(directory / f"{split}.jsonl", rows)
    return ["--data", str(directory)]


@pytest.fixture(scope="module")
def classes(data, tmp_path_factory):
    """A run on classes: where its model is, its scores, and that of the linear model."""
    directory = tmp_path_factory.mktemp("classes")
    flags = [*data, "--task", "classification", "--label", "kind", "--epochs", "6"]
    results = example.main([*TINY, *flags, "--output", str(directory)])
    return directory / "classification", *results["classification"]


def test_classes_of_pairs_are_learnt(classes):
    _, scores, linear = classes
    assert len(scores) == 6
    assert linear > 0.85
    assert scores[-1] > 0.75, "half of the texts have the more frequent class"


@pytest.fixture(scope="module")
def roberta(classes, tmp_path_factory):
    """A RoBERTa without a classifier, with a tokenizer that has no segments."""
    directory = tmp_path_factory.mktemp("roberta")
    words = transformers.AutoTokenizer.from_pretrained(classes[0]).get_vocab()
    names = ["input_ids", "attention_mask"]
    tokenizer: Any = transformers.BertTokenizer(vocab=words, model_input_names=names)
    tokenizer.save_pretrained(directory)
    config = models.RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        type_vocab_size=1,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_token_id,
    )
    models.save_pretrained(models.RobertaForMaskedLM(config, key=jax.random.key(0)), directory)
    return directory


def test_a_roberta_learns_a_number(roberta, data, tmp_path):
    flags = [*data, "--task", "regression", "--label", "score", "--epochs", "6"]
    rest = ["--model", str(roberta), "--rate", "2e-3", "--output", str(tmp_path)]
    scores, linear = example.main([*TINY, *flags, *rest])["regression"]
    assert linear > 0.5
    assert scores[-1] > 0.3, "0 by the mean"
    config = json.loads((tmp_path / "regression" / "config.json").read_text())
    assert config["problem_type"] == "regression"
    assert config["architectures"] == ["RobertaForSequenceClassification"]


def test_a_model_of_another_kind_is_named(data, tmp_path):
    config = models.ViTConfig(image_size=8, patch_size=4, hidden_size=16, num_attention_heads=2)
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    flags = [*TINY, *data, "--task", "classification", "--label", "kind", "--model", str(tmp_path)]
    assert_ends_with_one_line(example.main, flags, "a vit has no classifier here, only bert and roberta")
