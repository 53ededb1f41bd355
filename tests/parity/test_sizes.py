"""The full-size models hold what those of transformers hold: the same keys, shapes and number of parameters."""

import math

import equinox as eqx
import jax
import pytest
import torch
import transformers
from comparison import as_in_files
from published import PUBLISHED

from redco_eqx.models._families.registry import read_family
from redco_eqx.models._files.names import entries_of


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_full_size_models_hold_what_those_of_transformers_hold(name):
    published = PUBLISHED[name]
    config, kind = read_family(published.config)
    model = eqx.filter_eval_shape(lambda key: kind(config, key=key), jax.random.key(0))
    ours = {key: entry.file_shape for entry in entries_of(model) for key in entry.keys}
    with torch.device("meta"):
        architecture = kind.architecture or config.architecture
        there = getattr(transformers, architecture)(transformers.AutoConfig.for_model(**published.config))
        if published.config.get("tie_word_embeddings") is False:  # a T5 is made tied, and untied by its file
            there.lm_head.weight = torch.nn.Parameter(torch.empty_like(there.lm_head.weight))
    theirs = {key: tuple(x.shape) for key, x in as_in_files(there, dict(there.named_parameters())).items()}
    assert {key: shape for key, shape in ours.items() if key not in model.buffers} == theirs
    assert sum(map(math.prod, theirs.values())) == published.num_parameters
