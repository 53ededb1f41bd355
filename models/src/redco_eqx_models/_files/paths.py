"""The one check of each path that the package reads or writes."""

import os
import pathlib
import re

_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The beginning of an address. `Path("gs://bucket")` keeps only one of its slashes. A
scheme has at least two letters, so the letter of a Windows drive is none."""


def local_path(argument: str, path: str | os.PathLike[str]) -> pathlib.Path:
    """Return the absolute path, with `~` expanded.

    **Arguments:**

    - `argument`: the name of the argument, for messages: `"save: directory"`.
    - `path`: the path of a file or a directory, which need not exist.

    **Raises:**

    - `TypeError` if it is not a path.
    - `ValueError` for the address of a bucket or a server (`gs://bucket/run`, also as a
        `Path`), which would become a local folder named `gs:`; for a path below a file
        or below a link that leads nowhere; for a NUL character.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument} must be a path, but is a {type(path).__name__}.")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise TypeError(
            f"{argument} must be a path of text, but is {path!r}. Pass "
            "os.fsdecode(path)."
        )
    if _ADDRESS.match(text) or "://" in text:
        raise ValueError(
            f"{argument} is {text}, which is an address and not a path of a file "
            f"system: it would become a local folder named {text.partition('/')[0]!r}. "
            "Mount the bucket, or write to a disk and copy."
        )
    if "\0" in text:
        raise ValueError(f"{argument} is {text!r}, but no path has a NUL character.")
    absolute = pathlib.Path(text).expanduser().absolute()
    # A directory that is not there yet can be made, but not below a file.
    nearest = next(
        (parent for parent in absolute.parents if os.path.lexists(parent)), None
    )
    if nearest is not None and not nearest.is_dir():
        kind = "file"
        if nearest.is_symlink() and not nearest.exists():
            kind = f"link to {os.fspath(nearest.readlink())}, which does not exist"
        raise ValueError(
            f"{argument} is {absolute}, but {nearest} is a {kind}. Pass another path."
        )
    return absolute
