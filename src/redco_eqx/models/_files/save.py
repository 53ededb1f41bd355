"""`save_pretrained`: write a model as a directory that Hugging Face's libraries can open, with a model card."""

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

from redco_eqx._base.tree import to_arrays
from redco_eqx._paths import local_path
from redco_eqx.models._blocks.config import BaseConfig
from redco_eqx.models._blocks.model import Model
from redco_eqx.models._files.directory import GENERATION, carry_over, commit, part, prepare, tidy, write_beside
from redco_eqx.models._files.names import entries_of, list_problems
from redco_eqx.models._files.pieces import Piece, check_arrays, common_dtype, pieces_of, write_together
from redco_eqx.models._files.safetensors import write_file

CARD = "README.md"

_FORM = """---
library_name: {library}
tags:
- redco_eqx
---

# {name}

`{architecture}`, {num_parameters:,} parameters in {dtype}, trained to step {step} with {versions} on {place}.

| metric | step | value |
| --- | ---: | ---: |
"""


@runtime_checkable
class RunHistory(Protocol):
    """The rows and evaluations of a run, each with its `step`, as `fit` returns them."""

    @property
    def rows(self) -> Sequence[Mapping[str, float]]: ...

    @property
    def evaluations(self) -> Sequence[Mapping[str, float]]: ...


def card_of(model: Model, name: str, history: RunHistory) -> str:
    """Make a card with the model, library versions, the mesh, and the last value of each metric."""
    last = {}
    for row in (*history.rows, *history.evaluations):
        last |= {metric: (row["step"], value) for metric, value in row.items() if metric != "step"}
    arrays = to_arrays(model)
    mesh = next((x.sharding.mesh for x in arrays.values() if isinstance(x.sharding, NamedSharding)), None)
    sizes = {} if mesh is None else mesh.shape
    text = _FORM.format(
        library="diffusers" if "diffusion" in model.config.weights else "transformers",
        name=name,
        architecture=model.architecture or type(model).__name__,
        dtype=common_dtype(arrays),
        num_parameters=sum(math.prod(entry.unpadded_shape) for entry in entries_of(model)),
        step=max((step for step, _ in last.values()), default=0),
        versions=" and ".join(f"{x} {importlib.metadata.version(x)}" for x in ("redco_eqx", "jax")),
        place=" x ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device",
    )
    return text + "".join(f"| `{metric}` | {step} | {value:.6g} |\n" for metric, (step, value) in last.items())


