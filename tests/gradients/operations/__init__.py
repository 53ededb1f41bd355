"""One file for each family of operations."""

from gradients.operations import convolution, indexing, loops, moves, products, spectral
from gradients.operations._registry import OPERATIONS, one_of

__all__ = [
    "OPERATIONS",
    "convolution",
    "indexing",
    "loops",
    "moves",
    "one_of",
    "products",
    "spectral",
]
