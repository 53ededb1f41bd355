"""The history of a run: the same whether it was interrupted or not, in memory and beside checkpoints."""

import copy
import json
import pathlib
import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import COUNTING, EXAMPLES, Rows, collate, errors_of, fit_with_history, linear_state, spoiled

import redco_eqx as rx

EVALUATION = rx.Evaluation(EXAMPLES, every_steps=4)


class Failing:
    """A logger that fails once, at some step."""

    def __init__(self, step: int):
        self.step = step

    def __call__(self, step: int, row: Any) -> None:
        if step == self.step:
            raise OSError("killed")


def run(num_steps: int = 11, **arguments: Any) -> Any:
    defaults: Any = {"num_steps": num_steps, "log_every": 3, "evaluation": EVALUATION}
    return fit_with_history(linear_state(), EXAMPLES, **{**defaults, **arguments})


def test_it_has_what_the_loggers_got_without_rates() -> None:
    rows = Rows()
    _, history = run(loggers=[rows])
    assert [row["step"] for row in history.rows] == [3, 4, 6, 8, 9, 11]
    assert [row["step"] for row in history.evaluations] == [4, 8, 11]
    expected = [{"step": step, **row} for step, row in rows.rows]
    for row in expected:
        row.pop("train/examples_per_second", None)
        row.pop("train/tokens_per_second", None)
    assert [row for row in expected if "eval/loss" not in row] == list(history.rows)
    assert [row for row in expected if "eval/loss" in row] == list(history.evaluations)
    assert history["eval/loss"] == [row["eval/loss"] for row in history.evaluations]
    assert history["train/loss"] == [row["train/loss"] for row in history.rows]
    with pytest.raises(KeyError, match=r"eval/los' is in no row .* train/loss, .*eval/loss"):
        history["eval/los"]


def test_an_error_comes_with_the_rows_of_all_steps_before_it() -> None:
    """Also with those that were handed to the devices and not looked at."""
    rows, num_batches = Rows(), 0

    def fails_later(examples: Any) -> Any:
        nonlocal num_batches
        num_batches += 1
        if num_batches == 8:
            raise LookupError("mine")
        return collate(examples)

    examples = rx.Data(EXAMPLES, prefetch=0)
    with pytest.raises(LookupError) as error:
        fit_with_history(
            linear_state(), examples, collate_fn=fails_later, num_steps=9, log_every=1, loggers=[rows]
        )
    raised: Any = error.value
    assert int(raised.state.step) == len(raised.history.rows) == len(rows.rows) == 7


def test_a_run_without_rows_has_an_empty_history() -> None:
    assert rx.types.History() == rx.types.History((), ())
    with pytest.raises(KeyError, match="none"):
        rx.types.History()["train/loss"]


@pytest.mark.parametrize("at", [3, 4, 5, 6, 8, 10])
@pytest.mark.parametrize("killed", [False, True])
def test_a_resumed_run_has_the_history_of_an_uninterrupted_one(
    tmp_path: pathlib.Path, at: int, killed: bool
) -> None:
    """Killed: with rows of steps after its newest checkpoint, and half a line."""
    _, expected = run()
    checkpoints = rx.Checkpoints(tmp_path, every_steps=2, keep_last=None)
    file = tmp_path / "history.jsonl"

    def stops(record: Any, row: Any, state: Any) -> None:
        if record.step >= at:
            raise OSError("killed")

    for _ in range(2):  # it goes on from where it stopped, and is stopped there again
        with pytest.raises(OSError, match="killed") as caught:
            run(checkpoints=checkpoints, hook=stops)
        error: Any = caught.value
        assert list(error.history.rows) == [
            row for row in expected.rows if row["step"] <= int(error.state.step)
        ]
    if killed:
        later = [json.loads(line) for line in file.read_text().splitlines()][-1]
        with file.open("a") as opened:
            opened.write(json.dumps({**later, "step": 99}) + "\n" + json.dumps(later)[:20])
    assert run(checkpoints=checkpoints)[1] == expected
    assert run(checkpoints=checkpoints)[1] == expected  # it is over


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(tmp_path: pathlib.Path) -> None:
    _, expected = run()
    checkpoints = rx.Checkpoints(tmp_path, every_steps=1000)
    with pytest.raises(OSError, match="killed"):
        run(checkpoints=checkpoints, loggers=[Failing(9)])
    for path in tmp_path.iterdir():  # the checkpoint that the error has left
        if path.is_dir():
            path.rename(path.with_name(path.name + ".orbax-checkpoint-tmp"))
    assert (tmp_path / "history.jsonl").read_text()
    assert run(checkpoints=checkpoints)[1] == expected


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
    assert copy.copy(caught.value).history == caught.value.history
    error = rx.errors.TrainingInterrupted(None, 3, history=caught.value.history)
    assert pickle.loads(pickle.dumps(error)).history == caught.value.history
