"""A hook within `fit`: when it is called, what it may change, and that a resumed run is exact with it."""

import dataclasses
import functools
import json
import pathlib
import signal
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    COUNTING,
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
)

import redco_eqx as rx

EXAMPLES = make_examples(22)  # five batches of 4, and 2 dropped


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


def exactly(rows: Any) -> list[Any]:
    """Rows without what depends on the clock."""
    clocked = ("train/examples_per_second", "train/tokens_per_second", "train/epoch")
    return [(step, {name: x for name, x in row.items() if name not in clocked}) for step, row in rows]


def halved(state: Any) -> Any:
    return dataclasses.replace(state, params=jax.tree.map(lambda x: x / 2, state.params))


def test_it_is_called_after_each_row_and_each_evaluation_with_what_was_logged() -> None:
    rows, hook = Rows(), Calls()
    counted(hook=hook, loggers=[rows], evaluation=rx.Evaluation(EXAMPLES, every_steps=4))
    assert hook.calls == exactly(rows.rows)
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


@pytest.mark.parametrize("mesh", [{"data": 1}, {"tensor": 2, "fsdp": 2}], ids=["one", "mixed"])
def test_a_changed_state_is_gone_on_with(mesh: Any) -> None:
    """Equal to the loop by hand, from a state that is halved after every second step."""
    mesh = rx.make_mesh(**mesh)
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


