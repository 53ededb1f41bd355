"""`save_pretrained`: write a model as a directory that Hugging Face's libraries can
open, with a model card."""

import contextlib
import importlib.metadata
import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np
from jax.sharding import NamedSharding

from redco_eqx import to_arrays
from redco_eqx_models._blocks.config import BaseConfig
from redco_eqx_models._blocks.model import Model
from redco_eqx_models._files.copies import carry_over, check_links
from redco_eqx_models._files.directory import CARD, CONFIG, GENERATION
from redco_eqx_models._files.exchange import Exchange, begin, tidied_after_error
from redco_eqx_models._files.names import entries_of, list_problems
from redco_eqx_models._files.paths import local_path
from redco_eqx_models._files.pieces import (
    Piece,
    check_arrays,
    common_dtype,
    pieces_of,
    write_together,
)
from redco_eqx_models._files.safetensors import write_file
from redco_eqx_models._files.writer import only_writer
from redco_eqx_models._leaves import AnyArray

_FORM = """---
library_name: {library}
tags:
- redco_eqx
---

# {name}

`{architecture}`, {num_parameters:,} parameters in {dtype}, trained to step {step} \
with {versions} on {place}.

| metric | step | value |
| --- | ---: | ---: |
"""


@runtime_checkable
class RunHistory(Protocol):
    """The rows and evaluations of a run, each with its `step`, as `fit` returns
    them."""

    @property
    def rows(self) -> Sequence[Mapping[str, float]]: ...

    @property
    def evaluations(self) -> Sequence[Mapping[str, float]]: ...


def card_of(model: Model, name: str, history: RunHistory) -> str:
    """Make a card with the model, library versions, the mesh, and the last value of
    each metric."""
    last = {}
    for row in (*history.rows, *history.evaluations):
        for metric, value in row.items():
            if metric != "step":
                last[metric] = (row["step"], value)
    arrays = to_arrays(model)
    # The hub shows how to load a model with this library.
    library = "transformers"
    if "diffusion" in model.config.weights:
        library = "diffusers"
    versions = [f"{x} {importlib.metadata.version(x)}" for x in ("redco_eqx", "jax")]
    text = _FORM.format(
        library=library,
        name=name,
        architecture=model.architecture or type(model).__name__,
        dtype=common_dtype(arrays),
        num_parameters=sum(
            math.prod(entry.unpadded_shape) for entry in entries_of(model)
        ),
        step=max((step for step, _ in last.values()), default=0),
        versions=" and ".join(versions),
        place=_name_of_mesh(arrays),
    )
    lines = [
        f"| `{metric}` | {step} | {value:.6g} |\n"
        for metric, (step, value) in last.items()
    ]
    return text + "".join(lines)


def _name_of_mesh(arrays: Mapping[str, Any]) -> str:
    """Return the axes and sizes of the mesh of the first array that is on one."""
    for x in arrays.values():
        if isinstance(x.sharding, NamedSharding):
            axes = [f"{axis}={size}" for axis, size in x.sharding.mesh.shape.items()]
            return " x ".join(axes) or "one device"
    return "one device"


