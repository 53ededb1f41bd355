"""LoRA: branches that start at nothing, merge into what they were beside, and are all that is trained."""

import pytest

pytest.importorskip("transformers", exc_type=ImportError)

import code_data
import common
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from lora import main as lora
from transformers import AutoTokenizer

import redco_eqx as rx
from redco_eqx import models

KEY = jax.random.key(0)
TOKENS = jnp.arange(24).reshape(2, 12) % 32


def llama(stacked):
    config = models.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    return models.LlamaForCausalLM(config, stacked=stacked, key=KEY)


def gptj(stacked):
    config = models.GPTJConfig(vocab_size=32, n_embd=16, n_layer=1, n_head=4, n_positions=16, rotary_dim=4)
    return models.GPTJForCausalLM(config, stacked=stacked, key=KEY)


def adapt(model, mesh, targets=("q_proj", "v_proj")):
    return lora.adapt(model, mesh, targets=targets, rank=4, scale=2.0, key=KEY)


@eqx.filter_jit
def logits_of(model):
    return model(TOKENS)


def with_noise(adapted):
    """Branches as after some training."""
    state = rx.init_state(adapted, key=KEY, trainable=lora.branches(adapted))
    noise = {path: x + 0.1 * jax.random.normal(KEY, x.shape) for path, x in state.params.items()}
    return state.build(noise, {})


@pytest.mark.parametrize(("make", "stacked"), [(llama, False), (llama, True), (gptj, False)])
def test_a_branch_starts_at_nothing_and_merges_into_its_base(make, stacked):
    model, mesh = make(stacked), rx.make_mesh(tensor=4)
    expected = logits_of(model)
    adapted = adapt(model, mesh)
    np.testing.assert_allclose(logits_of(adapted), expected, atol=1e-6)

    trained = with_noise(adapted)
    logits = logits_of(trained)
    assert np.abs(logits - expected).max() > 1e-2, "the branches must matter by now"
    merged = eqx.filter_jit(lora.merge)(trained)
    np.testing.assert_allclose(logits_of(merged), logits, atol=1e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    assert {p: x.shape for p, x in rx.to_arrays(merged).items()} == {
        p: x.shape for p, x in rx.to_arrays(model).items()
    }


def test_only_the_branches_are_trained_and_kept_by_the_optimizer():
    mesh = rx.make_mesh(tensor=2)
    adapted = adapt(llama(False), mesh, targets=lora.TARGETS)
    optimizer = optax.adam(1e-2)
    state = rx.init_state(adapted, optimizer, key=KEY, trainable=lora.branches(adapted))
    assert len(state.params) == 2 * len(lora.TARGETS)
    assert all(path.endswith(("lora_a", "lora_b")) for path in state.params)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim == 2]
    assert len(moments) == 2 * len(state.params)

    frozen = jax.tree.map(np.asarray, state.frozen)

    def loss_fn(model, batch, key):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch)[:, :-1], batch[:, 1:]).mean()

    before = jax.tree.map(np.asarray, state.params)
    state = rx.fit(
        state,
        list(np.tile(np.asarray(TOKENS), (8, 1))),
        collate_fn=np.stack,
        loss_fn=loss_fn,
        optimizer=optimizer,
        batch_size=8,
        num_steps=3,
        loggers=(),
    )
    assert all((np.asarray(state.frozen[path]) == x).all() for path, x in frozen.items())
    assert all((np.asarray(state.params[path]) != x).any() for path, x in before.items())


def test_branches_are_split_with_their_bases():
    adapted = adapt(llama(False), rx.make_mesh(tensor=4), targets=("q_proj", "o_proj"))
    specs = {
        path: tuple(x.sharding.spec) for path, x in rx.to_arrays(adapted).items() if ".0.self_attn" in path
    }
    names = {path.split("self_attn.")[1]: [entry or None for entry in spec] for path, spec in specs.items()}
    split = {name: "tensor" in spec and spec.index("tensor") for name, spec in names.items()}
    assert split["q_proj.base.weight"] == 0
    assert split["q_proj.lora_a"] is False
    assert split["q_proj.lora_b"] == 0
    assert split["o_proj.base.weight"] == 1
    assert split["o_proj.lora_a"] == 1
    assert split["o_proj.lora_b"] is False


def test_a_target_that_the_model_lacks_is_refused_by_name():
    with pytest.raises(ValueError, match=r"no projections named \['c_attn'\]"):
        adapt(llama(False), rx.make_mesh(), targets=("q_proj", "c_attn"))


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
    with pytest.raises(SystemExit) as caught:
        common.run(lambda: lora.main(["--quick", *flags]))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


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
    with np.load(tmp_path / "branches.npz") as branches:
        assert sum(branches[name].size for name in branches) == trained
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    test = code_data.encode(tokenizer, code_data.signatures(code_data.modules(10)[1]), 64)
    state = rx.init_state(model, key=KEY)
    functions = {"collate_fn": lora.collate_fn, "loss_fn": lora.loss_fn, "batch_size": 8}
    assert rx.evaluate(state, test, **functions)["loss"] == pytest.approx(results["merged"][0], rel=1e-5)
