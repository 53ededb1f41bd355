"""`load_pretrained`: load a sharded model from a directory in Hugging Face's format."""

import dataclasses
import functools
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Array

from redco_eqx import make_mesh, shard_rules, to_arrays
from redco_eqx.types import Key, Overrides, Remat
from redco_eqx_models._blocks.attention import Implementation
from redco_eqx_models._blocks.config import BaseConfig, Json
from redco_eqx_models._blocks.decoder import check_can_pad, pad_vocabulary
from redco_eqx_models._blocks.model import Model, Options, count_layers
from redco_eqx_models._families.registry import Family, read_family
from redco_eqx_models._files.directory import (
    CONFIG,
    GENERATION,
    file_in_force,
    local_directory,
    read_json,
    unchanged,
    weight_files,
)
from redco_eqx_models._files.names import (
    Entry,
    count_stored,
    entries_of,
    list_problems,
    match_keys,
    shapes_of,
)
from redco_eqx_models._files.pieces import place
from redco_eqx_models._files.rename import hint_of_beginning, rename_keys
from redco_eqx_models._files.safetensors import NAMES, Stored, open_file
from redco_eqx_models._leaves import first_few, path_of, shardings_by_path


def load_pretrained(
    directory: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    family: Family | None = None,
    dtype: DTypeLike | None = None,
    stacked: bool = False,
    remat: Remat = "none",
    attention: Implementation | None = None,
    sequence_parallel: bool | None = None,
    overrides: Overrides = (),
    entries: Mapping[str, Json] | None = None,
    key: Key | None = None,
    pad_vocabulary_to: int = 1,
    rename: Mapping[str, str | None] | None = None,
) -> Any:
    """Load the model from a directory that Hugging Face's libraries or
    `save_pretrained` wrote, or from the folder of one part of a diffusers pipeline.

    Loading computes nothing. An array is never whole on the host unless it is whole on
    a device: each process reads each slice once, directly for the devices that need it.
    Weights are in `model.safetensors`, or in the files that
    `model.safetensors.index.json` names. For a part of a pipeline, whose `config.json`
    has a `_class_name` instead of a `model_type`, they are in
    `diffusion_pytorch_model.safetensors`.

    It also accepts files of the bare model, norms with `gamma` and `beta`, and the
    attention of an autoencoder under its old names, even as convolutions of one pixel.
    It ignores masks and frequencies among the keys. Instead of the embedding table, or
    beside it, it accepts a head that the configuration ties to the table. A head beside
    the table must equal the table bit for bit, and is not kept. It warns about arrays
    of other heads, which the model does not have, and names them.

    ```python
    model = models.load_pretrained("tiny", mesh, stacked=True, remat="row_out")
    ```

    **Arguments:**

    - `directory`: with `config.json` and weights. Its `generation_config.json`, if
        there is one, names the tokens that end a text of `generate`.
    - `mesh`: from `make_mesh`. `shard_rules` reads the layout from the program of the
        model on the batch that its method `example` returns. Without it, the model is
        on the default device.
    - `family`: the classes of the configuration and of the model, for a `model_type`
        (or `_class_name`) of your own. By default, this library's family that
        `config.json` names.
    - `dtype`: the dtype to convert the arrays to, slice by slice; by default that of
        the file.
    - `stacked`: true for stacked layers (one layer whose arrays have a leading dim, for
        `jax.lax.scan`), so that compile time does not grow with depth; false for a list
        of layers.
    - `remat`: the activations that the backward pass keeps: `none`, `full`,
        `products`, `row_out`, or a policy of `jax.checkpoint`, see `scan_layers`.
    - `attention`: `"xla"`, `"cudnn"` or `"splash"`, as for
        `redco_eqx.layers.attention`. By default, a kernel on GPUs and TPUs where one
        fits, and XLA's otherwise.
    - `sequence_parallel`: true to split the stream between layers over `tensor` along
        the token dimension; false to leave it whole. By default, it is split if a
        device has at least a quarter as many tokens as the stream has features, see
        `Options`.
    - `overrides`: as for `shard_rules`.
    - `entries`: entries that replace those of `config.json`, under any of their names,
        such as dropout rates or `{"num_labels": 3}`.
    - `key`: for arrays that the files lack in a head that the family states. For
        example, `family=(BertConfig, BertForSequenceClassification)` adds a classifier
        to a model that was trained without one.
    - `pad_vocabulary_to`: adds rows of zeros to the embedding table and the head, up to
        a multiple of this number (see [`pad_vocabulary`][]). Pass
        `mesh.shape["tensor"]` to split a vocabulary that does not divide evenly.
    - `rename`: new beginnings for keys in the weight files, `{old: new}`; `None` leaves
        those keys out. If two of them fit a key, the longer one counts.
        `{"_orig_mod.": ""}` reads the weights of a module from `torch.compile`,
        `{"module.": ""}` of one from `DataParallel`, and
        `{"language_model.": "", "vision_tower.": None}` a part of a larger model. If
        the keys do not fit the model, but would without their beginning, the error
        states the `rename` to pass.

    **Raises:**

    - `FileNotFoundError` if the directory, its `config.json`, its weights, or a file
        that the index names does not exist.
    - `ValueError`, naming the file and the key, for a `model_type` or an entry of
        `config.json` that is not supported, a number of layers that differs from the
        files (before any layer is made), missing or unexpected keys, a wrong shape, a
        truncated file, a wrong index, weights that exist only as a pickle, or a dtype
        that is not floating. Also for a directory that is an address (`gs://bucket`),
        and a `rename` that fits no key, or gives two keys one name. Errors about
        arguments and `config.json` are raised before any weight is read.
    - `OSError` if other programs keep saving to the directory. After one save during
        the load, it reads again.
    """
    directory = local_directory("load_pretrained", directory)
    kind = None if dtype is None else _check_dtype(dtype)
    read = functools.partial(
        _read_directory, directory, family, entries or {}, pad_vocabulary_to
    )
    config, make_model, stored = unchanged("load_pretrained", directory, read)
    if rename is not None:
        stored = rename_keys(directory, stored, rename)
    if make_model.tied_by_file:
        config = _as_stored(config, stored, make_model)
    options = Options(
        remat=remat, attention=attention, sequence_parallel=sequence_parallel
    )

    def make(stacked: bool, options: Options = options) -> Any:
        # Only shapes and dtypes: no array exists before its numbers are read.
        model = eqx.filter_eval_shape(
            lambda key: make_model(config, stacked=stacked, key=key, **options),
            jax.random.key(0),
        )
        if pad_vocabulary_to == 1:
            # A family without a `vocabulary` cannot be padded, even by nothing.
            return model
        return pad_vocabulary(model, pad_vocabulary_to)

    _check_layers(directory, config, make_model, make, stored)
    model = make(stacked)
    if mesh is None:
        # The device of a new array is the default one, also under
        # `jax.default_device`.
        mesh = make_mesh(devices=list(jnp.zeros(()).devices()))
    traced = model
    if mesh.shape.get("tensor", 1) > 1:
        # No option changes the layout, but cuDNN's attention cannot be traced without a
        # GPU.
        traced = make(stacked, Options(attention="xla"))
    layout = shardings_by_path(_layout(traced, mesh, overrides))
    stored_leaves = entries_of(model)
    may_lack = () if key is None else make_model.heads
    found = _find(directory, stored, stored_leaves, model, may_lack=may_lack)
    buffers = [entry for entry in stored_leaves if entry.path in make_model.buffers]
    others = [entry for entry in stored_leaves if entry.path not in make_model.buffers]
    here = [entry for entry in others if all(name in found for name in entry.keys)]
    arrays: dict[str, Array | np.ndarray] = {
        entry.path: _buffer(entry, found, kind) for entry in buffers
    }
    arrays |= place(here, found, layout, kind)
    lacking = {
        entry.path: layout[entry.path] for entry in others if entry.path not in arrays
    }
    if lacking and key is not None:
        arrays |= _make_anew(
            lambda key: make_model(config, stacked=stacked, key=key), lacking, kind, key
        )

    def loaded(keypath: KeyPath, x: Any) -> Any:
        is_array = isinstance(x, jax.ShapeDtypeStruct | jax.Array | np.ndarray)
        return arrays[path_of(keypath)] if is_array else x

    return jax.tree_util.tree_map_with_path(loaded, model)


