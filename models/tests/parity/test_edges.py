"""Directories unlike those that today's transformers writes by default, held against it
all the same."""

import dataclasses
import functools
import json
import shutil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from comparison import (
    TOLERANCE,
    as_in_files,
    distance,
    inputs_of,
    outputs,
    torch_output,
)
from references import REFERENCES, VOCABULARY
from transformers.models.t5.modeling_t5 import T5Attention

import redco_eqx_models as models
from redco_eqx import to_arrays
from redco_eqx_models import load_pretrained, save_pretrained
from redco_eqx_models._blocks.positions import relative_bias
from redco_eqx_models._families.registry import FAMILIES


def test_an_entry_that_is_left_out_means_the_same():
    for model_type, (config, *_) in FAMILIES.items():
        ours = config()
        if isinstance(ours, models.VisionEncoderDecoderConfig):
            # Transformers has no default encoder and decoder; those that are here are
            # tested apart.
            continue
        theirs = transformers.AutoConfig.for_model(model_type)
        for field in dataclasses.fields(ours):
            value = getattr(ours, field.name)
            # What is null follows from other entries, which
            # `test_configurations_made_here_open_there` holds.
            if value is not None and hasattr(theirs, field.name):
                assert value == getattr(theirs, field.name), (model_type, field.name)
        if hasattr(ours, "rope"):
            there = {
                k: x
                for k, x in theirs.rope_parameters.items()
                if (k, x) != ("partial_rotary_factor", 1)
            }
            assert there == ours.rope.to_json()["rope_parameters"], model_type


INPUTS = inputs_of(REFERENCES["gpt2"])
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "rotary_dim": 8,
    "num_key_value_heads": None,
    "sliding_window": None,
}


DECODERS = [
    name for name, (_, kind) in FAMILIES.items() if issubclass(kind, models.DecoderLM)
]


@pytest.mark.parametrize("model_type", DECODERS)
def test_configurations_made_here_open_there(model_type, tmp_path):
    # With as much left to defaults as there is, null included.
    config, kind = FAMILIES[model_type]
    fields = {field.name: field.type for field in dataclasses.fields(config)}
    given = {config.aliases.get(name, name): x for name, x in SIZES.items()}
    if (config().pad_token_id or 0) >= VOCABULARY:
        given["pad_token_id"] = 0
    given = {
        name: x
        for name, x in given.items()
        if name in fields and isinstance(x, fields[name])
    }
    made = config(**given)
    model = eqx.filter_jit(lambda key: kind(made, stacked=True, key=key))(
        jax.random.key(0)
    )
    save_pretrained(model, tmp_path)
    expected = torch_output(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval(), INPUTS
    )
    (found,) = outputs((load_pretrained(tmp_path, stacked=True), INPUTS))
    assert np.abs(found - expected).max() <= TOLERANCE * expected.std()


def edit(directory, **entries):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_the_text_half_of_a_whole_clip_is_read(tmp_path):
    text = {**REFERENCES["clip_text"].options}
    vision = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    vision |= {"image_size": 8, "patch_size": 4}
    whole = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision)
    )
    whole.save_pretrained(tmp_path)
    assert transformers.AutoConfig.from_pretrained(tmp_path).model_type == "clip"
    edit(tmp_path, text_config_dict={**text, "layer_norm_eps": 0.5})
    assert (
        transformers.AutoConfig.from_pretrained(tmp_path).text_config.layer_norm_eps
        == 0.5
    )
    with pytest.warns(
        match=r"has arrays of a head that a CLIPTextModel .*: text_projection\.weight\."
    ):
        model = load_pretrained(tmp_path)
    assert isinstance(model, models.CLIPTextModel)
    assert model.config.layer_norm_eps == 0.5
    theirs = as_in_files(whole.text_model, dict(whole.text_model.named_parameters()))
    arrays = to_arrays(model)
    assert arrays.keys() == theirs.keys()
    for path, x in arrays.items():
        np.testing.assert_array_equal(x, theirs[path].detach().numpy())


def test_a_scaling_added_by_hand_is_read_as_there(directory, tmp_path):
    pairs = []
    for name, scaling in (
        ("qwen3", {"rope_type": "yarn", "factor": 4.0}),
        ("gemma3", {"factor": 3.0}),
    ):
        shutil.copytree(directory(name), tmp_path / name)
        edit(tmp_path / name, rope_scaling=scaling)
        pairs.append((load_pretrained(tmp_path / name, stacked=True), INPUTS))
    for found, name in zip(outputs(*pairs), ("qwen3", "gemma3"), strict=True):
        there = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / name
        ).eval()
        assert distance(found, torch_output(there, INPUTS), INPUTS) <= TOLERANCE


def test_every_distance_has_the_bucket_that_it_has_there():
    key = jnp.arange(401)[None]
    for num_buckets, farthest in ((32, 128), (8, 12), (16, 100)):
        table = models.Embedding(num_buckets, num_buckets, key=jax.random.key(0))
        table = eqx.tree_at(lambda t: t.weight, table, jnp.eye(num_buckets))
        for bidirectional in (False, True):
            options = {"bidirectional": bidirectional, "max_distance": farthest}
            found = jax.jit(functools.partial(relative_bias, table, **options))(
                key[:, 200:201], key
            )
            distances = torch.arange(401)[None] - 200
            options = options | {"num_buckets": num_buckets}
            expected = T5Attention._relative_position_bucket(distances, **options)
            np.testing.assert_array_equal(
                np.argmax(found[0, :, 0], axis=0), expected[0].numpy()
            )
