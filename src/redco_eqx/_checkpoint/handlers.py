"""Orbax's handler of arrays, for directories whose names are patterns. Importing this
file imports Orbax."""

import pathlib
from collections.abc import Iterator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

# When Orbax has written all arrays, it lists the files of each process with
# `directory.glob`, and merges them. Its `glob` takes the whole path for a pattern. In
# `betas=[0.9,0.95]` it finds no files, logs that it skips the merge, and the checkpoint
# looks complete but cannot be read. In `a*` it would also find the files of `ab`.


class LiteralPath(type(epath.Path())):
    """A path in which only the argument of `glob` is a pattern, as in `pathlib`."""

    def glob(self, pattern: str) -> Iterator[Any]:
        return (type(self)(found) for found in pathlib.Path(self).glob(pattern))


class ArraysHandler(ocp.PyTreeCheckpointHandler):
    """Orbax's handler for a tree of arrays, which also merges files in a directory
    whose name is a pattern."""

    def finalize(self, directory: Any) -> None:
        super().finalize(LiteralPath(directory))


# Orbax finds the handler of an item by the type of its arguments, and asks for one type
# in both directions. `restore.py` reads without this one.
@ocp.args.register_with_handler(ArraysHandler, for_save=True, for_restore=True)
class ArraysSave(ocp.args.PyTreeSave):
    """The arguments with which `ArraysHandler` saves a tree of arrays."""
