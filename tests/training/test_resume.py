"""`fit` with checkpoints: interrupted and resumed equals uninterrupted, and nothing is
lost."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import shutil
import signal
import time
from typing import Any

import equinox as eqx
import fit_helpers as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    EXAMPLES,
    SGD,
    Collate,
    assert_counted,
    assert_same,
    counted,
    fit,
    linear_state,
    raised,
)
from helpers import assert_close, assert_same_layout
from stream_sources import KINDS

import redco_eqx as rx
from redco_eqx._data import streams


def interrupted(
    state: Any, checkpoints: Any, call: Any = counted, **arguments: Any
) -> Any:
    """The error of a run that a signal ends."""
    return raised(
        rx.errors.TrainingInterrupted, call, state, checkpoints=checkpoints, **arguments
    )


class Killed(BaseException):
    """An exception that nothing in `fit` handles, so that nothing is saved."""


def kill() -> None:
    raise Killed


# Bit for bit


def on_a_mesh() -> Any:
    """With dropout, unequal weights, microbatches, Adam and a mesh with all axes."""
    optimizer, examples = optax.adam(1e-2), tiny.make_examples(44, dim=8)
    evaluation = rx.Evaluation(examples[:8], every_steps=4)
    sizes = {"batch_size": 8, "num_microbatches": 2, "num_epochs": 3}
    functions: Any = {
        "loss_fn": tiny.dropout_loss,
        "optimizer": optimizer,
        "evaluation": evaluation,
    }
    return tiny.mlp_state(optimizer), examples, {**functions, **sizes}


def with_a_hook() -> Any:
    """That ends the run, by the row and by the evaluations so far."""

    def hook(run: Any, row: Any, state: Any) -> Any:
        return (
            run.num_steps >= 14
            and "train/loss" in row
            and [x["step"] for x in run.evaluations] == [6, 12]
        )

    evaluation = rx.Evaluation(EXAMPLES[:8], every_steps=6)
    return (
        linear_state(),
        EXAMPLES,
        {"num_steps": 20, "hook": hook, "evaluation": evaluation},
    )


def of_a_stream(kind: str) -> Any:
    """Made ahead by a thread: the stop comes when more has been read than was trained
    on."""
    evaluation = rx.Evaluation(EXAMPLES[:8], every_steps=50, predict_fn=tiny.predict_fn)
    stream = KINDS[kind](EXAMPLES, prefetch=2)
    return (
        linear_state(),
        stream,
        {"num_steps": 13, "evaluation": evaluation, "prefetch": None},
    )


# The run, its number of steps, and the call of `collate_fn` at which it is interrupted.
RUNS: dict[str, tuple[Any, int, int]] = {
    # One call before training, and one an evaluation.
    "mesh, edge of an epoch": (on_a_mesh, 15, 1 + 5 + 1),
    "mesh, end of a row": (on_a_mesh, 15, 1 + 6 + 1),
    "hook, in an evaluation": (with_a_hook, 15, 1 + 6 + 2),
    "hook, between rows": (with_a_hook, 15, 17),
    "stream": (lambda: of_a_stream("function"), 13, 11),
    "stream with a state": (lambda: of_a_stream("iterable with a state"), 13, 11),
}


@pytest.mark.parametrize("name", RUNS)
def test_interrupted_and_resumed_equals_uninterrupted(
    name: str, tmp_path: pathlib.Path, monkeypatch
) -> None:
    """The state, the examples, the history and the rows of the log, some of which
    straddle the interruption."""
    # A batch, so that the states of short epochs are used.
    monkeypatch.setattr(streams, "PROOF", 4)
    make, num_steps, at = RUNS[name]

    def run(name: str, collate_fn: Collate) -> Any:
        state, examples, arguments = make()
        checkpoints = rx.Checkpoints(tmp_path / name, every_steps=2)
        arguments = {
            "prefetch": 0,
            "log_every": 3,
            "checkpoints": checkpoints,
            **arguments,
        }
        arguments["loggers"] = [rx.JSONLLogger(tmp_path / f"{name}.jsonl")]
        return tiny.fit_with_history(
            state, examples, collate_fn=collate_fn, **arguments
        )

    whole, first, second, third = Collate(), Collate(at), Collate(), Collate()
    expected, history = run("whole", whole)
    assert int(expected.step) == num_steps
    error = raised(rx.errors.TrainingInterrupted, run, "cut", first)
    assert 0 < error.step < num_steps
    logged = error.history.rows  # that of the last step may be among them
    assert logged == history.rows[: len(logged)]
    assert len(logged) >= sum(row["step"] < error.step for row in history.rows)
    with (tmp_path / "cut" / "history.jsonl").open(
        "r+"
    ) as file:  # a kill would leave more than was saved
        later = json.loads(file.readlines()[-1])
        file.write(json.dumps({**later, "step": 99}) + "\n" + json.dumps(later)[:20])
    for spy in (second, third):
        found, rows = run("cut", spy)
        assert_same(found, expected)
        assert rows == history
        assert tiny.read_log(tmp_path / "cut.jsonl") == tiny.read_log(
            tmp_path / "whole.jsonl"
        )
    if make is on_a_mesh:
        rehearsal = list(range(8))
        assert whole.ids[:8] == first.ids[:8] == second.ids[:8] == rehearsal
        assert first.ids[8:] + second.ids[8:] == whole.ids[8:]
        assert third.ids == rehearsal  # it was over


def test_a_model_with_a_state_and_keys_is_trained_and_resumed(
    tmp_path: pathlib.Path,
) -> None:
    norm = functools.partial(eqx.nn.BatchNorm, 2, axis_name="batch", mode="batch")
    noisy = eqx.nn.make_with_state(lambda: {"norm": norm(), "key": jax.random.key(3)})

    def make() -> Any:
        return rx.init_state(noisy(), SGD, key=jax.random.key(1))

    def loss(model: Any, batch: Any, key: Any) -> Any:
        apply = jax.vmap(
            model[0]["norm"], axis_name="batch", in_axes=(0, None), out_axes=(0, None)
        )
        out, model_state = apply(batch["x"], model[1])
        noise = jax.random.normal(jax.random.fold_in(model[0]["key"], 1), (2,))
        return jnp.mean((out - batch["y"] + noise) ** 2), {}, model_state

    start = make()
    # It leaves the state of the model as it is.
    evaluation = rx.Evaluation(EXAMPLES[:8], every_steps=2)
    run = functools.partial(
        counted, loss_fn=loss, optimizer=SGD, num_steps=6, evaluation=evaluation
    )
    expected = run(make(), tmp_path / "whole")
    # Not bit for bit: beside the guard the compiler fuses the running mean otherwise,
    # to a last digit.
    assert_close(expected, tiny.state_after(6, start, loss_fn=loss), rtol=1e-6)
    assert any(
        not np.array_equal(x, start.model_state[p])
        for p, x in expected.model_state.items()
    )
    interrupted(make(), tmp_path / "cut", run, collate_fn=Collate(3))
    assert_same(run(make(), tmp_path / "cut"), expected)


def test_resumed_on_another_mesh(tmp_path: pathlib.Path) -> None:
    run = functools.partial(
        fit,
        examples=tiny.make_examples(40, dim=8),
        num_epochs=2,
        batch_size=8,
        prefetch=0,
    )
    start = tiny.mlp_state(SGD, rx.make_mesh(tensor=4))
    first, second, whole = Collate(4), Collate(), Collate()
    expected = run(start, collate_fn=whole, donate=False)
    interrupted(start, tmp_path, run, collate_fn=first)
    state = tiny.mlp_state(SGD, rx.make_mesh(fsdp=8))
    found = run(state, collate_fn=second, checkpoints=tmp_path)
    assert_same_layout(found.params, state.params)
    assert_close(found.params, expected.params, rtol=1e-5, atol=1e-7)
    assert first.ids + second.ids == whole.ids


# Rows of the log


def test_a_killed_run_loses_no_row(tmp_path: pathlib.Path) -> None:
    """It has logged more than it has saved, and its newest checkpoint is in the middle
    of a row."""
    whole, cut = (
        rx.JSONLLogger(tmp_path / f"{name}.jsonl") for name in ("whole", "cut")
    )
    arguments: Any = {
        "log_every": 5,
        "num_steps": 20,
        "loss_fn": tiny.loss_fn,
        "optimizer": SGD,
    }
    run = functools.partial(counted, None, **arguments)
    run(tmp_path / "whole", loggers=[whole])
    raised(
        LookupError,
        run,
        tmp_path / "cut",
        loggers=[cut],
        collate_fn=Collate(14, tiny.fail),
    )
    # The error saved at 13. A kill leaves a checkpoint at 13 that is not whole, and a
    # row that is too late.
    cut(15, {"train/loss": 5.0})
    os.rename(tmp_path / "cut" / "13", tmp_path / "cut" / "13.orbax-checkpoint-tmp")
    assert tiny.steps_in(tmp_path / "cut")[-1] == 12
    run(tmp_path / "cut", loggers=[rx.JSONLLogger(tmp_path / "cut.jsonl")])
    assert tiny.read_log(tmp_path / "cut.jsonl") == tiny.read_log(
        tmp_path / "whole.jsonl"
    )
    assert sorted(os.listdir(tmp_path / "cut")) == ["18", "20", "history.jsonl"]


def test_one_missing_row_is_named_even_if_metrics_are_not_logged_yet(
    tmp_path: pathlib.Path,
) -> None:
    run = functools.partial(counted, None, tmp_path, log_every=2)
    # Saved after 5 steps, in the middle of a row.
    raised(LookupError, run, collate_fn=Collate(6, tiny.fail))
    rows = tmp_path / "history.jsonl"
    assert [json.loads(line)["step"] for line in rows.read_text().splitlines()] == [
        2,
        4,
    ]
    rows.write_bytes(rows.read_bytes().splitlines(keepends=True)[0])
    with pytest.warns(
        UserWarning, match=r"1 of the 2 rows of the run are left in .*history\.jsonl"
    ):
        run()


def test_a_second_fit_killed_before_its_first_save(tmp_path: pathlib.Path) -> None:
    """It begins anew, and the rows of the first stay, though they have the same file
    and directory."""

    def script(name: str, at: int | None = None) -> None:
        checkpoints = rx.Checkpoints(tmp_path / name, every_steps=10)
        logger = rx.JSONLLogger(tmp_path / f"{name}.jsonl")
        arguments: Any = {"loggers": [logger], "log_every": 1, "num_steps": 6}
        state = counted(None, checkpoints, **arguments)
        counted(state, checkpoints, collate_fn=Collate(at, kill), **arguments)

    script("whole")
    raised(Killed, script, "cut", at=3)
    script("cut")
    found = tiny.read_log(tmp_path / "cut.jsonl")  # those of the killed one stay, too
    assert found[:6] + found[-6:] == tiny.read_log(tmp_path / "whole.jsonl")
    rows = (tmp_path / "cut.jsonl").read_bytes()
    script("cut")  # both are finished, and drop nothing of each other
    assert (tmp_path / "cut.jsonl").read_bytes() == rows


# Which run


def test_a_script_of_two_fits_resumes_each(tmp_path: pathlib.Path) -> None:
    """The second has epochs of its own. Finished ones do not train again, unless they
    are made longer."""

    def script(spy: Any, num_steps: int = 5) -> Any:
        run = functools.partial(
            counted, collate_fn=spy, loss_fn=tiny.loss_fn, optimizer=SGD
        )
        state = run(None, tmp_path, num_steps=6)
        assert_same(state, plain)
        return run(state, tmp_path, num_steps=num_steps)

    plain = fit(num_steps=6)
    assert raised(rx.errors.TrainingInterrupted, script, Collate(9)).step == 9
    for num_steps, num_calls in ((5, 2), (5, 0), (7, 2)):
        spy = Collate()
        assert_same(
            script(spy, num_steps), fit(plain, num_steps=num_steps, donate=False)
        )
        assert spy.num_calls == num_calls


@pytest.fixture(scope="module")
def run_of_8(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of a run that a signal ended after 8 steps, and a checkpoint in
    `own` that is of no run. Tests must not change it."""
    directory = tmp_path_factory.mktemp("run_of_8")
    interrupted(None, directory, collate_fn=Collate(8))
    begin = linear_state()
    rx.save(directory / "own", dataclasses.replace(begin, step=begin.step + 5))
    return directory


