"""A hook within `fit`: when it is called, what it may change, and that a resumed run is exact with it."""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    COUNTING,
    EXAMPLES,
    SGD,
    Rows,
    assert_counted,
    assert_same,
    collate,
    fit,
    hand_loop,
    linear_state,
    loss_fn,
    make_examples,
    mlp_state,
    without_times,
)

import redco_eqx as rx


class Calls:
    """A hook that notes how it was called."""

    def __init__(self, *changes: Any):
        self.calls: list[tuple[int, dict[str, float]]] = []
        self._changes = list(changes)

    def __call__(self, run: Any, row: Any, state: Any) -> Any:
        assert int(jnp.copy(state.step)) == run.step
        self.calls.append((run.step, dict(row)))
        return self._changes.pop(0) if self._changes else None


def counted(state: Any = None, **arguments: Any) -> Any:
    """`fit` that compiles in no time."""
    defaults: dict[str, Any] = {"optimizer": COUNTING, "prefetch": 0, "num_steps": 12, "log_every": 5}
    return fit(linear_state() if state is None else state, EXAMPLES, **{**defaults, **arguments})


def halved(state: Any) -> Any:
    return dataclasses.replace(state, params=jax.tree.map(lambda x: x / 2, state.params))


def test_it_is_called_after_each_row_and_each_evaluation_with_what_was_logged() -> None:
    rows, hook = Rows(), Calls()
    counted(hook=hook, loggers=[rows], evaluation=rx.Evaluation(EXAMPLES, every_steps=4))
    logged = without_times(rows.rows)
    assert hook.calls == [(step, {k: x for k, x in row.items() if k != "train/epoch"}) for step, row in logged]
    assert [(step, next(iter(row))) for step, row in hook.calls] == [
        (4, "train/loss"),
        (4, "eval/loss"),
        (5, "train/loss"),
        (8, "train/loss"),
        (8, "eval/loss"),
        (10, "train/loss"),
        (12, "train/loss"),
        (12, "eval/loss"),
    ]


def test_a_hook_that_changes_nothing_changes_nothing() -> None:
    expected = fit(linear_state(), EXAMPLES, num_steps=7)
    found = fit(linear_state(), EXAMPLES, num_steps=7, log_every=2, hook=Calls(None, rx.Change(), None))
    assert_same(found, expected)


def test_a_run_that_a_hook_ends_is_a_whole_run() -> None:
    """With a last evaluation, and the state as its result."""
    rows = Rows()
    hook = Calls(None, rx.Change(stop=True))
    state = counted(hook=hook, loggers=[rows], evaluation=rx.Evaluation(EXAMPLES, every_steps=100))
    assert_counted(state, 10, linear_state())
    assert [step for step, _ in rows.rows] == [5, 10, 10]
    assert [step for step, _ in hook.calls] == [5, 10, 10]


def test_a_changed_state_is_gone_on_with() -> None:
    """Equal to the loop by hand, from a state that is halved after every second step."""
    mesh = rx.make_mesh(tensor=2, fsdp=2)
    state: Any = mlp_state(SGD, mesh)
    examples = make_examples(22, dim=8)
    step = jax.jit(functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=SGD))
    loop = hand_loop(state, examples)
    layout = jax.tree.map(lambda x: x.sharding, state)
    for i in range(1, 7):
        state = step(state, next(loop)[2])[0]
        state = halved(state) if i % 2 == 0 else state

    def hook(run: Any, row: Any, state: Any) -> Any:
        return rx.Change(state=halved(state))

    found = fit(mlp_state(SGD, mesh), examples, num_steps=6, log_every=2, hook=hook)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(state.params)):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert jax.tree.map(lambda x: x.sharding, found) == layout


