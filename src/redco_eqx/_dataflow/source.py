"""Where in the user's code an operation was asked for."""

from jax.extend.core import JaxprEqn

ADDING = ("redco_eqx.column", "redco_eqx.row")
"""The scopes of the building blocks that add up before they sum over devices."""

ENDS = ("redco_eqx.embed", "redco_eqx.cross_entropy")
"""Those that gather what is stored split once, and hand each device its part of the gradient."""

STREAM = "redco_eqx.stream"
"""Of what flows between layers: whole over its features on each device."""


def source_line(equation: JaxprEqn) -> str:
    """`file.py:12 (function)`: where the user's code asked for an operation."""
    traceback = getattr(equation.source_info, "traceback", None)
    own = ("/jax/", "/jaxlib/", "/equinox/", "/redco_eqx/")
    for frame in traceback.frames if traceback else ():
        if not any(part in frame.file_name.replace("\\", "/") for part in own):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return "an operation of unknown origin"


def block_of(equation: JaxprEqn) -> str:
    """The building block of this library that an operation, or what it is the gradient of, is in; or ''."""
    scopes = str(equation.source_info.name_stack)
    return next((name for name in (*ADDING, *ENDS, STREAM) if name in scopes), "")


def short_line(equation: JaxprEqn) -> str:
    """`file.py:12`, without its directory."""
    place = source_line(equation).partition(" (")[0]
    return place.replace("\\", "/").rpartition("/")[2]