def three_steps_later() -> Any:
    begin = linear_state()
    return dataclasses.replace(begin, step=begin.step + 3)


NOT_THE_RUN: dict[str, tuple[Any, str, Any, str]] = {
    "a later state": (
        three_steps_later,
        ".",
        EXAMPLES,
        r"state is at step 3, but .* runs that began at \[0\], up to step 8",
    ),
    "a checkpoint of no run": (
        linear_state,
        "own",
        EXAMPLES,
        r"that no run of fit wrote, up to step 5",
    ),
    "another model": (
        functools.partial(linear_state, dim=3),
        ".",
        tiny.make_examples(22, dim=3),
        r"model/bias: float32\[3\] in the state, flo",
    ),
    "fewer examples": (
        linear_state,
        ".",
        EXAMPLES[:20],
        r"examples is 20, but was 22 when .*allow_changes=True",
    ),
    "another order": (
        linear_state,
        ".",
        rx.Data(EXAMPLES, shuffle=False),
        r"order of the examples is None, but was feistel",
    ),
    "a stream": (
        linear_state,
        ".",
        rx.Stream(EXAMPLES),
        r"the number of train_examples is None, but was 22",
    ),
}


@pytest.mark.parametrize("case", NOT_THE_RUN)
def test_what_is_not_the_run_is_refused(run_of_8: pathlib.Path, case: str) -> None:
    """Another beginning or model, and unless it is allowed, another number or order of
    examples."""
    make_state, directory, examples, message = NOT_THE_RUN[case]
    state = make_state()
    raised(
        ValueError,
        counted,
        state,
        run_of_8 / directory,
        examples,
        prefetch=None,
        match=message,
    )
    assert_same(state, make_state())  # nothing was taken over
    assert tiny.steps_in(run_of_8)[-1] == 8


