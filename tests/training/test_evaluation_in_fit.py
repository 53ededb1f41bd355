"""Evaluations within `fit`: when, their predictions, and what is broken in them."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import (
    BODY,
    COUNTING,
    EXAMPLES,
    STEP,
    Compilations,
    Rows,
    assert_same,
    collate,
    errors_of,
    fit,
    linear_state,
    loss_fn,
    predict_fn,
    state_after,
)

import redco_eqx as rx


class Metric:
    """A `metric_fn` that remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int]]] = []

    def __call__(self, examples: Any, predictions: Any) -> Any:
        ids = [examples[i]["id"] for i in range(len(examples))]
        self.calls.append((ids, [int(p["id"]) for p in predictions]))
        return {"size": len(examples), "jax": jnp.ones(()), "numpy": np.float32(2), "array": np.array(3)}


def test_rows_of_evaluations_and_when_they_are_made() -> None:
    """Every fourth step, and at the end, of epochs that have examples of their own."""
    rows, metric, examples = Rows(), Metric(), EXAMPLES[:11]
    evaluation = rx.Evaluation(examples, every_steps=4, predict_fn=predict_fn, metric_fn=metric)
    arguments: Any = {"num_epochs": 2, "optimizer": COUNTING, "evaluation": evaluation}
    found = fit(linear_state(), lambda epoch: EXAMPLES, loggers=[rows], **arguments)
    evaluations = rows.with_prefix("eval/")
    assert [step for step, _ in evaluations] == [4, 8, 10]
    assert int(found.step) == 10
    # First the rehearsal, on one batch, and then always everything, in order.
    assert metric.calls == [(list(range(n)), list(range(n))) for n in (4, 11, 11, 11)]
    for _, row in evaluations:
        assert row.keys() == {f"eval/{n}" for n in ("loss", "plain", "size", "jax", "numpy", "array")}
        assert (row["eval/size"], row["eval/jax"], row["eval/numpy"], row["eval/array"]) == (11, 1, 2, 3)
        assert all(type(x) is float for x in row.values())
    # Train rows come before the evaluation at their step.
    assert [step for step, _ in rows.rows] == sorted(step for step, _ in rows.rows)
    assert rows.rows[-1] == evaluations[-1]
    own = rx.evaluate(found, examples, collate_fn=collate, loss_fn=loss_fn, batch_size=4)
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


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def predicted(extras: list[Any], directory: pathlib.Path) -> tuple[list[Any], list[Any]]:
    """Trains, and writes predictions for examples that have something besides; these, and what is predicted."""
    examples = [{**example, "extra": extra} for example, extra in zip(EXAMPLES, extras)]

    def without_extra(given: Any) -> Any:
        return collate([{k: v for k, v in e.items() if k != "extra"} for e in given])

    evaluation = rx.Evaluation(examples, predict_fn=predict_fn, predictions_directory=directory)
    arguments: Any = {"num_epochs": 2, "optimizer": COUNTING, "evaluation": evaluation}
    state = fit(linear_state(), EXAMPLES, collate_fn=without_extra, **arguments)
    given: Any = {"collate_fn": without_extra, "predict_fn": predict_fn, "batch_size": 4}
    return examples, rx.predict(state, examples, **given)


def test_the_file_of_predictions(tmp_path: pathlib.Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    extras: list[Any] = [Odd(), "Grüße", {("a", 1): 2}, {np.int64(3): b"x"}, "half \ud800 pair", loop]
    directory = tmp_path / "deep" / "predictions"
    examples, predictions = predicted(extras, directory)
    assert sorted(path.name for path in directory.iterdir()) == ["step-10.jsonl", "step-5.jsonl"]
    text = (directory / "step-10.jsonl").read_bytes().decode("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert "Grüße" in text
    assert [line["prediction"] for line in lines] == [
        {"id": int(p["id"]), "out": p["out"].tolist()} for p in predictions
    ]
    for i in (0, 1, 4):
        assert lines[i]["example"]["x"] == EXAMPLES[i]["x"].tolist()
        assert lines[i]["example"]["id"] == i
    assert lines[0]["example"]["extra"] == "<an odd thing>"
    assert lines[4]["example"]["extra"] == "half \ud800 pair"
    for i in (2, 3, 5):  # what JSON cannot hold at all is there by its repr
        assert lines[i]["example"] == repr(examples[i])


def test_a_file_of_predictions_that_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(RuntimeError, match="no repr"):
        predicted([Broken(), Broken()], tmp_path)
    assert list(tmp_path.iterdir()) == []


def broken(*_: Any) -> Any:
    raise KeyError("mine")


def test_what_is_broken_fails_before_training() -> None:
    state = linear_state()
    for name in ("predict_fn", "metric_fn", "loss_fn"):
        functions: Any = {"predict_fn": predict_fn, "metric_fn": Metric(), "loss_fn": loss_fn, name: broken}
        with Compilations() as compilations, pytest.raises(KeyError, match="mine") as caught:
            fit(state, EXAMPLES, num_epochs=1, evaluation=rx.Evaluation(EXAMPLES, **functions))
        assert BODY not in compilations.names
        assert any("the evaluation" in note for note in caught.value.__notes__)
    assert_same(state, linear_state())  # and the state is still there
