"""Functions of the user that change what is not theirs, or make what cannot be used."""

import collections
import dataclasses
import functools
import pathlib
import random
import re
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import (
    EXAMPLES,
    SGD,
    assert_same,
    collate,
    fit,
    fit_with_history,
    linear_state,
    raised,
)

import redco_eqx as rx
from redco_eqx._data.collation import CollatedTwice

# Hooks


def donated(state: Any) -> None:
    rx.jit_step(lambda state, batch: (state, {}))(state, np.zeros((4, 2), np.float32))


def deleted(state: Any) -> None:
    state.params["weight"].delete()


@pytest.mark.parametrize("use", [donated, deleted])
def test_a_hook_that_uses_up_its_state_is_named(use: Any) -> None:
    """Instead of a segmentation fault in the next step."""

    def hook(run: Any, row: Any, state: Any) -> None:
        if run.step == 2:
            use(state)

    error = raised(
        ValueError,
        fit,
        hook=hook,
        num_steps=4,
        log_every=1,
        match=r"hook deleted .*weight.*copy",
    )
    assert not hasattr(error, "state")  # there is none left


def test_a_hook_may_use_up_a_copy() -> None:
    """The remedy that the message names."""

    def hook(run: Any, row: Any, state: Any) -> None:
        donated(jax.tree.map(jnp.copy, state))

    assert_same(fit(hook=hook, num_steps=4, log_every=1), fit(num_steps=4))


def test_a_state_fn_that_uses_up_its_state_is_named() -> None:
    def state_fn(state: Any) -> Any:
        kept = jax.tree.map(jnp.copy, state)
        if int(state.step) > 0:
            deleted(state)
        return kept

    evaluation = rx.Evaluation(EXAMPLES, state_fn=state_fn, every_steps=2)
    raised(
        ValueError,
        fit,
        evaluation=evaluation,
        num_steps=4,
        match="a function of the evaluation .*deleted",
    )


def test_a_hook_that_changes_its_row_changes_no_other() -> None:
    def hook(run: Any, row: Any, state: Any) -> None:
        row["eval/loss"] = row["train/loss"] = -1.0
        row["more"] = 2.0

    options: Any = {
        "num_steps": 4,
        "log_every": 2,
        "evaluation": rx.Evaluation(EXAMPLES, every_steps=2),
    }
    assert fit_with_history(hook=hook, **options)[1] == fit_with_history(**options)[1]


# Batches that depend on more than their examples

GENERATOR = np.random.default_rng(0)


def by_numpy() -> float:
    return float(np.random.random())


def by_python() -> float:
    return random.random()


def by_closure() -> float:
    return float(GENERATOR.random())


def by_nothing() -> float:
    return float(np.random.default_rng().random())


def shifted(draw: Any) -> Any:
    def collate_fn(examples: Any) -> Any:
        batch = collate(examples)
        return {**batch, "x": batch["x"] + np.float32(draw())}

    return collate_fn


@pytest.mark.parametrize("kind", [rx.Data, rx.Stream], ids=["sequence", "stream"])
@pytest.mark.parametrize(
    "draw",
    [by_numpy, by_python, by_closure, by_nothing],
    ids=lambda draw: draw.__name__,
)
def test_random_numbers_in_collate_fn_are_said(
    draw: Any, kind: Any, tmp_path: pathlib.Path
) -> None:
    options: Any = {"collate_fn": shifted(draw), "checkpoints": tmp_path}
    with pytest.warns(
        UserWarning, match="two different batches of the same examples: x differs"
    ) as caught:
        fit(None, kind(EXAMPLES), num_steps=2, **options)
    assert len([w for w in caught if "two different batches" in str(w.message)]) == 1
    with pytest.warns(
        UserWarning, match="two different batches of the same examples: x differs"
    ):
        # Again when the run goes on.
        fit(None, kind(EXAMPLES), num_steps=4, **options)


def by_example(examples: Any) -> Any:
    """The remedy that the message names."""
    batch = collate(examples)
    draws = [np.random.default_rng(example["id"]).random() for example in examples]
    return {**batch, "x": batch["x"] + np.array(draws, np.float32)[:, None]}


def test_random_numbers_by_example_are_exact(tmp_path: pathlib.Path) -> None:
    options: Any = {"collate_fn": by_example}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(num_steps=3, checkpoints=tmp_path, **options)
        resumed = fit(num_steps=7, checkpoints=tmp_path, **options)
    assert_same(resumed, fit(num_steps=7, **options))