def test_an_array_may_stand_twice_in_what_a_hook_returns_and_be_kept() -> None:
    """The next step takes over what it is given, so it must have been given copies."""
    kept = []

    def hook(run: Any, row: Any, state: Any) -> Any:
        kept.append(new := {"bias": jnp.ones(2), "weight": jnp.ones((2, 2))})
        return rx.Change(state=dataclasses.replace(state, params=new))

    state = counted(hook=hook, num_steps=4, log_every=2)
    assert_same(state.params, {"bias": jnp.ones(2), "weight": jnp.ones((2, 2))})
    assert not any(x.is_deleted() for x in jax.tree.leaves(kept))

    moved = optax.sgd(0.1, momentum=0.9)

    def shared(run: Any, row: Any, state: Any) -> Any:
        trace = state.opt_state[0]._replace(trace=state.params)
        return rx.Change(state=dataclasses.replace(state, opt_state=(trace, *state.opt_state[1:])))

    state = fit(linear_state(moved), EXAMPLES, optimizer=moved, num_steps=4, log_every=2, hook=shared)
    assert_same(state.opt_state[0].trace, state.params)


def test_what_cannot_be_a_change() -> None:
    def with_params(**params: Any) -> Any:
        return lambda state: rx.Change(state=dataclasses.replace(state, params=params))

    def with_other(**fields: Any) -> Any:
        return lambda state: rx.Change(state=dataclasses.replace(state, **fields))

    weight = jnp.ones((2, 2))
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda state: state, TypeError, r"hook must return None or an rx.Change, but returned a TrainState"),
        (lambda state: False, TypeError, r"hook must return None or an rx.Change, but returned a bool"),
        (
            with_params(bias=jnp.ones(3), weight=weight),
            ValueError,
            r"params.bias was float32\[2\] and became float32\[3\]",
        ),
        (with_params(bias=jnp.ones(2)), ValueError, r"params.weight was float32\[2,2\] and became missing"),
        (
            lambda state: with_other(step=state.step + 1)(state),
            ValueError,
            r"another step, but a run must keep it",
        ),
        (with_other(key=jax.random.key(5)), ValueError, r"another key, but a run must keep it"),
        (with_other(stored=("bias",)), ValueError, r"is of another model"),
    ]
    for change, exception, message in cases:
        with pytest.raises(exception, match=message):
            counted(hook=lambda run, row, state, change=change: change(state))


def test_without_its_hook_an_ended_run_goes_on(tmp_path: pathlib.Path) -> None:
    stop = Calls(rx.Change(stop=True))
    assert_counted(counted(hook=stop, checkpoints=tmp_path), 5, linear_state())
    assert_counted(counted(hook=stop, checkpoints=tmp_path), 5, linear_state())
    assert_counted(counted(checkpoints=tmp_path), 12, linear_state())


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
    examples = make_examples(16, dim=8)
    state = mlp_state(optimizer, rx.make_mesh(tensor=2, fsdp=2))
    # By hand: the loop, and beside it the average.
    loop, rows = hand_loop(state, examples, optimizer=optimizer), []
    average: Any = state.params
    for i in range(1, 7):
        new, *_ = next(loop)
        average = jax.tree.map(lambda a, x: 0.5 * a + 0.5 * x, average, new.params)
        if i % 2 == 0:
            by_hand = dataclasses.replace(new, params=average)
            metrics = rx.evaluate(by_hand, examples, collate_fn=collate, loss_fn=loss_fn, batch_size=4)
            rows.append(metrics["loss"])
    logged = Rows()
    state = fit(
        state,
        examples,
        optimizer=optimizer,
        num_steps=6,
        loggers=[logged],
        evaluation=rx.Evaluation(examples, every_steps=2, state_fn=averaged),
        checkpoints=rx.Checkpoints(tmp_path, every_steps=2, keep_last=1, keep_best={"eval/loss": "min"}),
    )
    found = [row["eval/loss"] for _, row in logged.with_prefix("eval/")]
    np.testing.assert_allclose(found, rows, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(averaged(state).params), jax.tree.leaves(average)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    best = 2 * (1 + int(np.argmin(found)))
    assert {info.step for info in rx.list_checkpoints(tmp_path)} == {best, 6}
