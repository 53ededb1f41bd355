"""`fit` with checkpoints: interrupted and resumed equals uninterrupted, and nothing is lost."""

import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys
import textwrap
from typing import Any

import equinox as eqx
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
    errors_of,
    fit,
    linear_state,
    loss_fn,
    make_examples,
    mlp_state,
)
from helpers import events

import redco_eqx as rx

EVERY = 2


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Collate:
    """`collate`, which notes ids and acts at its n-th call (from 1, evaluations included)."""

    def __init__(self, at: int | None = None, act: Any = terminate):
        self.ids: list[int] = []
        self.num_calls = 0
        self._at, self._act = at, act

    def __call__(self, examples: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self._at:
            self._act()
        self.ids += [example["id"] for example in examples]
        return collate(examples)


def counted(state: Any, directory: Any, **arguments: Any) -> Any:
    """`fit` that compiles in no time, saves every second step, and makes batches when they are asked for."""
    checkpoints = directory
    if not isinstance(directory, rx.Checkpoints):
        checkpoints = rx.Checkpoints(directory, every_steps=EVERY)
    defaults = {"optimizer": COUNTING, "prefetch": 0, "num_steps": 12}
    if "num_epochs" in arguments:
        del defaults["num_steps"]
    return fit(state, EXAMPLES, checkpoints=checkpoints, **{**defaults, **arguments})


def steps_in(directory: pathlib.Path) -> list[int]:
    return [info.step for info in rx.list_checkpoints(directory)]


def without_times(rows: list[Any]) -> list[Any]:
    return [
        (step, {name: x for name, x in row.items() if not name.endswith("per_second")}) for step, row in rows
    ]


def read_log(path: pathlib.Path) -> list[Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    unlike = ("time", "run")
    return without_times(
        [(line.pop("step"), {k: x for k, x in line.items() if k not in unlike}) for line in lines]
    )


# Bit for bit


def dropout_loss(model: Any, batch: Any, key: Any) -> Any:
    keep = jax.random.bernoulli(key, 0.7, batch["x"].shape)
    errors = errors_of(model, {**batch, "x": batch["x"] * keep})
    return rx.Mean(jnp.sum(batch["weight"] * errors), jnp.sum(batch["weight"])), {"plain": jnp.mean(errors)}


@pytest.mark.parametrize("at", [3, 5, 7], ids=["mid-epoch", "epoch edge", "between evaluations"])
def test_interrupted_and_resumed_equals_uninterrupted(at: int, tmp_path: pathlib.Path) -> None:
    """With dropout, unequal weights, microbatches, Adam, a mesh with all axes, evaluations, and log rows that
    straddle the interruption."""
    examples = make_examples(44, dim=8)
    optimizer = optax.adam(1e-2)
    arguments: Any = {
        "loss_fn": dropout_loss,
        "optimizer": optimizer,
        "batch_size": 8,
        "num_microbatches": 2,
        "num_epochs": 3,
        "evaluation": rx.Evaluation(examples[:8], every_steps=4),
        "log_every": 3,
        "prefetch": 0,
    }

    def run(name: str, collate_fn: Collate) -> Any:
        with rx.JSONLLogger(tmp_path / f"{name}.jsonl") as logger:
            return fit(
                mlp_state(optimizer, rx.make_mesh(tensor=2, fsdp=2)),
                examples,
                collate_fn=collate_fn,
                checkpoints=rx.Checkpoints(tmp_path / name, every_steps=EVERY),
                loggers=[logger],
                **arguments,
            )

    whole = Collate()
    expected = run("whole", whole)
    # The first call is the rehearsal, and each evaluation has one.
    first, second = Collate(at=1 + at + (at - 1) // 4), Collate()
    with pytest.raises(rx.errors.TrainingInterrupted) as caught:
        run("cut", first)
    assert caught.value.step == at
    assert_same(run("cut", second), expected)
    rehearsal = list(range(8))
    assert first.ids[8:] + second.ids[8:] == whole.ids[8:]
    assert whole.ids[:8] == first.ids[:8] == second.ids[:8] == rehearsal
    cut, uncut = (read_log(tmp_path / f"{name}.jsonl") for name in ("cut", "whole"))
    # The interruption ended a row early; otherwise the rows are the same.
    assert [row for row in uncut if row[0] <= at - at % 3] == [row for row in cut if row[0] <= at - at % 3]
    assert uncut[-1] == cut[-1]
    evaluations = [[row for row in rows if "eval/loss" in row[1]] for rows in (cut, uncut)]
    assert evaluations[0] == evaluations[1]
    assert [step for step, _ in evaluations[0]] == [4, 8, 12, 15]


def test_a_crash_loses_no_row(tmp_path: pathlib.Path) -> None:
    """A run that is killed has logged more than it has saved, and has saved in the middle of a row."""
    arguments: Any = {"log_every": 5, "num_steps": 20}
    with rx.JSONLLogger(tmp_path / "whole.jsonl") as logger:
        counted(linear_state(), tmp_path / "whole", loggers=[logger], **arguments)
    with rx.JSONLLogger(tmp_path / "cut.jsonl") as logger:
        # What a kill leaves behind, at step 12 of a run whose checkpoint at 12 is not whole yet.
        counted(linear_state(), tmp_path / "cut", loggers=[logger], **{**arguments, "num_steps": 12})
        logger(15, {"train/loss": 5.0})
        os.rename(tmp_path / "cut" / "12", tmp_path / "cut" / "12.orbax-checkpoint-tmp")
    assert steps_in(tmp_path / "cut") == [10]
    with rx.JSONLLogger(tmp_path / "cut.jsonl") as logger:
        counted(linear_state(), tmp_path / "cut", loggers=[logger], **arguments)
    assert read_log(tmp_path / "cut.jsonl") == read_log(tmp_path / "whole.jsonl")
    assert sorted(os.listdir(tmp_path / "cut")) == ["18", "20", "begun.json", "history.jsonl"]


class Killed(BaseException):
    """An exception that nothing in `fit` handles, so that nothing is saved."""


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_run_killed_before_its_first_save_leaves_no_rows(at: int, tmp_path: pathlib.Path) -> None:
    """In a file with the rows of other runs: with checkpoints and without, finished and killed."""
    log = tmp_path / "log.jsonl"

    def run(name: str, *, kill: int | None = None, **arguments: Any) -> Any:
        def act() -> None:
            raise Killed

        checkpoints = rx.Checkpoints(tmp_path / name, every_steps=10)
        defaults: Any = {"log_every": 1, "num_steps": 8, "checkpoints": checkpoints}
        with rx.JSONLLogger(log) as logger:
            return fit(
                linear_state(), EXAMPLES, optimizer=COUNTING, prefetch=0, loggers=[logger],
                collate_fn=Collate(kill, act), **{**defaults, **arguments},
            )  # fmt: skip

    run("finished")
    run("unsaved", checkpoints=None)
    with pytest.raises(Killed):
        run("killed", kill=8)
    before = log.read_bytes()
    for _ in range(2):
        with pytest.raises(Killed):
            run("cut", kill=at)
    run("cut")
    assert log.read_bytes().startswith(before)
    own = read_log(log)[-8:]
    assert [step for step, _ in own] == list(range(1, 9))
    assert read_log(log) == own + own + own[:3] + own  # four rows of the killed one were on their way
    run("killed")
    assert read_log(log) == own * 4


def test_a_second_fit_killed_before_its_first_save(tmp_path: pathlib.Path) -> None:
    """Its rows begin anew, and those of the first stay, though they have the same file and directory."""

    def script(name: str, kill: int | None = None) -> None:
        def act() -> None:
            raise Killed

        with rx.JSONLLogger(tmp_path / f"{name}.jsonl") as logger:
            arguments: Any = {"loggers": [logger], "log_every": 1, "num_steps": 6}
            checkpoints = rx.Checkpoints(tmp_path / name, every_steps=10)
            state = counted(linear_state(), checkpoints, **arguments)
            counted(state, checkpoints, collate_fn=Collate(kill, act), **arguments)

    script("whole")
    with pytest.raises(Killed):
        script("cut", kill=3)
    script("cut")
    assert read_log(tmp_path / "cut.jsonl") == read_log(tmp_path / "whole.jsonl")
    rows = (tmp_path / "cut.jsonl").read_bytes()
    script("cut")  # both are finished, and drop nothing of each other
    assert (tmp_path / "cut.jsonl").read_bytes() == rows


def test_a_row_that_straddles_a_checkpoint_is_whole(tmp_path: pathlib.Path) -> None:
    arguments: Any = {"log_every": 5, "num_steps": 20, "loss_fn": loss_fn, "optimizer": SGD}
    with rx.JSONLLogger(tmp_path / "whole.jsonl") as logger:
        counted(linear_state(), tmp_path / "whole", loggers=[logger], **arguments)

    def die() -> None:
        raise LookupError("as if it were killed")

    with rx.JSONLLogger(tmp_path / "cut.jsonl") as logger, pytest.raises(LookupError):
        counted(linear_state(), tmp_path / "cut", loggers=[logger], collate_fn=Collate(14, die), **arguments)
    # The error saved at 13; the checkpoint before it is that of a kill, in the middle of the row of 11 to 15.
    os.rename(tmp_path / "cut" / "13", tmp_path / "13")
    with rx.JSONLLogger(tmp_path / "cut.jsonl") as logger:
        counted(linear_state(), tmp_path / "cut", loggers=[logger], **arguments)
    assert read_log(tmp_path / "cut.jsonl") == read_log(tmp_path / "whole.jsonl")


def test_a_jsonl_log_is_rewound(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    logger = rx.JSONLLogger(path)
    logger.rewind(3)  # there is none yet
    assert not path.exists()
    for step in (1, 2, 3, 3, 4, 9):
        logger(step, {"a": float(step)})
    with path.open("a") as file:
        file.write('{"step": 2, "a"')  # a machine that went down
    logger.rewind(3)
    logger(4, {"a": 40.0})
    logger.close()
    assert read_log(path) == [
        (1, {"a": 1.0}),
        (2, {"a": 2.0}),
        (3, {"a": 3.0}),
        (3, {"a": 3.0}),
        (4, {"a": 40.0}),
    ]
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_tensorboard_is_told_where_a_run_goes_on(tmp_path: pathlib.Path) -> None:
    logger = rx.TensorBoardLogger(tmp_path)
    logger(5, {"a": 1.0})
    logger.rewind(3)
    logger(4, {"a": 2.0})
    logger.close()
    assert [event.step for event in events(tmp_path) if event.HasField("session_log")] == [4]


def test_loggers_are_rewound_to_the_restored_step_only(tmp_path: pathlib.Path) -> None:
    class Rewindable(Rows):
        def rewind(self, step: int) -> None:
            self.rows.append((step, {"rewound": 1.0}))

    def rewinds() -> list[int]:
        rows = Rewindable()
        counted(linear_state(), tmp_path, loggers=[rows], num_steps=4)
        return [step for step, row in rows.rows if row == {"rewound": 1.0}]

    assert rewinds() == []
    assert rewinds() == [4]


# With what it began


def reseeded(params: int | None = None, key: int | None = None, mesh: Any = None) -> Any:
    state = mlp_state(SGD, mesh or rx.make_mesh(tensor=2))
    if params is not None:
        noise = jax.random.split(jax.random.key(params), len(state.params))
        drawn = {path: x + jax.random.normal(k, x.shape) for (path, x), k in zip(state.params.items(), noise)}
        laid_out = {path: jax.device_put(x, state.params[path].sharding) for path, x in drawn.items()}
        state = dataclasses.replace(state, params=laid_out)
    if key is not None:
        state = dataclasses.replace(state, key=jax.device_put(jax.random.key(key), state.key.sharding))
    return state


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"params": 7}, "other initial parameters"),
        ({"key": 7}, "another key"),
        ({"params": 7, "key": 7}, "another key and other initial parameters"),
    ],
    ids=["parameters", "key", "both"],
)
def test_a_run_that_began_otherwise_is_refused(other: Any, what: str, tmp_path: pathlib.Path) -> None:
    examples = make_examples(16, dim=8)
    arguments: Any = {"optimizer": COUNTING, "batch_size": 8, "num_steps": 2, "prefetch": 0}
    expected = fit(reseeded(), examples, checkpoints=tmp_path, **arguments)
    state = reseeded(**other)
    with pytest.raises(ValueError, match=rf"is another one: it has {what}\. To begin a new run"):
        fit(state, examples, checkpoints=tmp_path, **arguments)
    assert_same(state, reseeded(**other))  # nothing was taken over
    allowed = rx.Checkpoints(tmp_path, allow_changes=True)
    assert_same(fit(state, examples, checkpoints=allowed, **arguments), expected)


