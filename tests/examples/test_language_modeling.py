"""Language modeling, at a tiny size: it learns more than a bigram, and goes on with
prompts."""

import json

import code_data
import jax
import numpy as np
import pytest
import text_data
import text_tables
import tiny_models
import transformers
from language_modeling import generate
from language_modeling import main as example
from lora import main as lora
from refusals import assert_ends_with_one_line
from safetensors.numpy import load_file

import redco_eqx as rx
import redco_eqx_models as models

TINY = ["--quick", "--length", "64"]


# Text in the form of WikiText.

LINES = [
    "= {title} =",
    "The {title} is a small boat , which sails on the @-@ wind , and <unk> in a storm "
    ". x = y",
    "= = History = =",
    "In 18{year} the {title} was built = so it is said = by a man of the sea .",
    "= = = Early years = = =",
    "It sailed to the north and to the south , and then it came back to the sea .",
]
# In the files a space stands before and after each.
ARTICLE = "".join(f"  \n {line} \n" for line in LINES)


def articles(begin, num):
    return [
        ARTICLE.format(title=f"Boat {i}", year=10 + i % 80)
        for i in range(begin, begin + num)
    ]


def write_wiki(directory, form, train, valid):
    train, valid = "".join(train), "".join(valid)
    if form == "parquet":  # one row for each line
        for name, content in (
            ("train-00000-of-00001", train),
            ("validation-00000-of-00001", valid),
        ):
            lines = [{"text": line} for line in content.splitlines(keepends=True)]
            text_tables.write(directory / f"{name}.parquet", lines)
        return
    names = {"tokens": "wiki.{}.tokens", "raw": "wiki.{}.raw", "txt": "{}.txt"}
    (directory / names[form].format("train")).write_text(train, "utf-8")
    (directory / names[form].format("valid")).write_text(valid, "utf-8")


@pytest.mark.parametrize("form", ["tokens", "raw", "txt", "parquet"])
def test_articles_are_read_whole_and_apart(tmp_path, form):
    train, valid = articles(0, 5), articles(5, 2)
    write_wiki(tmp_path, form, train, valid)
    expected = [x.strip() for x in train], [x.strip() for x in valid]
    assert text_data.articles(str(tmp_path)) == expected


def test_a_text_without_headings_is_one_article(tmp_path):
    write_wiki(tmp_path, "txt", "One line .\nAnother one .\n", "A third .")
    assert text_data.articles(str(tmp_path)) == (
        ["One line .\nAnother one ."],
        ["A third ."],
    )


def test_a_directory_without_texts_to_train_on_is_named(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"there is no train in it, as wiki\.train\.tokens, train\.txt or",
    ):
        text_data.articles(str(tmp_path))


def test_a_directory_without_texts_to_evaluate_on_is_named(tmp_path):
    (tmp_path / "train.txt").write_text("text")
    with pytest.raises(
        ValueError, match="there is no valid or validation or test in it"
    ):
        text_data.articles(str(tmp_path))


def test_a_table_without_a_column_of_texts_is_named(tmp_path):
    (tmp_path / "train.txt").write_text("text")
    text_tables.write(tmp_path / "valid.parquet", [{"line": "a"}])
    with pytest.raises(ValueError, match="no column 'text' among line"):
        text_data.articles(str(tmp_path))


# The runs.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of both tasks: where its results are, and its numbers."""
    directory = tmp_path_factory.mktemp("run")
    checkpoints = ["--checkpoints", str(directory / "checkpoints")]
    return directory, example.main([*TINY, *checkpoints, "--output", str(directory)])


def bits_of(model, examples):
    """Return the bits per byte that a model needs for examples."""
    state = rx.init_state(model, key=jax.random.key(0))
    functions = {
        "collate_fn": example.collate_fn,
        "loss_fn": example.loss_fn,
        "batch_size": 8,
    }
    return rx.evaluate(state, examples, **functions)["loss"]


def test_both_tasks_learn_more_than_a_bigram_and_leave_checkpoints(run):
    (before, *_, after), bigram = run[1]["code"]
    assert after < bigram - 0.1 < before - 1
    (before, *_, after), bigram = run[1]["instructions"]
    assert after < min(bigram, before - 0.1)
    for task in ("code", "instructions"):
        names = {file.name for file in (run[0] / task).iterdir()}
        assert {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        } <= names
        assert rx.list_checkpoints(run[0] / "checkpoints" / task)