@pytest.mark.parametrize(("length", "number"), [("num_steps", 8), ("num_epochs", 2)])
def test_a_run_that_is_longer_already_is_refused(
    run_of_8: pathlib.Path, length: str, number: int
) -> None:
    begin = linear_state()
    message = rf"{length}=1, but the run in .* already has {number} "
    raised(ValueError, counted, begin, run_of_8, match=message, **{length: 1})
    assert_same(begin, linear_state())
    assert tiny.steps_in(run_of_8)[-1] == 8


def test_another_batch_size_is_refused_unless_it_is_allowed(
    run_of_8: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    directory = shutil.copytree(run_of_8, tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"batch_size is 2, but was 4 when .*allow_changes=True"
    ):
        counted(None, directory, batch_size=2, num_epochs=3)
    spy = Collate()
    allowed = rx.Checkpoints(directory, allow_changes=True)
    counted(None, allowed, collate_fn=spy, batch_size=2, num_epochs=3)
    # After 8 steps of 4, the second epoch is three batches on, which are six of 2; a
    # third one follows.
    assert len(spy.ids) == (11 - 6) * 2 + 11 * 2
    run: Any = rx.list_checkpoints(directory)[-1].run
    assert run.batch_size == 2


# What is kept


OFTEN = 1e-9  # minutes, less than a step
INTERVALS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "often": ({"every_minutes": OFTEN}, [1, 2, 3, 4, 5, 6, 7]),
    "seldom": ({"every_minutes": 60}, [7]),
    "a whole number": ({"every_minutes": 10**6}, [7]),
    "seldom, and by steps": ({"every_minutes": 60.0, "every_steps": 3}, [3, 6, 7]),
    "by steps": ({"every_steps": 3}, [3, 6, 7]),
    "by epochs": ({}, [5, 7]),
}


