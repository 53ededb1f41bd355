"""A hook within `fit`: when it is called, what it may change, and that a resumed run is exact with it."""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import fit_helpers as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import EXAMPLES, SGD, Rows, assert_counted, assert_same, fit, linear_state

import redco_eqx as rx

counted = functools.partial(tiny.counted, log_every=5)


class Calls:
    """A hook that notes how it was called."""

    def __init__(self, *changes: Any):
        self.calls: list[tuple[int, dict[str, float]]] = []
        self._changes = list(changes)

    def __call__(self, run: Any, row: Any, state: Any) -> Any:
        assert int(jnp.copy(state.step)) == run.step
        self.calls.append((run.step, dict(row)))
        return self._changes.pop(0) if self._changes else None


def changing(**changed: Any) -> Any:
    """A hook that gives fields of the state other values, or those that functions of the state return."""

    def hook(run: Any, row: Any, state: Any) -> Any:
        new = {name: x(state) if callable(x) else x for name, x in changed.items()}
        return rx.Change(state=dataclasses.replace(state, **new))

    return hook


def halved(state: Any) -> Any:
    return jax.tree.map(lambda x: x / 2, state.params)


def test_it_is_called_after_each_row_and_each_evaluation_with_what_was_logged() -> None:
    rows, hook = Rows(), Calls()
    counted(hook=hook, loggers=[rows], evaluation=rx.Evaluation(EXAMPLES, every_steps=4))
    logged = tiny.without_times(rows.rows)
    assert hook.calls == [(step, {k: x for k, x in row.items() if k != "train/epoch"}) for step, row in logged]
    found = " ".join(f"{step} {next(iter(row)).partition('/')[0]}" for step, row in hook.calls)
    assert found == "4 train 4 eval 5 train 8 train 8 eval 10 train 12 train 12 eval"


def test_a_hook_that_changes_nothing_changes_nothing() -> None:
    found = fit(num_steps=7, log_every=2, hook=Calls(None, rx.Change(), None))
    assert_same(found, fit(num_steps=7))


def test_a_run_that_a_hook_ends_is_a_whole_run() -> None:
    """With a last evaluation, and the state as its result."""
    rows, hook = Rows(), Calls(None, rx.Change(stop=True))
    state = counted(hook=hook, loggers=[rows], evaluation=rx.Evaluation(EXAMPLES, every_steps=100))
    assert_counted(state, 10)
    assert [step for step, _ in rows.rows] == [step for step, _ in hook.calls] == [5, 10, 10]


def test_a_changed_state_is_gone_on_with() -> None:
    """Equal to the loop by hand, from a state that is halved after every second step."""
    state: Any = tiny.mlp_state()
    examples = tiny.make_examples(22, dim=8)
    step = jax.jit(functools.partial(rx.train_step, loss_fn=tiny.loss_fn, optimizer=SGD))
    loop = tiny.hand_loop(state, examples)
    layout = jax.tree.map(lambda x: x.sharding, state)
    for i in range(1, 7):
        state = step(state, next(loop)[2])[0]
        state = dataclasses.replace(state, params=halved(state)) if i % 2 == 0 else state
    found = fit(tiny.mlp_state(), examples, num_steps=6, log_every=2, hook=changing(params=halved))
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(state.params)):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert jax.tree.map(lambda x: x.sharding, found) == layout


def test_an_array_may_stand_twice_in_what_a_hook_returns_and_be_kept() -> None:
    """The next step takes over what it is given, so it must have been given copies."""
    kept = []

    def new(state: Any) -> Any:
        kept.append({"bias": jnp.ones(2), "weight": jnp.ones((2, 2))})
        return kept[-1]

    state = counted(hook=changing(params=new), num_steps=4, log_every=2)
    assert_same(state.params, {"bias": jnp.ones(2), "weight": jnp.ones((2, 2))})
    assert not any(x.is_deleted() for x in jax.tree.leaves(kept))

    def shared(state: Any) -> Any:
        return state.opt_state[0]._replace(trace=state.params), *state.opt_state[1:]

    moved = optax.sgd(0.1, momentum=0.9)
    hook = changing(opt_state=shared)
    state = fit(linear_state(moved), optimizer=moved, num_steps=4, log_every=2, hook=hook)
    assert_same(state.opt_state[0].trace, state.params)


