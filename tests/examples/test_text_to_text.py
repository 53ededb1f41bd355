"""Text to text: it learns more than the lead, keeps what is best, reads XSum's form,
and its models open."""

import json

import numpy as np
import pytest
import text_tables
from text_to_text import main as example

import redco_eqx as rx

SUMMARIES = {
    "storm": "A great storm\nis coming.",
    "sun": 'Fair weather, "they say", for days.',
    "fog": "Stay in port.",
}
TINY = ["--quick", "--lengths", "16", "16", "--beams", "2"]
TINY += ["--epochs", "4", "--batch-size", "16"]


def rows(num, seed):
    """News whose summary one of their words decides."""
    random = np.random.default_rng(seed)
    for i in range(num):
        word = random.choice([*SUMMARIES])
        words = random.permutation([*random.choice(text_tables.CALM, 7), word])
        yield {"document": " ".join(words), "summary": SUMMARIES[word], "id": str(i)}


@pytest.mark.long
def test_each_family_beats_the_lead_keeps_the_best_and_is_trained_further(tmp_path):
    """On a directory in XSum's form, in two of its files."""
    train = list(rows(320, 0))
    for i, half in enumerate((train[:160], train[160:])):
        text_tables.write(tmp_path / f"train-{i:05}-of-00002.parquet", half)
    text_tables.write(tmp_path / "validation.jsonl", list(rows(32, 1)))
    data = ["--data", str(tmp_path)]
    flags = ["--checkpoints", str(tmp_path / "checkpoints"), "--output", str(tmp_path)]
    results = example.main([*TINY, *data, *flags])
    for family in ("T5", "BART"):
        kept = {
            info.step for info in rx.list_checkpoints(tmp_path / "checkpoints" / family)
        }
        for score in ("ROUGE-2", "ROUGE-L"):
            scores, lead = results[f"{family}, {score}"]
            assert len(scores) == 4
            assert scores[-1] > lead + 0.3
            assert 20 * (1 + int(np.argmax(scores))) in kept
        written = [
            json.loads(x)
            for x in (tmp_path / family / "step-80.jsonl").read_text().splitlines()
        ]
        assert [x["example"]["document"] for x in written] == [
            row["document"] for row in rows(32, 1)
        ]
        found = example.metric_fn(
            [x["example"] for x in written], [x["prediction"] for x in written]
        )
        assert found["rougeL"] == pytest.approx(results[f"{family}, ROUGE-L"][0][-1])
    before, expected = results["BART, ROUGE-L"]
    flags = ["--model", str(tmp_path / "BART"), "--fsdp", "2"]
    scores, lead = example.main([*TINY[:-4], "--epochs", "1", *data, *flags])[
        "BART, ROUGE-L"
    ]
    assert lead == expected
    assert scores[-1] > before[-1] - 0.05, "at a rate of 2e-5"


# -------------------------------------------------------------------------------------
# the data


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_formats_give_the_same_rows(tmp_path, suffix):
    expected = list(rows(20, 2))
    pairs = [
        {"document": row["document"], "summary": row["summary"]} for row in expected
    ]
    text_tables.write(tmp_path / f"train.{suffix}", expected)
    assert example.read(str(tmp_path), "train") == pairs


def test_other_columns_are_named(tmp_path):
    text_tables.write(tmp_path / "train.jsonl", [{"text": "a", "title": "b"}])
    with pytest.raises(
        ValueError, match=r"train.jsonl: no document and summary among text, title"
    ):
        example.read(str(tmp_path), "train")


def test_docstrings_are_summaries_of_functions_that_do_not_have_them():
    train, held_out = example.docstrings(20)
    assert {x["document"] for x in train[: len(train) // 2]}.isdisjoint(
        x["document"] for x in held_out
    )
    assert len(train) > 4 * len(held_out) > 40
    assert all(x["summary"] and "\n" not in x["summary"] for x in train)


def test_what_a_docstring_says_first_is_taken_from_the_body_of_its_function(
    tmp_path, monkeypatch
):
    source = (
        'def getName(self, x=1):\n    """Name it.\n\n    Or not."""\n    return '
        "self._first_name\n"
    )
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_text(
        source + source.replace("Name it.", "Two\n    lines.")
    )
    monkeypatch.setattr(example.sysconfig, "get_path", lambda name: str(tmp_path))
    train, held_out = example.docstrings(1)
    assert (train, held_out) == (
        [{"document": "return self._first_name", "summary": "Name it."}],
        [],
    )


def test_rouge_and_the_lead_are_what_they_are_by_hand():
    examples = [{"document": "a cat sat down on it", "summary": "the cat sat"}]
    found = example.metric_fn(examples, ["a cat sat down"])
    rouge2 = 2 * (1 / 3) * (1 / 2) / (1 / 3 + 1 / 2)
    assert found == {"rouge2": pytest.approx(rouge2), "rougeL": pytest.approx(4 / 7)}
    assert example.lead(examples) == found