@pytest.mark.parametrize("kind", INTERVALS)
def test_when_a_run_is_saved(kind: str, tmp_path: pathlib.Path) -> None:
    """An epoch has five steps."""
    options, expected = INTERVALS[kind]
    checkpoints = rx.Checkpoints(tmp_path, keep_last=None, **options)
    counted(num_steps=7, checkpoints=checkpoints)
    assert [info.step for info in rx.list_checkpoints(tmp_path)] == expected


def test_time_counts_from_the_last_save(tmp_path: pathlib.Path) -> None:
    """An interval of 0.3 seconds, and steps of 0.2: every second step is saved."""
    checkpoints = rx.Checkpoints(tmp_path, keep_last=None, every_minutes=0.3 / 60)

    def slow(examples: Any) -> Any:
        time.sleep(0.2)
        return Collate()(examples)

    counted(num_steps=9, checkpoints=checkpoints, collate_fn=slow)
    found = [info.step for info in rx.list_checkpoints(tmp_path)]
    # A busy machine takes longer for a step, and then saves more often.
    assert found[-1] == 9
    assert all(second - first <= 2 for first, second in itertools.pairwise(found))
    assert len(found) < 9


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("every_steps", 0),
        ("every_steps", -1),
        ("every_minutes", 0),
        ("every_minutes", -1.5),
        ("every_minutes", float("nan")),
        ("every_minutes", float("inf")),
        ("every_minutes", True),
        ("keep_last", 0),
    ],
)
def test_numbers_that_cannot_be(name: str, number: int) -> None:
    options: Any = {name: number}
    message = rf"Checkpoints: {name}"
    raised(ValueError, rx.Checkpoints, "nowhere", match=message, **options)


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        (None, "nothing, without an evaluation="),
        (rx.Evaluation(EXAMPLES), "'eval/loss', 'eval/plain'"),
    ],
    ids=["without_evaluation", "not_among_its_metrics"],
)
def test_the_best_by_a_metric_that_is_not_there_is_refused(
    evaluation: Any, words: str, tmp_path: pathlib.Path
) -> None:
    checkpoints = rx.Checkpoints(tmp_path, keep_best={"eval/accuracy": "max"})
    message = rf"keep_best={{'eval/accuracy'.*evaluations give {words}"
    raised(ValueError, counted, None, checkpoints, evaluation=evaluation, match=message)
    assert tiny.steps_in(tmp_path) == []


