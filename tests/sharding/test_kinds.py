"""The kind of each array: by hand for the zoo and the families; a stack has the kinds of one of its members."""

import re
from fnmatch import fnmatchcase
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
import tiny_models
import zoo
from helpers import abstract

import redco_eqx as rx
import redco_eqx_models as models

KEY = jax.random.key(0)

# By hand, in the words of the files of these models. The first that matches a path in lower case decides.
BY_HAND = {
    "other": "key keys ids mask weight_ids *.cls_token *.class_embedding",
    "norm": "norm.* *norm.* *norm?.* *norms.*.* *layernorm* *layer_norm* *ln_?.* *ln_cross_attn.* *norm_out.*",
    "table": "*relative_attention_bias* *wte.* *wpe.* *embed_tokens.* *embed_positions.* *embed_in.* "
    "shared.weight *.shared.weight *shared.pytree.?.weight *position_embedding* *token_type_embeddings.* "
    "*word_embeddings.* *token_embedding.*",
    "bias": "*bias *bias_n",
    "matrix": "*",
}


def by_hand(path: str) -> str:
    globs = [(kind, glob) for kind, globs in BY_HAND.items() for glob in globs.split()]
    return next(kind for kind, glob in globs if fnmatchcase(path.lower(), glob))


def expected(model: Any) -> dict[str, str]:
    return {path: by_hand(path) for path in rx.to_arrays(model)}


@pytest.mark.parametrize("name", zoo.BY_NAME)
def test_kinds_in_the_zoo_are_those_by_hand_and_a_stack_of_models_has_the_same(name: str) -> None:
    make = zoo.BY_NAME[name].make
    assert rx.parameter_kinds(abstract(make)) == expected(abstract(make))
    ensemble = abstract(lambda key: zoo.stack(make, key))
    # Nothing says that arrays without a module are stacked, but matrices they are.
    assert rx.parameter_kinds(ensemble) == expected(ensemble)


STACKED = [name for name in tiny_models.CONFIGS if name not in ("unet", "unet_linear", "vae")]


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_kinds_in_the_families_are_those_by_hand(name: str) -> None:
    model = tiny_models.abstract(name)
    assert rx.parameter_kinds(model) == expected(model)


@pytest.mark.parametrize("name", STACKED)
def test_stacked_layers_of_the_families_have_the_kinds_of_a_list(name: str) -> None:
    listed, stacked = (
        {(re.sub(r"\.\d+(?=\.)", "", path), kind) for path, kind in rx.parameter_kinds(model).items()}
        for model in (tiny_models.abstract(name), tiny_models.abstract(name, stacked=True))
    )
    assert listed == stacked


@pytest.mark.parametrize("stacked", [False, True])
def test_the_branches_of_lora_are_matrices(stacked: bool) -> None:
    branches: Any = {"targets": ["q_proj", "down_proj"], "rank": 2, "scale": 1.0, "key": KEY}
    base = tiny_models.abstract("llama", stacked=stacked)
    model = eqx.filter_eval_shape(lambda base: models.add_lora(base, **branches), base)
    kinds = rx.parameter_kinds(model)
    factors = {path: kind for path, kind in kinds.items() if "lora" in path}
    assert factors
    assert set(factors.values()) == {"matrix"}
    assert kinds == expected(model)


class Scaled(eqx.Module):
    """A block of raw arrays, whose names say something."""

    up: jax.Array
    down: jax.Array
    scale: jax.Array
    b: jax.Array

    def __init__(self, key: Any):
        self.up, self.down = jnp.ones((8, 16)), jnp.ones((16, 8))
        self.scale, self.b = jnp.ones(8), jnp.ones(16)


class Gated(eqx.Module):
    """A block of a typed layer, and raw arrays whose names say nothing."""

    lin: eqx.nn.Linear
    mix: jax.Array
    tau: jax.Array

    def __init__(self, key: Any):
        self.lin, self.mix, self.tau = eqx.nn.Linear(8, 8, key=key), jnp.ones((8, 8)), jnp.ones(8)


