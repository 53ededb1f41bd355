"""The language-modeling example, at a tiny size: it learns more than a bigram, and others can read it."""

import pytest

pytest.importorskip("transformers", exc_type=ImportError)

import json
import math
from typing import Any

import code_data
import common
import jax
import numpy as np
import transformers
from language_modeling import generate
from language_modeling import main as example

import redco_eqx as rx
from redco_eqx import models

TINY = ["--quick", "--length", "64"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of both tasks: where its results are, and its numbers."""
    directory = tmp_path_factory.mktemp("run")
    checkpoints = ["--checkpoints", str(directory / "checkpoints")]
    return directory, example.main([*TINY, *checkpoints, "--output", str(directory)])


@pytest.fixture(scope="module")
def held_out(run):
    """Some windows of held-out modules, in the tokens of the run."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "code")
    return code_data.encode(tokenizer, code_data.modules(10)[1], 64)[:24]


def measure(state, examples):
    return rx.evaluate(state, examples, collate_fn=example.collate_fn, loss_fn=example.loss_fn, batch_size=8)[
        "loss"
    ]


def test_both_tasks_learn_more_than_a_bigram(run):
    (before, *_, after), bigram = run[1]["code"]
    assert after < bigram - 0.1 < before - 1
    (before, *_, after), bigram = run[1]["instructions"]
    assert after < bigram
    assert after < before - 0.1


def test_what_is_written_is_a_checkpoint_with_its_tokenizer(run):
    for task in ("code", "instructions"):
        names = {file.name for file in (run[0] / task).iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
        assert json.loads((run[0] / task / "config.json").read_text())["model_type"] == "llama"
        assert rx.list_checkpoints(run[0] / "checkpoints" / task)


def test_transformers_gives_the_same_bits_per_byte(run, held_out):
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(run[0] / "code")
    batch = example.collate_fn(held_out)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(batch["tokens"].astype(np.int64))).logits.log_softmax(-1).numpy()
    nats = -np.take_along_axis(logits[:, :-1], batch["tokens"][:, 1:, None], axis=2)[..., 0]
    expected = (nats * batch["answer"][:, 1:]).sum() / math.log(2) / batch["num_bytes"].sum()

    ours = models.load_pretrained(run[0] / "code", rx.make_mesh(tensor=2))
    assert measure(rx.init_state(ours, key=jax.random.key(0)), held_out) == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------- inference alone


def test_the_perplexity_from_the_directory_is_that_of_the_trained_model(run):
    rows = json.loads((run[0] / "instructions" / "prompts.json").read_text())
    assert 8 <= len(rows) <= 16
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "instructions")
    examples = code_data.encode(tokenizer, rows, 64)
    state = rx.init_state(models.load_pretrained(run[0] / "instructions"), key=jax.random.key(0))
    num_bytes, num_tokens = (sum(float(np.sum(x[name])) for x in examples) for name in ("num_bytes", "answer"))
    perplexity, bigram = run[1]["instructions, inference"]
    assert perplexity == pytest.approx(2 ** (measure(state, examples) * num_bytes / num_tokens), rel=1e-4)
    assert perplexity < bigram


def infer(run, *flags):
    directory = run[0] / "code"
    return generate.main(["--model", str(directory), "--length", "64", "--max-new-tokens", "12", *flags])


def test_lines_of_a_text_are_gone_on_with_by_any_mesh_and_by_transformers(run, tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "prompts.txt").write_text("import\ndef main(\n    return self")
    flags = ["--prompts", str(tmp_path / "prompts.txt"), "--output", str(tmp_path)]
    found = infer(run, *flags, "--tensor", "1")["written"]
    assert infer(run, *flags, "--tensor", "4")["written"] == found
    assert [text for _, text in json.loads((tmp_path / "written.json").read_text())] == found
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "code")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(run[0] / "code")
    for prompt, text in zip(["import", "def main(", "    return self"], found):
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        assert ids[0, 0] == tokenizer.bos_token_id, "as in training"
        expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert tokenizer.decode(expected, skip_special_tokens=True) == text


def test_beams_of_prompts_of_several_lengths_are_those_of_each_alone(run, tmp_path):
    rows = ["import", {"instruction": "Return it."}, {"instruction": "Return it.", "output": "def f():"}]
    (tmp_path / "prompts.json").write_text(json.dumps(rows))
    found = infer(run, "--prompts", str(tmp_path / "prompts.json"), "--num-beams", "4")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "code")
    model = models.load_pretrained(run[0] / "code")
    for prompt, text in zip(["import", code_data.prompt(rows[1])], found["written"]):
        ids = np.array([tokenizer(prompt)["input_ids"]])
        best = models.beam_search(model, ids, max_new_tokens=12, num_beams=4).tokens[0, 0]
        assert tokenizer.decode(best, skip_special_tokens=True) == text
    assert found["written"][1] == found["written"][2]
    assert found["speed"] > 0


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A file as Alpaca's: sums."""
    rows = [{"instruction": "Add.", "input": f"{i} + 1", "output": f"the sum is {i + 1}"} for i in range(40)]
    file = tmp_path_factory.mktemp("records") / "rows.json"
    file.write_text(json.dumps(rows))
    return file


