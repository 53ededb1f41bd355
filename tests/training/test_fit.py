import dataclasses
import fcntl
import itertools
import json
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import types
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    BODY,
    MESHES,
    SGD,
    STEP,
    Compilations,
    Rows,
    assert_counted,
    assert_same,
    collate,
    counting_step,
    errors_of,
    fit,
    hand_loop,
    linear_state,
    loss_fn,
    make_examples,
    mlp_state,
    no_threads_left,
    to_numpy,
)
from jax._src.array import ArrayImpl

import redco_eqx as rx
from redco_eqx._logging.report import Reporter
from redco_eqx._training.checks import BatchShapes

EXAMPLES = make_examples(22)  # five batches of 4, and 2 dropped


@pytest.fixture(autouse=True)
def _nothing_stays_behind():
    handler = signal.getsignal(signal.SIGINT)  # a shell makes background jobs ignore it
    yield
    assert no_threads_left()
    assert signal.getsignal(signal.SIGINT) is handler


def state_after(num_steps: int, state: Any = None, examples: Any = EXAMPLES, **arguments: Any) -> Any:
    """The hand-written loop's state after so many steps."""
    state = linear_state() if state is None else state
    steps = hand_loop(state, examples, **arguments)
    return next(itertools.islice(steps, num_steps - 1, None))[0] if num_steps else state


