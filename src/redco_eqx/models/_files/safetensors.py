"""Safetensors files: slices read from many, whole ones written array by array."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
"""Floating dtypes, and what the format calls them."""

MAX_HEADER = 100_000_000
"""Bytes; readers of the format refuse longer ones."""

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file.

    - `file`, `key`: where it is.
    - `dtype`: as NumPy names it; other than floating ones as the format does.
    - `shape`: of the whole.
    """

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]


class Reader:
    """Reads slices of the arrays in safetensors files. A context manager, which closes them."""

    def __init__(self):
        self._safetensors = _package()
        self._files: dict[Path, Any] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def open(self, file: Path) -> dict[str, Stored]:
        """What is in a file, by key.

        Raises `ValueError` if it is not a whole safetensors file.
        """
        try:
            handle = self._open.enter_context(self._safetensors.safe_open(str(file), framework="np"))
        except (self._safetensors.SafetensorError, OSError) as error:
            raise ValueError(
                f"{file} is not a whole safetensors file, {file.stat().st_size} bytes: {error}. Was it cut "
                "short in a download or a copy, or is it a pointer of Git LFS?"
            ) from error
        self._files[file] = handle
        dtypes = {name: dtype for dtype, name in NAMES.items()}
        found = {}
        for key in handle.keys():  # noqa: SIM118  (not a mapping)
            view = handle.get_slice(key)
            dtype: str = view.get_dtype()
            found[key] = Stored(file, key, dtypes.get(dtype, dtype), tuple(view.get_shape()))
        return found

    def read(self, stored: Stored, index: Index) -> np.ndarray:
        """A slice of an array, from the disk. Nothing else of the file is read."""
        return self._files[stored.file].get_slice(stored.key)[index]


def _package() -> Any:
    try:
        import ml_dtypes  # noqa: F401  NumPy knows bfloat16 by it
        import safetensors
    except ImportError as error:
        raise ImportError(
            'Reading a checkpoint needs safetensors. Install it by: pip install "redco_eqx[hf]"'
        ) from error
    return safetensors


def write_file(
    file: Path,
    contents: Sequence[tuple[str, Any, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
    metadata: Mapping[str, str],
) -> None:
    """Writes a safetensors file, and waits until it is on the disk.

    **Arguments:**

    - `file`: is overwritten.
    - `contents`: key, dtype and shape of each array, aligned as they come if larger dtypes are first.
    - `arrays`: in the same order. One is held at a time.
    - `metadata`: of the whole file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for key, dtype, shape in contents:
        start, end = end, end + int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        header[key] = {"dtype": NAMES[np.dtype(dtype).name], "shape": list(shape), "data_offsets": [start, end]}
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