LINEAR = {"weight": "matrix", "bias": "bias"}
NORM = {"weight": "norm", "bias": "norm"}
LAYERS: dict[str, tuple[Any, dict[str, str]]] = {
    "linear": (lambda key: eqx.nn.Linear(8, 16, key=key), LINEAR),
    "linear of one": (lambda key: eqx.nn.Linear(1, 16, key=key), LINEAR),
    "conv1d": (lambda key: eqx.nn.Conv1d(8, 16, 3, key=key), LINEAR),
    "depthwise": (lambda key: eqx.nn.Conv2d(8, 8, 3, groups=8, key=key), LINEAR),
    "transposed": (lambda key: eqx.nn.ConvTranspose2d(8, 16, 3, key=key), LINEAR),
    "embedding": (lambda key: eqx.nn.Embedding(16, 8, key=key), {"weight": "table"}),
    "layer norm": (lambda key: eqx.nn.LayerNorm(8), NORM),
    "layer norm of images": (lambda key: eqx.nn.LayerNorm((8, 4, 4)), NORM),
    "rms norm": (lambda key: eqx.nn.RMSNorm(8), NORM),
    "group norm": (lambda key: eqx.nn.GroupNorm(2, 8), NORM),
    "batch norm": (lambda key: eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "b", mode="batch")[0], NORM),
    "weight norm": (
        lambda key: eqx.nn.WeightNorm(eqx.nn.Linear(8, 16, key=key)),
        {"layer.weight": "matrix", "layer.bias": "bias", "g": "norm"},
    ),
    "gru": (
        lambda key: eqx.nn.GRUCell(8, 16, key=key),
        {"weight_ih": "matrix", "weight_hh": "matrix", "bias": "bias", "bias_n": "bias"},
    ),
    "lstm": (
        lambda key: eqx.nn.LSTMCell(8, 16, key=key),
        {"weight_ih": "matrix", "weight_hh": "matrix", "bias": "bias"},
    ),
    "attention": (
        lambda key: eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=key),
        {f"{name}_proj.weight": "matrix" for name in ("query", "key", "value", "output")}
        | {"query_proj.bias": "bias"},
    ),
    "prelu": (lambda key: eqx.nn.PReLU(0.25), {"negative_slope": "other"}),
    "raw arrays": (Scaled, {"up": "matrix", "down": "matrix", "scale": "norm", "b": "bias"}),
    "raw arrays beside a layer": (
        Gated,
        {"lin.weight": "matrix", "lin.bias": "bias", "mix": "matrix", "tau": "other"},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_stacks_of_it_have_the_same_kinds(name: str) -> None:
    make, kinds = LAYERS[name]
    assert rx.parameter_kinds(abstract(make)) == kinds
    assert rx.parameter_kinds([abstract(make)]) == {f"0.{path}": kind for path, kind in kinds.items()}
    one = abstract(lambda key: zoo.stack(make, key, 3))
    assert rx.parameter_kinds(one) == kinds
    if name == "prelu":  # one number: after two dims of layers, nothing says that it is no matrix
        return
    two = abstract(lambda key: zoo.stack(lambda key: zoo.stack(make, key, 3), key, 2))
    assert rx.parameter_kinds(two) == kinds


def test_arrays_that_may_be_stacked_vectors_are_no_matrices() -> None:
    def make(key: Any) -> Any:
        return {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8)), "tau": jnp.ones(8)}

    assert rx.parameter_kinds(make(KEY)) == {"up": "matrix", "down": "matrix", "tau": "other"}
    assert rx.parameter_kinds(zoo.stack(make, KEY, 3)) == {"up": "matrix", "down": "matrix", "tau": "other"}


@pytest.mark.parametrize("stacked", [False, True])
def test_a_mask_by_kind_decays_matrices_alone(stacked: bool) -> None:
    model = tiny_models.make("llama", stacked=stacked)
    decayed = {path: kind == "matrix" for path, kind in rx.parameter_kinds(model).items()}
    optimizer = optax.adamw(0.1, weight_decay=0.5, mask=rx.by_path(decayed))
    params = rx.init_state(model, key=KEY).params
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates: Any = optimizer.update(zeros, optimizer.init(params), params)[0]
    for path, x in params.items():
        factor = -0.05 if by_hand(path) == "matrix" else 0.0
        assert jnp.allclose(updates[path], factor * x, rtol=1e-6), path
