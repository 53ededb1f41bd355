"""Classification and regression: they learn, read the formats of the public sets, and
refuse others."""

import gzip
import json
import types
from typing import Any

import digits_data
import jax
import numpy as np
import pytest
import table_data
import text_tables
import tiny_models
import transformers
from classification_regression import main as example
from glue import main as glue
from refusals import assert_ends_with_one_line

import redco_eqx_models as models


def write_tables(directory):
    text_tables.write(directory / "dev.parquet", list(text_tables.rows(64, 1)))
    text_tables.write(directory / "train.tsv", list(text_tables.rows(256, 0)))
    return ["--data", str(directory), "--text", "first", "second"]


def write_mnist(directory, train, test):
    for name, split in (("train", train), ("t10k", test)):
        images = np.stack([np.round(x * 255) for x, _ in split]).astype(np.uint8)
        labels = np.array([y for _, y in split], np.uint8)
        head = np.array([0x803, *images.shape], ">i4").tobytes()
        (directory / f"{name}-images-idx3-ubyte.gz").write_bytes(
            gzip.compress(head + images.tobytes())
        )
        head = np.array([0x801, len(labels)], ">i4").tobytes()
        (directory / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def test_digits_in_the_format_of_mnist_are_read_and_learnt(tmp_path):
    train, test = digits_data.digits()
    write_mnist(tmp_path, train[:640], test[:160])
    again, _ = digits_data.digits(str(tmp_path))
    assert [y for _, y in again] == [y for _, y in train[:640]]
    np.testing.assert_allclose(again[7][0], train[7][0], atol=1 / 255)
    scores, linear = example.main(
        ["--task", "digits", "--data", str(tmp_path), "--epochs", "6"]
    )["digits"]
    assert 0.8 < linear < 0.95
    assert scores[-1] > linear - 0.08, "after 120 steps"


@pytest.mark.parametrize(
    ("task", "label", "least", "gap"),
    [("classification", "kind", 0.85, 0.1), ("regression", "score", 0.5, 0.15)],
)
def test_tables_are_read_and_learnt(tmp_path, task, label, least, gap):
    flags = write_tables(tmp_path)
    results = example.main([*flags, "--task", task, "--label", label, "--epochs", "5"])
    scores, linear = results[task]
    assert len(scores) == 5
    assert linear > least
    assert scores[-1] > linear - gap, "after 40 steps"


def table(directory, split, text, label, columns=None):
    args = types.SimpleNamespace(
        data=str(directory), text=text, label=label, columns=columns
    )
    return table_data.table(args, split)


@pytest.mark.parametrize("suffix", ["csv", "tsv", "parquet", "jsonl"])
def test_formats_give_the_same_rows(tmp_path, suffix):
    expected = list(text_tables.rows(20, 2))
    expected[3]["first"] = 'says "no", twice'
    pairs = [((row["first"], row["second"]), row["kind"]) for row in expected]
    text_tables.write(tmp_path / f"train.{suffix}", expected)
    assert table(tmp_path, "train", ["first", "second"], "kind") == pairs


def test_a_table_without_a_header_is_read_by_given_names(tmp_path):
    """As that of CoLA."""
    (tmp_path / "train.tsv").write_text('gj04\t1\t\tHe "said so.\nclc95\t0\t*\tSo he\n')
    columns = ["source", "label", "marker", "sentence"]
    found = table(tmp_path, "train", ["sentence"], "label", columns)
    assert found == [(('He "said so.',), "1"), (("So he",), "0")]


def test_pairs_of_neighbours_tell_orders_apart():
    one, other, longer = (
        set(example.encode((x,)).tolist()) for x in ("a b c", "c b a", "a b c " * 50)
    )
    assert len(one & other) == 1 + 4, "nothing, the start and three words"
    assert one < longer


def test_docstrings_are_split_once_and_for_all():
    train, held_out = table_data.docstrings("kind", 20)
    texts = {text for text, _ in train}
    assert texts.isdisjoint(text for text, _ in held_out)
    assert len(texts) > 2 * len(held_out) > 20
    assert {kind for _, kind in train} == {0, 1, 2}


def test_images_in_another_format_are_named(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(
        ValueError, match="train-images-idx3-ubyte: not in the format of MNIST"
    ):
        digits_data.digits(str(tmp_path))


BY_KIND = ["--text", "first", "--label", "kind"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ["--task", "classification"],
            "no column 'label' among first, second, kind, score",
        ),
        (["--task", "regression", *BY_KIND], "is not a number"),
    ],
    ids=["without labels", "words for numbers"],
)
def test_a_column_that_cannot_be_used_is_named(tmp_path, more, words):
    flags = write_tables(tmp_path)
    assert_ends_with_one_line(example.main, [*flags, *more], words)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("ay\tcalm\nno\n", "row 1 lacks a text or its kind"),
        ("ay\twild\n", "'wild' is not among those"),
    ],
    ids=["a short row", "an unknown kind"],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, rows, words):
    (tmp_path / "train.tsv").write_text("first\tkind\nay\tcalm\nno\tgrim\n")
    (tmp_path / "dev.tsv").write_text("first\tkind\n" + rows)
    flags = ["--data", str(tmp_path), "--task", "classification", *BY_KIND]
    assert_ends_with_one_line(example.main, flags, words)