# Evaluations and checkpoints at one step


def test_an_evaluation_is_part_of_the_checkpoint_after_it(
    tmp_path: pathlib.Path,
) -> None:
    """And a logger is rewound to the restored step only."""
    rewinds = []

    class Rewindable(tiny.Rows):
        def rewind(self, step: int) -> None:
            rewinds.append(step)

    rows, again = Rewindable(), Rewindable()
    for logger in (rows, again):
        checkpoints = rx.Checkpoints(tmp_path)
        counted(
            None,
            checkpoints,
            loggers=[logger],
            num_epochs=2,
            evaluation=rx.Evaluation(EXAMPLES),
        )
        found = [(info.step, info.metrics) for info in rx.list_checkpoints(tmp_path)]
        assert found == rows.with_prefix("eval/")
        assert rewinds == ([] if logger is rows else [10])
    assert again.rows == []


@pytest.mark.parametrize(
    ("during", "num_epochs"), [("evaluation", 1), ("prediction", 2)]
)
def test_an_evaluation_that_was_cut_short_is_made_again(
    during, num_epochs, tmp_path
) -> None:
    """After the last epoch, and after another."""
    evaluation = rx.Evaluation(EXAMPLES[:12], predict_fn=tiny.predict_fn)
    run = functools.partial(counted, num_epochs=num_epochs, evaluation=evaluation)
    whole, cut = tiny.Rows(), tiny.Rows()
    run(None, tmp_path / "whole", loggers=[whole])
    # Two rehearsing calls, five of training, and three for each of the two.
    spy = Collate(2 + 5 + (2 if during == "evaluation" else 5))
    error = interrupted(None, tmp_path / "cut", run, loggers=[cut], collate_fn=spy)
    assert (error.step, error.checkpoint) == (5, tmp_path / "cut" / "5")
    assert spy.num_calls <= 2 + 5 + 6  # it did not go on to the end
    assert cut.with_prefix("eval/") == []
    info = rx.list_checkpoints(tmp_path / "cut")[-1]
    assert (info.step, info.metrics) == (5, {})
    run(None, tmp_path / "cut", loggers=[cut])
    assert tiny.without_times(cut.rows) == tiny.without_times(whole.rows)
    metrics = [
        [i.metrics for i in rx.list_checkpoints(tmp_path / name)[-2:]]
        for name in ("cut", "whole")
    ]
    assert metrics[0] == metrics[1]


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_at_the_next_step(number: Any, tmp_path: pathlib.Path) -> None:
    """And the run goes on exactly from the state of the interruption."""
    error = interrupted(None, tmp_path, collate_fn=Collate(3, number))
    assert number.name in str(error)
    assert (error.signal, error.step, error.checkpoint) == (number, 3, tmp_path / "3")
    assert error.code == 128 + number
    assert_same(rx.restore(tmp_path, linear_state()), error.state)
    spy = Collate()
    assert_counted(counted(error.state, tmp_path, collate_fn=spy), 12)
    assert len(spy.ids) == 4 * 9


