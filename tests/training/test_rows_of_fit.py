"""The rows that `fit` logs, its history, and what it writes to a terminal."""

import itertools
import pathlib
import pickle
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
    Collate,
    Rows,
    assert_same,
    collate,
    errors_of,
    fit,
    fit_with_history,
    hand_loop,
    linear_state,
    make_examples,
    predict_fn,
    scalar_loss,
    spoiled,
    without_times,
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


@pytest.mark.parametrize(
    ("loss", "log_every", "eval_every_steps"),
    [(per_token, 10, 15), (scalar_loss, 100, 3)],
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


# History

EVALUATION = rx.Evaluation(EXAMPLES, every_steps=4)


def run(num_steps: int = 11, **arguments: Any) -> Any:
    defaults: Any = {"num_steps": num_steps, "log_every": 3, "evaluation": EVALUATION}
    return fit_with_history(linear_state(), EXAMPLES, **{**defaults, **arguments})


def test_it_has_what_the_loggers_got_without_rates() -> None:
    rows = Rows()
    _, history = run(loggers=[rows])
    assert [row["step"] for row in history.rows] == [3, 4, 6, 8, 9, 11]
    assert [row["step"] for row in history.evaluations] == [4, 8, 11]
    expected = [{"step": step, **row} for step, row in without_times(rows.rows)]
    assert [row for row in expected if "eval/loss" not in row] == list(history.rows)
    assert [row for row in expected if "eval/loss" in row] == list(history.evaluations)
    assert history["eval/loss"] == [row["eval/loss"] for row in history.evaluations]
    assert history["train/loss"] == [row["train/loss"] for row in history.rows]
    with pytest.raises(KeyError, match=r"eval/los' is in no row .* train/loss, .*eval/loss"):
        history["eval/los"]


def test_an_error_comes_with_the_rows_of_all_steps_before_it() -> None:
    """Also with those that were handed to the devices and not looked at."""

    def fail() -> None:
        raise LookupError("mine")

    rows, examples = Rows(), rx.Data(EXAMPLES, prefetch=0)
    with pytest.raises(LookupError) as error:
        fit_with_history(
            linear_state(), examples, collate_fn=Collate(8, fail), num_steps=9, log_every=1, loggers=[rows]
        )
    raised: Any = error.value
    assert int(raised.state.step) == len(raised.history.rows) == len(rows.rows) == 7


def test_a_run_without_rows_has_an_empty_history() -> None:
    assert rx.types.History() == rx.types.History((), ())
    with pytest.raises(KeyError, match="none"):
        rx.types.History()["train/loss"]


def test_runs_in_one_directory_have_their_own_rows(tmp_path: pathlib.Path) -> None:
    arguments: Any = {"optimizer": COUNTING, "checkpoints": tmp_path, "log_every": 1}
    state, first = fit_with_history(linear_state(), EXAMPLES, num_steps=3, **arguments)
    _, second = fit_with_history(state, EXAMPLES, num_steps=2, **arguments)
    assert [row["step"] for row in first.rows] == [1, 2, 3]
    assert [row["step"] for row in second.rows] == [4, 5]


def test_numbers_that_are_not_finite_come_back(tmp_path: pathlib.Path) -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        value = jnp.mean(errors_of(model, batch))
        return value, {"odd": value * jnp.nan, "large": value + jnp.inf}

    for _ in range(2):
        _, history = fit_with_history(
            linear_state(), EXAMPLES, num_steps=2, log_every=1, checkpoints=tmp_path, loss_fn=loss
        )
        assert np.isnan(history["train/odd"]).all()
        assert history["train/large"] == [np.inf, np.inf]


def test_checkpoints_do_not_grow_by_rows(tmp_path: pathlib.Path) -> None:
    fit_with_history(
        linear_state(), EXAMPLES, num_steps=60, log_every=1, optimizer=COUNTING,
        checkpoints=rx.Checkpoints(tmp_path, every_steps=20, keep_last=None),
    )  # fmt: skip
    first, *_, last = (
        len((tmp_path / f"{step}" / "record" / "record.json").read_bytes()) for step in (20, 40, 60)
    )
    assert last <= first + 10
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 60


def test_errors_carry_it_from_one_process_to_another() -> None:
    examples, step = spoiled(np.nan)
    with pytest.raises(rx.errors.NonFiniteError) as caught:
        fit_with_history(linear_state(), examples, num_epochs=2, log_every=1)
    assert [row["step"] for row in caught.value.history.rows] == list(range(1, step + 1))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.step, again.history) == (str(caught.value), step, caught.value.history)
    assert_same(again.state, caught.value.state)
    error = rx.errors.TrainingInterrupted(None, 3, history=caught.value.history)
    assert pickle.loads(pickle.dumps(error)).history == caught.value.history


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
    sizes = r"([\d.]+) KiB of each device, ([\d.]+) KiB of it while it runs"
    found = re.fullmatch(f"fit: a step takes {sizes}, and sends nothing", cost)
    assert found, cost
    assert float(found[2]) < float(found[1])
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
