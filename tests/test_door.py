"""The first hour: each mistake is refused before anything is compiled, and the message names what it must."""

import os
import pathlib
import subprocess
import sys


def test_mistakes_are_told() -> None:
    """In another process: there no annotation is checked, as with a user."""
    tests = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, tests / "door.py"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