def _layout(model: Any, mesh: Mesh, overrides: Overrides) -> Any:
    """Return `shard_rules` for the model's program, or by names if it has no example or
    `tensor` is 1."""
    num_rows = 8 * mesh.shape.get("data", 1) * mesh.shape.get("fsdp", 1)
    batch = None
    if mesh.shape.get("tensor", 1) > 1:
        batch = model.example(num_rows)
    if batch is None:
        return shard_rules(model, mesh, overrides=overrides)

    def loss_fn(model: Any, batch: Any, key: Any) -> Array:
        # Any loss that uses all outputs: only the traced program counts, and nothing is
        # computed.
        total = jnp.float32(0)
        for x in jax.tree.leaves(model(*batch)):
            total = total + jnp.mean(x.astype(jnp.float32) ** 2)
        return total

    return shard_rules(model, mesh, overrides=overrides, loss_fn=loss_fn, batch=batch)


def _check_dtype(dtype: DTypeLike) -> np.dtype:
    try:
        kind = np.dtype(dtype)
    except TypeError as error:
        raise ValueError(f"load_pretrained: dtype={dtype!r} is not a dtype.") from error
    if kind.name not in NAMES:
        raise ValueError(
            f"load_pretrained: dtype={kind.name}, but it must be one of "
            f"{', '.join(NAMES)}."
        )
    # Without this setting, JAX makes float32 of float64, with only a warning.
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        raise ValueError(
            "load_pretrained: dtype=float64 needs jax.config.update('jax_enable_x64', "
            "True)."
        )
    return kind