def test_a_checkpoint_that_does_not_say_how_its_run_began_is_taken(tmp_path: pathlib.Path) -> None:
    counted(linear_state(), tmp_path, num_steps=4)
    (record,) = (tmp_path / "4").rglob("record.json")
    content = json.loads(record.read_text())["content"]
    for name in ("identity", "id"):  # as an older version wrote it
        del content["run"][name]
    sha256 = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    record.write_text(json.dumps({"sha256": sha256, "content": content}))
    spy = Collate()
    assert_counted(counted(linear_state(), tmp_path, collate_fn=spy), 12, linear_state())
    assert len(spy.ids) == 4 * 8


# Which run


def test_a_second_fit_starts_epochs_of_its_own(tmp_path: pathlib.Path) -> None:
    plain = fit(linear_state(), EXAMPLES, num_epochs=2, optimizer=SGD)
    expected = fit(plain, EXAMPLES, num_epochs=2, donate=False)
    state = fit(linear_state(), EXAMPLES, num_epochs=2, checkpoints=tmp_path)
    assert_same(state, plain)
    assert_same(fit(state, EXAMPLES, num_epochs=2, checkpoints=tmp_path), expected)
    assert steps_in(tmp_path) == [5, 10, 15, 20]

    # The whole script again: both are finished, and neither trains.
    spy = Collate()
    state = fit(linear_state(), EXAMPLES, num_epochs=2, checkpoints=tmp_path, collate_fn=spy, prefetch=0)
    assert_same(state, plain)
    state = fit(state, EXAMPLES, num_epochs=2, checkpoints=tmp_path, collate_fn=spy, prefetch=0)
    assert_same(state, expected)
    assert spy.num_calls == 0


