"""Two processes: they read the rows of their devices, or a shard of a stream each, go
on together, and process 0 decides."""

import json
import pathlib
import re
from typing import Any

import jax
import numpy as np
import pytest
from fit_helpers import counted, linear_state
from hosts import harness
from stream_sources import order

import redco_eqx as rx
from redco_eqx._data.batches import Epochs
from redco_eqx._data.data import Place
from redco_eqx._data.order import epoch_order
from redco_eqx._data.streams import state_to_text


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> pathlib.Path:
    """The files of the processes. The last thing that they do is to differ, for which
    they end."""
    path = tmp_path_factory.mktemp("two")
    program = pathlib.Path(__file__).with_name("_two_processes.py")
    processes = harness.start_loopback(path, program=program, JAX_ENABLE_X64=0)
    codes, _ = processes.leave(120)
    fewer = r"len\(examples\) is 29 on process 0 .*, but 28 on process 1 "
    assert (path / "0.json").exists(), processes.text()
    assert codes[1] == 1, processes.text()
    assert re.search(fewer, processes.text(1)), processes.text()
    return path


@pytest.fixture(scope="module")
def results(directory: pathlib.Path) -> list[Any]:
    return [json.loads((directory / f"{i}.json").read_text()) for i in range(2)]


FIRST_BATCHES = {
    "whole": list(range(16)),
    "sharded": order(20, 0)[:8] + [100 + i for i in order(27, 0)[:8]],
}


@pytest.mark.parametrize("how", FIRST_BATCHES)
def test_they_evaluate_the_first_batches_of_a_stream(
    results: list[Any], how: str
) -> None:
    mean = np.mean(FIRST_BATCHES[how])
    for result in results:
        assert result[f"evaluated {how}"] == [{"eval/loss": mean}] * 2
        assert "the processes read different examples" in result["evaluated unlike"]


def test_each_reads_the_rows_of_its_devices(results: list[Any]) -> None:
    rows = epoch_order(29, jax.random.key(5), 2)(np.arange(29)).tolist()
    whole = [rows[:8], rows[8:16], rows[16:24]]
    for name in ("data", "interleaved", "tensor", "mixed"):
        last = [rows[24:28], rows[28:]] if name == "mixed" else [rows[24:]]
        for process, result in enumerate(results):
            found = result[name]["sequence"]
            assert [batch["x"] for batch in found["batches"]] == whole + last
            assert all(
                batch["wide"] == [[x] * 3 for x in batch["x"]]
                for batch in found["batches"]
            )
            halves = [batch[4 * process :][:4] for batch in whole]
            mine = {
                "interleaved": [batch[process::2] for batch in whole],
                "tensor": whole,
            }.get(name, halves)
            # The first tail of "mixed" is split four ways, so each process holds half
            # of it.
            my_last = [last[0][2 * process :][:2], last[1]] if name == "mixed" else last
            assert found["seen"] == mine + my_last, (name, process)


def test_what_is_unlike_is_refused(results: list[Any]) -> None:
    for result in results:
        assert "read different examples for a batch" in result["unlike"]
        assert "with several processes, say what each of them reads" in result["unsaid"]


def test_an_epoch_has_one_shape(results: list[Any]) -> None:
    """Another one is refused where it is made, or on the process that comes later to
    its first batch."""
    leaves = [
        ("x", "float32[rows, 2]"),
        ("x", "float16[rows, 3]"),
        ("y", "missing"),
        ("z", "float32[rows]"),
    ]
    usual = {"x": "float32[rows, 3]", "y": "int32[rows]", "z": "missing"}
    first, second = (result["first shapes"] for result in results)
    assert first == [[2, ""]] * len(leaves)
    for i, (leaf, value) in enumerate(leaves):
        for result in results:
            num_made, said = result["shapes"][i]
            assert num_made == 1
            assert (
                f"collate_fn: batch 1: {leaf} is {value}, but was {usual[leaf]} in "
                "batch 0." in said
            )
        num_made, said = second[i]
        assert num_made == 0
        pattern = (
            r"collate_fn: batch 0: {} is {} on process 0 \(.*\), but {} on process 1 \("
        )
        assert re.match(
            pattern.format(leaf, re.escape(usual[leaf]), re.escape(value)), said
        ), said


@pytest.mark.parametrize(
    ("rows", "batch", "leaf"),
    [
        ("tensor", 0, "the batch"),
        ("workers", 0, "the batch"),
        ("one batch", 2, "y"),
        ("rest", 4, "the batch"),
        ("whole", 0, "the batch"),
        ("shard", 0, "the batch"),
        ("batched", 0, "the batch"),
        ("seeded", None, ""),
        ("other rows", None, ""),
        ("seeded rest", None, ""),
    ],
)
def test_rows_of_both_are_the_same_or_refused(
    results: list[Any], rows: str, batch: int | None, leaf: str
) -> None:
    """Nobody waits for this: the later of the two finds it, before it has the batch."""
    said = [
        message
        for _, message in (result["rows"][rows] for result in results)
        if message
    ]
    if batch is None:
        assert said == []
        assert {result["rows"][rows][0] for result in results} == {
            5 if "rest" in rows else 3
        }
    else:
        assert said
        pattern = (
            rf"collate_fn: batch {batch}: the rows of {leaf} have the checksum "
            r"\w+ on process \d \(.*seed"
        )
        assert all(re.match(pattern, message) for message in said), said


