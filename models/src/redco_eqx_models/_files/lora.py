"""Files with only LoRA branches, in peft's format: `adapter_config.json` and
safetensors."""

import functools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from redco_eqx import make_mesh, shard_rules, to_arrays
from redco_eqx_models._blocks.decoder import DecoderLM
from redco_eqx_models._blocks.layers import Linear
from redco_eqx_models._blocks.lora import LoRA, add_lora, beside
from redco_eqx_models._blocks.model import Model
from redco_eqx_models._files.directory import ADAPTER_CONFIG as CONFIG
from redco_eqx_models._files.directory import (
    file_in_force,
    local_directory,
    read_json,
    single,
    unchanged,
)
from redco_eqx_models._files.exchange import begin, tidied_after_error
from redco_eqx_models._files.names import Entry, entries_of, shapes_of
from redco_eqx_models._files.paths import local_path
from redco_eqx_models._files.pieces import (
    check_arrays,
    pieces_of,
    place,
    write_together,
)
from redco_eqx_models._files.safetensors import NAMES, Stored, open_file, write_file
from redco_eqx_models._files.writer import only_writer
from redco_eqx_models._leaves import first_few, path_of, shardings_by_path

M = TypeVar("M", bound=Model)

STEM = "adapter_model"
WEIGHTS = single(STEM)

# `PeftModel` has the tuner as `base_model`, and the tuner has the model as `model`.
_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FACTOR = re.compile(r"\.lora_([ab])$")
_ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_rslora": (True,),
    # Other ways of initialization change the base's weights.
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva", "mica"),
}
"""The allowed values of entries, besides null, false or empty."""
_OTHERS = {
    *("r", "lora_alpha"),  # read here
    # the places of the branches, which the keys state
    *(
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "ensure_weight_tying",
    ),
    *("lora_dropout", "inference_mode", "eva_config"),  # for training
    # Entries that only tell names and versions.
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "peft_version",
        "revision",
        "task_type",
    ),
    # Have defaults, and belong to entries that are refused.
    *("megatron_core", "qalora_group_size"),
}
"""Entries with any value: the logits do not depend on them. All unknown entries are
refused."""


