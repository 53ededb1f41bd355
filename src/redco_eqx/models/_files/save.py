"""`save_pretrained`: a model written as a directory that Hugging Face's libraries open."""

import contextlib
import functools
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Array, Int

from redco_eqx._tree import to_arrays
from redco_eqx.models._blocks.model import Model
from redco_eqx.models._files.directory import commit, part, prepare, tidy
from redco_eqx.models._files.names import entries_of
from redco_eqx.models._files.safetensors import NAMES, Record, write_file


def save_pretrained(
    model: Model, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 2**30
) -> None:
    """Writes a model as `config.json` and safetensors, which `transformers` and other engines open as they are.

    A list of layers and stacked layers give the same files. Every file is written beside its place and renamed
    at the end, so that at any moment the directory holds the old checkpoint or the new one, whole; files of
    other names (a tokenizer's) stay. Should the configuration change, then for an instant, between two
    renames, only `load_pretrained` finds the one that belongs to the weights.

    With several processes, all call this; all take part in fetching, and process 0 writes. It returns once the
    new checkpoint is on the disk.

    **Arguments:**

    - `model`: of any layout. One array at a time is fetched to the host; of stacked layers, one layer of it.
    - `directory`: is made if it is not there.
    - `max_shard_bytes`: weights beyond it go into several files, named by an index, which is by Hugging Face's
        convention `model-00001-of-0000N.safetensors`; saved again over the same number of files, they are
        `model-2-00001-of-...`, because the old ones must not be touched before the index is.

    **Raises:**

    - `TypeError` if the model is not a `Model`.
    - `ValueError` if `max_shard_bytes` is not positive or an array is abstract, deleted, or not floating.
    - `OSError` if it cannot be written. The old checkpoint is in force then.
    - `RuntimeError` in the other processes, if process 0 could not write.
    """
    if not isinstance(model, Model):
        raise TypeError(f"save_pretrained: expected a model of redco_eqx.models, got a {type(model).__name__}.")
    if max_shard_bytes < 1:
        raise ValueError(f"save_pretrained: max_shard_bytes={max_shard_bytes}, but it must be positive.")
    arrays = to_arrays(model)
    _check(arrays)
    directory = Path(directory)
    plan = _into_files(_pieces(model, arrays), max_shard_bytes)
    dtype = functools.reduce(jnp.promote_types, (x.dtype for x in arrays.values())).name
    config = {**model.config.to_json(), "dtype": dtype, "torch_dtype": dtype}
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    fetched = (_fetch(arrays[piece.path], piece) for pieces in plan for piece in pieces)
    error = None
    try:
        if jax.process_index() == 0:
            _write(directory, plan, text, fetched)
    except Exception as caught:
        error = caught
    if jax.process_count() > 1:
        for _ in fetched:  # every process takes part in each fetch, also once process 0 cannot write
            pass
        if multihost_utils.broadcast_one_to_all(np.int32(error is not None)) and error is None:
            raise RuntimeError(f"save_pretrained: process 0 could not write {directory}; its error says why.")
    if error is not None:
        raise error


class _Piece(NamedTuple):
    """An array in a file, and the leaf (and layer of it) that it is."""

    record: Record
    path: str
    layer: int | None


def _check(arrays: dict[str, Any]) -> None:
    for path, x in arrays.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(f"save_pretrained: {path} is abstract; there are no numbers to write.")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(
                f"save_pretrained: {path} has been deleted. It was donated, perhaps with a state: save the "
                "model of the newest state."
            )
        if x.dtype.name not in NAMES:
            raise ValueError(f"save_pretrained: {path} is {x.dtype.name}, not one of {', '.join(NAMES)}.")


def _pieces(model: Model, arrays: dict[str, Any]) -> list[_Piece]:
    """What is written, layer by layer also where layers are stacked."""
    pieces = []
    for stack, group in itertools.groupby(entries_of(model), lambda entry: entry.stack):
        entries = list(group)
        for layer in [None] if stack is None else range(len(entries[0].keys)):
            for entry in entries:
                dtype = np.dtype(arrays[entry.path].dtype)
                record = Record(entry.keys[layer or 0], dtype, entry.file_shape)
                pieces.append(_Piece(record, entry.path, layer))
    return pieces


def _into_files(pieces: list[_Piece], max_bytes: int) -> list[list[_Piece]]:
    """Files of at most so many bytes (or of one array); larger dtypes first in each, as alignment wants."""
    files: list[list[_Piece]] = [[]]
    used = 0
    for piece in pieces:
        if files[-1] and used + piece.record.num_bytes > max_bytes:
            files.append([])
            used = 0
        files[-1].append(piece)
        used += piece.record.num_bytes
    return [sorted(file, key=lambda piece: -piece.record.dtype.itemsize) for file in files]


def _fetch(x: Array | np.ndarray, piece: _Piece) -> np.ndarray:
    if piece.layer is not None:
        x = _take(x, piece.layer)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)[: piece.record.shape[0]].reshape(piece.record.shape)  # without rows that pad it


@jax.jit
def _take(x: Array, layer: Int[Array, ""]) -> Array:
    return jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)


def _write(directory: Path, plan: list[list[_Piece]], config: str, arrays: Iterator[np.ndarray]) -> None:
    try:
        files, tag = prepare(directory, len(plan), config)
        metadata = {"format": "pt", **({"config": tag} if tag else {})}
        for file, pieces in zip(files, plan):
            records = [piece.record for piece in pieces]
            write_file(part(file), records, itertools.islice(arrays, len(records)), metadata)
        written = [(piece.record, file) for file, pieces in zip(files, plan) for piece in pieces]
        weight_map = {record.key: file.name for record, file in written}
        commit(directory, files, tag, weight_map, sum(record.num_bytes for record, _ in written))
    except Exception:
        with contextlib.suppress(OSError):
            tidy(directory)
        raise
