"""The recipes for experiment trackers: a run that crashes and continues leaves each row
once in the tracker."""

import contextlib
import importlib
import json
import pathlib
import struct
from collections.abc import Iterator
from typing import Any

import fit_helpers as tiny
import pages
import pytest
from helpers import events

import redco_eqx as rx

ROWS = [("train", 2), ("train", 4), ("eval", 4), ("train", 6), ("train", 8)]
ROWS += [("eval", 8), ("train", 10), ("eval", 10)]


class Crash(BaseException):
    """Ends a run without a save, as a kill does: the rows of steps 6 and 8 come
    again."""


def crash(run: Any, row: Any, state: Any) -> None:
    if run.num_steps == 8 and "eval/loss" in row:
        raise Crash


def logger_of(package: str) -> dict[str, Any]:
    """The names that the recipe for this package leaves."""
    return pages.defined("howto/loggers.md", "class Once", f"import {package}\n")


def train(logger: Any, **arguments: Any) -> None:
    """Ten steps with a row every two steps, an evaluation every four, and a checkpoint
    at step five."""
    arguments["evaluation"] = rx.Evaluation(tiny.EXAMPLES[:4], every_steps=4)
    checkpoints = rx.Checkpoints("run", every_steps=5)
    tiny.counted(
        None, checkpoints, num_steps=10, log_every=2, loggers=[logger], **arguments
    )


def crashed_and_continued(package: str, end: Any) -> Any:
    """Returns the package. `end(names)` ends the tracker's run, after the crash and
    after the end of `fit`."""
    module = pytest.importorskip(
        package, reason=f"the recipe needs {package}, which is not installed"
    )
    names = logger_of(package)
    with pytest.raises(Crash):
        train(names["logger"], hook=crash)
    end(names)
    names = logger_of(package)
    train(names["logger"])
    end(names)
    return module


def kinds(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [
        (kind, int(row["step"]))
        for row in rows
        for kind in ("train", "eval")
        if f"{kind}/loss" in row
    ]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


def records(path: pathlib.Path) -> Iterator[bytes]:
    """Those of a file in LevelDB's log format, after a header of 7 bytes."""
    data = path.read_bytes()
    at = 7
    record = b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15
        if left < 7:  # the end of a block, padded
            at += left
            continue
        size, part = struct.unpack("<HB", data[at + 4 : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb() -> None:
    wandb = crashed_and_continued("wandb", lambda names: names["run"].finish())
    Record: Any = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    # Waits for the process that writes the files, as the end of a program does.
    wandb.teardown()
    rows = []
    # One for each process, of one run.
    first, second = sorted(pathlib.Path().rglob("*.wandb"))
    for path in (first, second):
        for data in records(path):
            record = Record.FromString(data)
            assert record.run.run_id in ("", "first")
            items = {
                item.key or ".".join(item.nested_key): item.value_json
                for item in record.history.item
            }
            rows += (
                [{name: json.loads(x) for name, x in items.items()}] if items else []
            )
    assert kinds(rows) == ROWS


def test_mlflow() -> None:
    mlflow = crashed_and_continued("mlflow", lambda names: names["mlflow"].end_run())
    (run,) = mlflow.search_runs(experiment_names=["bytes"], output_format="list")
    client = mlflow.MlflowClient()
    for kind in ("train", "eval"):
        points = client.get_metric_history(run.info.run_id, f"{kind}/loss")
        assert [(kind, point.step) for point in points] == [
            x for x in ROWS if x[0] == kind
        ]


def test_trackio() -> None:
    trackio = crashed_and_continued("trackio", lambda names: names["trackio"].finish())
    assert kinds(trackio.SQLiteStorage.get_logs("bytes", "first")) == ROWS


def test_tensorboard() -> None:
    """Which hides the earlier rows from the step on at which a session starts."""
    for hook in (crash, None):
        logger = rx.TensorBoardLogger("logs")
        with pytest.raises(Crash) if hook else contextlib.nullcontext():
            train(logger, hook=hook)
    rows: list[dict[str, Any]] = []
    for event in events(pathlib.Path("logs")):
        if event.HasField("session_log"):
            rows = [row for row in rows if row["step"] < event.step]
        rows += [
            {"step": event.step, value.tag: value.simple_value}
            for value in event.summary.value
        ]
    assert kinds(rows) == ROWS
