"""Safetensors files: slices read from many, whole ones written array by array."""

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
"""Floating dtypes, and what the format calls them."""

MAX_HEADER = 100_000_000
"""Bytes; readers of the format refuse longer ones."""

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file, which stays open as long as this is there.

    - `file`, `key`: where it is.
    - `dtype`: as NumPy names it; other than floating ones as the format does.
    - `shape`: of the whole.
    - `view`: what `safetensors` reads slices by.
    """

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    view: Any = dataclasses.field(repr=False, compare=False)

    def read(self, index: Index) -> np.ndarray:
        """A slice of it, from the disk. Nothing else of the file is read."""
        return self.view[index]


def open_file(file: Path) -> dict[str, Stored]:
    """What is in a file, by key.

    Raises `ValueError` if it is not a whole safetensors file, `ImportError` without the package safetensors.
    """
    try:
        import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
        import safetensors
    except ImportError as error:
        raise ImportError(
            'Reading a checkpoint needs safetensors. Install it by: pip install "redco_eqx[hf]"'
        ) from error
    try:
        handle = safetensors.safe_open(str(file), framework="np")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is not a whole safetensors file, {file.stat().st_size} bytes: {error}. Was it cut "
            "short in a download or a copy, or is it a pointer of Git LFS?"
        ) from error
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    found = {}
    for key in handle.keys():  # noqa: SIM118  (not a mapping)
        view = handle.get_slice(key)
        dtype: str = view.get_dtype()
        found[key] = Stored(file, key, dtypes.get(dtype, dtype), tuple(view.get_shape()), view)
    return found


class Record(NamedTuple):
    """An array to be written: its key, dtype and shape."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    file: Path, records: Sequence[Record], arrays: Iterable[np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file, and waits until it is on the disk. safetensors' own writer wants all arrays of
    a file at once.

    **Arguments:**

    - `file`: is overwritten.
    - `records`: what the arrays are, aligned as they come if larger dtypes are first.
    - `arrays`: in the same order. One is held at a time.
    - `metadata`: of the whole file.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for record in records:
        start, end = end, end + record.num_bytes
        header[record.key] = {
            "dtype": NAMES[record.dtype.name],
            "shape": record.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            f.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())


def read_metadata(file: Path) -> dict[str, str]:
    """The metadata of a safetensors file; nothing if it is not one."""
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        try:
            return dict(json.loads(f.read(min(size, MAX_HEADER))).get("__metadata__", {}))
        except (ValueError, AttributeError):
            return {}