@pytest.mark.parametrize(
    ("change", "exception", "message"),
    [
        (lambda state: state, TypeError, r"hook must return None or an rx.Change, but returned a TrainState"),
        (lambda state: False, TypeError, r"hook must return None or an rx.Change, but returned a bool"),
        (
            lambda state: rx.Change(state=linear_state(dim=3)),
            ValueError,
            r"params.bias was float32\[2\] and became float32\[3\]",
        ),
        (
            lambda state: rx.Change(
                state=dataclasses.replace(state, params={**state.params, "bias": jnp.ones(2, jnp.bfloat16)})
            ),
            ValueError,
            r"params.bias was float32\[2\] and became bfloat16\[2\]",
        ),
        (
            lambda state: rx.Change(state=dataclasses.replace(state, params={"bias": jnp.ones(2)})),
            ValueError,
            r"params.weight was float32\[2,2\] and became missing",
        ),
        (
            lambda state: rx.Change(state=dataclasses.replace(state, step=state.step + 1)),
            ValueError,
            r"another step, but a run must keep it",
        ),
        (
            lambda state: rx.Change(state=dataclasses.replace(state, key=jax.random.key(5))),
            ValueError,
            r"another key, but a run must keep it",
        ),
        (
            lambda state: rx.Change(state=dataclasses.replace(state, stored=("bias",))),
            ValueError,
            r"is of another model",
        ),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_cannot_be_a_change(change: Any, exception: Any, message: str) -> None:
    with pytest.raises(exception, match=message):
        counted(hook=lambda run, row, state: change(state))


# Interrupted and resumed


class Interrupting:
    """`collate`, during whose n-th call Ctrl-C comes."""

    def __init__(self, at: int):
        self._left = at

    def __call__(self, examples: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            signal.raise_signal(signal.SIGINT)
        return collate(examples)


def deciding(run: Any, row: Any, state: Any) -> Any:
    """Changes the state by the row and by the evaluations so far, at rows and at evaluations alike."""
    seen = [next(iter(row.values())), *(evaluation["eval/loss"] for evaluation in run.evaluations)]
    scale = 1 + 0.01 * sum(seen) / len(seen)
    changed = {path: x * scale for path, x in state.params.items()}
    return rx.Change(state=dataclasses.replace(state, params=changed), stop=run.num_steps >= 14)


@pytest.mark.parametrize("at", [2, 6, 9, 13, 17, 20], ids=lambda n: f"call {n}")
def test_interrupted_and_resumed_equals_uninterrupted(at: int, tmp_path: pathlib.Path) -> None:
    """State and all rows, wherever the interrupt falls: between rows, at one, within an evaluation.

    What ends the run ends the resumed one, and it stays ended.
    """

    def run(name: str, collate_fn: Any = collate) -> Any:
        with rx.JSONLLogger(tmp_path / f"{name}.jsonl") as logger:
            return fit(
                linear_state(),
                EXAMPLES,
                num_steps=20,
                log_every=3,
                hook=deciding,
                prefetch=0,
                collate_fn=collate_fn,
                evaluation=rx.Evaluation(EXAMPLES[:8], every_steps=6, collate_fn=collate_fn),
                checkpoints=rx.Checkpoints(tmp_path / name, every_steps=4),
                loggers=[logger],
            )

    def log(name: str) -> Any:
        rows = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
        return exactly(
            (row.pop("step"), {k: x for k, x in row.items() if k not in ("time", "run")}) for row in rows
        )

    expected = run("whole")
    assert int(expected.step) == 15
    with pytest.raises(rx.errors.TrainingInterrupted):
        run("cut", Interrupting(at))
    assert_same(run("cut"), expected)
    assert log("cut") == log("whole")
    assert_same(run("cut"), expected)  # ended for good
    assert log("cut") == log("whole")


def test_without_its_hook_an_ended_run_goes_on(tmp_path: pathlib.Path) -> None:
    stop = Calls(rx.Change(stop=True))
    assert_counted(counted(hook=stop, checkpoints=tmp_path), 5, linear_state())
    assert_counted(counted(hook=stop, checkpoints=tmp_path), 5, linear_state())
    assert_counted(counted(checkpoints=tmp_path), 12, linear_state())


# Recipes


def patience(metric: str, num: int) -> Any:
    """Ends a run when a metric has not been at its least for so many evaluations. Derived from the record."""

    def hook(run: Any, row: Any, state: Any) -> Any:
        values = [evaluation[metric] for evaluation in run.evaluations]
        return rx.Change(stop=metric in row and min(values) < min(values[-num:]))

    return hook


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


def test_early_stopping(tmp_path: pathlib.Path) -> None:
    scores = iter([5.0, 3.0, 4.0, 2.0, 2.5, 2.1, 9.0, 1.0])
    evaluation = rx.Evaluation(
        EXAMPLES[:4],
        every_steps=2,
        predict_fn=lambda model, batch, key: batch["x"],
        metric_fn=lambda examples, predictions: {"score": next(scores)},
    )
    next(scores)  # the rehearsal has one
    rows = Rows()
    arguments: Any = {"hook": patience("eval/score", 3), "evaluation": evaluation, "num_steps": 20}
    state = counted(loggers=[rows], checkpoints=tmp_path, **arguments)
    assert [row["eval/score"] for _, row in rows.with_prefix("eval/")] == [4.0, 2.0, 2.5, 2.1, 9.0]
    assert_counted(state, 10, linear_state())


@pytest.mark.parametrize("mesh", [{"data": 1}, {"tensor": 2, "fsdp": 2}], ids=["one", "mixed"])
def test_the_average_of_the_parameters_is_evaluated_and_kept_best(mesh: Any, tmp_path: pathlib.Path) -> None:
    optimizer = optax.chain(optax.sgd(0.3), params_ema(0.5))
    examples = make_examples(16, dim=8)
    state = mlp_state(optimizer, rx.make_mesh(**mesh))
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


def test_text_is_sampled_at_each_evaluation() -> None:
    """A hook that writes by itself, with a key of its own for each step."""
    samples = {}

    def sample(run: Any, row: Any, state: Any) -> None:
        if run.is_evaluated:
            x = jax.random.normal(jax.random.fold_in(jax.random.key(7), run.step), (2,))
            samples[run.step] = "abcdefgh"[int(jnp.argmax(state.model(x)))]

    counted(hook=sample, evaluation=rx.Evaluation(EXAMPLES[:4], every_steps=4))
    assert list(samples) == [4, 8, 12]
    assert set(samples.values()) <= set("ab")


def test_an_evaluation_of_what_is_no_state_is_refused_before_training() -> None:
    with pytest.raises(TypeError, match=r"what state_fn returns must be a TrainState, but is a dict"):
        counted(evaluation=rx.Evaluation(EXAMPLES, state_fn=lambda state: state.params))  # pyright: ignore