def test_what_cannot_be_a_change() -> None:
    bias, weight = jnp.ones(2), jnp.ones((2, 2))
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda run, row, state: state, TypeError, r"must return None or an rx.Change, but returned a TrainSt"),
        (lambda run, row, state: False, TypeError, r"must return None or an rx.Change, but returned a bool"),
        (
            changing(params={"bias": jnp.ones(3), "weight": weight}),
            ValueError,
            r"params.bias was float32\[2\] and became float32\[3\]",
        ),
        (changing(params={"bias": bias}), ValueError, r"params.weight was float32\[2,2\] and became missing"),
        (changing(step=lambda state: state.step + 1), ValueError, r"another step, but a run must keep it"),
        (changing(key=jax.random.key(5)), ValueError, r"another key, but a run must keep it"),
        (changing(stored=("bias",)), ValueError, r"is of another model"),
    ]
    for hook, exception, message in cases:
        with pytest.raises(exception, match=message):
            counted(hook=hook)


def test_without_its_hook_an_ended_run_goes_on(tmp_path: pathlib.Path) -> None:
    stop = Calls(rx.Change(stop=True))
    for hook, num_steps in ((stop, 5), (stop, 5), (None, 12)):
        assert_counted(counted(None, rx.Checkpoints(tmp_path), hook=hook), num_steps)


# A state of its own for evaluations


class Ema(NamedTuple):
    average: Any


def params_ema(decay: float) -> optax.GradientTransformation:
    """The last of a chain: it keeps an average of the parameters."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        new = optax.apply_updates(params, updates)
        return updates, Ema(optax.incremental_update(new, state.average, 1 - decay))

    return optax.GradientTransformation(lambda params: Ema(params), update)


def averaged(state: Any) -> Any:
    return dataclasses.replace(state, params=state.opt_state[-1].average)


def test_the_average_of_the_parameters_is_evaluated_and_kept_best(tmp_path: pathlib.Path) -> None:
    optimizer = optax.chain(optax.sgd(0.3), params_ema(0.5))
    examples = tiny.make_examples(16, dim=8)
    state = tiny.mlp_state(optimizer)
    # By hand: the loop, and beside it the average.
    loop, losses, logged = tiny.hand_loop(state, examples, optimizer=optimizer), [], Rows()
    average: Any = state.params
    for i in range(1, 7):
        new, *_ = next(loop)
        average = jax.tree.map(lambda a, x: 0.5 * a + 0.5 * x, average, new.params)
        if i % 2 == 0:
            by_hand = dataclasses.replace(new, params=average)
            arguments: Any = {"collate_fn": tiny.collate, "loss_fn": tiny.loss_fn, "batch_size": 4}
            losses.append(rx.evaluate(by_hand, examples, **arguments)["loss"])
    evaluation = rx.Evaluation(examples, every_steps=2, state_fn=averaged)
    best: Any = {"eval/loss": "min"}
    checkpoints = rx.Checkpoints(tmp_path, every_steps=2, keep_last=1, keep_best=best)
    arguments = {"optimizer": optimizer, "evaluation": evaluation, "checkpoints": checkpoints}
    state = fit(state, examples, num_steps=6, loggers=[logged], **arguments)
    found = [row["eval/loss"] for _, row in logged.with_prefix("eval/")]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(averaged(state).params), jax.tree.leaves(average)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    lowest = 2 * (1 + int(np.argmin(found)))
    assert {info.step for info in rx.list_checkpoints(tmp_path)} == {lowest, 6}
