"""Checksums of examples and batches, to notice those that are not the same again."""

import contextlib
import dataclasses
import marshal
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from redco_eqx._base.protocols import Batch
from redco_eqx._base.tree import leaves_with_paths

_PLAIN = {bool, int, float, complex, str, bytes, type(None)}


def checksum(x: Any, begin: int = 0) -> int:
    """Add the numbers and text in an example to the initial checksum `begin`, and
    return the result: a number from 0 to 2**30.

    Other objects count only by type and size, because processing their content may cost
    more than reading them.
    """
    content, parts = _contents(x)
    if content is not None:
        # Processes compare checksums with a `Vote`, whose numbers are of 32 bits with a
        # sign.
        return zlib.crc32(content, begin) % 2**30
    for part in parts:
        begin = checksum(part, begin)
    return begin


def checksums_of(batch: Batch) -> dict[str, int]:
    """Compute the checksum of each leaf of a batch, by the name that errors use for
    it."""
    return {path or "the batch": checksum(x) for path, x in leaves_with_paths(batch)}


def _contents(x: Any) -> tuple[Any, Iterable[Any]]:
    """Return the bytes of an object that has no parts, or only numbers and text as
    parts. For any other object, return `None` and its parts."""
    if isinstance(x, list | tuple):
        if not _PLAIN.issuperset(map(type, x)):
            return None, x
        # Avoid versions 3 and 4 of `marshal`, in which the bytes depend on the
        # references to an object.
        return marshal.dumps(list(x), 2), x
    if type(x) in _PLAIN:
        return marshal.dumps(x, 2), ()
    if isinstance(x, np.ndarray | np.generic):
        # The bytes of such an array are addresses, which differ in each process.
        if x.dtype.hasobject:
            return None, x.ravel().tolist()
        return np.ascontiguousarray(x).tobytes(), ()
    if isinstance(x, Mapping):
        return None, x.items()
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return None, [getattr(x, field.name) for field in dataclasses.fields(x)]
    if hasattr(x, "__array__"):  # an array of torch or JAX, unless NumPy cannot read it
        with contextlib.suppress(TypeError, RuntimeError):
            return None, [np.asarray(x)]
    if isinstance(x, str | bytes | bytearray | int | float):
        return repr(x).encode(), ()
    size = getattr(x, "size", None)  # an image has one
    told_size = size if isinstance(size, int | tuple) else None
    return repr((type(x).__name__, told_size)).encode(), ()
