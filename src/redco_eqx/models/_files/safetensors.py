"""Safetensors files: slices read from many, whole ones written array by array."""

import dataclasses
import json
import math
import mmap
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
    - `view`: the array in the mapped file; `None` for a dtype that is not supported.
    - `mapped`: the file.
    """

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    view: np.ndarray | None = dataclasses.field(repr=False, compare=False)
    mapped: mmap.mmap = dataclasses.field(repr=False, compare=False)

    def read(self, index: Index) -> np.ndarray:
        """A slice of it. Nothing else of the file is read, and this once it is used."""
        assert self.view is not None
        return self.view[index]

    def as_matrix(self) -> "Stored":
        """The kernel of a convolution of one pixel without its window."""
        if self.view is None or self.shape[2:] != (1, 1):
            return self
        return dataclasses.replace(self, shape=self.shape[:2], view=self.view.reshape(self.shape[:2]))

    def release(self) -> None:
        """Lets go of the memory that what was read of the file takes, where the system can do so."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)


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
    del handle  # it has checked the file, and keeps what was read of it in memory
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    start, header = _read_header(file)
    with file.open("rb") as f:
        mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    found = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        dtype = dtypes.get(entry["dtype"]) or str(entry["dtype"])
        shape = tuple(entry["shape"])
        view = None
        if dtype in NAMES:
            size = math.prod(shape)
            begin = start + entry["data_offsets"][0] if size else 0
            view = np.frombuffer(mapped, dtype, size, begin).reshape(shape)
        found[key] = Stored(file, key, dtype, shape, view, mapped)
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


def read_metadata(file: Path) -> dict[str, Any]:
    """The metadata of a safetensors file; nothing if it is not one."""
    try:
        return dict(_read_header(file)[1].get("__metadata__", {}))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the arrays begin, and what the file says of them."""
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        return 8 + size, json.loads(f.read(min(size, MAX_HEADER)))
