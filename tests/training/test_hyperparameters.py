"""The hyperparameters that `optax.inject_hyperparams` keeps, when a run continues:
named, and chosen."""

import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import fit, fit_with_history, linear_state
from helpers import assert_close

import redco_eqx as rx
from redco_eqx._training.hyperparameters import hyperparameters_in

OLD, NEW = 0.05, 0.01


def injected(rate: Any, **options: Any) -> optax.GradientTransformation:
    return optax.inject_hyperparams(optax.sgd)(rate, **options)


def by_bias(rate: float) -> dict[Any, Any]:
    return {"bias": injected(rate), "weight": optax.inject_hyperparams(optax.sgd)(0.5)}


def label(params: Any) -> Any:
    return {path: path for path in params}


# The optimizer of a rate, and the words for the change from 0.05 to 0.01.
OPTIMIZERS: dict[str, tuple[Callable[[float], optax.GradientTransformation], str]] = {
    "alone": (injected, "hyperparams.learning_rate is 0.05, not 0.01"),
    "chained": (
        lambda rate: optax.chain(optax.clip_by_global_norm(1.0), injected(rate)),
        "1.hyperparams.learning_rate is 0.05, not 0.01",
    ),
    "masked": (
        lambda rate: optax.masked(
            injected(rate), lambda params: dict.fromkeys(label(params), True)
        ),
        "inner_state.hyperparams.learning_rate is 0.05, not 0.01",
    ),
    "partitioned": (
        lambda rate: optax.partition(by_bias(rate), label),
        "inner_states.bias.inner_state.hyperparams.learning_rate is 0.05, not 0.01",
    ),
    "weight decay": (
        lambda rate: optax.inject_hyperparams(optax.adamw)(1e-3, weight_decay=rate),
        "hyperparams.weight_decay is 0.05, not 0.01",
    ),
    "a beta": (
        lambda rate: optax.inject_hyperparams(optax.adam)(1e-3, b1=1 - rate),
        "hyperparams.b1 is 0.95, not 0.99",
    ),
    "in one that is injected": (
        lambda rate: optax.inject_hyperparams(
            lambda outer: optax.chain(injected(rate), optax.scale(outer))
        )(1.0),
        "inner_state.0.hyperparams.learning_rate is 0.05, not 0.01",
    ),
    "several multisteps": (
        lambda rate: optax.MultiSteps(injected(rate), 2).gradient_transformation(),
        "inner_opt_state.hyperparams.learning_rate is 0.05, not 0.01",
    ),
}


def run(
    optimizer: Any, directory: Any, num_steps: int, state: Any = None, **options: Any
) -> Any:
    state = linear_state(optimizer) if state is None else state
    checkpoints = directory and rx.Checkpoints(directory, every_steps=4, **options)
    return fit_with_history(
        state,
        optimizer=optimizer,
        num_steps=num_steps,
        log_every=1,
        checkpoints=checkpoints,
    )


def said(caught: Any) -> list[str]:
    return [str(w.message) for w in caught if str(w.message).startswith("fit: ")]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_kept_ones_count_and_both_are_named(
    kind: str, tmp_path: pathlib.Path, recwarn: Any
) -> None:
    make, words = OPTIMIZERS[kind]
    expected, _ = run(make(OLD), None, 8)
    run(make(OLD), tmp_path, 4)
    state, _ = run(make(NEW), tmp_path, 8)
    # Nothing is said about an optimizer that computes something else.
    (text,) = said(recwarn)
    assert (
        f"so those of {tmp_path / '4'} count, and not those of this call: {words}. To "
        "continue" in text
    )
    assert "allow_changes=True" in text
    np.testing.assert_array_equal(state.params["weight"], expected.params["weight"])
    run(make(OLD), tmp_path, 9)
    assert len(said(recwarn)) == 1