# Streams


def part(epoch: int, shard: int, num_shards: int) -> list[int]:
    return [1000 * epoch + 100 * shard + i for i in order(20 + 7 * shard, epoch)]


def test_a_stream_is_read_whole(results: list[Any]) -> None:
    expected = [[1000 * (i // 3) + i % 3 * 8 + j for j in range(8)] for i in range(7)]
    for mesh in ("data", "tensor", "mixed"):
        for result in results:
            found = result[mesh]["whole"]
            assert found["batches"] == expected
            assert [place[:2] for place in found["places"]] == [
                [*divmod(i, 3)] for i in range(1, 8)
            ]
            assert found["places"][3][2] == [[0, 1, 8, None]]


def test_a_shard_each_to_the_end_of_the_shorter_one(results: list[Any]) -> None:
    """Shard 0 has five batches of four rows, shard 1 six and a ragged tail: the epoch
    has five. Processes of one tensor group read the same shard."""
    expected = [
        part(i // 5, 0, 2)[i % 5 * 4 :][:4] + part(i // 5, 1, 2)[i % 5 * 4 :][:4]
        for i in range(7)
    ]
    same = [part(i // 2, 0, 1)[i % 2 * 8 :][:8] for i in range(7)]
    for process, result in enumerate(results):
        for mesh in ("data", "mixed"):
            found = result[mesh]["sharded"]
            assert found["batches"] == expected
            assert [place[:2] for place in found["places"]] == [
                [*divmod(i, 5)] for i in range(1, 8)
            ]
            assert found["places"][1][2] == [[process, 2, 8, state_to_text(b"4")]]
            assert found["places"][4][2] == [[process, 2, 0, None]]
            assert result[mesh]["shards"] == [[0, process, 2], [1, process, 2]]
        assert result["tensor"]["sharded"]["batches"] == same
        assert {tuple(shard) for _, *shard in result["tensor"]["shards"]} == {(0, 1)}


def test_a_run_on_a_stream_goes_on(results: list[Any], directory: pathlib.Path) -> None:
    for result in results:
        assert result["steps whole"] == result["steps sharded"] == 7
        assert (
            "the processes are at the steps [7, 8], but must save the same"
            in result["apart whole"]
        )
    runs: Any = [info.run for info in rx.list_checkpoints(directory / "sharded")]
    four, seven = runs
    # Where both shards were left, though process 0 alone writes.
    assert [p[:4] for p in four.positions or ()] == [
        (i, 2, 16, state_to_text(b"12")) for i in (0, 1)
    ]
    assert (seven.epoch, seven.batch) == (1, 2)
    assert [p[:4] for p in seven.positions or ()] == [
        (i, 2, 8, state_to_text(b"4")) for i in (0, 1)
    ]


def test_a_run_on_a_stream_with_another_number_of_processes(
    results: Any, directory: pathlib.Path
) -> None:
    """One that read a whole stream continues; one that read two shards is refused,
    allowed or not."""
    sharded: Any = rx.Stream(
        lambda epoch, shard, num_shards: part(epoch, shard, num_shards), sharded=True
    )
    begin = linear_state(dim=4)
    for allow_changes in (False, True):
        checkpoints = rx.Checkpoints(directory / "sharded", allow_changes=allow_changes)
        with pytest.raises(
            ValueError,
            match=r"in 1 shards, but was in 2 .*Use as many processes as before",
        ):
            counted(begin, checkpoints, sharded, batch_size=8, prefetch=None)
    assert not begin.params["bias"].is_deleted()
    run: Any = rx.list_checkpoints(directory / "whole")[-1].run
    assert (run.epoch, run.batch, run.positions[0][:4]) == (2, 1, (0, 1, 8, None))
    stream = rx.Stream(lambda epoch: range(1000 * epoch, 1000 * epoch + 29))
    epochs = Epochs(stream, np.asarray, batch_size=8, mesh=rx.make_mesh())
    made = epochs.after(Place(run.epoch, run.batch, None, run.positions), key=begin.key)
    assert next(made)[0].tolist() == [2008 + i for i in range(8)]
    made.close()


def test_process_0_says_when_time_has_passed(results: list[Any]) -> None:
    """It is always time. Its word reaches both two steps later."""
    for result in results:
        assert result["often"] == [3, 4, 5, 6, 7]


# The hook


def test_process_0_says_when_the_run_ends(results: list[Any]) -> None:
    """At step 6, though process 1 would have ended it at 2. Each step adds 1."""
    for result in results:
        assert result["ended"] == [6, [6, 6]]
    first, second = (result["calls"] for result in results)
    assert first == second
    assert [step for step, *_ in first] == [2, 4, 6]


def test_a_row_names_the_process_that_waited_longest_for_data(
    results: list[Any],
) -> None:
    """Rows of two steps; the batches of process 1 take three seconds each, those of
    process 0 one."""
    # A run with checkpoints makes its first batch twice.
    rows = [[2, 3.0, 1, 6.0], [4, 2.0, 1, 4.0], [6, 2.0, 1, 4.0]]
    assert [result["clocks"] for result in results] == [rows, []]
