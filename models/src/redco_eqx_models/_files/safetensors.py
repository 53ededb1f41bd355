"""Safetensors files: slices read from many, and whole files written array by array."""

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
"""Floating dtypes, and their names in the format."""

MAX_HEADER = 100_000_000
"""The limit on a header in bytes; readers of the format reject longer ones."""

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file, which stays open as long as this object exists.

    - `file`, `key`: the place of the array.
    - `dtype`: NumPy's name for floating dtypes, and the format's name for others.
    - `shape`: the shape of the whole array.
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
        """Read a slice of the array. Nothing else of the file is read, and the slice
        only once it is used."""
        assert self.view is not None
        return self.view[index]

    def as_matrix(self) -> "Stored":
        """Return the kernel of a convolution of one pixel without its window."""
        if self.view is None or self.shape[2:] != (1, 1):
            return self
        return dataclasses.replace(
            self, shape=self.shape[:2], view=self.view.reshape(self.shape[:2])
        )

    def release(self) -> None:
        """Release the memory of the parts of the file that were read, if the system can
        do so."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.madvise(mmap.MADV_DONTNEED)


def open_file(file: Path) -> dict[str, Stored]:
    """Open a file, and return its arrays by key.

    Raises `ValueError` if it is not a complete safetensors file.
    """
    # Only a reader needs the package: a model that is made here needs no file.
    import safetensors

    try:
        handle = safetensors.safe_open(str(file), framework="np")
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is not a whole safetensors file, {file.stat().st_size} bytes: "
            f"{error}. Was it cut short in a download or a copy, or is it a pointer of "
            "Git LFS?"
        ) from error
    # It has checked the file, and would keep the parts that it read in memory.
    del handle
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
            # Offsets count from the end of the header.
            begin = 0
            if size:
                begin = start + entry["data_offsets"][0]
            view = np.frombuffer(mapped, dtype, size, begin).reshape(shape)
        found[key] = Stored(file, key, dtype, shape, view, mapped)
    return found


class Record(NamedTuple):
    """An array to write: its key, dtype and shape."""

    key: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_file(
    file: Path,
    records: Sequence[Record],
    arrays: Iterable[np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file, and wait until it is on disk. The safetensors package's
    own writer needs all arrays of a file at once.

    **Arguments:**

    - `file`: the path of the file, which is overwritten.
    - `records`: the descriptions of the arrays. The arrays stay aligned if larger
        dtypes come first.
    - `arrays`: the arrays, in the same order. Only one is in memory at a time.
    - `metadata`: the metadata of the whole file.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for record in records:
        start = end
        end = end + record.num_bytes
        kind = {"dtype": NAMES[record.dtype.name], "shape": record.shape}
        header[record.key] = {**kind, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    # The package's own writer pads the header with spaces too, so that arrays begin at
    # a multiple of 8 bytes.
    text += b" " * (-len(text) % 8)
    with file.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            # As bytes, because Python's buffers have no bfloat16.
            f.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())


def read_metadata(file: Path) -> dict[str, Any]:
    """Return the metadata of a safetensors file; nothing if it is not one."""
    try:
        return dict(_read_header(file)[1].get("__metadata__", {}))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Return the offset of the arrays, and the file's header."""
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
        return 8 + size, json.loads(f.read(min(size, MAX_HEADER)))
