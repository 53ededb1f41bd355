"""Numbers that JSON has no form for, as the strings that `float` reads."""

import math
from typing import Any

_STRINGS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(x: Any) -> Any:
    """The string for NaN or an infinity; all else as it is."""
    if not isinstance(x, float) or math.isfinite(x):
        return x
    return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"


def from_json(x: Any) -> Any:
    """The inverse of `to_json`."""
    return _STRINGS.get(x, x) if isinstance(x, str) else x
