"""Rows that make a vocabulary divide change no number, and no file."""

import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import in_long
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file
from tiny_models import ENCODERS, VOCABULARY, abstract, loss_fn, make

import redco_eqx as rx
from redco_eqx import models, to_arrays

ROWS = 96  # of 64 tokens


def tables(model):
    return {path: x for path, x in to_arrays(model).items() if x.shape[0] == ROWS}


@pytest.mark.parametrize("name", ["gptj", "gemma3", *in_long("gpt2")])
def test_a_padded_model_is_the_same_model(tmp_path, name):
    layers: dict[str, Any] = {"n_layer" if name.startswith("gpt") else "num_hidden_layers": 1}
    models.save_pretrained(make(name, **layers), tmp_path / "given")
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    plain = models.load_pretrained(tmp_path / "given", mesh, stacked=True)
    padded = models.load_pretrained(tmp_path / "given", mesh, pad_vocabulary_to=48, stacked=True)
    assert tables(padded).keys() >= {path for path in to_arrays(padded) if "lm_head" in path}
    for path, x in tables(padded).items():
        assert not np.any(x[VOCABULARY:]), path
    assert len(tables(padded)) in (1, 2, 3)

    models.save_pretrained(padded, tmp_path / "saved")
    stored, given = (load_file(tmp_path / x / "model.safetensors") for x in ("saved", "given"))
    assert {key: x.tobytes() for key, x in stored.items()} == {key: x.tobytes() for key, x in given.items()}
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["vocab_size"] == VOCABULARY

    tokens = jax.random.randint(jax.random.key(0), (8, 6), 0, VOCABULARY)
    wrong = tokens.at[0, 0].set(VOCABULARY + 3).at[1, 1].set(-1).at[2, 2].set(-VOCABULARY - 3)
    tokens, wrong = jax.device_put((tokens, wrong), rx.batch_sharding(mesh))

    @eqx.filter_jit
    def run(model, tokens, wrong):
        found = eqx.filter_value_and_grad(loss_fn)(model, (tokens,), None)
        return model(tokens), model.hidden_states(wrong)[0], *found

    logits, hidden, loss, gradient = run(padded, tokens, wrong)
    expected, expected_hidden, expected_loss, expected_gradient = run(plain, tokens, wrong)
    np.testing.assert_allclose(logits[..., :VOCABULARY], expected, rtol=1e-4, atol=1e-5)
    assert bool(jnp.all(logits[..., VOCABULARY:] == -jnp.inf))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    found = to_arrays(gradient)
    for path, x in to_arrays(expected_gradient).items():
        np.testing.assert_allclose(found[path][: len(x)], x, rtol=1e-4, atol=1e-5, err_msg=path)
        assert not np.any(found[path][len(x) :])
    # NaN where it looks up what is no token.
    np.testing.assert_allclose(hidden, expected_hidden, rtol=1e-3, atol=1e-4)
    assert [bool(np.isnan(x).any()) for x in hidden[:3]] == [True, False, True]
    drawn = models.generate(padded, tokens[:, :4], max_new_tokens=3, temperature=50.0, key=jax.random.key(1))
    assert int(jnp.max(drawn)) < VOCABULARY


def test_what_does_not_divide_is_split_once_it_is_padded():
    mesh = rx.make_mesh(tensor=4)
    plain = abstract("gpt2", vocab_size=127)
    padded = models.pad_vocabulary(plain, 4)
    assert padded.transformer.wte.weight.shape == (128, 32)
    assert rx.shard_rules(padded, mesh).transformer.wte.weight.spec == P("tensor")
    assert rx.shard_rules(plain, mesh).transformer.wte.weight.spec == P()
    assert to_arrays(models.pad_vocabulary(plain, 1)) == to_arrays(plain)
    with pytest.raises(ValueError, match="multiple=0, but it must be positive"):
        models.pad_vocabulary(plain, 0)


def test_models_with_an_encoder_are_refused_by_name(tmp_path):
    """Before any weight is read: there are none here."""
    for name in ENCODERS.keys() - {"clip"}:
        model: Any = abstract(name)
        with pytest.raises(ValueError, match=rf"pad_vocabulary: {type(model).__name__} does not name"):
            models.pad_vocabulary(model, 4)
    (tmp_path / "config.json").write_text(json.dumps(ENCODERS["bart"]))
    with pytest.raises(ValueError, match=r"pad_vocabulary: .* does not name"):
        models.load_pretrained(tmp_path, rx.make_mesh(tensor=4), pad_vocabulary_to=4)
