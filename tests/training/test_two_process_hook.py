"""The hook of `fit` on two processes: process 0 decides, and the state is changed on both."""

import json
import pathlib
from typing import Any

import pytest
from helpers import run_two_processes


@pytest.fixture(scope="module")
def directory(tmp_path_factory: Any) -> pathlib.Path:
    path = tmp_path_factory.mktemp("hook")
    run_two_processes(pathlib.Path(__file__).with_name("_two_process_hook.py"), path, str(path))
    return path


@pytest.fixture(scope="module")
def results(directory: pathlib.Path) -> list[Any]:
    return [json.loads((directory / f"{i}.json").read_text()) for i in range(2)]


def test_process_0_says_when_the_run_ends(results: list[Any]) -> None:
    """At step 6, though process 1 would have ended it at 2. Each step adds 1, each second one doubles."""
    value = 0
    for step in range(1, 7):
        value = 2 * (value + 1) if step % 2 == 0 else value + 1
    for result in results:
        assert result["ended"] == [6, [value, value]]


def test_both_are_called_alike(results: list[Any]) -> None:
    first, second = (result["calls"] for result in results)
    assert first == second
    assert [step for step, *_ in first] == [2, 4, 6]
