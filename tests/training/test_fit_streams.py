"""`fit` on a stream: as long as it was told to, with all that belongs to a run, and exact when it goes on."""

import dataclasses
import json
import os
import pathlib
import signal
from typing import Any

import numpy as np
import pytest
from fit_helpers import (
    COUNTING,
    Rows,
    assert_same,
    collate,
    counting_step,
    errors_of,
    fit,
    linear_state,
    loss_fn,
    make_examples,
    no_threads_left,
)
from stream_sources import KINDS, WITH_STATE, Unlike, generate, order

import redco_eqx as rx
from redco_eqx._data import streams
from redco_eqx._data.batches import Epochs
from redco_eqx._data.data import Place
from redco_eqx._step.state import order_key

EXAMPLES = make_examples(22)  # five batches of 4, and 2 dropped


@pytest.fixture(autouse=True)
def _nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(streams, "PROOF", 4)  # a batch, so that the states of short epochs are used
    yield
    assert no_threads_left()


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return errors_of(model, batch)


def metric_fn(examples: Any, predictions: Any) -> Any:
    return {"sum": sum(float(p) * float(e["weight"]) for e, p in zip(examples, predictions, strict=True))}


class Stopping:
    """`collate`, which asks the run to stop at its n-th call."""

    def __init__(self, at: int):
        self.at, self.num_calls = at, 0

    def __call__(self, examples: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
        return collate(examples)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_trains_as_its_examples_do(kind: str) -> None:
    def of_epoch(epoch: int) -> Any:
        return [EXAMPLES[i] for i in order(22, epoch)]

    expected = fit(linear_state(), rx.Data(of_epoch, shuffle=False), num_steps=13)
    rows = Rows()
    found = fit(linear_state(), KINDS[kind](EXAMPLES), num_steps=13, log_every=3, loggers=[rows])
    assert_same(found, expected)
    assert [(step, row["train/epoch"]) for step, row in rows.rows] == [(3, 0), (6, 1), (9, 1), (12, 2), (13, 2)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [3, 5, 7])
def test_interrupted_and_resumed_equals_uninterrupted(
    kind: str, at: int, tmp_path: pathlib.Path, capsys: Any
) -> None:
    arguments: Any = {
        "num_steps": 13,
        "log_every": 3,
        "evaluation": rx.Evaluation(EXAMPLES[:8], every_steps=50, predict_fn=predict_fn, metric_fn=metric_fn),
    }

    def run(name: str, prefetch: int, **more: Any) -> Any:
        with rx.JSONLLogger(tmp_path / f"{name}.jsonl") as logger:
            return fit(
                linear_state(),
                KINDS[kind](EXAMPLES, prefetch=prefetch),
                checkpoints=rx.Checkpoints(tmp_path / name, every_steps=2),
                loggers=[logger, rx.ConsoleLogger(progress=False)],
                **arguments,
                **more,
            )

    def rows(name: str) -> list[Any]:
        found = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        return [
            {k: x for k, x in row.items() if k not in ("time", "run") and not k.endswith("second")}
            for row in found
        ]

    expected = run("whole", 3)
    # Made ahead by a thread: the stop comes when more has been read than was trained on.
    stopping = Stopping(at + 4)  # 2 calls for the rehearsal, and those ahead
    with pytest.raises(rx.errors.TrainingInterrupted) as caught:
        run("cut", 2, collate_fn=stopping)
    assert 0 < caught.value.step < 13
    capsys.readouterr()
    assert_same(run("cut", 2), expected)
    (info,) = [info for info in rx.list_checkpoints(tmp_path / "whole") if info.step == 13]
    assert info.run is not None
    assert info.run.positions is not None
    said = capsys.readouterr().err
    batch = caught.value.step % 5
    assert ("continues from the stored state" in said) == (kind in WITH_STATE and batch > 1)
    assert ("is read again" in said) == (batch == 1 or (kind not in WITH_STATE and batch > 1))
    assert rows("cut")[-1] == rows("whole")[-1]


def test_a_saved_state_need_not_be_used(tmp_path: pathlib.Path, capsys: Any) -> None:
    def run(kind: str, num_steps: int) -> Any:
        loggers = [rx.ConsoleLogger(progress=False)]
        stream = KINDS[kind](EXAMPLES)
        return fit(linear_state(), stream, num_steps=num_steps, checkpoints=tmp_path, loggers=loggers)

    run("iterable with a state", 3)
    (info,) = rx.list_checkpoints(tmp_path)
    assert info.run is not None
    assert info.run.positions is not None
    assert info.run.positions[0][3] is not None
    found = run("iterable", 7)
    assert "is read again from its beginning: 12 items are skipped" in capsys.readouterr().err
    assert_same(found, fit(linear_state(), KINDS["iterable"](EXAMPLES), num_steps=7))


def test_other_items_are_refused(tmp_path: pathlib.Path, capsys: Any) -> None:
    def run(num_steps: int, **options: Any) -> Any:
        checkpoints = rx.Checkpoints(tmp_path, **options)
        stream, loggers = rx.Stream(Unlike(EXAMPLES)), [rx.ConsoleLogger(progress=False)]
        return fit(linear_state(), stream, num_steps=num_steps, checkpoints=checkpoints, loggers=loggers)

    run(3)
    with pytest.raises(ValueError, match=r"first 12 items of epoch 0 differ from those when the run was saved"):
        run(5)
    assert int(run(5, allow_changes=True).step) == 5
    assert "from those when the run was saved: continuing anyway" in capsys.readouterr().err


def test_the_end_of_an_iterator_ends_the_run(tmp_path: pathlib.Path) -> None:
    rows = Rows()
    expected = fit(linear_state(), rx.Data([EXAMPLES[i] for i in order(22, 0)], shuffle=False), num_epochs=1)

    def run(examples: Any) -> Any:
        return fit(
            linear_state(),
            rx.Stream(examples),
            num_steps=100,
            loggers=[rows],
            evaluation=rx.Evaluation(EXAMPLES),
            checkpoints=tmp_path,
        )

    assert_same(run(generate(EXAMPLES, 0)), expected)
    assert [step for step, row in rows.rows if "eval/loss" in row] == [5]
    (info,) = rx.list_checkpoints(tmp_path)
    assert info.run is not None
    assert (info.step, info.run.finished) == (5, True)
    assert_same(run(generate(EXAMPLES, 0)), expected)  # which has come to its end already


def test_a_stream_is_evaluated_as_its_examples_are(tmp_path: pathlib.Path) -> None:
    state = linear_state(mesh=rx.make_mesh(data=4))
    common: Any = {"collate_fn": collate, "batch_size": 8}
    stream = rx.Stream(lambda epoch: iter(EXAMPLES))
    expected = rx.evaluate(state, EXAMPLES, loss_fn=loss_fn, **common)
    assert rx.evaluate(state, stream, loss_fn=loss_fn, **common) == expected
    predicted = rx.predict(state, stream, predict_fn=predict_fn, **common)
    np.testing.assert_array_equal(predicted, rx.predict(state, EXAMPLES, predict_fn=predict_fn, **common))
    evaluation = rx.Evaluation(
        stream,
        loss_fn=loss_fn,
        predict_fn=predict_fn,
        metric_fn=metric_fn,
        predictions_directory=tmp_path,
        **common,
    )
    assert evaluation(state) == dataclasses.replace(evaluation, examples=EXAMPLES)(state)
    assert evaluation.rehearse(state).keys() == evaluation(state).keys()
    assert len((tmp_path / "step-0.jsonl").read_text().splitlines()) == 22


def test_a_loop_of_ones_own_saves_the_position(tmp_path: pathlib.Path) -> None:
    """The pieces of `fit` carry it: `advanced` into the record, `after` out of it."""

    def run(num_steps: int) -> Any:
        state = linear_state()
        stream = KINDS["iterable with a state"](EXAMPLES)
        epochs = Epochs(stream, collate, batch_size=4, mesh=state.step.sharding.mesh)
        record = rx.types.RunRecord(0, 0, 0, 0, batch_size=4, num_examples=None, order=None)
        saved = rx.list_checkpoints(tmp_path)
        if saved:
            state, record = rx.restore(tmp_path, state), saved[-1].run
            assert record is not None
        key = order_key(linear_state(), 0)
        seen, here = [], Place(record.epoch, record.batch, None, record.positions)
        with rx.Checkpoints(tmp_path).open() as writer:
            for batch, place in epochs.after(here, key=key):
                state = counting_step(state, batch)[0]
                seen += np.asarray(batch["id"]).tolist()
                record = record.advanced(place.epoch, place.batch, place.positions)
                if record.num_steps == num_steps:
                    writer.save(state, run=record)
                    return seen

    found = run(7) + run(13)
    assert found == [i for epoch in range(3) for i in order(22, epoch)[:20]][: 13 * 4]


# Runs that were saved otherwise


def with_order(directory: pathlib.Path, order: str) -> None:
    """Rewrites the newest checkpoint as if another version had ordered its examples by this method."""
    from redco_eqx._checkpoint.record import _sha256

    path = rx.list_checkpoints(directory)[-1].path
    (file,) = path.rglob("record.json")
    content = json.loads(file.read_text())["content"]
    content["run"]["order"] = order
    file.write_text(json.dumps({"sha256": _sha256(content), "content": content}))


def test_another_order_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    arguments: Any = {"optimizer": COUNTING, "num_steps": 6}
    fit(linear_state(), EXAMPLES, checkpoints=tmp_path, **arguments)
    with_order(tmp_path, "sorted")
    begin = linear_state()
    with pytest.raises(
        ValueError, match=r"order of the examples is feistel, but was sorted .*allow_changes=True"
    ):
        fit(begin, EXAMPLES, checkpoints=tmp_path, **arguments)
    assert_same(begin, linear_state())
    allowed = rx.Checkpoints(tmp_path, allow_changes=True)
    state = fit(begin, EXAMPLES, checkpoints=allowed, **{**arguments, "num_steps": 8})
    assert int(state.step) == 8
    info = rx.list_checkpoints(tmp_path)[-1]
    assert info.run is not None
    assert info.run.order == "feistel"


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (rx.Data(EXAMPLES, shuffle=False), "the order of the examples is None, but was feistel"),
        (rx.Stream(EXAMPLES), "the number of train_examples is None, but was 22"),
    ],
    ids=["not shuffled", "stream"],
)
def test_another_way_to_read_is_refused(examples: Any, message: str, tmp_path: pathlib.Path) -> None:
    fit(linear_state(), EXAMPLES, checkpoints=tmp_path, optimizer=COUNTING, num_steps=6)
    with pytest.raises(ValueError, match=message):
        fit(linear_state(), examples, checkpoints=tmp_path, optimizer=COUNTING, num_steps=8)


def test_not_shuffled_keeps_the_order() -> None:
    seen = []

    def spying(examples: Any) -> Any:
        seen.extend(example["id"] for example in examples)
        return collate(examples)

    data = rx.Data(EXAMPLES, shuffle=False, prefetch=0)
    fit(linear_state(), data, collate_fn=spying, optimizer=COUNTING, num_epochs=2)
    assert seen == [*range(20)] * 2


def test_a_billion_examples_train_at_once() -> None:
    class Lazy:
        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, i: int) -> Any:
            return EXAMPLES[i % 22]

    assert int(fit(linear_state(), Lazy(), optimizer=COUNTING, num_steps=3).step) == 3