def test_the_perplexity_from_the_directory_is_that_of_the_trained_model(run):
    rows = json.loads((run[0] / "instructions" / "prompts.json").read_text())
    assert 8 <= len(rows) <= 16
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "instructions")
    examples = code_data.encode(tokenizer, rows, 64)
    bits = bits_of(models.load_pretrained(run[0] / "instructions"), examples)
    num_bytes, num_tokens = (
        sum(float(np.sum(x[name])) for x in examples)
        for name in ("num_bytes", "answer")
    )
    perplexity, bigram = run[1]["instructions, inference"]
    assert perplexity == pytest.approx(2 ** (bits * num_bytes / num_tokens), rel=1e-4)
    assert perplexity < bigram


def infer(run, *flags):
    return generate.main(
        [
            "--model",
            str(run[0] / "code"),
            "--length",
            "64",
            "--max-new-tokens",
            "12",
            *flags,
        ]
    )


def test_prompts_of_several_lengths_are_gone_on_with_as_each_alone(run, tmp_path):
    (tmp_path / "prompts.txt").write_text("import\ndef main(\n    return self")
    rows = [
        "import",
        {"instruction": "Return it."},
        {"instruction": "Return it.", "output": "def f():"},
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    lines = infer(
        run,
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--output",
        str(tmp_path),
        "--tensor",
        "4",
    )
    assert [
        text for _, text in json.loads((tmp_path / "written.json").read_text())
    ] == lines["written"]
    beams = infer(run, "--prompts", str(tmp_path / "prompts.json"), "--num-beams", "4")
    assert beams["written"][1] == beams["written"][2]
    assert beams["speed"] > 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "code")
    model = models.load_pretrained(run[0] / "code")
    for prompt, text in zip(
        ["import", "def main(", "    return self"], lines["written"], strict=True
    ):
        ids = np.array([tokenizer(prompt)["input_ids"]])
        assert ids[0, 0] == tokenizer.bos_token_id, "as in training"
        best = models.generate(model, ids, max_new_tokens=12)[0]
        assert tokenizer.decode(best, skip_special_tokens=True) == text
    ids = np.array([tokenizer(code_data.prompt(rows[1]))["input_ids"]])
    best = models.beam_search(model, ids, max_new_tokens=12, num_beams=4).tokens[0, 0]
    assert tokenizer.decode(best, skip_special_tokens=True) == beams["written"][1]


def test_an_adapted_model_nears_the_fully_trained_one_and_is_a_plain_checkpoint(
    run, tmp_path
):
    flags = [
        "--model",
        str(run[0] / "code"),
        "--rate",
        "5e-3",
        "--output",
        str(tmp_path),
    ]
    results = lora.main([*TINY, *flags])
    trained, parameters = results["trained"]
    assert trained < parameters / 5
    (before, *_, in_full), bigram = run[1]["instructions"]
    scores, reference = results["branches"]
    assert scores[0] == pytest.approx(before, rel=1e-5)
    assert scores[-1] < reference == bigram
    assert before - scores[-1] > (before - in_full) / 2 > 0.1
    assert results["merged"] == (pytest.approx(scores[-1], rel=1e-5), scores[-1])

    # The file has the merged weights, and the branches are beside it for whoever wants
    # to keep the base.
    model = models.load_pretrained(tmp_path)
    assert sum(x.size for x in rx.to_arrays(model).values()) == parameters
    branches = load_file(tmp_path / "branches" / "adapter_model.safetensors")
    assert sum(x.size for x in branches.values()) == trained
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    test = code_data.encode(
        tokenizer, code_data.signatures(code_data.modules(10)[1]), 64
    )
    assert bits_of(model, test) == pytest.approx(results["merged"][0], rel=1e-5)


def test_a_model_of_ones_own_is_tuned_on_data_of_ones_own(run, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "code")
    config = tiny_models.abstract(
        "opt_125m",
        vocab_size=len(tokenizer),
        num_hidden_layers=1,
        max_position_embeddings=128,
    ).config
    models.save_pretrained(
        models.OPTForCausalLM(config, key=jax.random.key(0)), tmp_path
    )
    tokenizer.save_pretrained(tmp_path)
    sums = [
        {"instruction": "Add.", "input": f"{i} + 1", "output": f"the sum is {i + 1}"}
        for i in range(40)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(sums))  # as Alpaca's
    write_wiki(tmp_path, "tokens", articles(0, 40), articles(40, 4))
    data = ["--data", str(tmp_path / "rows.json"), "--text", str(tmp_path)]
    results = example.main(
        [*TINY, "--model", str(tmp_path), *data, "--rate", "1e-2", "--epochs", "4"]
    )
    assert set(results) == {
        f"{task}{end}"
        for task in ("text", "instructions")
        for end in ("", ", inference")
    }
    for task in ("text", "instructions"):
        before, *_, after = results[task][0]
        assert after < before / 2