def _read_config(
    directory: Path, family: Family | None, entries: Mapping[str, Json]
) -> tuple[BaseConfig, Any]:
    if not directory.is_dir():
        raise FileNotFoundError(
            f"load_pretrained: {directory} is not a directory. Download a model of the "
            "Hub with huggingface_hub.snapshot_download(name), which returns its "
            "directory."
        )
    file = file_in_force("load_pretrained", directory, CONFIG)
    if file is None:
        raise FileNotFoundError(
            f"load_pretrained: {directory} has no config.json, which describes the "
            "model."
        )
    generation = file_in_force("load_pretrained", directory, GENERATION)
    try:
        config, make_model = read_family(read_json(file), family, entries)
        raw = {}
        if generation is not None:
            raw = read_json(generation)
        return config.with_generation(raw, os.fspath(directory.absolute())), make_model
    except ValueError as error:
        raise ValueError(f"load_pretrained: {directory}: {error}") from error


def _read_directory(
    directory: Path,
    family: Family | None,
    entries: Mapping[str, Json],
    pad_vocabulary_to: int,
) -> tuple[BaseConfig, Any, dict[str, Stored]]:
    """Read the configuration, and open the weights. Once they are open, another save
    does not change them."""
    config, make_model = _read_config(directory, family, entries)
    if pad_vocabulary_to != 1:
        check_can_pad(make_model, pad_vocabulary_to)
    return config, make_model, _open(directory, config.weights)


def _check_layers(
    directory: Path,
    config: BaseConfig,
    family: type[Model],
    make: Callable[[bool], Any],
    stored: Iterable[str],
) -> None:
    """Raise `ValueError` if the number of layers differs from the files, before each of
    them is made.

    `make` stacks the layers, so only one is made, whatever their number; models of
    images cannot be stacked.
    """
    problems = []
    model = None
    if family.stacks:
        model = make(True)
        for stack in family.stacks:
            wanted = count_layers(attrgetter(stack)(model))
            found = count_stored(stored, stack, family)
            if found != wanted:
                problems.append(
                    f"it has {wanted} layers at {stack}, the files have {found}"
                )
    else:
        most = 1 + _largest_number(stored)
        for name in ("layers_per_block", "transformer_layers_per_block"):
            value = getattr(config, name, 1)
            numbers = value if isinstance(value, tuple) else (value,)
            if max(numbers) > most:
                problems.append(
                    f"{name}={value}, the files have at most {most} in a row"
                )
    if problems:
        # A model whose layers are not stacked is not made here: it may have a billion
        # of them. A beginning of its keys does not change the numbers in them anyway.
        hint = ""
        if model is not None:
            hint = hint_of_beginning(stored, family, model)
        if hint:
            raise ValueError(
                f"load_pretrained: the keys in {directory} do not fit the model.{hint}"
            )
        raise ValueError(
            f"load_pretrained: config.json in {directory} does not match the weight "
            f"files beside it: {'; '.join(problems)}. Take both from one checkpoint."
        )


def _largest_number(keys: Iterable[str]) -> int:
    """Return the largest number between the dots of the keys; 0 if there is none."""
    largest = 0
    for key in keys:
        for number in re.findall(r"\.(\d+)\.", key):
            largest = max(largest, int(number))
    return largest


def _as_stored(
    config: BaseConfig, stored: Mapping[str, Stored], family: type[Model]
) -> BaseConfig:
    """Return the configuration, with the head tied or not as in the files, if they
    alone decide."""
    head = "lm_head.weight"
    table = family.tied[head]
    # Files of a tied model may have the table under both names.
    is_own = (
        head in stored and table in stored and not _equal(stored[head], stored[table])
    )
    return dataclasses.replace(config, **{"tie_word_embeddings": not is_own})


