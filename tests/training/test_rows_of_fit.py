"""The rows that `fit` logs, and what it writes to a terminal."""

import itertools
import json
import pathlib
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    COUNTING,
    EXAMPLES,
    Rows,
    collate,
    errors_of,
    fit,
    hand_loop,
    linear_state,
    make_examples,
    predict_fn,
    scalar_loss,
)

import redco_eqx as rx
from redco_eqx._training.run import Training

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


@pytest.mark.parametrize(
    ("loss", "log_every", "eval_every_steps"),
    [(per_token, 10, 15), (per_example, 10, 15), (scalar_loss, 100, 3)],
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

    catch_up = Training._catch_up

    def catch_up_when_done(self: Any, num_ahead: int = 0) -> None:
        jax.block_until_ready([step.window for step in self._ahead])
        catch_up(self, num_ahead)

    # Devices that are always done with a window when the next step is dispatched.
    monkeypatch.setattr(Training, "_catch_up", catch_up_when_done)
    for module in ("run", "loggers"):
        monkeypatch.setattr(f"redco_eqx._training.{module}.time", types.SimpleNamespace(perf_counter=clock))
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
            optimizer=COUNTING,
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
    arguments: Any = {"evaluation": rx.Evaluation(EXAMPLES[:5]), "optimizer": COUNTING}
    fit(linear_state(), EXAMPLES, num_steps=3, log_every=1, loggers=(), **arguments)
    assert capfd.readouterr() == ("", "")


def test_where_there_is_no_terminal_there_is_no_bar(capfd: pytest.CaptureFixture[str]) -> None:
    fit(linear_state(), EXAMPLES, num_steps=3, log_every=1, loggers=None, optimizer=COUNTING)
    out, err = capfd.readouterr()
    assert out == ""
    first, cost, *rest = err.splitlines()
    assert first == "fit: 22 examples, 5 steps of 4 per epoch, 2 dropped from each"
    assert re.fullmatch(r"fit: a step takes .* of each device, .* while it runs, and sends nothing", cost)
    assert [line.split()[:3] for line in rest] == [["step", str(i), "train/loss"] for i in (1, 2, 3)]
    assert "\r" not in err
    assert "it/s" not in err


def test_a_bar_where_it_is_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    loggers = [rx.ConsoleLogger(progress=True)]
    fit(linear_state(), EXAMPLES, num_epochs=1, loggers=loggers, optimizer=COUNTING)
    err = capfd.readouterr().err
    assert "train: 100%" in err
    assert "loss " in err
    assert "5/5" in err