@pytest.mark.parametrize("kind", ["alone", "chained", "partitioned", "weight decay"])
def test_changes_that_are_allowed_take_those_of_the_call(
    kind: str, tmp_path: pathlib.Path, recwarn: Any
) -> None:
    make, words = OPTIMIZERS[kind]
    run(make(OLD), tmp_path, 4)
    state, _ = run(make(NEW), tmp_path, 8, allow_changes=True)
    path, _, _ = words.partition(" is ")
    assert float(hyperparameters_in(state.opt_state)[path]) == pytest.approx(NEW)
    (text,) = said(recwarn)
    assert f"because allow_changes=True: {path} is 0.01, not 0.05" in text
    # The run now has the new ones.
    again, _ = run(make(NEW), tmp_path, 9)
    assert float(hyperparameters_in(again.opt_state)[path]) == pytest.approx(NEW)
    assert len(said(recwarn)) == 1


def test_a_run_with_a_new_rate_is_one_with_a_schedule(tmp_path: pathlib.Path) -> None:
    def rate(count: Any) -> Any:
        return jnp.where(count < 4, OLD, NEW)

    expected = fit(
        linear_state(optax.sgd(rate)), optimizer=optax.sgd(rate), num_steps=8
    )
    run(injected(OLD), tmp_path, 4)
    with pytest.warns(UserWarning, match="with other hyperparameters"):
        state, history = run(injected(NEW), tmp_path, 8, allow_changes=True)
    assert_close(state.params, expected.params, rtol=1e-6)
    np.testing.assert_allclose(
        history["train/learning_rate"], [OLD] * 4 + [NEW] * 4, rtol=1e-6
    )


def test_a_restored_state_whose_numbers_are_replaced_continues_with_them(
    tmp_path: pathlib.Path,
) -> None:
    run(injected(OLD), tmp_path, 4)
    with pytest.warns(UserWarning, match="with other hyperparameters"):
        expected, _ = run(injected(NEW), tmp_path, 8, allow_changes=True)
    other = tmp_path / "other"
    run(injected(OLD), other, 8, state=None)
    for path in (other / "8", other / "history.jsonl"):  # stopped after step 4
        path.rename(tmp_path / f"aside-{path.name}")
    restored = rx.restore(other, like=linear_state(injected(OLD)))
    state = eqx.tree_at(
        lambda s: s.opt_state.hyperparams["learning_rate"],
        restored,
        replace_fn=lambda x: x * 0.2,
    )
    with pytest.warns(UserWarning, match="hyperparams.learning_rate is 0.01, not 0.05"):
        found, _ = run(injected(OLD), other, 8, state=state, allow_changes=True)
    assert_close(found.params, expected.params, rtol=1e-6)


def test_a_restored_state_with_another_optimizer_is_told_too(
    tmp_path: pathlib.Path, recwarn: Any
) -> None:
    run(injected(OLD), tmp_path, 8)
    (tmp_path / "8").rename(tmp_path / "aside")
    restored = rx.restore(tmp_path, like=linear_state(injected(NEW)))
    run(injected(NEW), tmp_path, 8, state=restored)
    assert any(
        "not those of this call: hyperparams.learning_rate is 0.05, not 0.01" in text
        for text in said(recwarn)
    )


def test_numbers_of_a_schedule_are_not_changes(
    tmp_path: pathlib.Path, recwarn: Any
) -> None:
    schedule = optax.linear_schedule(0.1, 0.01, 10)
    run(injected(schedule, momentum=0.9), tmp_path, 4)
    run(injected(schedule, momentum=0.9), tmp_path, 8)
    run(injected(schedule, momentum=0.9), tmp_path, 9, allow_changes=True)
    assert said(recwarn) == []
    kept = hyperparameters_in(linear_state(injected(schedule, momentum=0.9)).opt_state)
    assert {path: float(x) for path, x in kept.items()} == {
        "hyperparams.momentum": pytest.approx(0.9)
    }


def test_a_parameter_with_this_name_is_none() -> None:
    state = rx.init_state(
        {"hyperparams": {"learning_rate": jnp.ones(2)}},
        optax.adam(1e-3),
        key=jax.random.key(0),
    )
    assert hyperparameters_in(state.opt_state) == {}