def _make_anew(
    make_model: Callable[[Key], Model],
    layout: dict[str, NamedSharding],
    dtype: np.dtype | None,
    key: Key,
) -> dict[str, Array]:
    """Return the arrays of a new model at these paths. The others are not computed."""

    def make(key: Key) -> dict[str, Array]:
        arrays = to_arrays(make_model(key))
        made = {}
        for path in layout:
            made[path] = arrays[path]
            if dtype is not None:
                made[path] = made[path].astype(dtype)
        return made

    # XLA removes the computation of arrays that are not returned.
    return jax.jit(make, out_shardings=layout)(key)


def _find(
    directory: Path,
    stored: Mapping[str, Stored],
    entries: list[Entry],
    model: Model,
    *,
    may_lack: tuple[str, ...] = (),
) -> dict[str, Stored]:
    """Return the stored array for each key of the model."""
    family = type(model)
    shapes = shapes_of(entries)
    match = match_keys(stored, shapes, family)
    found = {}
    for key, name in match.found.items():
        found[key] = stored[name]
        if any(re.search(pattern, key) for pattern in family.windowed):
            found[key] = found[key].as_matrix()
    # `_buffer` makes zeros of a buffer that the files leave out.
    given = {*found, *family.buffers}
    missing = [
        key for key in shapes if key not in given and not key.startswith(may_lack)
    ]
    misshapen = [(x, shapes[key]) for key, x in found.items() if x.shape != shapes[key]]
    untied = [
        (key, table)
        for key, table in match.tied.items()
        if table in found and not _equal(stored[key], found[table])
    ]
    problems = {
        "missing": [f"{key} {list(shapes[key])}" for key in missing],
        "unexpected": [f"{key} {list(stored[key].shape)}" for key in match.unexpected],
        "of a wrong shape": [
            f"{x.key} {list(x.shape)} instead of {list(shape)} in {x.file.name}"
            for x, shape in misshapen
        ],
        "of an unsupported dtype": [
            f"{x.key} {x.dtype}" for x in found.values() if x.dtype not in NAMES
        ],
        "there twice": [
            f"{key} as {one} and as {two}" for key, one, two in match.twice
        ],
        "different from the table that config.json ties it to": [
            f"{key} and {table}" for key, table in untied
        ],
    }
    if text := list_problems(problems):
        hint = hint_of_beginning(stored, family, model)
        raise ValueError(
            f"load_pretrained: the keys in {directory} do not fit the "
            f"{family.__name__} of its config.json.{text}{hint}"
        )
    if match.dropped:
        warnings.warn(
            f"load_pretrained: {directory} also has arrays of a head that a "
            f"{family.__name__} does not have, and that are left out: "
            f"{first_few(match.dropped)}.",
            stacklevel=3,
        )
    return found


def _buffer(
    entry: Entry, found: Mapping[str, Stored], dtype: np.dtype | None
) -> np.ndarray:
    """Return an array that is not trained; zeros if the files leave it out."""
    (key,) = entry.keys
    if key not in found:
        return np.zeros(entry.shape, dtype or np.float32)
    stored = found[key].read(tuple(slice(0, size) for size in entry.shape))
    if dtype is None:
        return stored
    return stored.astype(dtype)


def _open(directory: Path, stem: str) -> dict[str, Stored]:
    """Return all stored arrays of the directory's weights, by key."""
    files = weight_files(directory, stem)
    if isinstance(files, Path):
        return open_file(files)
    contents = {file: open_file(file) for file in sorted(set(files.values()))}
    lacking = [
        f"{key} ({file.name})"
        for key, file in files.items()
        if key not in contents[file]
    ]
    if lacking:
        raise ValueError(
            f"load_pretrained: {directory}: the index puts keys into files without "
            f"them: {first_few(lacking)}."
        )
    return {key: contents[file][key] for key, file in files.items()}


def _equal(one: Stored, other: Stored) -> bool:
    """Return true if two matrices are equal bit for bit; a few rows at a time are in
    memory."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    num_rows = max(1, 2**22 // math.prod(one.shape[1:]))
    for first in range(0, one.shape[0], num_rows):
        rows = (slice(first, min(first + num_rows, one.shape[0])),)
        # By their bytes, because a NaN does not equal itself.
        if one.read(rows).tobytes() != other.read(rows).tobytes():
            return False
    return True
