"""Draws the pictures of the site that are no output of an example:
`python docs/pictures.py`."""

import pathlib

from architecture import subpackages
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

PICTURES = pathlib.Path(__file__).parent / "pages" / "pictures"
COLORS = ["#e4572e", "#f0a202", "#4f9d69", "#3a6ea5"]
OUTPUTS, INPUTS, WHOLE = "outputs", "inputs", "whole"


def matrix(
    axes, x: float, y: float, width: float, height: float, split: str, label: str
) -> None:
    """A matrix `(outputs, inputs)` whose parts are coloured by the device that holds
    them."""
    for i, color in enumerate(COLORS):
        if split == OUTPUTS:
            part = (x, y + height * (3 - i) / 4, width, height / 4)
        elif split == INPUTS:
            part = (x + width * i / 4, y, width / 4, height)
        else:
            part = (x, y, width, height)
        axes.add_patch(
            Rectangle(
                part[:2], *part[2:], color=color if split != WHOLE else "#c9ccd1", lw=0
            )
        )
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor="#333", lw=1))
    axes.text(
        x + width / 2,
        y - 0.12,
        label,
        ha="center",
        va="top",
        fontsize=8.5,
        color="#555",
    )


def pair() -> None:
    """Two consecutive Linear layers on four devices, and what flows between them."""
    figure = Figure(figsize=(8.2, 2.6))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 9.4), ylim=(-0.75, 2.35), aspect="equal")
    axes.axis("off")
    matrix(axes, 0.25, 0.5, 0.22, 1.0, WHOLE, "x\nwhole")
    column = "column: each device has\nsome of the outputs"
    matrix(axes, 1.5, 0.0, 1.0, 2.0, OUTPUTS, column)
    matrix(axes, 3.7, 0.0, 0.22, 2.0, OUTPUTS, "hidden\nstays split")
    row = "row: each device uses\nthe units that it has"
    matrix(axes, 4.9, 0.5, 2.0, 1.0, INPUTS, row)
    matrix(axes, 8.8, 0.5, 0.22, 1.0, WHOLE, "y\nwhole")
    for start, stop, text in [
        (0.6, 1.35, ""),
        (2.65, 3.55, ""),
        (4.05, 4.75, ""),
        (7.05, 8.65, "one sum"),
    ]:
        axes.annotate(
            "", (stop, 1), (start, 1), arrowprops={"arrowstyle": "->", "color": "#333"}
        )
        axes.text(
            (start + stop) / 2,
            1.1,
            text,
            ha="center",
            fontsize=9.5,
            color="#b3261e",
            weight="bold",
        )
    figure.savefig(PICTURES / "pair.png", dpi=150)


def architecture() -> None:
    """The subpackages by floors: each stands above all that it imports, and is joined
    to those just below."""
    imports = subpackages()
    floors: dict[str, int] = {}
    for subpackage, below in imports.items():  # in order, from the ground up
        floors[subpackage] = 1 + max((floors[other] for other in below), default=-1)
    places = {}
    for floor in range(max(floors.values()) + 1):
        there = [subpackage for subpackage in imports if floors[subpackage] == floor]
        places |= {
            subpackage: (4.2 * (i - (len(there) - 1) / 2), 1.5 * floor)
            for i, subpackage in enumerate(there)
        }
    figure = Figure(figsize=(10, 8))
    axes = figure.subplots()
    axes.axis("off")
    for subpackage, below in imports.items():
        indirect = set().union(*(_all_below(imports, other) for other in below))
        for other in below - indirect:
            (x, y), (x_below, y_below) = places[subpackage], places[other]
            axes.plot(
                [x, x_below],
                [y - 0.33, y_below + 0.33],
                color="#9aa0a6",
                linewidth=0.9,
                zorder=1,
            )
    for subpackage, (x, y) in places.items():
        color = "#3a6ea5" if subpackage.startswith("models") else "#e4572e"
        box = {
            "boxstyle": "round,pad=0.45",
            "facecolor": "white",
            "edgecolor": color,
            "linewidth": 1.4,
        }
        axes.text(
            x,
            y,
            subpackage,
            ha="center",
            va="center",
            fontsize=10,
            family="monospace",
            bbox=box,
            zorder=2,
        )
    axes.margins(x=0.12, y=0.05)
    figure.savefig(PICTURES / "architecture.png", dpi=110, bbox_inches="tight")


def _all_below(imports: dict[str, set[str]], subpackage: str) -> set[str]:
    return imports[subpackage].union(
        *(_all_below(imports, other) for other in imports[subpackage])
    )


def main() -> None:
    """All of them."""
    PICTURES.mkdir(exist_ok=True)
    pair()
    architecture()


if __name__ == "__main__":
    main()
