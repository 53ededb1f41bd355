"""`TrainState.with_model` takes an edited model back; trees like the model for optax
are named."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    SGD,
    Normed,
    collate,
    compilations,
    loss_fn,
    make_examples,
    mlp_state,
)

import redco_eqx as rx

KEY = jax.random.key(0)


def weight(model: Any) -> Any:
    return model.layers[0].weight


def pruned(model: Any) -> Any:
    keep = np.arange(16)[:, None] % 2
    return eqx.tree_at(
        lambda m: m.layers[0].weight, model, replace_fn=lambda w: w * keep
    )


def test_an_edited_model_keeps_the_optimizer_and_its_place() -> None:
    optimizer = optax.adam(1e-2)
    state = mlp_state(optimizer)
    batch = collate(make_examples(8, dim=8))
    step = rx.jit_step(partial(rx.train_step, loss_fn=loss_fn, optimizer=optimizer))
    state, _ = step(state, batch)
    edited = state.with_model(pruned(state.model))
    path = "layers.0.weight"
    expected = np.asarray(state.params[path]) * (np.arange(16)[:, None] % 2)
    np.testing.assert_array_equal(edited.params[path], expected)
    assert edited.shardings == state.shardings
    old, new = (eqx.tree_at(lambda s: s.params[path], s, None) for s in (state, edited))
    for x, y in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert x is y
    # The step is not compiled again for it.
    with compilations() as compiled:
        step(edited, batch)
    assert compiled == []


def test_under_jit_it_is_a_pure_function() -> None:
    state = mlp_state()
    edit = jax.jit(lambda state: state.with_model(pruned(state.model)))
    np.testing.assert_array_equal(
        edit(state).params["layers.0.weight"],
        state.with_model(pruned(state.model)).params["layers.0.weight"],
    )


def test_a_pair_takes_a_pair() -> None:
    pair = eqx.nn.make_with_state(Normed)(KEY)
    state = rx.init_state(pair, SGD, key=KEY)
    model, model_state = state.model
    model = eqx.tree_at(lambda m: m.linear.bias, model, replace_fn=jnp.ones_like)
    edited = state.with_model((model, model_state))
    np.testing.assert_array_equal(edited.params["linear.bias"], np.ones(128))
    with pytest.raises(ValueError, match=r"of a pair .* but got a Normed"):
        state.with_model(model)


def replaced(module: Any, **fields: Any) -> Any:
    """As `dataclasses.replace`, for a class with an `__init__` of its own."""
    new = object.__new__(type(module))
    for name, value in {**vars(module), **fields}.items():
        object.__setattr__(new, name, value)
    return new


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shape": (
        partial(eqx.tree_at, weight, replace_fn=lambda w: w[:8]),
        r"layers\.0\.weight was float32\[16,8\], and is float32\[8,8\]",
    ),
    "dtype": (
        lambda model: rx.cast(model, jnp.bfloat16),
        r"layers\.0\.bias was float32\[16\], and is bfloat16\[16\]",
    ),
    "missing": (
        partial(eqx.tree_at, lambda m: m.layers[1].bias, replace=None),
        r"layers\.1\.bias was float32\[8\], and is missing",
    ),
    "another activation": (
        partial(eqx.tree_at, lambda m: m.activation, replace=jnp.tanh),
        "activation was .*, and is .*tanh",
    ),
    "a static field": (
        lambda model: eqx.tree_at(
            lambda m: m.layers[1],
            model,
            replaced(model.layers[1], use_bias=False),
        ),
        r"layers\.1\.use_bias was True, and is False",
    ),
    "one array twice": (
        lambda model: eqx.tree_at(
            lambda m: (m.layers[0].bias, m.layers[1].bias),
            model,
            (shared := jnp.zeros(8), shared),
        ),
        "one and the same array",
    ),
    "a state": (lambda model: mlp_state(), "params|missing|was"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_another_model_is_refused_by_path(kind: str) -> None:
    edit, match = REFUSED[kind]
    state = mlp_state()
    if kind == "one array twice":  # on one device, and two biases of one shape
        model = eqx.nn.MLP(8, 8, 8, 1, key=KEY)
        state = rx.init_state(model, SGD, key=KEY)
    with pytest.raises(ValueError, match=match):
        state.with_model(edit(state.model))


MODEL = eqx.nn.MLP(2, 2, 8, 1, key=KEY)
MASK = jax.tree.map(eqx.is_array, MODEL)
LABELS = jax.tree.map(lambda _: "all", eqx.filter(MODEL, eqx.is_array))
BY_TREE: dict[str, tuple[Callable[[], Any], str]] = {
    "multi_transform": (
        lambda: optax.multi_transform({"all": SGD}, LABELS),
        "param_labels",
    ),
    "partition": (lambda: optax.partition({"all": SGD}, LABELS), "param_labels"),
    "masked": (lambda: optax.masked(SGD, MASK), "mask"),
    "adamw": (lambda: optax.adamw(1e-3, mask=MASK), "mask"),
    "in a chain": (
        lambda: optax.chain(optax.clip(1.0), optax.adamw(1e-3, mask=MASK)),
        "mask",
    ),
    "injected": (
        lambda: optax.inject_hyperparams(optax.adamw, static_args="mask")(
            1e-3, mask=MASK
        ),
        "mask",
    ),
}


@pytest.mark.parametrize("kind", BY_TREE)
def test_a_tree_like_the_model_is_named_with_its_remedy(kind: str) -> None:
    make, name = BY_TREE[kind]
    match = f"the optimizer's {name} is a tree like the model, .*Pass {name}=rx.by_path"
    with pytest.raises(ValueError, match=match):
        rx.init_state(MODEL, make(), key=KEY)
