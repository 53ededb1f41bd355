"""The full-size models hold what those of transformers hold: the same keys, shapes and number of parameters."""

import math

import equinox as eqx
import jax
import pytest
import torch
import transformers
from published import PUBLISHED

from redco_eqx import to_arrays
from redco_eqx.models._families.registry import read_family


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_full_size_models_hold_what_those_of_transformers_hold(name):
    published = PUBLISHED[name]
    config, kind = read_family(published.config)
    model = eqx.filter_eval_shape(lambda key: kind(config, key=key), jax.random.key(0))
    ours = {path: x.shape for path, x in to_arrays(model).items()}
    with torch.device("meta"):
        there = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**published.config)
        )
    theirs = {key: tuple(x.shape) for key, x in there.named_parameters()}
    assert ours.keys() == theirs.keys()
    for key, shape in theirs.items():
        # A file has query, key and value of GPT-2 in one dim.
        fused = (*ours[key][:-2], math.prod(ours[key][-2:])) if ".c_attn." in key else ours[key]
        assert fused == shape, key
    assert sum(map(math.prod, theirs.values())) == published.num_parameters