def save_pretrained(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    card: str | RunHistory | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a model as `config.json` and safetensors. `transformers` and other engines
    open these without changes, and so does `diffusers` if the model is a part of one of
    its pipelines.

    A list of layers and stacked layers produce the same files. The files next to the
    weights in the directory that the model was loaded from (a tokenizer's files,
    `generation_config.json`, a licence; no subdirectories) are copied, unless a file of
    the same name exists. Every file is written under a temporary name and renamed at
    the end. At any moment, the directory therefore contains either the complete old
    checkpoint or the complete new one. Files with other names (a tokenizer's) stay. If
    `config.json`, `generation_config.json` or the card changes, then for an instant,
    between two renames, only `load_pretrained` opens those that belong to the weights.
    If a save is killed at that instant, `load_pretrained` warns, and the next save
    finishes it.

    Programs that save to one directory take turns: one waits until the other has ended,
    for at most 10 minutes. The directory then contains the model that was saved last.

    With several processes, all must call this function: all of them fetch arrays, and
    process 0 writes. It returns when the new checkpoint is on disk.

    ```python
    # transformers.AutoModelForCausalLM.from_pretrained opens it.
    models.save_pretrained(model, "finetuned")
    ```

    **Arguments:**

    - `model`: a model in any layout. One array at a time (one layer at a time, if
        layers are stacked) is copied, fetched to the host, written and dropped.
    - `directory`: created if it does not exist. `~` is expanded.
    - `card`: the text of a model card for the Hugging Face Hub, written as `README.md`.
        Or pass the [`History`][redco_eqx.types.History] of a run to generate a card
        with the model, the versions, the mesh and the last metrics. All texts are
        written in UTF-8, whatever the locale.
    - `max_shard_bytes`: larger weights go into several files, which an index names.
        Their names follow Hugging Face's convention,
        `model-00001-of-0000N.safetensors`. If you save the model again over the same
        number of files, they are `model-2-00001-of-...`, because the old files must not
        change before the index does.

    **Raises:**

    - `TypeError` if the model is not a `Model`, the directory not a path, or the card
        not one of these.
    - `ValueError` if the directory is an address (`gs://bucket`), `max_shard_bytes` is
        not positive, an array is abstract, deleted, or not floating, or the arrays are
        not those of the model's family: LoRA that was not merged, for example. Also if
        a file to copy is a link that points outside the directory (but not into the
        cache of the hub).
    - `OSError` if the files cannot be written. The old checkpoint is then in force.
        `TimeoutError`, which is one of them, names another program that has been
        writing the directory for 10 minutes.
    - `RuntimeError` in the other processes, if process 0 could not write.
    """
    directory = local_path("save_pretrained: directory", directory)
    save = plan_save(
        "save_pretrained", model, directory, card=card, max_shard_bytes=max_shard_bytes
    )

    def write(fetched: Iterator[np.ndarray]) -> None:
        with contextlib.ExitStack() as stack:
            save.stage(fetched, stack)
            save.commit()

    write_together("save_pretrained", directory, save.pieces, save.arrays, write)


class Save:
    """A checked model on its way to a directory. Process 0 calls `stage`, and then
    `commit`."""

    def __init__(
        self,
        what: str,
        directory: Path,
        config: BaseConfig,
        arrays: dict[str, AnyArray],
        files: list[list[Piece]],
        contents: Mapping[str, bytes | None],
    ):
        self.arrays = arrays
        self._what = what
        self._directory = directory
        self._config = config
        self._files = files
        self._contents = contents
        self._exchange: Exchange | None = None

    @property
    def pieces(self) -> list[Piece]:
        """The arrays to fetch, in the order in which `stage` takes them."""
        return list(itertools.chain.from_iterable(self._files))

    def stage(self, fetched: Iterator[np.ndarray], stack: contextlib.ExitStack) -> None:
        """Write all files under temporary names. Until the stack is closed, nobody else
        writes there. The stack also removes the temporary files after an error.
        """
        config = self._config
        if config.source is not None:
            check_links(Path(config.source), self._directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        stack.enter_context(only_writer(self._what, self._directory))
        stack.enter_context(tidied_after_error(self._directory))
        self._exchange = begin(
            self._directory, config.weights, len(self._files), self._contents
        )
        if config.source is not None:
            # After `begin`, whose files (a card, for example) come before the source's.
            carry_over(Path(config.source), self._directory)
        for file, pieces in zip(self._exchange.files, self._files, strict=True):
            records = [piece.record for piece in pieces]
            arrays = itertools.islice(fetched, len(records))
            write_file(
                self._exchange.part(file), records, arrays, self._exchange.metadata
            )

    def commit(self) -> None:
        """Put the written files in force."""
        assert self._exchange is not None
        weight_map = {}
        for file, pieces in zip(self._exchange.files, self._files, strict=True):
            weight_map |= {piece.record.key: file.name for piece in pieces}
        num_bytes = sum(piece.record.num_bytes for piece in self.pieces)
        self._exchange.commit(weight_map, num_bytes)


def plan_save(
    what: str,
    model: Any,
    directory: Path,
    *,
    card: str | RunHistory | None = None,
    max_shard_bytes: int,
) -> Save:
    """Check a model, and plan its files. Nothing is written. Raises the errors of
    `save_pretrained`."""
    if not isinstance(model, Model):
        raise TypeError(
            f"{what}: expected a model of redco_eqx_models, got a "
            f"{type(model).__name__}."
        )
    if max_shard_bytes < 1:
        raise ValueError(
            f"{what}: max_shard_bytes={max_shard_bytes}, but it must be positive."
        )
    arrays = to_arrays(model)
    check_arrays(what, arrays)
    _check_family(what, model)
    config: BaseConfig = model.config
    entries = config.to_file(
        dtype=common_dtype(arrays), architecture=model.architecture
    )
    text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
    contents: dict[str, bytes | None] = {CONFIG: text.encode()}
    # A file that is there belongs to another model.
    contents[GENERATION] = None
    if config.generation != "{}":
        generation = json.dumps(json.loads(config.generation), indent=2) + "\n"
        contents[GENERATION] = generation.encode()
    if card is not None:
        contents[CARD] = _card_content(what, model, directory, card)
    files = _into_files(pieces_of(entries_of(model), arrays), max_shard_bytes)
    return Save(what, directory, config, arrays, files, contents)


def _card_content(
    what: str, model: Model, directory: Path, card: str | RunHistory
) -> bytes:
    """Return the text of a card in UTF-8, whatever the locale."""
    if isinstance(card, str):
        text = card
    elif isinstance(card, RunHistory):
        # In an ASCII locale, a name with accents is not text.
        name = os.fsencode(directory.resolve().name).decode("utf-8", "replace")
        text = card_of(model, name, card)
    else:
        raise TypeError(
            f"{what}: card must be a text or the History of a run, but is a "
            f"{type(card).__name__}."
        )
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what}: card has {text[error.start]!r} at position {error.start}, which "
            "is no character of a text. Read the card with encoding='utf-8'."
        ) from error


def _check_family(what: str, model: Model) -> None:
    """Raise `ValueError` for arrays that a reader of the configuration would not
    expect, or would miss."""
    entries = entries_of(model)
    family = type(model)
    config = model.config
    # The model that `load_pretrained` would make for the configuration.
    make: Any = family
    is_stacked = any(entry.stack for entry in entries)
    fresh = eqx.filter_eval_shape(
        lambda key: make(config, stacked=is_stacked, key=key), jax.random.key(0)
    )
    own = {entry.path: entry.unpadded_shape for entry in entries}
    wanted = {entry.path: entry.unpadded_shape for entry in entries_of(fresh)}
    extra = [path for path in own if path not in wanted]
    misshapen = [path for path in wanted if path in own and own[path] != wanted[path]]
    problems = {
        "unknown": extra,
        "missing": [path for path in wanted if path not in own],
        "of a wrong shape": [
            f"{path} {list(own[path])} instead of {list(wanted[path])}"
            for path in misshapen
        ],
    }
    if text := list_problems(problems):
        hint = ""
        if any(path.endswith((".lora_a", ".lora_b")) for path in extra):
            hint = (
                "\nmerge_lora(model) adds the branches to its weights; save_lora "
                "writes them alone."
            )
        raise ValueError(
            f"{what}: the arrays are not those of a {family.__name__} with this "
            f"configuration, and it would not open.{text}{hint}"
        )


def _into_files(pieces: list[Piece], max_bytes: int) -> list[list[Piece]]:
    """Group the pieces into files of at most `max_bytes` (or of one array); larger
    dtypes come first, for alignment.
    """
    files: list[list[Piece]] = [[]]
    used = 0
    for piece in pieces:
        if files[-1] and used + piece.record.num_bytes > max_bytes:
            files.append([])
            used = 0
        files[-1].append(piece)
        used += piece.record.num_bytes
    return [
        sorted(file, key=lambda piece: -piece.record.dtype.itemsize) for file in files
    ]