def test_a_checkpoint_goes_on_with_records_of_ones_own(run, records, tmp_path):
    arguments = ["--model", str(run[0] / "code"), "--data", str(records), "--tasks", "instructions"]
    rest = ["--rate", "3e-3", "--epochs", "4", "--output", str(tmp_path)]
    before, *_, after = example.main([*TINY, *arguments, *rest])["instructions"][0]
    assert after < before / 2
    # It was scanned over its layers, and is written layer by layer again.
    saved = models.load_pretrained(tmp_path / "instructions")
    assert rx.to_arrays(saved).keys() == rx.to_arrays(models.load_pretrained(run[0] / "code")).keys()


def test_an_opt_of_any_size_is_tuned_by_the_same_program(run, records, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "code")
    config = models.OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    models.save_pretrained(models.OPTForCausalLM(config, key=jax.random.key(0)), tmp_path)
    tokenizer.save_pretrained(tmp_path)
    arguments = ["--model", str(tmp_path), "--data", str(records), "--tasks", "instructions"]
    results = example.main([*TINY, *arguments, "--rate", "1e-2", "--epochs", "4"])
    before, *_, after = results["instructions"][0]
    assert after < before / 2


# ------------------------------------------------------------------------------------- the data


@pytest.fixture(scope="module")
def tokenizer():
    return code_data.make_tokenizer(["def f(x):\n    return x + 1\n" * 20], 300)


def test_windows_hold_every_token_and_byte_of_a_text_once(tokenizer):
    texts = ["def g(y): return y\n" * 9, "", "é = 'ü'\n"]
    examples = code_data.encode(tokenizer, texts, 16)
    tokens = [token for x in examples for token in x["tokens"][x["answer"]].tolist()]
    assert tokenizer.decode(tokens) == "</s>".join(texts) + "</s>"
    assert sum(x["num_bytes"] for x in examples) == pytest.approx(len("".join(texts).encode()))
    assert all(x["tokens"][0] == tokenizer.bos_token_id and not x["answer"][0] for x in examples)


def test_an_answer_is_what_follows_the_prompt_and_is_cut_at_the_length(tokenizer):
    row = {"instruction": "Say x.", "output": "return x"}
    (example_,) = code_data.encode(tokenizer, [row], 96)
    tokens = example_["tokens"]
    assert tokenizer.decode(tokens[example_["answer"]]) == "return x</s>"
    assert tokenizer.decode(tokens[example_["prompt"]]) == "<s>### Instruction:\nSay x.\n\n### Response:\n"
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
        tokens[:2], answer[1] = (context["tokens"][0], token), True
        unseen = {"tokens": tokens, "answer": answer, "num_bytes": np.float32(1)}
        total += 2 ** -code_data.bigram_bits(train, [unseen], len(tokenizer))
    assert total == pytest.approx(1, abs=1e-6)


def test_signatures_come_from_docstrings():
    text = 'def f(x, *, y=1):\n    """First\n    line.\n\n    More."""\n\ndef g():\n    pass\n'
    assert code_data.signatures([text]) == [{"instruction": "First line.", "output": "def f(x, *, y=1):"}]


# ------------------------------------------------------------------------------------- bad input


def refusal(capsys, *arguments):
    """The one line with which the program ends."""
    with pytest.raises(SystemExit) as error:
        common.run(lambda: example.main([*TINY, *arguments]))
    line = str(error.value.code)
    assert line.startswith("error: ")
    assert "\n" not in line
    return line


def test_bad_input_ends_in_one_line(run, tmp_path, capsys):
    assert "absent" in refusal(capsys, "--model", str(tmp_path / "absent"))
    assert "rows.json" in refusal(capsys, "--data", str(tmp_path / "rows.json"))
    file = tmp_path / "columns.json"
    file.write_text(json.dumps([{"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"}]))
    assert "row 1 needs instruction, output" in refusal(capsys, "--data", str(file))
    for text, words in (("{}", "a list of objects was expected, not dict"), ("[", "columns.json: not JSON")):
        file.write_text(text)
        assert words in refusal(capsys, "--data", str(file))
    assert "needs 128 devices" in refusal(capsys, "--tensor", "128")

    tokenizer = transformers.AutoTokenizer.from_pretrained(run[0] / "code")
    tokenizer.pad_token = None
    bare = tmp_path / "bare"
    models.save_pretrained(models.load_pretrained(run[0] / "code"), bare)
    tokenizer.save_pretrained(bare)
    assert "lacks a pad_token" in refusal(capsys, "--model", str(bare))


@pytest.mark.parametrize("text", ["[]", '["import", {"output": "x"}]', "[{}]"])
def test_prompts_that_are_none_are_refused(run, tmp_path, text):
    (tmp_path / "prompts.json").write_text(text)
    with pytest.raises(ValueError, match=r"prompts\.json: row \d is no text, nor has it an instruction"):
        infer(run, "--prompts", str(tmp_path / "prompts.json"))
