"""Shapes as HLO prints them: `"f32[8,128]"`."""

import math
import re

_ARRAY = re.compile(r"\w+\[[^\]]*\]")
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}


def arrays(shape: str) -> tuple[str, ...]:
    """The arrays in a shape or a tuple of them, without their memory layouts."""
    return tuple(_ARRAY.findall(shape))


def num_elements(array: str) -> int:
    """Elements of `"f32[8,128]"`."""
    dims = array.rstrip("]").split("[")[1]
    # "<=8" is a dim of at most 8.
    return math.prod(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)


def num_bytes(array: str) -> int:
    """Bytes of `"f32[8,128]"`; elements of less than a byte are packed."""
    dtype = array.split("[")[0]
    # "s4", "u32", "f16", "f8e4m3fn", "c64": the number is the width.
    width = re.match(r"[sufc](\d+)", dtype)
    bits = int(width[1]) if width else _BITS.get(dtype)
    if bits is None:
        raise ValueError(f"communication: the width of dtype {dtype!r}, of {array}, is not known.")
    return -(-bits * num_elements(array) // 8)
