"""Preference tuning, at a tiny size: the loss is that of the paper, and a model learns
from its own answers to write right ones."""

import argparse
import json

import code_data
import equinox as eqx
import jax
import jax.numpy as jnp
import language_modeling.main as language_modeling
import numpy as np
import optax
import pytest
from preference_tuning import main as example

import redco_eqx as rx
import redco_eqx_models as models

ROWS = [
    {"instruction": "Return the sum.", "output": "def add(a, b):"},
    {"instruction": "Return the sum.", "output": "def add(a, a):"},
]
ARGS = argparse.Namespace(length=48, max_new_tokens=16, samples=8, batch_size=4)


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("def f(a, *, b=1):", True),
        ("def f(a, b", False),
        ("def f(a=1, b):", False),
        # Python's parser accepts it, and its compiler does not.
        ("def f(a, a):", False),
        ("def f(a):\0", False),
    ],
)
def test_what_compiles(signature, expected):
    assert example.compiles(signature) is expected


def llama(key, vocab_size=32):
    config = models.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return models.LlamaForCausalLM(config, key=key)


def with_branches(model):
    key = jax.random.key(1)
    return models.add_lora(model, targets=example.TARGETS, rank=2, scale=2.0, key=key)


def test_the_loss_is_that_of_the_paper_by_hand():
    base = llama(jax.random.key(0))
    adapted = with_branches(base)
    adapted = jax.tree.map(
        lambda x, is_factor: x + 0.1 if is_factor else x,
        adapted,
        models.lora_spec(adapted),
    )
    rng = np.random.default_rng(0)
    batch = {}
    for kind in ("chosen", "rejected"):
        batch[kind] = rng.integers(0, 32, (4, 12)).astype(np.int32)
        batch[f"{kind}_answer"] = np.arange(12) * np.ones((4, 1)) > 6
    batch = jax.tree.map(jnp.asarray, batch)

    def log_probability(model, kind):
        tokens = batch[kind]
        log_probs = np.asarray(jax.nn.log_softmax(model(tokens[:, :-1])), np.float64)
        totals = np.zeros(4)
        for row, place in zip(*np.nonzero(batch[f"{kind}_answer"])):
            totals[row] += log_probs[row, place - 1, tokens[row, place]]
        return totals

    policy, reference = (
        log_probability(model, "chosen") - log_probability(model, "rejected")
        for model in (adapted, base)
    )
    reward = example.BETA * (policy - reference)
    assert np.abs(reward).max() > 0.1, "the branches change something"
    loss, metrics = example.loss_fn(adapted, batch, None)
    # Float32, and sums of a few terms.
    np.testing.assert_allclose(loss, np.log1p(np.exp(-reward)).mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["margin"], reward.mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["ranked by likelihood"], (policy > 0).mean())
    np.testing.assert_allclose(metrics["ranked by reward"], (reward > 0).mean())


def test_the_reference_gets_no_gradient():
    adapted = with_branches(llama(jax.random.key(0)))
    spec = models.lora_spec(adapted)
    tokens = jnp.arange(24).reshape(2, 12)
    answer = jnp.ones((2, 12), bool)
    batch = {"chosen": tokens, "rejected": tokens[::-1]}
    batch |= {"chosen_answer": answer, "rejected_answer": answer}
    policy, frozen = eqx.partition(adapted, spec)

    def loss_of(policy):
        return example.loss_fn(eqx.combine(policy, frozen), batch, None)[0]

    def loss_against_a_copy(policy):
        """The reference is another model, which has never had branches."""
        model = eqx.combine(policy, frozen)
        apart = example.preference(llama(jax.random.key(0)), batch)
        reward = example.BETA * (example.preference(model, batch) - apart)
        return -jnp.mean(jax.nn.log_sigmoid(reward))

    found = eqx.filter_grad(loss_of)(policy)
    expected = eqx.filter_grad(loss_against_a_copy)(policy)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        # Float32. Some gradients are zero but for rounding.
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-8)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A model that writes a right signature or a wrong one, as often: its directory,
    itself, and its tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = code_data.make_tokenizer(
        [code_data.prompt(row) + row["output"] for row in ROWS], 300
    )
    mesh = rx.make_mesh(tensor=2)
    model = rx.init_model(
        lambda key: llama(key, vocab_size=300), mesh, key=jax.random.key(0)
    )
    optimizer = optax.adam(3e-3)
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    state, _ = rx.fit(
        state,
        code_data.encode(tokenizer, 8 * ROWS, ARGS.length + ARGS.max_new_tokens),
        collate_fn=language_modeling.collate_fn,
        loss_fn=language_modeling.loss_fn,
        optimizer=optimizer,
        batch_size=16,
        num_steps=60,
        loggers=(),
    )
    models.save_pretrained(state.model, directory)
    tokenizer.save_pretrained(directory)
    return directory, state.model, tokenizer


def test_a_model_learns_from_its_own_answers(written, tmp_path):
    directory, model, tokenizer = written
    rows = 4 * ROWS[:1]
    before = example.share_right(model, tokenizer, rows, ARGS, seed=1)
    assert 0.2 < before < 0.8
    pairs = example.make_pairs(model, tokenizer, rows, ARGS, seed=0)
    assert len(pairs) >= 4
    for pair in pairs:
        assert example.compiles(pair["chosen"])
        assert not example.compiles(pair["rejected"])

    data = tmp_path / "pairs.json"
    data.write_text(json.dumps((pairs * 16)[:64]))
    flags = ["--model", directory, "--data", data, "--output", tmp_path]
    flags += ["--length", ARGS.length, "--max-new-tokens", ARGS.max_new_tokens]
    flags += ["--batch-size", 8, "--epochs", 2, "--rate", 1e-3]
    results = example.main([str(flag) for flag in flags])
    assert results["ranked right"][0][-1] == 1.0
    assert results["margin"][0][-1] > 0.1
    assert results["margin"][1] == 0.0, "at first, the model is its reference"

    tuned = models.load_lora(model, tmp_path / "branches")
    after = example.share_right(tuned, tokenizer, rows, ARGS, seed=1)
    assert after > before + 0.15, example.write(tuned, tokenizer, rows, ARGS, seed=1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"instruction": "a", "chosen": "b"}], "row 0 needs instruction, chosen and"),
        (4 * [{"instruction": "a", "chosen": "b", "rejected": "c"}], "do not suffice"),
    ],
    ids=["incomplete", "too few"],
)
def test_pairs_that_are_refused(written, tmp_path, rows, message):
    data = tmp_path / "pairs.json"
    data.write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=message):
        example.main(["--model", str(written[0]), "--data", str(data)])
