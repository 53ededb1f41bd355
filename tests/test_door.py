"""The first hour: each mistake is refused before anything is compiled, and the message names what it must."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from door import MISTAKES


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Return the outcomes from another process: there no annotation is checked, as with a user."""
    tests = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, tests / "door.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    ("mistake", "exception", "names"), [(m, e, n) for m, _, e, n in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_a_mistake_is_told(mistake: str, exception: Any, names: list[str], outcomes: dict[str, Any]) -> None:
    found = outcomes[mistake]
    assert found["exception"] == exception.__name__, found["message"]
    assert [name for name in names if name not in found["message"]] == [], found["message"]
    assert not found["compiled"]


def test_each_mistake_is_told_once() -> None:
    assert len({mistake for mistake, *_ in MISTAKES}) == len(MISTAKES)
