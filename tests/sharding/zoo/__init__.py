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

# What the path rules do not see: of these the golden layout is found by the program.
BY_PROGRAM_ALONE: dict[str, str] = {
    "bare_arrays": "matrices that are no `weight` of a module",
    "raw_einsum": "the same, with a dim for heads",
    "moe_raw": "the same, with a dim for experts",
    "moe_raw_indivisible": "the same: the router is taken for a matrix of its own",
    "wrapped_weights": "a weight that is a module itself",
    "lora_raw": "the same, in a matrix that is seen",
    "vision_two_fields": "blocks that are fields of their own, and no list or stack",
    "conv_depthwise": "convolutions in groups: left whole, between the two that are split",
    "shared_head": "the bias of a head whose weight is another leaf: left whole",
}

__all__ = ["BY_NAME", "BY_PROGRAM_ALONE", "ZOO", "Entry", "arrays", "golden", "goldens", "strip"]