CHILD = """
import os, pathlib, signal, sys
from fit_helpers import Collate, counted
act = lambda: [os.kill(os.getpid(), signal.SIGTERM) for _ in range(int(sys.argv[2]))]
directory, collate_fn = pathlib.Path(sys.argv[1]), Collate(3, act)
counted(None, directory, collate_fn=collate_fn, num_steps=9, loggers=None)
"""


def test_the_exit_tells_what_it_was(tmp_path: pathlib.Path) -> None:
    """One signal saves, and so do two at once, which are one request."""
    children = [tiny.python(CHILD, tmp_path / times, times) for times in ("1", "2")]
    said = [child.communicate()[1] for child in children]
    assert [child.returncode for child in children] == [128 + signal.SIGTERM] * 2, said
    assert [tiny.steps_in(tmp_path / times)[-1] for times in ("1", "2")] == [3, 3]


# Faults


def test_a_damaged_newest_is_named_and_the_one_before_it_used(
    tmp_path: pathlib.Path,
) -> None:
    interrupted(None, tmp_path, collate_fn=Collate(7))
    assert tiny.steps_in(tmp_path) == [6, 7]
    for path in (tmp_path / "7").rglob("d/*"):
        path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(
        UserWarning, match=f"{tmp_path}/7 is damaged.*The checkpoint before it is used"
    ):
        found = counted(None, tmp_path)
    assert_counted(found, 12)
    assert sorted(os.listdir(tmp_path)) == ["10", "12", "7.damaged", "history.jsonl"]


@pytest.mark.filterwarnings("ignore:.*The checkpoint before it is used")
@pytest.mark.parametrize("which", ["record/record.json", "arrays/manifest.ocdbt"])
def test_when_all_are_damaged_nothing_begins_anew(
    which: str, tmp_path: pathlib.Path
) -> None:
    counted(None, tmp_path)
    for step in (10, 12):
        (tmp_path / str(step) / which).write_bytes(b"")
    spy = Collate()
    message = "12 is damaged" if "record" in which else "damaged"
    for _ in range(2):  # nor at the next try
        raised(
            rx.errors.CheckpointError,
            counted,
            None,
            tmp_path,
            collate_fn=spy,
            match=message,
        )
    assert spy.num_calls == 0