# The loop is the one that a reader would write


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_fit_is_the_loop_by_hand(sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []

    def spying(*arguments: Any, **options: Any) -> Any:
        told.append(options["shardings"])
        return rx.train_step(*arguments, **options)

    optimizer = optax.sgd(1e-2, momentum=0.9)
    examples = make_examples(40, dim=8)
    state = mlp_state(optimizer, rx.make_mesh(**sizes))
    layout = {path: x.sharding for path, x in state.params.items()}
    arguments: Any = {"batch_size": 16, "optimizer": optimizer}
    expected = state_after(6, state, examples, **arguments)
    monkeypatch.setattr("redco_eqx._training.compile.train_step", spying)
    with Compilations() as compilations:
        found = fit(state, examples, num_epochs=3, **arguments)
    assert_same(found, expected)
    assert compilations.names.count(BODY) == 1
    # The compiler is told the layout (which the numbers do not show), and it is kept.
    assert told
    assert all(shardings == layout for shardings in told)
    assert {path: x.sharding for path, x in found.params.items()} == layout


@pytest.mark.parametrize("num_steps", [3, 5, 12])
def test_steps_cut_and_repeat_epochs(num_steps: int) -> None:
    assert_same(fit(linear_state(), EXAMPLES, num_steps=num_steps), state_after(num_steps))


def test_microbatches_are_those_of_train_step() -> None:
    found = fit(linear_state(), EXAMPLES, num_epochs=1, num_microbatches=2)
    assert_same(found, state_after(5, num_microbatches=2))
    assert not np.array_equal(found.params["weight"], state_after(5).params["weight"])  # other noise


def spy(seen: list[int]) -> Any:
    def collate_and_note(examples: Any) -> Any:
        seen.extend(example["id"] for example in examples)
        return collate(examples)

    return collate_and_note


def test_a_second_fit_starts_epochs_of_its_own() -> None:
    examples = make_examples(20)
    first: list[int] = []
    second: list[int] = []
    middle = fit(linear_state(), examples, num_epochs=2, collate_fn=spy(first), donate=False)
    expected = state_after(10, middle, examples)
    assert_same(fit(middle, examples, num_epochs=2, collate_fn=spy(second), prefetch=0), expected)
    epochs = [tuple(seen[i : i + 20]) for seen in (first, second) for i in (0, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 4
    assert len(set(epochs)) == 4


@pytest.mark.parametrize("stop", [{"num_epochs": 3}, {"num_steps": 6}], ids=str)
def test_examples_by_epoch(stop: Any) -> None:
    of_epoch = [EXAMPLES[:8], EXAMPLES[8:21], EXAMPLES[21:] + EXAMPLES[:3]]  # 2, 3 and 1 batches
    asked = []

    def examples(epoch: int) -> Any:
        asked.append(epoch)
        return of_epoch[epoch]

    rows = Rows()
    found = fit(linear_state(), examples, log_every=1, loggers=[rows], **stop)
    assert_same(found, state_after(6, examples=of_epoch.__getitem__))
    assert asked == [0, 1, 2]
    epochs = [row["train/epoch"] for _, row in rows.rows]
    np.testing.assert_allclose(epochs, [0.5, 1, 4 / 3, 5 / 3, 2, 3], rtol=1e-12)


def test_donation() -> None:
    kept, given = linear_state(), linear_state()
    arguments: Any = {"num_steps": 2, "step_fn": counting_step}
    assert_counted(fit(kept, EXAMPLES, donate=False, **arguments), 2, kept)
    assert_same(kept, linear_state())
    assert_counted(fit(given, EXAMPLES, **arguments), 2, kept)
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    for use in (
        lambda: fit(given, EXAMPLES, **arguments),
        lambda: rx.evaluate(given, EXAMPLES, collate_fn=collate, loss_fn=loss_fn, batch_size=4),
        lambda: rx.predict(given, EXAMPLES, collate_fn=collate, predict_fn=predict_fn, batch_size=4),
    ):
        with pytest.raises(ValueError, match=r"array \w+ has been deleted.*donated.*donate=False"):
            use()


def test_a_model_with_a_state_is_trained_with_it() -> None:
    def make() -> Any:
        norm = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch")
        pair = eqx.nn.make_with_state(lambda: norm)()
        return rx.init_state(pair, SGD, key=jax.random.key(1))

    def loss(model: Any, batch: Any, key: Any) -> Any:
        apply = jax.vmap(model[0], axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, model_state = apply(batch["x"], model[1])
        return jnp.mean((out - batch["y"]) ** 2), {}, model_state

    start = make()
    expected = state_after(5, start, loss_fn=loss)
    found = fit(make(), EXAMPLES, num_epochs=1, loss_fn=loss)
    # Not bit for bit: beside the guard the compiler fuses the running mean otherwise, to a last digit.
    for x, y in zip(to_numpy(found), to_numpy(expected)):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    assert any(not np.array_equal(x, start.model_state[p]) for p, x in found.model_state.items())


# Compiled once, and no waiting


def test_a_new_shape_compiles_once_more_and_is_told_once() -> None:
    lengths = itertools.cycle([3, 5, 4])

    def ragged(examples: Any) -> Any:
        length = next(lengths)
        return {"pad": np.zeros((len(examples), length), np.float32), **collate(examples)}

    with Compilations() as compilations, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(linear_state(), EXAMPLES, num_steps=6, collate_fn=ragged, step_fn=counting_step, prefetch=0)
    assert compilations.names.count(BODY) == 3
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1
    assert "pad is float32[4,5], but was float32[4,3] in the first batch" in messages[0]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"x": np.zeros((2, 3)), "y": np.zeros(2, np.int32)}, r"y is int32\[2\], but was float64\[2\]"),
        ({"x": np.zeros((2, 3))}, r"y is missing, but was float64\[2\]"),
        ({"x": np.zeros((2, 3)), "y": np.zeros(2), "z": np.zeros(2)}, r"z is float64\[2\], but was missing"),
    ],
)
def test_what_changed_in_a_batch_is_named(second: Any, message: str) -> None:
    shapes = BatchShapes()
    first = {"x": np.zeros((2, 3)), "y": np.zeros(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shapes.check(first)
        shapes.check(dict(first))
    with pytest.warns(UserWarning, match=message):
        shapes.check(second)


def test_a_users_step_may_forget_the_layout() -> None:
    mesh = rx.make_mesh(tensor=8)
    state = mlp_state(SGD, mesh)
    layout = {path: x.sharding for path, x in state.params.items()}
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def step(state: Any, batch: Any) -> Any:
        state, metrics = rx.train_step(state, batch, loss_fn=loss_fn, optimizer=SGD)
        params = jax.lax.with_sharding_constraint(state.params, whole)
        return dataclasses.replace(state, params=params), metrics

    with Compilations() as compilations:
        found = fit(state, make_examples(8, dim=8), num_steps=4, step_fn=step)
    assert compilations.names.count(BODY) == 1
    assert {path: x.sharding for path, x in found.params.items()} == layout


def test_numbers_are_fetched_only_with_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    get, check, value = jax.device_get, BatchShapes.check, ArrayImpl.__dict__["_value"]
    fetching = False

    def noted_get(tree: Any) -> Any:
        nonlocal fetching
        events.append("get")
        fetching = True
        try:
            return get(tree)
        finally:
            fetching = False

    def noted_check(self: Any, batch: Any) -> None:
        events.append("batch")
        check(self, batch)

    def noted_value(self: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not fetching:
            events.append("value")
        return value.fget(self)

    state, rows = linear_state(), Rows()
    monkeypatch.setattr(jax, "device_get", noted_get)
    monkeypatch.setattr(BatchShapes, "check", noted_check)
    monkeypatch.setattr(ArrayImpl, "_value", property(noted_value))
    assert float(jnp.ones(())) == 1  # the ears work
    assert events == ["value"]
    events.clear()
    fit(state, make_examples(48), num_epochs=1, log_every=5, loggers=[rows], step_fn=counting_step)
    # The window of steps 1-5 is fetched when step 10 is on its way, and the last one at the end.
    loop = events[events.index("batch") :]
    assert loop == ["batch"] * 10 + ["get"] + ["batch"] * 2 + ["get"] * 2
    assert [step for step, _ in rows.rows] == [5, 10, 12]


# Rows


def test_a_row_is_the_exact_mean_of_its_steps() -> None:
    rows = Rows()
    begin = fit(linear_state(), EXAMPLES, num_steps=2)
    steps = hand_loop(begin, EXAMPLES)
    metrics = [metrics for _, metrics, _ in itertools.islice(steps, 7)]
    fit(begin, EXAMPLES, num_steps=7, log_every=3, loggers=[rows])
    assert [step for step, _ in rows.rows] == [5, 8, 9]
    windows = [metrics[0:3], metrics[3:6], metrics[6:7]]
    for (_, row), window, done in zip(rows.rows, windows, (3, 6, 7)):
        for name in window[0]:
            total = sum(float(m[name].total) for m in window)
            weight = sum(float(m[name].weight) for m in window)
            # The window adds in float32.
            np.testing.assert_allclose(row[f"train/{name}"], total / weight, rtol=1e-6)
        assert row["train/epoch"] == pytest.approx(done / 5, rel=1e-12)
        assert set(row) >= {"train/loss", "train/plain", "train/grad_norm", "train/examples_per_second"}
        assert next(iter(row)) == "train/loss"
    of_first = [float(m["loss"].value) for m in windows[0]]
    assert rows.rows[0][1]["train/loss"] != pytest.approx(np.mean(of_first), rel=1e-3)  # no mean of means


def test_the_learning_rate_is_in_the_row() -> None:
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
    rows = Rows()
    fit(linear_state(optimizer), EXAMPLES, num_steps=2, optimizer=optimizer, loggers=[rows])
    assert rows.rows[0][1]["train/learning_rate"] == 0.25


def per_token(model: Any, batch: Any, key: Any) -> Any:
    weight = jnp.sum(batch["weight"])  # more than one for each example
    return rx.Mean(weight * jnp.mean(errors_of(model, batch)), weight)


def per_example(model: Any, batch: Any, key: Any) -> Any:
    errors = errors_of(model, batch)
    return rx.Mean(jnp.sum(errors), len(errors))


def scalar(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(errors_of(model, batch))


@pytest.mark.parametrize(
    ("loss", "log_every", "eval_every_steps"), [(per_token, 10, 15), (per_example, 10, 15), (scalar, 100, 3)]
)
def test_rates(loss: Any, log_every: int, eval_every_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that a batch moves on by one second, the first one (which compiles) by a minute, and an
    evaluation by an hour."""
    now = 0.0

    def clock() -> float:
        return now

    def timed_collate(examples: Any) -> Any:
        nonlocal now
        if len(examples) == 4:
            now += 60.0 if now == 0 else 1.0
        return collate(examples)

    def metric_fn(examples: Any, predictions: Any) -> Any:
        nonlocal now
        now += 3600.0 if now else 0.0
        return {}

    advance = Reporter.advance

    def advance_when_done(self: Any) -> None:
        jax.block_until_ready(self._pending and self._pending.window)
        advance(self)

    # Devices that are always done with a window when the next step is dispatched.
    monkeypatch.setattr(Reporter, "advance", advance_when_done)
    monkeypatch.setattr("redco_eqx._logging.report.time", types.SimpleNamespace(perf_counter=clock))
    rows = Rows()
    examples = make_examples(100)
    for example in examples:
        example["weight"] = np.float32(3)
    fit(
        linear_state(),
        examples,
        collate_fn=timed_collate,
        loss_fn=loss,
        prefetch=0,
        num_steps=40,
        log_every=log_every,
        loggers=[rows],
        evaluation=rx.Evaluation(
            examples[:3], batch_size=3, every_steps=eval_every_steps, predict_fn=predict_fn, metric_fn=metric_fn
        ),
    )
    train = rows.with_prefix("train/")
    assert [step for step, _ in train] == [
        step for step in range(1, 41) if step % log_every == 0 or step % eval_every_steps == 0 or step == 40
    ]
    steps = np.diff([1, *(step for step, _ in train)])  # without the first, which compiles
    rates = np.array([row["train/examples_per_second"] for _, row in train])
    # The end of a window is seen at the next step, so that one in five may count for its neighbour,
    np.testing.assert_allclose(rates, 4.0, rtol=0.2501)
    # but in all no time is lost, and none counted twice.
    assert np.sum(steps * 4 / rates) == pytest.approx(39, rel=1e-9)
    for _, row in train:
        assert ("train/tokens_per_second" in row) == (loss is per_token)
        if loss is per_token:
            ratio = row["train/tokens_per_second"] / row["train/examples_per_second"]
            assert ratio == pytest.approx(3.0, rel=1e-6)


def test_the_jsonl_logger_and_a_function_take_the_same_rows(tmp_path: pathlib.Path) -> None:
    rows = Rows()
    path = tmp_path / "run" / "log.jsonl"
    with rx.JSONLLogger(path) as logger:
        fit(
            linear_state(),
            EXAMPLES,
            num_steps=4,
            step_fn=counting_step,
            log_every=2,
            loggers=[logger, lambda step, row: rows(step, row)],
            evaluation=rx.Evaluation(EXAMPLES[:5]),
        )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        assert line.pop("time") > 1.6e9
    assert lines == [{"step": step, **row} for step, row in rows.rows]
    assert [line["step"] for line in lines] == [2, 4, 4]


# Terminal


def test_without_loggers_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    arguments: Any = {"evaluation": rx.Evaluation(EXAMPLES[:5]), "step_fn": counting_step}
    fit(linear_state(), EXAMPLES, num_steps=3, log_every=1, loggers=(), **arguments)
    assert capfd.readouterr() == ("", "")


def test_where_there_is_no_terminal_there_is_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    fit(linear_state(), EXAMPLES, num_steps=3, log_every=1, loggers=None, step_fn=counting_step)
    out, err = capfd.readouterr()
    assert out == ""
    first, *rest = err.splitlines()
    assert first == "fit: 22 examples, 5 steps of 4 per epoch, 2 dropped from each"
    assert [line.split()[:3] for line in rest] == [["step", str(i), "train/loss"] for i in (1, 2, 3)]
    assert "\r" not in err
    assert "it/s" not in err


def test_a_bar_where_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    loggers = [rx.ConsoleLogger(progress=True)]
    fit(linear_state(), EXAMPLES, num_epochs=1, loggers=loggers, step_fn=counting_step)
    err = capfd.readouterr().err
    assert "train: 100%" in err
    assert "5/5" in err


# Evaluation


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return {"id": batch["id"], "out": jax.vmap(model)(batch["x"])}


class Metric:
    """A `metric_fn` that remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def __call__(self, examples: Any, predictions: Any) -> Any:
        ids = [examples[i]["id"] for i in range(len(examples))]
        self.calls.append((ids, [int(p["id"]) for p in predictions]))
        return {"size": len(examples), "jax": jnp.ones(()), "numpy": np.float32(2), "array": np.array(3)}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"num_epochs": 2}, [5, 10]),
        ({"num_steps": 7}, [5, 7]),
        ({"num_steps": 10}, [5, 10]),
        ({"num_epochs": 1, "eval_every_steps": 2}, [2, 4, 5]),
        ({"num_steps": 6, "eval_every_steps": 3, "log_every": 4}, [3, 6]),
        ({"num_steps": 3, "eval_every_steps": 50}, [3]),
        ({"num_epochs": 2, "by_epoch": True}, [5, 10]),
        ({"num_epochs": 2, "by_epoch": True, "eval_every_steps": 4}, [4, 8, 10]),
    ],
    ids=str,
)
def test_when_to_evaluate(arguments: Any, expected: list[int]) -> None:
    rows, metric = Rows(), Metric()
    arguments = dict(arguments)
    every_steps = arguments.pop("eval_every_steps", None)
    examples: Any = (lambda _: EXAMPLES) if arguments.pop("by_epoch", False) else EXAMPLES
    found = fit(
        linear_state(),
        examples,
        step_fn=counting_step,
        loggers=[rows],
        evaluation=rx.Evaluation(
            EXAMPLES[:11], every_steps=every_steps, predict_fn=predict_fn, metric_fn=metric
        ),
        **arguments,
    )
    evaluations = rows.with_prefix("eval/")
    assert [step for step, _ in evaluations] == expected
    assert int(found.step) == expected[-1]
    # First the rehearsal, on one batch, and then always everything, in order.
    assert metric.calls == [(list(range(n)), list(range(n))) for n in [4] + [11] * len(expected)]
    for _, row in evaluations:
        assert row.keys() == {f"eval/{n}" for n in ("loss", "plain", "size", "jax", "numpy", "array")}
        assert (row["eval/size"], row["eval/jax"], row["eval/numpy"], row["eval/array"]) == (11, 1, 2, 3)
        assert all(type(x) is float for x in row.values())
    # Train rows come before the evaluation at their step.
    assert [step for step, _ in rows.rows] == sorted(step for step, _ in rows.rows)
    assert rows.rows[-1] == evaluations[-1]
    own = rx.evaluate(found, EXAMPLES[:11], collate_fn=collate, loss_fn=loss_fn, batch_size=4)
    assert {f"eval/{name}": value for name, value in own.items()}.items() <= evaluations[-1][1].items()


def test_evaluation_changes_nothing_in_training() -> None:
    found = fit(
        linear_state(), EXAMPLES, num_epochs=2, evaluation=rx.Evaluation(EXAMPLES, predict_fn=predict_fn)
    )
    assert_same(found, state_after(10))


def test_evaluation_compiles_each_step_once() -> None:
    def fresh_loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(errors_of(model, batch))

    def fresh_predict(model: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(model)(batch["x"])

    with Compilations() as compilations:
        fit(
            linear_state(),
            EXAMPLES,
            loss_fn=fresh_loss,
            num_epochs=3,
            evaluation=rx.Evaluation(EXAMPLES[:8], every_steps=2, predict_fn=fresh_predict),
        )
    assert compilations.names.count(STEP) == 2
    assert compilations.names.count(BODY) == 1


class Odd:
    def __repr__(self) -> str:
        return "<an odd thing>"


def test_the_file_of_predictions(tmp_path: pathlib.Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    examples = [{**example, "extra": None} for example in EXAMPLES[:6]]
    extras: list[Any] = [Odd(), "Grüße", {("a", 1): 2}, {np.int64(3): b"x"}, "half \ud800 pair", loop]
    for example, extra in zip(examples, extras):
        example["extra"] = extra

    def without_extra(given: Any) -> Any:
        return collate([{k: v for k, v in e.items() if k != "extra"} for e in given])

    directory = tmp_path / "deep" / "predictions"
    found = fit(
        linear_state(),
        EXAMPLES,
        collate_fn=without_extra,
        num_epochs=2,
        step_fn=counting_step,
        evaluation=rx.Evaluation(examples, predict_fn=predict_fn, predictions_directory=directory),
    )
    assert sorted(path.name for path in directory.iterdir()) == ["step-10.jsonl", "step-5.jsonl"]
    text = (directory / "step-10.jsonl").read_bytes().decode("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert "Grüße" in text
    predictions = rx.predict(found, examples, collate_fn=without_extra, predict_fn=predict_fn, batch_size=4)
    assert [line["prediction"] for line in lines] == [
        {"id": int(p["id"]), "out": p["out"].tolist()} for p in predictions
    ]
    for i, line in enumerate(lines[:2] + lines[4:5]):
        index = [0, 1, 4][i]
        assert line["example"]["x"] == EXAMPLES[index]["x"].tolist()
        assert line["example"]["id"] == index
    assert lines[0]["example"]["extra"] == "<an odd thing>"
    assert lines[4]["example"]["extra"] == "half \ud800 pair"
    for i in (2, 3, 5):  # what JSON cannot hold at all is there by its repr
        assert lines[i]["example"] == repr(examples[i])


def test_a_file_of_predictions_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no repr")

    examples = [{**example, "extra": Broken()} for example in EXAMPLES[:2]]

    def without_extra(given: Any) -> Any:
        return collate([{k: v for k, v in e.items() if k != "extra"} for e in given])

    with pytest.raises(RuntimeError, match="no repr"):
        fit(
            linear_state(),
            EXAMPLES,
            collate_fn=without_extra,
            num_steps=1,
            step_fn=counting_step,
            evaluation=rx.Evaluation(examples, predict_fn=predict_fn, predictions_directory=tmp_path),
        )
    assert list(tmp_path.iterdir()) == []


def broken(*_: Any) -> Any:
    raise KeyError("mine")


@pytest.mark.parametrize("name", ["predict_fn", "metric_fn", "loss_fn"])
def test_what_is_broken_fails_before_training(name: str) -> None:
    state = linear_state()
    functions: Any = {"predict_fn": predict_fn, "metric_fn": Metric(), "loss_fn": loss_fn, name: broken}
    with Compilations() as compilations, pytest.raises(KeyError, match="mine") as caught:
        fit(state, EXAMPLES, num_epochs=1, evaluation=rx.Evaluation(EXAMPLES, **functions))
    assert BODY not in compilations.names
    assert any("the evaluation" in note for note in caught.value.__notes__)
    assert_same(state, linear_state())  # and the state is still there


def test_prefetch_zero_keeps_all_to_one_thread() -> None:
    threads = set()

    def spying(examples: Any) -> Any:
        threads.add(threading.current_thread())
        return collate(examples)

    fit(
        linear_state(),
        EXAMPLES,
        collate_fn=spying,
        num_epochs=1,
        step_fn=counting_step,
        evaluation=rx.Evaluation(EXAMPLES, predict_fn=predict_fn),
        prefetch=0,
    )
    assert threads == {threading.main_thread()}


# Not a number


def infinite_gradient(model: Any, batch: Any, key: Any) -> Any:
    """The value of the loss is always finite, but at a flag of 0 the gradient is infinite."""
    zero = jnp.sum(model.bias) - jax.lax.stop_gradient(jnp.sum(model.bias))
    return jnp.mean(errors_of(model, batch)) + jnp.mean(jnp.sqrt(batch["flag"] + zero))


NONFINITE = {"nan loss": (loss_fn, np.nan), "inf loss": (loss_fn, np.inf), "gradient": (infinite_gradient, 0)}


def spoiled(value: float) -> tuple[list[Any], int]:
    """Examples of which one is spoiled, and the step of the first epoch that meets it."""
    examples = make_examples(20)
    examples[7]["flag"] = np.float32(value)
    batches = [batch for _, _, batch in itertools.islice(hand_loop(linear_state(), make_examples(20)), 5)]
    return examples, next(i for i, batch in enumerate(batches) if 7 in np.asarray(batch["id"]))


@pytest.mark.parametrize(
    ("kind", "log_every"),
    [("nan loss", 1), ("nan loss", 100), ("inf loss", 100), ("gradient", 1), ("gradient", 100)],
)
def test_a_nonfinite_step_ends_the_run_with_the_state_before_it(kind: str, log_every: int) -> None:
    loss, value = NONFINITE[kind]
    examples, step = spoiled(value)
    assert step > 0
    rows = Rows()
    with pytest.raises(rx.NonFiniteError, match=f"not finite at step {step} ") as caught:
        fit(linear_state(), examples, num_epochs=2, loss_fn=loss, log_every=log_every, loggers=[rows])
    assert caught.value.step == step
    assert_same(caught.value.state, state_after(step, examples=examples, loss_fn=loss))
    assert all(math.isfinite(x) for _, row in rows.rows for x in row.values())
    assert [at for at, _ in rows.rows] == (list(range(1, step + 1)) if log_every == 1 else [])


def test_a_nonfinite_step_is_found_before_an_evaluation() -> None:
    examples, step = spoiled(np.nan)
    rows = Rows()
    with pytest.raises(rx.NonFiniteError):
        fit(
            linear_state(),
            examples,
            num_epochs=2,
            log_every=100,
            loggers=[rows],
            evaluation=rx.Evaluation(EXAMPLES[:4], every_steps=step + 1),
        )
    assert rows.rows == []


@pytest.mark.parametrize("kind", ["nan loss", "gradient"])
def test_skipping_leaves_out_exactly_the_step(kind: str) -> None:
    loss, value = NONFINITE[kind]
    optimizer = optax.adam(1e-2)
    examples, step = spoiled(value)
    hand: Any = {"loss_fn": loss, "optimizer": optimizer}
    steps = list(itertools.islice(hand_loop(linear_state(optimizer), examples, skip=step, **hand), 5))
    rows = Rows()
    found = fit(
        linear_state(optimizer),
        examples,
        num_steps=5,
        on_nonfinite="skip",
        log_every=2,
        loggers=[rows],
        **hand,
    )
    # Parameters, moments and counts are kept at that step, only its number counts; and training goes on.
    assert_same(found, steps[-1][0])
    assert int(found.step) == 5
    assert [at for at, _ in rows.rows] == [2, 4, 5]
    for at, row in rows.rows:
        window = [i for i in range(5) if i // 2 == (at - 1) // 2]
        taken = [steps[i][1]["loss"] for i in window if i != step]
        assert row.get("train/skipped_steps", 0) == len(window) - len(taken)
        assert ("train/loss" in row) == bool(taken)
        if taken:
            mean = sum(float(m.total) for m in taken) / sum(float(m.weight) for m in taken)
            np.testing.assert_allclose(row["train/loss"], mean, rtol=1e-6)  # added in float32


# Ctrl-C


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_at_the_next_step_with_the_state() -> None:
    rows = Rows()

    def logger(step: int, row: Any) -> None:
        rows(step, row)
        if step == 2:
            interrupt()

    with pytest.raises(rx.TrainingInterrupted) as caught:
        fit(linear_state(), EXAMPLES, num_epochs=9, log_every=1, loggers=[logger])
    # The row of step 2 is there when step 3 is on its way, and the next boundary is that of step 4.
    stopped = caught.value.step
    assert stopped == 4
    assert isinstance(caught.value, KeyboardInterrupt)
    assert int(caught.value.state.step) == stopped
    assert [step for step, _ in rows.rows] == list(range(1, stopped + 1))  # no row is lost
    expected = state_after(stopped)
    assert_same(caught.value.state, expected)
    assert_same(fit(caught.value.state, EXAMPLES, num_steps=3), state_after(3, expected))  # and it can be used


def interrupting_collate(at: int, times: int = 1) -> Any:
    calls = itertools.count(1)

    def collate_and_interrupt(examples: Any) -> Any:
        if next(calls) == at:
            for _ in range(times):
                interrupt()
        return collate(examples)

    return collate_and_interrupt


@pytest.mark.parametrize("at", [1, 3, 5, 6])
def test_an_interrupt_while_a_batch_is_made(at: int) -> None:
    rows = Rows()
    with pytest.raises(rx.TrainingInterrupted, match=f"after step {at};") as caught:
        fit(
            linear_state(),
            EXAMPLES,
            collate_fn=interrupting_collate(at),
            num_steps=9,
            step_fn=counting_step,
            prefetch=0,
            log_every=4,
            loggers=[rows],
        )
    assert_counted(caught.value.state, at, linear_state())
    assert [step for step, _ in rows.rows] == [*range(4, at, 4), at]


def test_an_interrupt_from_the_thread_that_makes_batches() -> None:
    with pytest.raises(rx.TrainingInterrupted) as caught:
        fit(
            linear_state(),
            EXAMPLES,
            collate_fn=interrupting_collate(3),
            num_steps=10_000,
            step_fn=counting_step,
        )
    assert_counted(caught.value.state, caught.value.step, linear_state())


def test_an_interrupt_at_the_last_evaluation_is_not_lost() -> None:
    calls = itertools.count()

    def metric_fn(examples: Any, predictions: Any) -> Any:
        if next(calls) == 1:
            interrupt()
        return {}

    with pytest.raises(rx.TrainingInterrupted) as caught:
        fit(
            linear_state(),
            EXAMPLES,
            num_steps=2,
            step_fn=counting_step,
            evaluation=rx.Evaluation(EXAMPLES, predict_fn=predict_fn, metric_fn=metric_fn),
        )
    assert_counted(caught.value.state, 2, linear_state())


def test_a_second_interrupt_leaves_at_once() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(
            linear_state(),
            EXAMPLES,
            collate_fn=interrupting_collate(3, times=2),
            num_steps=9,
            step_fn=counting_step,
            prefetch=0,
        )
    assert type(caught.value) is KeyboardInterrupt


def test_an_interrupt_while_the_last_good_state_waits() -> None:
    examples, step = spoiled(np.nan)
    with pytest.raises(rx.NonFiniteError) as caught:
        fit(
            linear_state(),
            examples,
            collate_fn=interrupting_collate(step + 2),
            num_steps=99,
            prefetch=0,
            log_every=100,
        )
    assert caught.value.step == step


def test_the_programs_own_handler_stays() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        found = fit(
            linear_state(),
            EXAMPLES,
            collate_fn=interrupting_collate(2),
            num_steps=3,
            step_fn=counting_step,
            prefetch=0,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [True]
    assert_counted(found, 3, linear_state())


def test_outside_the_main_thread_no_handler_is_needed() -> None:
    found: list[Any] = []

    def run() -> None:
        found.append(fit(linear_state(), EXAMPLES, num_steps=3, step_fn=counting_step))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert_counted(found[0], 3, linear_state())


def test_a_real_ctrl_c(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    tests = pathlib.Path(__file__).parent.parent
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys
            os.open(sys.argv[1], os.O_RDWR)  # now the terminal that Ctrl-C is typed on is this program's
            sys.path.insert(0, {str(tests)!r})
            import jax
            from fit_helpers import counting_step, fit, linear_state, make_examples
            import redco_eqx as rx

            examples, options = make_examples(20), dict(step_fn=counting_step, log_every=500)
            try:
                say = lambda step, row: print("step", step, file=sys.stdout, flush=True)
                console = rx.ConsoleLogger(open(os.devnull, "w"), progress=True)
                fit(linear_state(), examples, num_epochs=10**6, loggers=[say, console], **options)
            except rx.TrainingInterrupted as error:
                state = fit(error.state, examples, num_steps=5, **options)
                print("went on", int(state.step) - error.step, flush=True)
            """
        )
    )
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    child = subprocess.Popen(
        [sys.executable, str(script), os.ttyname(theirs)],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
        text=True,
    )
    drawn: list[bytes] = []

    def drain() -> None:
        try:
            while data := os.read(ours, 4096):
                drawn.append(data)
        except OSError:  # the other end is closed
            pass

    drainer = threading.Thread(target=drain, daemon=True)
    drainer.start()
    deadline = threading.Timer(120, child.kill)
    deadline.start()
    try:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("step 500")
        os.write(ours, b"\x03")
        out, _ = child.communicate(timeout=60)
    finally:
        deadline.cancel()
        child.kill()
        child.wait()
        os.close(theirs)
        drainer.join(5)
        os.close(ours)
    assert out.splitlines()[-1] == "went on 5"
    assert child.returncode == 0
    assert b"train:" in b"".join(drawn)  # on a terminal there is a bar


# A step of one's own


def test_a_step_of_ones_own() -> None:
    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean(errors_of(state.build(params, {}), batch))

        value, grads = jax.value_and_grad(loss)(state.params)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, state.params, grads)
        metrics = {"loss": value, "tokens": rx.Mean(jnp.sum(batch["weight"]), 1.0), "count": 7}
        return dataclasses.replace(state, params=params, step=state.step + 1), metrics

    def forbidden(model: Any, batch: Any, key: Any) -> Any:
        raise AssertionError("loss_fn is for evaluation here")

    rows = Rows()
    found = fit(
        linear_state(), EXAMPLES, num_epochs=1, loss_fn=forbidden, step_fn=step, log_every=2, loggers=[rows]
    )
    assert int(found.step) == 5
    expected = state_after(5, loss_fn=scalar)
    for path, x in expected.params.items():
        np.testing.assert_allclose(found.params[path], x, rtol=1e-5)  # written in another order
    batches = [batch for _, _, batch in itertools.islice(hand_loop(linear_state(), EXAMPLES), 5)]
    sums = [float(np.sum(batch["weight"])) for batch in batches]
    assert [row["train/tokens"] for _, row in rows.rows] == [
        (sums[0] + sums[1]) / 2,
        (sums[2] + sums[3]) / 2,
        sums[4],
    ]
    assert [row["train/count"] for _, row in rows.rows] == [7, 7, 7]
    assert all("train/grad_norm" not in row for _, row in rows.rows)


def test_a_step_of_ones_own_that_is_not_finite() -> None:
    def step(state: Any, batch: Any) -> Any:
        loss = jnp.where(state.step == 3, jnp.nan, 1.0)
        params = jax.tree.map(lambda p: p + 1, state.params)
        return dataclasses.replace(state, params=params, step=state.step + 1), {"loss": loss}

    with pytest.raises(rx.NonFiniteError) as caught:
        fit(linear_state(), EXAMPLES, num_epochs=2, step_fn=step)
    assert caught.value.step == 3
    np.testing.assert_array_equal(
        caught.value.state.params["bias"], np.asarray(linear_state().params["bias"]) + 1 + 1 + 1
    )


# What fails, and what is warned of


class TwoHeads(eqx.Module):
    used: eqx.nn.Linear
    idle: eqx.nn.Linear
    table: Any

    def __call__(self, x: Any) -> Any:
        return self.used(x)


def two_heads_state(**arguments: Any) -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    used, idle = (eqx.nn.Linear(2, 2, key=key) for key in keys)
    model = TwoHeads(used, idle, np.ones(3, np.float32))
    return rx.init_state(model, SGD, key=jax.random.key(1), **arguments)


def test_unused_parameters_are_told_once_by_path() -> None:
    # No thread: beartype, at work in it, now and then catches what another thread warns of.
    with pytest.warns(UserWarning, match="does not depend on 2 trainable arrays") as caught:
        fit(two_heads_state(), EXAMPLES, num_epochs=2, prefetch=0)
    assert len(caught) == 1
    assert "idle.bias, idle.weight." in str(caught[0].message)


def test_parameters_that_are_left_out_are_not_told() -> None:
    model = two_heads_state().model
    nothing = jax.tree.map(lambda _: False, model)
    chosen = eqx.tree_at(lambda m: [m.used.weight, m.used.bias], nothing, [True, True])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(two_heads_state(trainable=chosen), EXAMPLES, num_epochs=2, prefetch=0)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_collate_fn_in_the_second_epoch_arrives(prefetch: int) -> None:
    calls = itertools.count(1)
    own = LookupError("mine")

    def failing(examples: Any) -> Any:
        if next(calls) == 7:
            raise own
        return collate(examples)

    with pytest.raises(LookupError) as caught:
        fit(
            linear_state(), EXAMPLES, collate_fn=failing, num_epochs=3, step_fn=counting_step, prefetch=prefetch
        )
    assert caught.value is own
    assert any("batch 1 of epoch 1" in note for note in own.__notes__)


def test_an_error_of_loss_fn_arrives_unchanged() -> None:
    own = LookupError("mine")

    def failing(model: Any, batch: Any, key: Any) -> Any:
        raise own

    state = linear_state()
    with Compilations() as compilations, pytest.raises(LookupError) as caught:
        fit(state, EXAMPLES, loss_fn=failing, num_epochs=3)
    assert caught.value is own
    assert BODY not in compilations.names
    assert_same(state, linear_state())


def test_an_error_of_a_logger_arrives() -> None:
    own = LookupError("mine")

    def failing(step: int, row: Any) -> None:
        raise own

    with pytest.raises(LookupError) as caught:
        fit(linear_state(), EXAMPLES, num_epochs=3, loggers=[failing], step_fn=counting_step)
    assert caught.value is own


@pytest.mark.parametrize(("n", "batch_size", "num_epochs"), [(22, 4, 3), (4, 4, 1), (7, 4, 2)])
def test_num_train_steps_is_what_fit_takes(n: int, batch_size: int, num_epochs: int) -> None:
    arguments: Any = {"batch_size": batch_size, "num_epochs": num_epochs}
    found = fit(linear_state(), EXAMPLES[:n], step_fn=counting_step, **arguments)
    assert int(found.step) == rx.num_train_steps(n, batch_size=batch_size, num_epochs=num_epochs)
    with pytest.raises(ValueError, match=r"3 examples do not fill a batch of 4"):
        rx.num_train_steps(3, batch_size=4, num_epochs=1)
    with pytest.raises(ValueError, match="batch_size=0"):
        rx.num_train_steps(3, batch_size=0, num_epochs=1)
