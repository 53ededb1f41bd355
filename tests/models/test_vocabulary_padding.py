"""Rows that make a vocabulary divide change no number, and no file."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import CONFIGS, SINGLE, VOCABULARY, assert_same, make_arrays, write
from helpers import in_long
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from test_encoder_models import CONFIGS as ENCODERS
from test_encoder_models import abstract

import redco_eqx as rx
from redco_eqx import models
from redco_eqx._base.tree import to_arrays

ROWS = 192  # of 128 tokens


def tables(model):
    return {path: x for path, x in to_arrays(model).items() if x.shape[0] == ROWS}


def loss_of(model, tokens):
    hidden, _ = model.hidden_states(tokens[:, :-1])
    return rx.layers.cross_entropy(hidden, model.head, tokens[:, 1:]).value


@pytest.mark.parametrize("family", ["gpt2", *in_long(*(name for name in CONFIGS if name != "gpt2"))])
def test_a_padded_model_is_the_same_model(tmp_path, family):
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    write(tmp_path, family, {key: 0.1 * x for key, x in make_arrays(family).items()})
    plain = models.load_pretrained(tmp_path, mesh)
    padded = models.load_pretrained(tmp_path, mesh, pad_vocabulary_to=96)
    assert tables(padded).keys() >= {path for path in to_arrays(padded) if "lm_head" in path}
    assert len(tables(padded)) in (1, 2, 3)
    tokens = jax.random.randint(jax.random.key(0), (8, 6), 0, VOCABULARY)
    tokens = jax.device_put(tokens, rx.batch_sharding(mesh))

    logits, expected = (eqx.filter_jit(lambda m, x: m(x))(model, tokens) for model in (padded, plain))
    np.testing.assert_allclose(logits[..., :VOCABULARY], expected, rtol=1e-4, atol=1e-5)
    assert bool(jnp.all(logits[..., VOCABULARY:] == -jnp.inf))

    (loss, gradients), (right, expected) = (
        eqx.filter_jit(eqx.filter_value_and_grad(loss_of))(model, tokens) for model in (padded, plain)
    )
    np.testing.assert_allclose(loss, right, rtol=1e-5)
    found, expected = to_arrays(gradients), to_arrays(expected)
    for path, x in expected.items():
        np.testing.assert_allclose(found[path][: len(x)], x, rtol=1e-4, atol=1e-5, err_msg=path)
        assert not np.any(found[path][len(x) :])

    wrong = tokens.at[0, 0].set(VOCABULARY + 3).at[1, 1].set(-1).at[2, 2].set(-VOCABULARY - 3)
    hidden, expected = (eqx.filter_jit(lambda m, x: m.hidden_states(x)[0])(m, wrong) for m in (padded, plain))
    np.testing.assert_allclose(hidden, expected, rtol=1e-3, atol=1e-4)  # NaN where it looks up what is no token
    assert [bool(np.isnan(x).any()) for x in hidden[:3]] == [True, False, True]

    found, expected = (models.generate(m, tokens[:, :4], max_new_tokens=3) for m in (padded, plain))
    np.testing.assert_array_equal(found, expected)
    sampled = models.generate(padded, tokens[:, :4], max_new_tokens=3, temperature=50.0, key=jax.random.key(1))
    assert int(jnp.max(sampled)) < VOCABULARY


@pytest.mark.parametrize(("family", "stacked"), [(name, i % 2 == 1) for i, name in enumerate(CONFIGS)])
def test_files_do_not_have_the_padding(tmp_path, family, stacked):
    arrays = make_arrays(family)
    write(tmp_path / "given", family, arrays)
    model = models.load_pretrained(
        tmp_path / "given", rx.make_mesh(tensor=4), stacked=stacked, pad_vocabulary_to=96
    )
    for path, x in tables(model).items():
        assert not np.any(x[VOCABULARY:]), path
    models.save_pretrained(model, tmp_path / "saved")
    assert_same(load_file(tmp_path / "saved" / SINGLE), arrays)
    assert models.load_pretrained(tmp_path / "saved").config.vocab_size == VOCABULARY


def test_what_does_not_divide_is_split_once_it_is_padded():
    mesh = rx.make_mesh(tensor=4)
    config = models.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=127, n_positions=8)

    def make(key):
        return models.pad_vocabulary(models.GPT2LMHeadModel(config, key=key), 4)

    model = rx.init_model(make, mesh, key=jax.random.key(0))
    table: Any = model.transformer.wte.weight
    assert table.shape == (128, 32)
    assert table.sharding.spec[0] == "tensor"
    plain = rx.shard_rules(models.GPT2LMHeadModel(config, key=jax.random.key(0)), mesh)
    assert plain.transformer.wte.weight.spec == P()


def test_what_cannot_be_padded_is_refused():
    config = models.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=127, n_positions=8)
    model = eqx.filter_eval_shape(lambda key: models.GPT2LMHeadModel(config, key=key), jax.random.key(0))
    with pytest.raises(ValueError, match="multiple=0, but it must be positive"):
        models.pad_vocabulary(model, 0)
    assert to_arrays(models.pad_vocabulary(model, 1)) == to_arrays(model)


@pytest.mark.parametrize(
    "name", [name for name in ENCODERS if not name.startswith(("vit_labels", "bert_labels"))]
)
def test_models_with_an_encoder_are_refused_by_name(tmp_path, name):
    """Before any weight is read: there are none here."""
    with pytest.raises(ValueError, match=rf"pad_vocabulary: {type(abstract(name)).__name__} does not name"):
        models.pad_vocabulary(abstract(name), 4)
    if name.startswith("t5"):
        return  # its files decide what it is, so that they are looked at first
    (tmp_path / "config.json").write_text(json.dumps(ENCODERS[name]))
    with pytest.raises(ValueError, match=r"pad_vocabulary: .* does not name"):
        models.load_pretrained(tmp_path, rx.make_mesh(tensor=4), pad_vocabulary_to=4)