def test_a_script_of_two_fits_that_is_cut_in_the_second(tmp_path: pathlib.Path) -> None:
    def script(collate_fn: Any) -> Any:
        state = counted(linear_state(), tmp_path, num_steps=6)
        return counted(state, tmp_path, num_steps=9, collate_fn=collate_fn)

    with pytest.raises(rx.errors.TrainingInterrupted) as caught:
        script(Collate(5))
    assert caught.value.step == 11
    spy = Collate()
    found = script(spy)
    assert_counted(found, 15, linear_state())
    assert len(spy.ids) == 4 * 4


def test_a_finished_run_can_be_made_longer(tmp_path: pathlib.Path) -> None:
    expected = fit(linear_state(), EXAMPLES, num_epochs=3)
    fit(linear_state(), EXAMPLES, num_epochs=2, checkpoints=tmp_path)
    assert_same(fit(linear_state(), EXAMPLES, num_epochs=3, checkpoints=tmp_path), expected)


def test_the_state_of_an_interruption_goes_on_exactly(tmp_path: pathlib.Path) -> None:
    with pytest.raises(rx.errors.TrainingInterrupted) as caught:
        counted(linear_state(), tmp_path, collate_fn=Collate(3))
    spy = Collate()
    assert_counted(counted(caught.value.state, tmp_path, collate_fn=spy), 12, linear_state())
    assert len(spy.ids) == 4 * 9


