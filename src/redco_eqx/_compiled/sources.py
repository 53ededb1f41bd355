"""Which line of Python an instruction was compiled from, by the tables at the head of the text."""

import re

_SECTION = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n?)*)", re.MULTILINE)
# Frames of these say how a thing is computed, not where a model or a loop asks for it.
_LIBRARIES = re.compile(
    r"-packages/(?:jax|jaxlib|jaxtyping|beartype|equinox|optax|einops)/|/redco_eqx/_parallel/|^<"
)


def source_lines(text: str) -> dict[int, str]:
    """`{id of a stack frame: "/home/me/train.py:12"}`: the innermost line that is not of a library, or the
    innermost if all are. Empty where the text has no such tables."""
    sections = {name: dict(re.findall(r"(\d+) (.*)", rows)) for name, rows in _SECTION.findall(text)}
    if len(sections) != 3:
        return {}
    places = {}
    for key, row in sections["FileLocations"].items():
        file = sections["FileNames"][_number(row, "file_name_id")].strip('"')
        places[key] = f"{file}:{_number(row, 'line')}"
    frames = {
        int(key): (places[_number(row, "file_location_id")], int(_number(row, "parent_frame_id")))
        for key, row in sections["StackFrames"].items()
    }
    # Parents are numbered from one or from zero, by version; the outermost frame's is the least, and no frame.
    outermost = min((parent for _, parent in frames.values()), default=0)

    def source(frame: int) -> str:
        found = innermost = frames[frame][0]
        while frame in frames:
            found, parent = frames[frame]
            if not _LIBRARIES.search(found):
                return found
            frame = parent - outermost
        return innermost

    return {frame: source(frame) for frame in frames}


def _number(row: str, field: str) -> str:
    found = re.search(rf"\b{field}=(\d+)", row)
    return found[1] if found else "0"