@pytest.mark.parametrize("log_every", [50, 1])
def test_a_full_disk_reaches_the_caller_with_the_state(
    log_every: int, tmp_path: pathlib.Path
) -> None:
    with contextlib.ExitStack() as stack:
        spy = Collate(7, lambda: stack.enter_context(tiny.full_disk()))
        run = functools.partial(
            counted, None, tmp_path, collate_fn=spy, log_every=log_every
        )
        state = raised(
            rx.errors.CheckpointError, run, match="could not be written"
        ).state
    assert_counted(state, int(state.step))
    # Told of the save of 6 or of 8, by 10 at the latest.
    assert 7 <= int(state.step) <= 10
    # That of 6 may have been on its way.
    assert tiny.steps_in(tmp_path) in ([2, 4], [4, 6])
    assert_counted(counted(None, tmp_path), 12)


def test_a_directory_that_cannot_be_written_is_told_first(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "file").write_text("")
    state = linear_state()
    spy = Collate()
    with pytest.raises(
        ValueError, match=r"file.*it is a file, and checkpoints need a directory"
    ):
        counted(state, tmp_path / "file", collate_fn=spy)
    raised(
        ValueError,
        counted,
        state,
        tmp_path / "file" / "below",
        collate_fn=spy,
        match="file is a file",
    )
    assert spy.num_calls == 0
    assert_same(state, linear_state())


def test_an_error_of_the_user_does_not_lose_the_state(tmp_path: pathlib.Path) -> None:
    error = raised(
        LookupError,
        counted,
        None,
        tmp_path,
        collate_fn=Collate(6, tiny.fail),
        match="mine",
    )
    assert_counted(error.state, 5)
    assert any(f"saved as {tmp_path / '5'}" in note for note in error.__notes__)
    for _ in range(2):  # the second time, the run is over already
        assert_counted(counted(None, tmp_path, num_steps=12), 12)


def test_an_error_before_the_hook_loses_no_call_and_one_before_the_first_step_adds_none(
    tmp_path,
) -> None:
    """The two calls of `fit` together call the hook as a run without the error does."""
    calls: list[Any] = []

    def hook(run: Any, row: Any, state: Any) -> None:
        calls.append((run.step, dict(row), np.asarray(state.params["bias"]).tolist()))

    options: Any = {
        "hook": hook,
        "log_every": 4,
        "evaluation": rx.Evaluation(EXAMPLES, every_steps=3),
    }
    expected = counted(None, tmp_path / "whole", **options)
    whole = calls.copy()
    collates: Any = {1: {"collate_fn": Collate(1, tiny.fail)}}
    for at in (1, 8, 9):

        def fails(step: int, row: Any, at: int = at) -> None:
            assert step != at

        calls.clear()
        more: Any = {"loggers": [fails], **options, **collates.get(at, {})}
        raised((LookupError, AssertionError), counted, None, tmp_path / str(at), **more)
        assert_same(counted(None, tmp_path / str(at), **options), expected)
        assert calls == whole


def test_what_is_not_finite_is_never_saved(tmp_path: pathlib.Path) -> None:
    spoiling = optax.sgd(lambda step: jnp.where(step == 5, jnp.nan, 0.05))
    with pytest.raises(
        ValueError, match="step 6 is not saved, because model/bias, and 1 more"
    ):
        counted(linear_state(spoiling), tmp_path, optimizer=spoiling)
    assert tiny.steps_in(tmp_path) == [2, 4]

    # The sixth step has this before it.
    limit = float(linear_state().params["bias"][0]) + 4.5

    def infinite(model: Any, batch: Any, key: Any) -> Any:
        return jnp.where(
            model.bias[0] > limit, jnp.inf, jnp.mean(tiny.errors_of(model, batch))
        )

    error = raised(
        rx.errors.NonFiniteError, counted, None, tmp_path / "loss", loss_fn=infinite
    )
    assert (error.step, tiny.steps_in(tmp_path / "loss")) == (5, [2, 4])
    assert_counted(error.state, 5)
