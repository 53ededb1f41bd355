"""Tiny models of every kind, each with the tensor-parallel layout that its arrays
should get, by hand.

The goldens are written from the design alone, independently of the code that they test.
"""

from . import conv, feedforward, language, squares
from ._entry import Entry, goldens, of_rows, unlike
from ._layers import stack

ZOO: list[Entry] = [
    *language.ENTRIES,
    *feedforward.ENTRIES,
    *conv.ENTRIES,
    *squares.ENTRIES,
]
BY_NAME: dict[str, Entry] = {entry.name: entry for entry in ZOO}

# What the path rules do not see: of these the golden layout is found by the program.
BY_PROGRAM_ALONE: dict[str, str] = {
    "raw_einsum": "matrices that are no `weight` of a module, with a dim for heads",
    "conv_depthwise": (
        "convolutions in groups: left whole, between the two that are split"
    ),
    "squares_wa_wb_wc_wd": "an attention with names of its own, taken for a chain",
    "shared_head": "the bias of a head whose weight is another leaf: left whole",
}

__all__ = [
    "BY_NAME",
    "BY_PROGRAM_ALONE",
    "ZOO",
    "Entry",
    "goldens",
    "of_rows",
    "stack",
    "unlike",
]
