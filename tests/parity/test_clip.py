"""CLIP's text encoder: what the parity of all encoders does not see."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from comparison import TOLERANCE, as_in_files, by_key, distance, encoder_inputs, output
from references import ENCODERS

from redco_eqx import to_arrays
from redco_eqx.models import CLIPTextConfig, CLIPTextModel, load_pretrained

NAMES = ["clip_text", "clip_text_gelu"]


def inputs_of(name):
    """Texts with an end token each, in different places; in one of them twice."""
    ids = encoder_inputs(ENCODERS[name])["input_ids"] % 94
    end = 95  # the highest, as the legacy rule has it
    ids[0, 7] = ids[1, 11] = ids[1, 20] = ids[2, 23] = end
    return ids


@pytest.mark.parametrize("name", NAMES)
def test_the_end_token_stands_for_the_text(name, directory, reference):
    model, ids = load_pretrained(directory(name)), inputs_of(name)
    pooled = eqx.filter_jit(lambda model, ids: model.pool(model(ids), ids))(model, jnp.asarray(ids))
    with torch.no_grad():
        there = reference(name)(torch.tensor(ids, dtype=torch.long)).pooler_output.numpy()
    assert distance(np.asarray(pooled), there) <= TOLERANCE
    # By the rule of the other one, it would be another token.
    other = load_pretrained(directory(name), entries={"eos_token_id": int(ids[0, 3])})
    wrong = other.pool(model(jnp.asarray(ids)), jnp.asarray(ids))
    assert distance(np.asarray(wrong), there) > 0.1


@pytest.mark.parametrize(("name", "stacked"), [("clip_text", False), ("clip_text_gelu", True)])
def test_gradients_equal_torchs(name, stacked, directory, reference):
    ids, there = inputs_of(name), reference(name)
    weights = np.random.default_rng(3).normal(size=(*ids.shape, 32)).astype(np.float32)

    def loss(model):
        hidden = model(jnp.asarray(ids))
        return jnp.mean(weights * hidden) + jnp.mean(model.pool(hidden, jnp.asarray(ids)) ** 2)

    model = load_pretrained(directory(name), stacked=stacked, remat="full")
    value, gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model)
    there.zero_grad()
    found = there(torch.tensor(ids, dtype=torch.long))
    expected = torch.mean(torch.tensor(weights) * found.last_hidden_state) + torch.mean(found.pooler_output**2)
    expected.backward()
    assert abs(float(value) / float(expected.detach()) - 1) <= TOLERANCE
    theirs = as_in_files(there, {key: p.grad.numpy() for key, p in there.named_parameters()})
    ours = by_key(model, gradients)
    assert ours.keys() == theirs.keys()
    for key, g in ours.items():
        assert np.linalg.norm(g - theirs[key]) <= TOLERANCE * np.linalg.norm(theirs[key]) + 2e-7, key


def test_the_two_activations_differ(directory, reference):
    # The control: a wrong activation shows, though the two are close.
    inputs = encoder_inputs(ENCODERS["clip_text"])
    with torch.no_grad():
        expected = reference("clip_text")(torch.tensor(inputs["input_ids"], dtype=torch.long))
    exact = load_pretrained(directory("clip_text"), entries={"hidden_act": "gelu"})
    assert distance(output(exact, inputs), expected.last_hidden_state.numpy()) > 10 * TOLERANCE


def test_the_text_half_of_a_whole_clip_is_read(tmp_path):
    text = {**ENCODERS["clip_text"].options}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
              "image_size": 8, "patch_size": 4}  # fmt: skip
    whole = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision))
    whole.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "clip"
    model = load_pretrained(tmp_path)
    assert isinstance(model, CLIPTextModel)
    theirs = as_in_files(whole.text_model, dict(whole.text_model.named_parameters()))
    arrays = to_arrays(model)
    assert arrays.keys() == theirs.keys()
    for path, x in arrays.items():
        np.testing.assert_array_equal(x, theirs[path].detach().numpy())


def test_a_pooled_text_needs_one_end_token():
    config = CLIPTextConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        eos_token_id=(1, 2),
    )  # fmt: skip
    with pytest.raises(ValueError, match="eos_token_id"):
        CLIPTextModel(config, key=jax.random.key(0)).pool(jnp.zeros((1, 2, 8)), jnp.zeros((1, 2), int))