@pytest.mark.parametrize("draw", [by_numpy, by_python], ids=lambda draw: draw.__name__)
@pytest.mark.filterwarnings("ignore:collate_fn made two different batches")
def test_the_second_look_draws_nothing_of_the_run(draw: Any) -> None:
    """With a seed, a run with checkpoints draws the same numbers as one without."""
    found = []
    for collate_fn in (shifted(draw), CollatedTwice(shifted(draw))):
        np.random.seed(0)
        random.seed(0)
        found.append([collate_fn(EXAMPLES[i : i + 4])["x"].tolist() for i in (0, 4, 8)])
    assert found[0] == found[1]


# Batches that JAX does not look into


@dataclasses.dataclass
class Plain:
    x: Any
    y: Any
    weight: Any
    flag: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Registered(Plain):
    pass


def plain(examples: Any) -> Any:
    batch = collate(examples)
    return Plain(*[batch[field.name] for field in dataclasses.fields(Plain)])


def registered(examples: Any) -> Any:
    return Registered(**vars(plain(examples)))


def of_fields(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch.x) - batch.y) ** 2)


def of_names(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def encoding(examples: Any) -> Any:
    return collections.UserDict(collate(examples))  # as transformers' BatchEncoding is


def test_a_plain_dataclass_is_refused_with_both_remedies() -> None:
    remedies = (
        r"vars\(batch\).*@jax.tree_util.register_dataclass above @dataclass of Plain"
    )
    raised(
        TypeError, fit, collate_fn=plain, loss_fn=of_fields, num_steps=2, match=remedies
    )
    expected = fit(loss_fn=of_names, num_steps=2)
    assert_same(
        fit(collate_fn=lambda rows: vars(plain(rows)), loss_fn=of_names, num_steps=2),
        expected,
    )
    assert_same(fit(collate_fn=registered, loss_fn=of_fields, num_steps=2), expected)


def test_a_mapping_of_another_kind_is_refused_with_its_remedy() -> None:
    remedy = "{name: np.asarray(x) for name, x in batch.items()}"
    raised(TypeError, fit, collate_fn=encoding, num_steps=2, match=re.escape(remedy))

    def collate_fn(examples: Any) -> Any:
        return eval(remedy, {"batch": encoding(examples), "np": np})

    assert_same(
        fit(None, collate_fn=collate_fn, num_steps=2), fit(linear_state(), num_steps=2)
    )


# Functions that jax.jit has compiled

MLP = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
BATCH = collate(EXAMPLES[:8])


def mlp_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)


def mlp_predict(model: Any, batch: Any, key: Any) -> Any:
    return jax.vmap(model)(batch["x"])


def mlp_state() -> Any:
    return rx.init_state(
        jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, MLP),
        SGD,
        key=jax.random.key(1),
    )


COMMON: Any = {"collate_fn": collate, "batch_size": 4}
CALLS = {
    "fit": lambda loss, _: fit(mlp_state(), loss_fn=loss, num_steps=2),
    "train_step": lambda loss, _: rx.train_step(
        mlp_state(), BATCH, loss_fn=loss, optimizer=SGD
    ),
    "eval_step": lambda loss, _: rx.eval_step(mlp_state(), BATCH, loss_fn=loss),
    "predict_step": lambda _, predict: rx.predict_step(
        mlp_state(), BATCH, predict_fn=predict
    ),
    "evaluate": lambda loss, _: rx.evaluate(
        mlp_state(), EXAMPLES, loss_fn=loss, **COMMON
    ),
    "predict": lambda _, predict: rx.predict(
        mlp_state(), EXAMPLES, predict_fn=predict, **COMMON
    ),
    "shard_rules": lambda loss, _: rx.shard_rules(
        MLP, rx.make_mesh(tensor=2), loss_fn=loss, batch=BATCH
    ),
    "explain": lambda loss, _: rx.explain(
        MLP, rx.make_mesh(tensor=2), loss_fn=loss, batch=BATCH
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_function_of_jax_jit_is_refused_with_the_leaf_that_it_cannot_take(
    call: Any,
) -> None:
    def refused(loss: Any, predict: Any) -> None:
        raised(
            TypeError,
            call,
            loss,
            predict,
            match="compiled by jax.jit, .* activation, .*eqx.filter_jit",
        )

    refused(jax.jit(mlp_loss), jax.jit(mlp_predict))
    refused(
        functools.partial(jax.jit(mlp_loss)), functools.partial(jax.jit(mlp_predict))
    )
    call(eqx.filter_jit(mlp_loss), eqx.filter_jit(mlp_predict))  # the remedy


def test_a_function_of_jax_jit_works_for_a_model_of_arrays() -> None:
    assert_same(
        fit(loss_fn=jax.jit(mlp_loss), num_steps=2), fit(loss_fn=mlp_loss, num_steps=2)
    )
