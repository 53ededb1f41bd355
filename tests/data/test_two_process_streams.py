"""Streams on two processes: read whole by both, or a shard by each, to the same end, and gone on with."""

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from fit_helpers import COUNTING, fit, linear_state, no_threads_left
from helpers import run_two_processes

import redco_eqx as rx
from redco_eqx._data.batches import Epochs
from redco_eqx._data.data import Place


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> pathlib.Path:
    path = tmp_path_factory.mktemp("streams")
    run_two_processes(pathlib.Path(__file__).with_name("_two_process_streams.py"), path, str(path))
    return path


@pytest.fixture(scope="module")
def results(directory: pathlib.Path) -> list[Any]:
    return [json.loads((directory / f"{i}.json").read_text()) for i in range(2)]


def part(epoch: int, shard: int, num_shards: int) -> list[int]:
    return [1000 * epoch + 100 * shard + i for i in range(20 + 7 * shard)]


@pytest.mark.parametrize("mesh", ["data", "tensor", "mixed"])
def test_read_whole(results: list[Any], mesh: str) -> None:
    expected = [[1000 * (i // 3) + i % 3 * 8 + j for j in range(8)] for i in range(7)]
    for result in results:
        found = result[mesh]["whole"]
        assert found["batches"] == expected
        assert [place[:2] for place in found["places"]] == [[*divmod(i, 3)] for i in range(1, 8)]
        assert found["places"][3][2] == [[0, 1, 8, None]]


@pytest.mark.parametrize("mesh", ["data", "mixed"])
def test_a_shard_each_to_the_end_of_the_shorter_one(results: list[Any], mesh: str) -> None:
    """Shard 0 has five batches of four rows, shard 1 six and a ragged tail: the epoch has five."""
    expected = [part(i // 5, 0, 2)[i % 5 * 4 :][:4] + part(i // 5, 1, 2)[i % 5 * 4 :][:4] for i in range(7)]
    for process, result in enumerate(results):
        found = result[mesh]["sharded"]
        assert found["batches"] == expected
        assert [place[:2] for place in found["places"]] == [[*divmod(i, 5)] for i in range(1, 8)]
        assert found["places"][1][2] == [[process, 2, 8, "4"]]
        assert found["places"][4][2] == [[process, 2, 0, None]]
        assert result[mesh]["opened"] == [[0, process, 2], [1, process, 2]]


def test_processes_of_one_tensor_group_read_the_same_shard(results: list[Any]) -> None:
    expected = [part(i // 2, 0, 1)[i % 2 * 8 :][:8] for i in range(7)]
    for result in results:
        assert result["tensor"]["sharded"]["batches"] == expected
        assert {tuple(shard) for _, *shard in result["tensor"]["opened"]} == {(0, 1)}


def test_runs_go_on(results: list[Any], directory: pathlib.Path) -> None:
    for result in results:
        assert result["steps whole"] == result["steps sharded"] == 7
    (four, seven) = [info.run for info in rx.list_checkpoints(directory / "sharded")]
    assert four is not None
    assert seven is not None
    # Where both shards were left, though process 0 alone writes.
    assert [p[:4] for p in four.positions or ()] == [(0, 2, 16, "12"), (1, 2, 16, "12")]
    assert (seven.epoch, seven.batch) == (1, 2)
    assert [p[:4] for p in seven.positions or ()] == [(0, 2, 8, "4"), (1, 2, 8, "4")]


def test_with_another_number_of_processes(results: list[Any], directory: pathlib.Path) -> None:
    """A run that read a whole stream continues; one that read two shards is refused."""
    arguments: Any = {"optimizer": COUNTING, "num_steps": 9, "batch_size": 8}
    sharded: Any = rx.Stream(lambda epoch, shard, num_shards: part(epoch, shard, num_shards), sharded=True)
    begin = linear_state()
    with pytest.raises(ValueError, match=r"read in 1 shards, but was in 2 .*Use as many processes as before"):
        fit(begin, sharded, checkpoints=directory / "sharded", **arguments)
    allowed = rx.Checkpoints(directory / "sharded", allow_changes=True)
    with pytest.raises(ValueError, match="read in 1 shards, but was in 2"):
        fit(begin, sharded, checkpoints=allowed, **arguments)
    assert not begin.params["bias"].is_deleted()
    run = rx.list_checkpoints(directory / "whole")[-1].run
    assert run is not None
    assert run.positions is not None
    assert (run.epoch, run.batch, run.positions[0][:4]) == (2, 1, (0, 1, 8, None))
    epochs = Epochs(
        rx.Stream(lambda epoch: range(1000 * epoch, 1000 * epoch + 29)),
        np.asarray,
        batch_size=8,
        mesh=rx.make_mesh(),
    )
    made = epochs.after(Place(run.epoch, run.batch, None, run.positions), key=begin.key)
    assert next(made)[0].tolist() == [2008 + i for i in range(8)]
    made.close()
    assert no_threads_left()


def test_what_is_refused(results: list[Any]) -> None:
    for result in results:
        assert "read different examples for a batch" in result["unlike"]
        assert "with several processes, say what each of them reads" in result["unsaid"]
        assert result["interleaved"] is None  # each process holds every second row: a shard of its own
