"""Tiny models of every kind, each with the tensor-parallel layout that its arrays should get, by hand.

The goldens are written from the design alone, independently of the code that they test.
"""

from . import conv, decoders, encoders, ends, feedforward, friends, fused, lora, moe, stacked
from ._entry import Entry, arrays, golden, goldens, strip

ZOO: list[Entry] = [
    *decoders.ENTRIES,
    *encoders.ENTRIES,
    *ends.ENTRIES,
    *feedforward.ENTRIES,
    *fused.ENTRIES,
    *stacked.ENTRIES,
    *moe.ENTRIES,
    *lora.ENTRIES,
    *conv.ENTRIES,
    *friends.ENTRIES,
]
BY_NAME: dict[str, Entry] = {entry.name: entry for entry in ZOO}

__all__ = ["BY_NAME", "ZOO", "Entry", "arrays", "golden", "goldens", "strip"]