def save_pretrained(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    card: str | RunHistory | None = None,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a model as `config.json` and safetensors. `transformers` and other engines open these without
    changes, and so does `diffusers` if the model is a part of one of its pipelines.

    A list of layers and stacked layers produce the same files. The files next to the weights in the directory
    that the model was loaded from (a tokenizer's files, `generation_config.json`, a licence; no
    subdirectories) are copied, unless a file of the same name exists. Every file is written under a temporary
    name and renamed at the end. At any moment, the directory therefore contains either the complete old
    checkpoint or the complete new one. Files with other names (a tokenizer's) stay. If the configuration
    changes, then for an instant, between two renames, only `load_pretrained` opens the configuration that
    belongs to the weights.

    With several processes, all must call this function: all of them fetch arrays, and process 0 writes. It
    returns when the new checkpoint is on disk.

    ```python
    models.save_pretrained(model, "finetuned")    # transformers.AutoModelForCausalLM.from_pretrained opens it
    ```

    **Arguments:**

    - `model`: a model in any layout. One array at a time (one layer at a time, if layers are stacked) is
        copied, fetched to the host, written and dropped.
    - `directory`: created if it does not exist. `~` is expanded.
    - `card`: the text of a model card for the Hugging Face Hub, written as `README.md`. Or pass the
        [`History`][redco_eqx.types.History] of a run to generate a card with the model, the versions, the mesh
        and the last metrics.
    - `max_shard_bytes`: larger weights go into several files, which an index names. Their names follow Hugging
        Face's convention, `model-00001-of-0000N.safetensors`. If you save the model again over the same number
        of files, they are `model-2-00001-of-...`, because the old files must not change before the index does.

    **Raises:**

    - `TypeError` if the model is not a `Model`.
    - `ValueError` if `max_shard_bytes` is not positive, an array is abstract, deleted, or not floating, or the
        arrays are not those of the model's family: LoRA that was not merged, for example. Also if a file to
        copy is a link that points outside the directory (but not into the cache of the hub).
    - `OSError` if the files cannot be written. The old checkpoint is then in force.
    - `RuntimeError` in the other processes, if process 0 could not write.
    """
    if not isinstance(model, Model):
        raise TypeError(f"save_pretrained: expected a model of redco_eqx.models, got a {type(model).__name__}.")
    if max_shard_bytes < 1:
        raise ValueError(f"save_pretrained: max_shard_bytes={max_shard_bytes}, but it must be positive.")
    arrays = to_arrays(model)
    check_arrays("save_pretrained", arrays)
    _check_family(model)
    directory = local_path("save_pretrained: directory", directory)
    if card is not None and not isinstance(card, str):
        card = card_of(model, directory.resolve().name, card)
    plan = _into_files(pieces_of(entries_of(model), arrays), max_shard_bytes)
    config: BaseConfig = model.config
    entries = config.to_file(dtype=common_dtype(arrays), architecture=model.architecture)
    text = json.dumps(entries, indent=2, sort_keys=True) + "\n"

    def write(fetched: Iterator[np.ndarray]) -> None:
        try:
            files, tag = prepare(directory, config.weights, len(plan), text, config.source)
            if config.source is not None:
                carry_over(Path(config.source), directory)
            metadata = {"format": "pt", **({"config": tag} if tag else {})}
            for file, pieces in zip(files, plan):
                records = [piece.record for piece in pieces]
                write_file(part(file), records, itertools.islice(fetched, len(records)), metadata)
            written = [(piece.record, file) for file, pieces in zip(files, plan) for piece in pieces]
            weight_map = {record.key: file.name for record, file in written}
            num_bytes = sum(record.num_bytes for record, _ in written)
            commit(directory, config.weights, files, tag, weight_map, num_bytes)
            if config.generation == "{}":
                (directory / GENERATION).unlink(missing_ok=True)  # of the model that was here before
            else:
                generation = json.dumps(json.loads(config.generation), indent=2)
                write_beside(directory / GENERATION, generation + "\n")
            if card is not None:
                write_beside(directory / CARD, card)
        except Exception:
            with contextlib.suppress(OSError):
                tidy(directory)
            raise

    write_together("save_pretrained", directory, itertools.chain.from_iterable(plan), arrays, write)


def _check_family(model: Model) -> None:
    """Raise `ValueError` for arrays that a reader of the configuration would not expect, or would miss."""
    entries = entries_of(model)
    family, config = type(model), model.config
    made: Any = family
    fresh = eqx.filter_eval_shape(
        lambda key: made(config, stacked=any(entry.stack for entry in entries), key=key), jax.random.key(0)
    )
    own, wanted = ({entry.path: entry.unpadded_shape for entry in x} for x in (entries, entries_of(fresh)))
    extra = [path for path in own if path not in wanted]
    misshapen = [path for path in wanted if path in own and own[path] != wanted[path]]
    problems = {
        "unknown": extra,
        "missing": [path for path in wanted if path not in own],
        "of a wrong shape": [f"{path} {list(own[path])} instead of {list(wanted[path])}" for path in misshapen],
    }
    if text := list_problems(problems):
        hint = ""
        if any(path.endswith((".lora_a", ".lora_b")) for path in extra):
            hint = "\nmerge_lora(model) adds the branches to its weights; save_lora writes them alone."
        raise ValueError(
            f"save_pretrained: the arrays are not those of a {family.__name__} with this configuration, and it "
            f"would not open.{text}{hint}"
        )


def _into_files(pieces: list[Piece], max_bytes: int) -> list[list[Piece]]:
    """Group the pieces into files of at most `max_bytes` (or of one array); larger dtypes come first, for
    alignment.
    """
    files: list[list[Piece]] = [[]]
    used = 0
    for piece in pieces:
        if files[-1] and used + piece.record.num_bytes > max_bytes:
            files.append([])
            used = 0
        files[-1].append(piece)
        used += piece.record.num_bytes
    return [sorted(file, key=lambda piece: -piece.record.dtype.itemsize) for file in files]
