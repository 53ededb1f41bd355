"""Where in the user's code an operation was asked for."""

from typing import Any

BLOCKS = ("redco_eqx.column", "redco_eqx.row")
"""The scopes of the blocks that add up before they sum over devices."""


def source_line(equation: Any) -> str:
    """`file.py:12 (function)`: where the user's code asked for an operation."""
    traceback = getattr(equation.source_info, "traceback", None)
    own = ("/jax/", "/jaxlib/", "/equinox/", "/redco_eqx/")
    for frame in traceback.frames if traceback else ():
        if not any(part in frame.file_name.replace("\\", "/") for part in own):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "an operation of unknown origin"


def is_in_block(equation: Any) -> bool:
    """Whether it is one of a building block of this library, or the gradient of one."""
    return any(name in str(equation.source_info.name_stack) for name in BLOCKS)


def short_line(equation: Any) -> str:
    """`file.py:12`, without its directory."""
    place = source_line(equation).partition(" (")[0]
    return place.replace("\\", "/").rpartition("/")[2]
