"""A function of the user's that takes a model for a pair `(model, eqx.nn.State)`, or a
pair for a model, is told so."""

import re
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from fit_helpers import Normed, collate, fit, make_examples

import redco_eqx as rx

EXAMPLES = make_examples(16, dim=4)
BATCH = collate(EXAMPLES[:8])
OPTIMIZER = optax.sgd(0.1)
NO_PAIR = "The model has no eqx.nn.State here, so it is not a pair"
A_PAIR = r"The model is the pair \(model, eqx.nn.State\) here"


def plain() -> Any:
    return eqx.nn.MLP(4, 4, 8, depth=1, key=jax.random.key(0))


def pair() -> Any:
    return eqx.nn.make_with_state(Normed)(key=jax.random.key(0))


def unpacks(model: Any, batch: Any, key: Any = None) -> Any:
    model, state = model
    return jnp.float32(0.0), {}, state


def calls(model: Any, batch: Any, key: Any = None) -> Any:
    return jnp.mean(jax.vmap(model)(batch["x"]))


def reads(model: Any, batch: Any, key: Any = None) -> Any:
    return jnp.mean(model.layers[0].weight)


def indexes(model: Any, batch: Any, key: Any = None) -> Any:
    return jnp.mean(jax.vmap(model[0])(batch["x"]))


# What makes the model, and what is done with it.
WRONG = {
    "unpacks a model": (plain, unpacks, NO_PAIR),
    "indexes a model": (plain, indexes, NO_PAIR),
    "calls a pair": (pair, calls, A_PAIR),
    "reads a field of a pair": (pair, reads, A_PAIR),
}


def shard(model: Any, function: Any) -> None:
    rx.shard_rules(model, rx.make_mesh(), loss_fn=function, batch=BATCH)


def train(model: Any, function: Any) -> None:
    state = rx.init_state(model, OPTIMIZER, key=jax.random.key(0))
    rx.train_step(state, BATCH, loss_fn=function, optimizer=OPTIMIZER)


def evaluate(model: Any, function: Any) -> None:
    state = rx.init_state(model, key=jax.random.key(0))
    rx.jit_step(partial(rx.eval_step, loss_fn=function), donate=False)(state, BATCH)


def predict(model: Any, function: Any) -> None:
    state = rx.init_state(model, key=jax.random.key(0))
    rx.predict_step(state, BATCH, predict_fn=function)


def hook(model: Any, function: Any) -> None:
    state = rx.init_state(model, OPTIMIZER, key=jax.random.key(0))

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        has_state = isinstance(model, tuple)
        arrays = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
        loss = sum(jnp.sum(x) for x in arrays)
        return (loss, {}, model[1]) if has_state else loss

    def hook(run: Any, row: Any, state: Any) -> Any:
        function(state.model, BATCH)
        return run

    fit(state, EXAMPLES, loss_fn=loss_fn, optimizer=OPTIMIZER, num_steps=1, hook=hook)


USES = {f.__name__: f for f in (shard, train, evaluate, predict, hook)}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_model_and_a_pair_that_are_mixed_up_are_named(use: str, kind: str) -> None:
    make, function, hint = WRONG[kind]
    with pytest.raises((TypeError, AttributeError, ValueError)) as caught:
        USES[use](make(), function)
    # `shard_rules` has it in its message, and the others as one note.
    notes = getattr(caught.value, "__notes__", [])
    text = "\n".join([str(caught.value), *notes])
    assert len(re.findall(hint, text)) == 1


def test_other_errors_are_left_as_they_are() -> None:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return len(3)  # pyright: ignore[reportArgumentType]

    with pytest.raises(TypeError, match="has no len") as caught:
        train(plain(), loss_fn)
    assert "eqx.nn.State" not in str(getattr(caught.value, "__notes__", []))
