"""The position in a stream, and a source's own state as text."""

import base64
import importlib
import json
from typing import Any, NamedTuple

import numpy as np


class Position(NamedTuple):
    """How far one shard of a stream has been read in an epoch. Plain numbers and text, for a checkpoint.

    - `shard`, `num_shards`: which part of the stream; 0 of 1 is the whole.
    - `num_items`: how many items (examples, or batches) have been read.
    - `state`: the source's own state there or a little before; `None` if it has none.
    - `checksum`: of the items that have been read; `None` if that is not known.
    - `state_items`, `state_checksum`: how many had been read when the state was taken, and their checksum. What
        is read from there must lead to `checksum`: this proves the state.
    """

    shard: int
    num_shards: int
    num_items: int = 0
    state: str | None = None
    checksum: int | None = None
    state_items: int = 0
    state_checksum: int = 0


def encode(state: Any) -> str | None:
    """A source's state as JSON; `None` if there is something in it that has no form here.

    Numbers, text, bytes, lists, tuples, dicts, and arrays of NumPy and torch have one.
    """
    try:
        return json.dumps(_encoded(state))
    except TypeError:
        return None


def decode(text: str) -> Any:
    """The inverse of `encode`."""
    return _decoded(json.loads(text))


def _encoded(x: Any) -> Any:
    if x is None or type(x) in (bool, int, float, str):
        return x
    if type(x) in (list, tuple):
        return {type(x).__name__: [_encoded(item) for item in x]}
    if type(x) is dict:  # as pairs, because its keys may be numbers
        return {"dict": [[_encoded(key), _encoded(value)] for key, value in x.items()]}
    if type(x) is bytes:
        return {"bytes": base64.b64encode(x).decode()}
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "biufc":
        array = np.ascontiguousarray(x)
        return {"array": [array.dtype.str, list(x.shape), base64.b64encode(array.tobytes()).decode()]}
    to_numpy = getattr(x, "numpy", None)
    if type(x).__module__ == "torch" and callable(to_numpy):
        return {"tensor": _encoded(to_numpy())}
    raise TypeError(f"a {type(x).__name__} has no form in JSON")


def _decoded(x: Any) -> Any:
    if not isinstance(x, dict):
        return x
    ((kind, content),) = x.items()
    match kind:
        case "list" | "tuple":
            return (list if kind == "list" else tuple)(_decoded(item) for item in content)
        case "dict":
            return {_decoded(key): _decoded(value) for key, value in content}
        case "bytes":
            return base64.b64decode(content)
        case "array":
            dtype, shape, text = content
            return np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
        case _:
            return importlib.import_module("torch").from_numpy(_decoded(content))