@pytest.fixture(scope="module")
def tokenizer():
    return code_data.make_tokenizer(["def f(x):\n    return x + 1\n" * 20], 300)


def test_windows_hold_every_token_and_byte_of_a_text_once(tokenizer):
    texts = ["def g(y): return y\n" * 9, "", "é = 'ü'\n"]
    examples = code_data.encode(tokenizer, texts, 16)
    tokens = [token for x in examples for token in x["tokens"][x["answer"]].tolist()]
    assert tokenizer.decode(tokens) == "</s>".join(texts) + "</s>"
    assert sum(x["num_bytes"] for x in examples) == pytest.approx(
        len("".join(texts).encode())
    )
    assert all(
        x["tokens"][0] == tokenizer.bos_token_id and not x["answer"][0]
        for x in examples
    )


def test_an_answer_is_what_follows_the_prompt_and_is_cut_at_the_length(tokenizer):
    row = {"instruction": "Say x.", "output": "return x"}
    (example_,) = code_data.encode(tokenizer, [row], 96)
    tokens = example_["tokens"]
    assert tokenizer.decode(tokens[example_["answer"]]) == "return x</s>"
    assert (
        tokenizer.decode(tokens[example_["prompt"]])
        == "<s>### Instruction:\nSay x.\n\n### Response:\n"
    )
    assert example_["num_bytes"] == len("return x")
    start = int(example_["prompt"].sum())

    (cut,) = code_data.encode(tokenizer, [row], start + 2)
    assert cut["answer"].sum() == 2
    assert 0 < cut["num_bytes"] < len("return x")
    assert code_data.encode(tokenizer, [row], start) == []


def test_the_bigram_is_a_distribution(tokenizer):
    train = code_data.encode(tokenizer, ["def f(x): return x\n" * 5], 16)
    (context,) = code_data.encode(tokenizer, ["d"], 16)
    total = 0.0
    for token in range(len(tokenizer)):
        tokens, answer = np.zeros(16, np.int32), np.zeros(16, bool)
        tokens[:2] = (context["tokens"][0], token)
        answer[1] = True
        unseen = {"tokens": tokens, "answer": answer, "num_bytes": np.float32(1)}
        total += 2 ** -code_data.bigram_bits(train, [unseen], len(tokenizer))
    assert total == pytest.approx(1, abs=1e-6)


def test_signatures_come_from_docstrings():
    text = (
        'def f(x, *, y=1):\n    """First\n    line.\n\n    More."""\n\ndef g():\n    '
        "pass\n"
    )
    assert code_data.signatures([text]) == [
        {"instruction": "First line.", "output": "def f(x, *, y=1):"}
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "rows.json"),
        (
            '[{"instruction": "a", "output": "b"}, {"prompt": "a"}]',
            "row 1 needs instruction, output",
        ),
        ("{}", "a list of objects was expected, not dict"),
        ("[", "rows.json: not JSON"),
    ],
    ids=["missing", "other fields", "no list", "no JSON"],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, content, words):
    rows = tmp_path / "rows.json"
    if content is not None:
        rows.write_text(content)
    assert_ends_with_one_line(example.main, [*TINY, "--data", str(rows)], words)


def test_prompts_and_models_that_cannot_be_used_are_named(run, tmp_path):
    prompts = tmp_path / "prompts.json"
    for content in ("[]", '["import", {"output": "x"}]', "[{}]"):
        prompts.write_text(content)
        with pytest.raises(
            ValueError,
            match=r"prompts\.json: row \d is neither a text nor an instruction",
        ):
            infer(run, "--prompts", str(prompts))
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "code")
    tokenizer.pad_token = None
    models.save_pretrained(models.load_pretrained(run[0] / "code"), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert_ends_with_one_line(
        example.main, [*TINY, "--model", str(tmp_path)], "lacks a pad_token"
    )
