"""The one check of each path that the library writes to."""

import os
import pathlib
import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of an address. `Path("gs://bucket")` keeps only one of its slashes. A scheme has at least two
letters, so the letter of a Windows drive is none."""


def local_path(argument: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """Return the absolute path, with `~` expanded.

    **Arguments:**

    - `argument`: the name of the argument, for messages: `"save: directory"`.
    - `path`: the path of a file or a directory, which need not exist.

    **Raises:**

    - `TypeError` if it is not a path.
    - `ValueError` for the address of a bucket or a server (`gs://bucket/run`, also as a `Path`), which would
        become a local folder named `gs:`.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument} must be a path, but is a {type(path).__name__}.")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(f"{argument} must be a path of text, but is {path!r}. Pass os.fsdecode(path).")
    if _ADDRESS.match(text) or "://" in text:
        raise ValueError(
            f"{argument} is {text}, which is an address and not a path of a file system: it would become a "
            f"local folder named {text.partition('/')[0]!r}. Mount the bucket, or write to a disk and copy."
        )
    return pathlib.Path(text).expanduser().absolute()
