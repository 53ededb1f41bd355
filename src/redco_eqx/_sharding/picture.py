"""Small pictures for notebooks, as SVG: the mesh, and which part of an array one device holds."""

import math
from collections.abc import Callable, Mapping, Sequence

_CELL, _GAP = 14, 2
_HELD, _OTHER = "#3b7dd8", "#e3e8ef"


def mesh_svg(shape: Mapping[str, int]) -> str:
    """The devices as a grid: `tensor` from left to right, the other axes from top to bottom."""
    columns = shape.get("tensor", 1)
    rows = math.prod(shape.values()) // columns
    return _grid(rows, columns, held=lambda row, column: True, cell=(_CELL, _CELL))


def split_svg(shape: Sequence[int], parts: Sequence[int]) -> str:
    """An array cut into `parts` along each dim, of which the first device's is filled.

    Drawn are the last two of those dims that are split, or of all where none is.
    """
    dims = [dim for dim, number in enumerate(parts) if number > 1]
    others = [dim for dim in reversed(range(len(shape))) if dim not in dims]
    drawn = sorted((dims[-2:] + others)[:2])
    numbers = [parts[dim] for dim in drawn]
    rows, columns = (1, *numbers)[-2:] if numbers else (1, 1)
    cell = max(3, 42 // rows), max(3, 42 // columns)
    return _grid(rows, columns, held=lambda row, column: row == column == 0, cell=cell)


def _grid(rows: int, columns: int, *, held: Callable[[int, int], bool], cell: tuple[int, int]) -> str:
    height, width = cell
    squares = [
        f'<rect x="{column * (width + _GAP)}" y="{row * (height + _GAP)}" width="{width}" height="{height}" '
        f'fill="{_HELD if held(row, column) else _OTHER}"/>'
        for row in range(rows)
        for column in range(columns)
    ]
    size = columns * (width + _GAP) - _GAP, rows * (height + _GAP) - _GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}">{"".join(squares)}</svg>'
    )