def test_checkpoints_of_another_run_are_refused(tmp_path: pathlib.Path) -> None:
    counted(linear_state(), tmp_path)
    begin = linear_state()
    other = dataclasses.replace(begin, step=begin.step + 3)
    with pytest.raises(ValueError, match=r"state is at step 3, but .* runs that began at \[0\], up to step 12"):
        counted(other, tmp_path)
    assert_same(other.params, linear_state().params)  # nothing was taken over
    rx.save(tmp_path / "own", dataclasses.replace(begin, step=begin.step + 5))
    with pytest.raises(ValueError, match="that no run of fit wrote, up to step 5"):
        counted(linear_state(), tmp_path / "own")


def test_another_model_is_refused(tmp_path: pathlib.Path) -> None:
    counted(linear_state(), tmp_path)
    other = linear_state(dim=3)
    with pytest.raises(
        ValueError, match=r"model/bias: float32\[3\] in the state, float32\[2\] in the checkpoint"
    ):
        fit(other, make_examples(22, dim=3), checkpoints=tmp_path, num_epochs=1)
    assert not other.params["bias"].is_deleted()
    assert steps_in(tmp_path) == [10, 12]


@pytest.mark.parametrize("change", [{"batch_size": 2}, {"examples": EXAMPLES[:20]}], ids=["batch", "examples"])
def test_changed_numbers_are_refused_unless_allowed(change: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(rx.errors.TrainingInterrupted):
        counted(linear_state(), tmp_path, collate_fn=Collate(8))
    examples = change.get("examples", EXAMPLES)
    arguments: Any = {"batch_size": change.get("batch_size", 4), "num_epochs": 3, "optimizer": COUNTING}
    now, was = ("2", "4") if "batch_size" in change else ("20", "22")
    with pytest.raises(ValueError, match=rf"is {now}, but was {was} when .*allow_changes=True"):
        fit(linear_state(), examples, checkpoints=tmp_path, **arguments)
    spy = Collate()
    allowed = rx.Checkpoints(tmp_path, allow_changes=True)
    fit(linear_state(), examples, checkpoints=allowed, collate_fn=spy, prefetch=0, **arguments)
    # After 8 steps of 4, the second epoch is three batches on, which are six of 2; a third one follows.
    assert len(spy.ids) == ((11 - 6) * 2 + 11 * 2 if "batch_size" in change else (5 - 3) * 4 + 5 * 4)


def test_resumed_on_another_mesh(tmp_path: pathlib.Path) -> None:
    examples = make_examples(40, dim=8)
    arguments: Any = {"num_epochs": 2, "batch_size": 8, "prefetch": 0}
    expected = fit(mlp_state(SGD, rx.make_mesh(tensor=4)), examples, **arguments)
    first, second, whole = Collate(4), Collate(), Collate()
    fit(mlp_state(SGD, rx.make_mesh(data=1)), examples, collate_fn=whole, **arguments)
    with pytest.raises(rx.errors.TrainingInterrupted):
        fit(
            mlp_state(SGD, rx.make_mesh(tensor=4)),
            examples,
            collate_fn=first,
            checkpoints=tmp_path,
            **arguments,
        )
    state = mlp_state(SGD, rx.make_mesh(fsdp=8))
    layout = {path: x.sharding for path, x in state.params.items()}
    found = fit(state, examples, collate_fn=second, checkpoints=tmp_path, **arguments)
    assert {path: x.sharding for path, x in found.params.items()} == layout
    for path, x in expected.params.items():
        np.testing.assert_allclose(found.params[path], x, rtol=1e-5, atol=1e-7)
    assert first.ids + second.ids == whole.ids


# When, and what is kept


@pytest.mark.parametrize(
    ("options", "arguments", "expected"),
    [
        ({}, {"num_epochs": 3}, [5, 10, 15]),
        ({"every_steps": 4}, {"num_steps": 9}, [4, 8, 9]),
        ({"every_steps": 4, "keep_last": 1}, {"num_steps": 9}, [9]),
    ],
    ids=str,
)
def test_when_to_save(options: Any, arguments: Any, expected: list[int], tmp_path: pathlib.Path) -> None:
    checkpoints = rx.Checkpoints(tmp_path, **{"keep_last": None, **options})
    counted(linear_state(), checkpoints, **arguments)
    assert steps_in(tmp_path) == expected
    infos = rx.list_checkpoints(tmp_path)
    assert [info.run and info.run.finished for info in infos] == [False] * (len(expected) - 1) + [True]


def scores(values: list[float]) -> Any:
    remaining = iter([0.0, *values])  # the rehearsal comes first

    def metric_fn(examples: Any, predictions: Any) -> Any:
        return {"score": next(remaining)}

    return metric_fn


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return batch["id"]


def scored(values: Any) -> Any:
    """Six epochs, and a metric that takes these values after each."""
    evaluation = rx.Evaluation(EXAMPLES[:4], predict_fn=predict_fn, metric_fn=scores(values))
    return {"evaluation": evaluation, "num_epochs": 6}


@pytest.mark.parametrize(
    ("mode", "expected"), [("min", {3: 1.0, 6: 5.0}), ("max", {5: 9.0, 6: 5.0})], ids=["min", "max"]
)
def test_the_best_is_kept_beside_the_last(mode: Any, expected: Any, tmp_path: pathlib.Path) -> None:
    checkpoints = rx.Checkpoints(tmp_path, every_steps=500, keep_last=1, keep_best={"eval/score": mode})
    values = [4.0, float("nan"), 1.0, 2.0, 9.0, 5.0]
    counted(linear_state(), checkpoints, **scored(values))
    infos = rx.list_checkpoints(tmp_path)
    assert {info.step // 5: info.metrics["eval/score"] for info in infos} == expected
    run = infos[-1].run
    assert run is not None
    np.testing.assert_array_equal([row["eval/score"] for row in run.evaluations], values)


def test_a_metric_that_there_is_not_is_told_before_training(tmp_path: pathlib.Path) -> None:
    checkpoints = rx.Checkpoints(tmp_path, keep_best={"eval/accuracy": "max"})
    with pytest.raises(
        ValueError, match=r"keep_best={'eval/accuracy'.*evaluations give 'eval/loss', 'eval/plain'"
    ):
        counted(linear_state(), checkpoints, evaluation=rx.Evaluation(EXAMPLES))
    with pytest.raises(ValueError, match=r"keep_best=.*evaluations give nothing, without an evaluation="):
        counted(linear_state(), checkpoints)
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("options", [{"every_steps": 0}, {"every_steps": -1}, {"keep_last": 0}], ids=str)
def test_wrong_options(options: Any) -> None:
    with pytest.raises(ValueError, match=rf"Checkpoints: {next(iter(options))}"):
        rx.Checkpoints("nowhere", **options)


# Evaluations and checkpoints at one step


def test_an_evaluation_is_part_of_the_checkpoint_after_it(tmp_path: pathlib.Path) -> None:
    rows = Rows()
    counted(
        linear_state(),
        rx.Checkpoints(tmp_path),
        loggers=[rows],
        num_epochs=2,
        evaluation=rx.Evaluation(EXAMPLES),
    )
    evaluations = rows.with_prefix("eval/")
    assert [(info.step, info.metrics) for info in rx.list_checkpoints(tmp_path)] == evaluations
    again = Rows()
    counted(
        linear_state(),
        rx.Checkpoints(tmp_path),
        loggers=[again],
        num_epochs=2,
        evaluation=rx.Evaluation(EXAMPLES),
    )
    assert again.rows == []


@pytest.mark.parametrize("num_epochs", [1, 2], ids=["the last", "not the last"])
@pytest.mark.parametrize("during", ["evaluation", "prediction"])
def test_an_evaluation_that_was_cut_short_is_made_again(
    during: str, num_epochs: int, tmp_path: pathlib.Path
) -> None:
    arguments: Any = {
        "evaluation": rx.Evaluation(EXAMPLES[:12], predict_fn=predict_fn),
        "num_epochs": num_epochs,
    }
    whole, cut = Rows(), Rows()
    counted(linear_state(), tmp_path / "whole", loggers=[whole], **arguments)
    # Two rehearsing calls, five of training, and three for each of the two.
    spy = Collate(2 + 5 + (2 if during == "evaluation" else 5))
    with pytest.raises(rx.errors.TrainingInterrupted) as caught:
        counted(linear_state(), tmp_path / "cut", loggers=[cut], collate_fn=spy, **arguments)
    assert caught.value.step == 5
    assert caught.value.checkpoint == tmp_path / "cut" / "5"
    assert spy.num_calls <= 2 + 5 + 6  # it did not go on to the end
    assert [row for _, row in cut.with_prefix("eval/")] == []
    (_, info) = rx.list_checkpoints(tmp_path / "cut")[-2:]
    assert (info.step, info.metrics) == (5, {})
    counted(linear_state(), tmp_path / "cut", loggers=[cut], **arguments)
    assert without_times(cut.rows) == without_times(whole.rows)
    assert [i.metrics for i in rx.list_checkpoints(tmp_path / "cut")[-2:]] == [
        i.metrics for i in rx.list_checkpoints(tmp_path / "whole")[-2:]
    ]


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_at_the_next_step(number: Any, tmp_path: pathlib.Path) -> None:
    def act() -> None:
        os.kill(os.getpid(), number)

    with pytest.raises(rx.errors.TrainingInterrupted, match=number.name) as caught:
        counted(linear_state(), tmp_path, collate_fn=Collate(3, act))
    error = caught.value
    assert (error.signal, error.step, error.checkpoint) == (number, 3, tmp_path / "3")
    assert error.code == 128 + number
    assert_same(rx.restore(tmp_path, linear_state()), error.state)


def test_a_signal_in_compilation(tmp_path: pathlib.Path) -> None:
    traces = itertools.count()

    def terminating_loss(model: Any, batch: Any, key: Any) -> Any:
        if next(traces) == 0:
            terminate()
        return loss_fn(model, batch, key)

    with pytest.raises(rx.errors.TrainingInterrupted):
        counted(linear_state(), tmp_path, loss_fn=terminating_loss)
    assert steps_in(tmp_path) == [1]


def run_child(program: str, *arguments: str) -> Any:
    tests = pathlib.Path(__file__).parent.parent
    head = (
        f"import sys; sys.path.insert(0, {str(tests)!r})\nfrom fit_helpers import *\nimport redco_eqx as rx\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(program), *arguments], capture_output=True, text=True
    )


CHILD = """
import os, signal
calls = 0
def collate_fn(examples):
    global calls
    calls += 1
    if calls == 3:
        for _ in range(int(sys.argv[3])):
            os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    return collate(examples)
fit(linear_state(), make_examples(20), collate_fn=collate_fn, optimizer=COUNTING, num_steps=9, prefetch=0,
    checkpoints=sys.argv[1], loggers=None)
"""


@pytest.mark.parametrize(
    ("name", "times", "code"), [("SIGTERM", 1, 143), ("SIGINT", 1, 130), ("SIGTERM", 2, -15)]
)
def test_the_exit_tells_what_it_was(name: str, times: int, code: int, tmp_path: pathlib.Path) -> None:
    child = run_child(CHILD, str(tmp_path), name, str(times))
    assert child.returncode == code, child.stderr
    assert steps_in(tmp_path) == ([3] if times == 1 else [])


# Faults


def test_a_damaged_newest_is_named_and_the_one_before_it_used(tmp_path: pathlib.Path) -> None:
    with pytest.raises(rx.errors.TrainingInterrupted):
        counted(linear_state(), tmp_path, collate_fn=Collate(7))
    assert steps_in(tmp_path) == [6, 7]
    for path in (tmp_path / "7").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(UserWarning, match=f"{tmp_path}/7 is damaged.*The checkpoint before it is used"):
        found = counted(linear_state(), tmp_path)
    assert_counted(found, 12, linear_state())
    assert sorted(os.listdir(tmp_path)) == ["10", "12", "7.damaged", "begun.json", "history.jsonl"]


@pytest.mark.filterwarnings("ignore:.*The checkpoint before it is used")
@pytest.mark.parametrize("which", ["record/record.json", "arrays/manifest.ocdbt"])
def test_when_all_are_damaged_nothing_begins_anew(which: str, tmp_path: pathlib.Path) -> None:
    counted(linear_state(), tmp_path)
    for step in (10, 12):
        (tmp_path / str(step) / which).write_bytes(b"")
    spy = Collate()
    for _ in range(2):  # nor at the next try
        with pytest.raises(rx.errors.CheckpointError, match="damaged"):
            counted(linear_state(), tmp_path, collate_fn=spy)
    assert spy.num_calls == 0


@pytest.mark.parametrize("log_every", [50, 1])
def test_a_full_disk_reaches_the_caller_with_the_state(log_every: int, tmp_path: pathlib.Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, hard))

    try:
        with pytest.raises(rx.errors.CheckpointError, match="could not be written") as caught:
            counted(linear_state(), tmp_path, collate_fn=Collate(7, fill), log_every=log_every)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    state: Any = caught.value.state  # pyright: ignore[reportAttributeAccessIssue]
    assert_counted(state, int(state.step), linear_state())
    assert 7 <= int(state.step) <= 10  # told of the save of 6 or of 8, by 10 at the latest
    assert steps_in(tmp_path) in ([2, 4], [4, 6])  # that of 6 may have been on its way
    assert_counted(counted(linear_state(), tmp_path), 12, linear_state())


def test_a_directory_that_cannot_be_written_is_told_first(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    state, spy = linear_state(), Collate()
    with pytest.raises(ValueError, match="file is a file, but checkpoints need a directory"):
        counted(state, tmp_path / "file", collate_fn=spy)
    with pytest.raises(OSError, match="file"):
        counted(state, tmp_path / "file" / "below", collate_fn=spy)
    assert spy.num_calls == 0
    assert_same(state, linear_state())


def test_an_error_of_the_user_does_not_lose_the_state(tmp_path: pathlib.Path) -> None:
    def fail() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        counted(linear_state(), tmp_path, collate_fn=Collate(6, fail))
    state: Any = caught.value.state  # pyright: ignore[reportAttributeAccessIssue]
    assert_counted(state, 5, linear_state())
    assert any(f"saved as {tmp_path / '5'}" in note for note in caught.value.__notes__)
    assert_counted(counted(linear_state(), tmp_path), 12, linear_state())


def test_an_error_without_checkpoints_hands_the_state_over() -> None:
    def fail() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError) as caught:
        fit(
            linear_state(),
            EXAMPLES,
            optimizer=COUNTING,
            collate_fn=Collate(6, fail),
            num_steps=9,
            prefetch=0,
        )
    assert_counted(caught.value.state, 5, linear_state())  # pyright: ignore[reportAttributeAccessIssue]


def test_what_is_not_finite_is_never_saved(tmp_path: pathlib.Path) -> None:
    spoiling = optax.sgd(lambda step: jnp.where(step == 5, jnp.nan, 0.05))
    with pytest.raises(ValueError, match="step 6 is not saved, because model/bias, and 1 more"):
        counted(linear_state(spoiling), tmp_path, optimizer=spoiling)
    assert steps_in(tmp_path) == [2, 4]

    limit = float(linear_state().params["bias"][0]) + 4.5  # which the sixth step has before it

    def infinite(model: Any, batch: Any, key: Any) -> Any:
        return jnp.where(model.bias[0] > limit, jnp.inf, jnp.mean(errors_of(model, batch)))

    with pytest.raises(rx.errors.NonFiniteError) as caught:
        counted(linear_state(), tmp_path / "loss", loss_fn=infinite)
    assert caught.value.step == 5
    assert steps_in(tmp_path / "loss") == [2, 4]
    assert_counted(caught.value.state, 5, linear_state())


def test_a_model_with_a_state_and_keys_is_resumed(tmp_path: pathlib.Path) -> None:
    class Noisy(eqx.Module):
        norm: eqx.nn.BatchNorm
        key: Any

        def __init__(self, key: Any):
            self.norm, self.key = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch"), key

    def make() -> Any:
        pair = eqx.nn.make_with_state(Noisy)(jax.random.key(3))
        return rx.init_state(pair, SGD, key=jax.random.key(1))

    def loss(model: Any, batch: Any, key: Any) -> Any:
        apply = jax.vmap(model[0].norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        out, model_state = apply(batch["x"], model[1])
        noise = jax.random.normal(jax.random.fold_in(model[0].key, 1), (2,))
        return jnp.mean((out - batch["y"] + noise) ** 2), {}, model_state

    arguments: Any = {"loss_fn": loss, "optimizer": SGD, "num_steps": 6}
    expected = counted(make(), tmp_path / "whole", **arguments)
    with pytest.raises(rx.errors.TrainingInterrupted):
        counted(make(), tmp_path / "cut", collate_fn=Collate(3), **arguments)
    assert_same(counted(make(), tmp_path / "cut", **arguments), expected)
