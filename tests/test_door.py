"""The first hour: each mistake is refused before anything is compiled, and the message
names what it must."""

from fit_helpers import printed


def test_mistakes_are_told() -> None:
    """In another process: there no annotation is checked, as with a user."""
    printed("import runpy; runpy.run_module('door', run_name='__main__')")
