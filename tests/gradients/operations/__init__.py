"""One file for each family of operations."""

from operations import (
    convolution,
    indexing,
    linear_algebra,
    loops,
    mixing,
    normalization,
    ordering,
    reshaping,
    spectral,
)
from operations._registry import OPERATIONS, Operation, one_of

__all__ = [
    "OPERATIONS",
    "Operation",
    "convolution",
    "indexing",
    "linear_algebra",
    "loops",
    "mixing",
    "normalization",
    "one_of",
    "ordering",
    "reshaping",
    "spectral",
]