def save_lora(
    model: Model,
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
) -> None:
    """Write only the branches of a model, as `adapter_config.json` and
    `adapter_model.safetensors`. `peft.PeftModel.from_pretrained(base, directory)` and
    other engines open them.

    A list of layers and stacked layers produce the same files. With several processes,
    all must call this function, and process 0 writes. Both files come into force
    together, and programs that save to one directory take turns, as in
    `save_pretrained`.

    **Arguments:**

    - `model`: with branches of one rank and scale, as `add_lora` makes them.
    - `directory`: created if it does not exist. `~` is expanded.
    - `base`: the name or directory of the model that the branches belong to; by
        default, the directory that it was loaded from.

    **Raises:**

    - `ValueError` if there are no branches, if they have several ranks or scales, if
        they are beside projections that files store joined (Phi-3), if arrays are
        abstract, deleted or not floating, or if the directory is an address
        (`gs://bucket`).
    - `OSError` if the files cannot be written; `RuntimeError` on the other processes.
    """
    directory = local_path("save_lora: directory", directory)
    branches = _branches(model)
    kinds = {(x.lora_a.shape[-2], x.scale) for x in branches.values()}
    if len(kinds) != 1:
        found = [f"rank {rank} with scale {scale}" for rank, scale in sorted(kinds)]
        raise ValueError(
            "save_lora: the branches must be of one rank and scale, but there are: "
            f"{', '.join(found) or 'none at all'}."
        )
    ((rank, scale),) = kinds
    parts = {}
    for whole, own in model.config.joined.items():
        parts |= dict.fromkeys(own, whole)
    alone = [path for path in branches if path.rpartition(".")[2] in parts]
    if alone:
        raise ValueError(
            f"save_lora: {first_few(alone, most=3)} have no place in peft's format, "
            "because elsewhere they are parts of "
            f"{parts[alone[0].rpartition('.')[2]]}. Use merge_lora to save them with "
            "the model."
        )
    entries = [entry for entry in entries_of(model) if _FACTOR.search(entry.path)]
    arrays = {entry.path: to_arrays(model)[entry.path] for entry in entries}
    check_arrays("save_lora", arrays)
    pieces = [
        piece._replace(record=piece.record._replace(key=_key(piece.record.key)))
        for piece in pieces_of(entries, arrays)
    ]
    # Larger dtypes first, so that all arrays are aligned.
    pieces.sort(key=lambda piece: -piece.record.dtype.itemsize)
    source = model.config.source
    if base is not None:
        source = os.fspath(base)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if isinstance(model, DecoderLM) else None,
        "base_model_name_or_path": source,
        "target_modules": sorted({path.rpartition(".")[2] for path in branches}),
        "r": rank,
        # peft divides it by `r`.
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        # peft asks for true if a base stores `(in, out)`. Only a `Linear` can have a
        # branch here, never a `Conv1D`.
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    text = json.dumps(config, indent=2) + "\n"

    records = [piece.record for piece in pieces]

    def write(fetched: Iterator[np.ndarray]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        with only_writer("save_lora", directory), tidied_after_error(directory):
            exchange = begin(directory, STEM, 1, {CONFIG: text.encode()})
            (weights,) = exchange.files
            write_file(exchange.part(weights), records, fetched, exchange.metadata)
            exchange.commit({}, 0)

    write_together("save_lora", directory, pieces, arrays, write)


def load_lora(model: M, directory: str | os.PathLike[str]) -> M:
    """Return the model with the branches that `save_lora` or peft wrote, in the model's
    layout.

    **Arguments:**

    - `model`: the base, as `load_pretrained` returns it; a list of layers, or stacked.
    - `directory`: with `adapter_config.json` and `adapter_model.safetensors`. `~` is
        expanded.

    **Returns:** The model; its other leaves are the same arrays.

    **Raises:**

    - `FileNotFoundError` if one of the files does not exist.
    - `ValueError`, naming the entry or the key, for an unknown entry that is not null,
        false or empty (DoRA, PiSSA, aLoRA, trained biases, several ranks), keys that
        are not LoRA's, projections that the model does not have, wrong shapes, or
        branches in only some of the stacked layers. Also for a directory that is an
        address (`gs://bucket`).
    """
    directory = local_directory("load_lora", directory)
    read = functools.partial(_read_directory, directory)
    (rank, scale), stored = unchanged("load_lora", directory, read)
    unknown = [key for key in stored if not _KEY.fullmatch(key)]
    if unknown:
        raise ValueError(
            f"load_lora: {directory / WEIGHTS} has other keys than LoRA's: "
            f"{first_few(unknown)}."
        )
    named = {
        _KEY.sub(lambda m: f"{m[1]}.lora_{m[2].lower()}", key): x
        for key, x in stored.items()
    }
    paths = [name.rpartition(".")[0] for name in named]
    targets = {_stacked(model, path) or path for path in paths}
    abstract = eqx.filter_eval_shape(
        lambda m: add_lora(
            m, targets=targets, rank=rank, scale=scale, key=jax.random.key(0)
        ),
        model,
    )
    entries = {
        entry.path: entry
        for entry in entries_of(abstract)
        if _FACTOR.search(entry.path)
    }
    _check(directory / WEIGHTS, entries, named)
    layout = shardings_by_path(shard_rules(abstract, _mesh(model)))
    arrays = place(entries.values(), named, layout, None)

    def branch(path: str, linear: Linear) -> LoRA:
        return LoRA(linear, arrays[f"{path}.lora_a"], arrays[f"{path}.lora_b"], scale)

    return beside(model, targets, branch)


def _branches(model: Model) -> dict[str, LoRA]:
    leaves = jax.tree_util.tree_leaves_with_path(
        model, is_leaf=lambda x: isinstance(x, LoRA)
    )
    return {path_of(keypath): x for keypath, x in leaves if isinstance(x, LoRA)}


def _key(path: str) -> str:
    """Return the key in files for a path that ends with a factor."""
    return "base_model.model." + _FACTOR.sub(
        lambda factor: f".lora_{factor[1].upper()}.weight", path
    )


def _read_directory(directory: Path) -> tuple[tuple[int, float], dict[str, Stored]]:
    """Return rank and scale, and the stored arrays."""
    config = file_in_force("load_lora", directory, CONFIG)
    if config is None:
        raise FileNotFoundError(f"load_lora: {directory} has no {CONFIG}.")
    if not (directory / WEIGHTS).is_file():
        raise FileNotFoundError(f"load_lora: {directory} has no {WEIGHTS}.")
    return _read_config(config), open_file(directory / WEIGHTS)


def _read_config(file: Path) -> tuple[int, float]:
    """Read rank and scale. Raises `ValueError` for a kind of adapter that is not
    supported."""
    raw = read_json(file)
    for name, value in raw.items():
        # peft writes null, false or an empty list for features that are not used.
        if value and name not in _OTHERS and value not in _ONLY.get(name, ()):
            only = ""
            if name in _ONLY:
                only = f", only {' or '.join(map(repr, _ONLY[name]))}"
            raise ValueError(
                f"load_lora: {file}: {name}={value!r} is not supported{only}. The "
                "logits would be wrong. Merge it in peft with "
                "model.merge_and_unload().save_pretrained(new), and open that instead."
            )
    rank = raw.get("r")
    alpha = raw.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(
            f"load_lora: {file}: r={rank!r}, but it must be a positive integer."
        )
    if (
        isinstance(alpha, bool)
        or not isinstance(alpha, int | float)
        or not 0 < alpha < math.inf
    ):
        raise ValueError(
            f"load_lora: {file}: lora_alpha={alpha!r}, but it must be a positive "
            "number."
        )
    if raw.get("use_rslora"):
        # Kalajdzievski 2023, as in peft.
        return rank, alpha / math.sqrt(rank)
    return rank, alpha / rank


def _stacked(model: Model, path: str) -> str | None:
    """Return the path of a stack's projection; `path` is that of one layer."""
    for stack in model.stacks:
        inside = re.fullmatch(rf"{re.escape(stack)}\.(\d+)\.(.+)", path)
        if inside and not isinstance(attrgetter(stack)(model), list):
            return f"{stack}.{inside[2]}"
    return None


def _check(
    file: Path, entries: Mapping[str, Entry], stored: Mapping[str, Stored]
) -> None:
    shapes = shapes_of(entries.values())
    problems = [
        f"{key} {list(shape)} is missing"
        for key, shape in shapes.items()
        if key not in stored
    ]
    for key, x in stored.items():
        if key not in shapes:
            problems.append(f"{x.key} is of a layer that the model does not have")
        elif x.shape != shapes[key] or x.dtype not in NAMES:
            problems.append(
                f"{x.key} is {x.dtype}{list(x.shape)} instead of {list(shapes[key])}"
            )
    if problems:
        raise ValueError(
            f"load_lora: {file} does not fit the model: {first_few(problems)}. If only "
            "some layers have branches, load the model with its layers in a list."
        )


def _mesh(model: Model) -> Mesh:
    """Return the mesh of the model."""
    x = next(iter(to_arrays(model).values()))
    if isinstance(x.sharding, NamedSharding) and isinstance(x.sharding.mesh, Mesh):
        return x.sharding.mesh
    return make_mesh(devices=list(x.devices())[:1])
