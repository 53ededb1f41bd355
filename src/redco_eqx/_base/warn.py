"""Warnings that name the line of the user's program."""

import inspect
import warnings
from types import FrameType

_BETWEEN = {"jax", "jaxlib", "equinox", "optax", "jaxtyping", "beartype"}
"""Packages through which this library is called, or which call it back."""

_STANDARD = {"contextlib", "functools", "threading", "concurrent"}
"""Modules of Python through which it is called."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that belongs to neither this library nor a package
    through which it is called.

    Python 3.12 can skip the files of one package (`skip_file_prefixes`), but a user's
    function may be called by JAX, which this library has called.
    """
    frame = inspect.currentframe()
    level = 1
    while frame is not None and _is_between(frame):
        frame = frame.f_back
        level += 1
    # In a thread there may be no line of the user.
    warnings.warn(message, category, stacklevel=level if frame is not None else 2)


def _is_between(frame: FrameType) -> bool:
    if frame.f_code.co_filename.startswith("<@"):  # made by a checker of types
        return True
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    # Another package of this project begins with the same name.
    is_ours = package.startswith("redco_eqx")
    return is_ours or package in _BETWEEN or package in _STANDARD
