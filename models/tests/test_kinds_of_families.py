"""The kind of each array of the families: by hand, and in a stack as in a list."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
import tiny_models
from kinds_by_hand import by_hand, expected

import redco_eqx as rx
import redco_eqx_models as models

KEY = jax.random.key(0)
STACKED = [
    name for name in tiny_models.CONFIGS if name not in ("unet", "unet_linear", "vae")
]


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_kinds_in_the_families_are_those_by_hand(name: str) -> None:
    model = tiny_models.abstract(name)
    assert rx.parameter_kinds(model) == expected(model)


@pytest.mark.parametrize("name", STACKED)
def test_stacked_layers_of_the_families_have_the_kinds_of_a_list(name: str) -> None:
    listed, stacked = (
        {
            (re.sub(r"\.\d+(?=\.)", "", path), kind)
            for path, kind in rx.parameter_kinds(model).items()
        }
        for model in (
            tiny_models.abstract(name),
            tiny_models.abstract(name, stacked=True),
        )
    )
    assert listed == stacked


@pytest.mark.parametrize("stacked", [False, True])
def test_the_branches_of_lora_are_matrices(stacked: bool) -> None:
    branches: Any = {
        "targets": ["q_proj", "down_proj"],
        "rank": 2,
        "scale": 1.0,
        "key": KEY,
    }
    base = tiny_models.abstract("llama", stacked=stacked)
    model = eqx.filter_eval_shape(lambda base: models.add_lora(base, **branches), base)
    kinds = rx.parameter_kinds(model)
    factors = {path: kind for path, kind in kinds.items() if "lora" in path}
    assert factors
    assert set(factors.values()) == {"matrix"}
    assert kinds == expected(model)


@pytest.mark.parametrize("stacked", [False, True])
def test_a_mask_by_kind_decays_matrices_alone(stacked: bool) -> None:
    model = tiny_models.make("llama", stacked=stacked)
    decayed = {
        path: kind == "matrix" for path, kind in rx.parameter_kinds(model).items()
    }
    optimizer = optax.adamw(0.1, weight_decay=0.5, mask=rx.by_path(decayed))
    params = rx.init_state(model, key=KEY).params
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates: Any = optimizer.update(zeros, optimizer.init(params), params)[0]
    for path, x in params.items():
        factor = -0.05 if by_hand(path) == "matrix" else 0.0
        assert jnp.allclose(updates[path], factor * x, rtol=1e-6), path