# BERT and RoBERTa: what they learn, what lies there afterwards, what is refused.

TINY = ["--quick", "--length", "32", "--text", "first", "second"]


def test_classes_of_pairs_are_learnt_and_a_roberta_learns_a_number(tmp_path):
    """A BERT; and, with its words, a RoBERTa without a classifier, whose tokenizer has
    no segments."""
    for split, num in (("train", 320), ("dev", 64)):
        rows = [
            row | {"score": float(row["score"])} for row in text_tables.rows(num, num)
        ]
        text_tables.write(tmp_path / f"{split}.jsonl", rows)
    flags = [*TINY, "--data", str(tmp_path), "--epochs", "6", "--output", str(tmp_path)]
    scores, linear = glue.main([*flags, "--task", "classification", "--label", "kind"])[
        "classification"
    ]
    assert len(scores) == 6
    assert linear > 0.85
    assert scores[-1] > 0.75, "half of the texts have the more frequent class"

    words = transformers.AutoTokenizer.from_pretrained(
        tmp_path / "classification"
    ).get_vocab()
    names = ["input_ids", "attention_mask"]
    tokenizer: Any = transformers.BertTokenizer(vocab=words, model_input_names=names)
    tokenizer.save_pretrained(tmp_path)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 1,
    }
    sizes |= {
        "max_position_embeddings": 40,
        "type_vocab_size": 1,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = tiny_models.abstract(
        "roberta_masked", initializer_range=0.1, **sizes
    ).config
    models.save_pretrained(
        models.RobertaForMaskedLM(config, key=jax.random.key(0)), tmp_path
    )
    flags += ["--task", "regression", "--label", "score"]
    flags += ["--model", str(tmp_path), "--rate", "2e-3"]
    scores, linear = glue.main(flags)["regression"]
    assert linear > 0.5
    assert scores[-1] > 0.3, "0 by the mean"
    config = json.loads((tmp_path / "regression" / "config.json").read_text())
    assert config["problem_type"] == "regression"
    assert config["architectures"] == ["RobertaForSequenceClassification"]


def test_a_model_of_another_kind_is_named(tmp_path):
    config = models.ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_attention_heads=2
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    flags = [
        "--quick",
        *write_tables(tmp_path),
        "--task",
        "classification",
        "--label",
        "kind",
    ]
    flags += ["--model", str(tmp_path)]
    assert_ends_with_one_line(
        glue.main, flags, "a vit has no classifier here, only bert and roberta"
    )
