"""The first hour with models: each mistake is refused before a step, and the message
names what it must."""

import pathlib

from fit_helpers import printed


def test_mistakes_are_told() -> None:
    """In another process: there no annotation is checked, as with a user."""
    here = str(pathlib.Path(__file__).parent)
    start = "import runpy, sys; sys.path.append(sys.argv[1]); "
    printed(f"{start}runpy.run_module('door_of_models', run_name='__main__')", here)
