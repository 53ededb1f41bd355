"""The kind of each array: by hand for the zoo; a stack has the kinds of one of its
members."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import zoo
from helpers import abstract
from kinds_by_hand import expected

import redco_eqx as rx

KEY = jax.random.key(0)


@pytest.mark.parametrize("name", zoo.BY_NAME)
def test_kinds_in_the_zoo_are_those_by_hand_and_a_stack_of_models_has_the_same(
    name: str,
) -> None:
    make = zoo.BY_NAME[name].make
    assert rx.parameter_kinds(abstract(make)) == expected(abstract(make))
    ensemble = abstract(lambda key: zoo.stack(make, key))
    # Nothing says that arrays without a module are stacked, but matrices they are.
    assert rx.parameter_kinds(ensemble) == expected(ensemble)


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
        self.lin = eqx.nn.Linear(8, 8, key=key)
        self.mix = jnp.ones((8, 8))
        self.tau = jnp.ones(8)


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
    "batch norm": (
        lambda key: eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "b", mode="batch")[0],
        NORM,
    ),
    "weight norm": (
        lambda key: eqx.nn.WeightNorm(eqx.nn.Linear(8, 16, key=key)),
        {"layer.weight": "matrix", "layer.bias": "bias", "g": "norm"},
    ),
    "gru": (
        lambda key: eqx.nn.GRUCell(8, 16, key=key),
        {
            "weight_ih": "matrix",
            "weight_hh": "matrix",
            "bias": "bias",
            "bias_n": "bias",
        },
    ),
    "lstm": (
        lambda key: eqx.nn.LSTMCell(8, 16, key=key),
        {"weight_ih": "matrix", "weight_hh": "matrix", "bias": "bias"},
    ),
    "attention": (
        lambda key: eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=key),
        {
            f"{name}_proj.weight": "matrix"
            for name in ("query", "key", "value", "output")
        }
        | {"query_proj.bias": "bias"},
    ),
    "prelu": (lambda key: eqx.nn.PReLU(0.25), {"negative_slope": "other"}),
    "raw arrays": (
        Scaled,
        {"up": "matrix", "down": "matrix", "scale": "norm", "b": "bias"},
    ),
    "raw arrays beside a layer": (
        Gated,
        {"lin.weight": "matrix", "lin.bias": "bias", "mix": "matrix", "tau": "other"},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_stacks_of_it_have_the_same_kinds(name: str) -> None:
    make, kinds = LAYERS[name]
    assert rx.parameter_kinds(abstract(make)) == kinds
    assert rx.parameter_kinds([abstract(make)]) == {
        f"0.{path}": kind for path, kind in kinds.items()
    }
    one = abstract(lambda key: zoo.stack(make, key, 3))
    assert rx.parameter_kinds(one) == kinds
    # One number: after two dims of layers, nothing says that it is no matrix.
    if name == "prelu":
        return
    two = abstract(lambda key: zoo.stack(lambda key: zoo.stack(make, key, 3), key, 2))
    assert rx.parameter_kinds(two) == kinds


def test_arrays_that_may_be_stacked_vectors_are_no_matrices() -> None:
    def make(key: Any) -> Any:
        return {"up": jnp.ones((8, 16)), "down": jnp.ones((16, 8)), "tau": jnp.ones(8)}

    assert rx.parameter_kinds(make(KEY)) == {
        "up": "matrix",
        "down": "matrix",
        "tau": "other",
    }
    assert rx.parameter_kinds(zoo.stack(make, KEY, 3)) == {
        "up": "matrix",
        "down": "matrix",
        "tau": "other",
    }
