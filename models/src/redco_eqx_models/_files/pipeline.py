"""Directories of Stable Diffusion in the format of diffusers: an index, and a folder
per part."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from redco_eqx.types import Remat
from redco_eqx_models._blocks.attention import Implementation
from redco_eqx_models._blocks.config import Json
from redco_eqx_models._diffusion.model import VERSION
from redco_eqx_models._diffusion.scheduler import Scheduler
from redco_eqx_models._diffusion.schedulers import (
    DDIMScheduler,
    DDPMScheduler,
    PNDMScheduler,
)
from redco_eqx_models._files.copies import carry_over, check_links, copy_folder
from redco_eqx_models._files.directory import local_directory, read_json
from redco_eqx_models._files.exchange import tidied_after_error, tidy, write_beside
from redco_eqx_models._files.load import load_pretrained
from redco_eqx_models._files.paths import local_path
from redco_eqx_models._files.pieces import write_together
from redco_eqx_models._files.save import Save, plan_save
from redco_eqx_models._files.writer import only_writer
from redco_eqx_models._text_to_image.stable_diffusion import (
    PipelineIndex,
    StableDiffusion,
)

INDEX = "model_index.json"
SCHEDULER = "scheduler_config.json"
PIPELINE = "StableDiffusionPipeline"
PARTS = {
    "text_encoder": ["transformers", "CLIPTextModel"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SCHEDULERS: dict[str, Any] = {
    kind.__name__: kind for kind in (DDIMScheduler, DDPMScheduler, PNDMScheduler)
}
TOKENIZER = ["transformers", "CLIPTokenizer"]
ABSENT = [None, None]
OPTIONAL = ("safety_checker", "feature_extractor", "image_encoder")


def load_stable_diffusion(
    directory: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    scheduler: Scheduler | None = None,
    dtype: DTypeLike | None = None,
    remat: Remat = "none",
    attention: Implementation | None = None,
) -> StableDiffusion:
    """Load the model from a directory that diffusers' `StableDiffusionPipeline` or
    `save_stable_diffusion` wrote.

    It reads Stable Diffusion 1 and 2, and models trained from them. The tokenizer stays
    in its folder, for `transformers.CLIPTokenizer.from_pretrained(directory /
    "tokenizer")`. A safety checker and its feature extractor are not loaded, so they
    check nothing, but saving copies them.

    As in diffusers' pipeline, `steps_offset` is 1 and `clip_sample` is false, whatever
    old files say.

    **Arguments:**

    - `directory`: with `model_index.json`.
    - `mesh`, `dtype`, `remat`, `attention`: as for `load_pretrained`, for each part.
    - `scheduler`: replaces the directory's scheduler, which then does not have to be
        DDPM, DDIM or PNDM.

    **Raises:**

    - `FileNotFoundError` if the directory, its index, or a part does not exist.
    - `ValueError` for a different pipeline, a part of a different class, a scheduler
        that is not supported, parts that do not fit each other, or anything that
        `load_pretrained` rejects.
    """
    directory = local_directory("load_stable_diffusion", directory)
    file = directory / INDEX
    if not file.is_file():
        raise FileNotFoundError(
            f"load_stable_diffusion: {file} does not exist. It names the model's "
            "parts. If a save into this directory was killed, its parts may belong to "
            "two models. Save the model again."
        )
    index = read_json(file)
    for name, expected in {"_class_name": PIPELINE, **PARTS}.items():
        if index.get(name) != expected:
            raise ValueError(
                f"{file}: {name}={index.get(name)!r} is not supported, only "
                f"{expected!r}."
            )
    if scheduler is None:
        scheduler = _read_scheduler(directory / "scheduler", index.get("scheduler"))
    parts = {
        name: load_pretrained(
            directory / name, mesh, dtype=dtype, remat=remat, attention=attention
        )
        for name in PARTS
    }
    read = {*PARTS, "_class_name", "scheduler"}
    rest = {name: x for name, x in index.items() if name not in read}
    source = PipelineIndex(
        json.dumps(rest, sort_keys=True), os.fspath(directory.absolute())
    )
    return StableDiffusion(**parts, scheduler=scheduler, index=source)


def _read_scheduler(directory: Path, entry: Json) -> Scheduler:
    # An entry is the library and the class: `["diffusers", "PNDMScheduler"]`.
    name = entry
    if isinstance(entry, list) and len(entry) == 2:
        name = entry[1]
    if name not in SCHEDULERS:
        raise ValueError(
            f"{directory.parent / INDEX}: scheduler={name!r} is not supported, only "
            f"{', '.join(SCHEDULERS)}. Pass one of these as scheduler=, created with "
            f"the betas and prediction_type of {directory.name}/{SCHEDULER}."
        )
    file = directory / SCHEDULER
    if not file.is_file():
        raise FileNotFoundError(
            f"load_stable_diffusion: {file} does not exist, but it says how to add "
            "noise."
        )
    try:
        scheduler: Scheduler = SCHEDULERS[name].from_json(read_json(file))
    except ValueError as error:
        raise ValueError(f"load_stable_diffusion: {directory}: {error}") from error
    # `StableDiffusionPipeline` of diffusers corrects these two entries of old files.
    changes: dict[str, Any] = {"steps_offset": 1}
    if hasattr(scheduler, "clip_sample"):
        changes["clip_sample"] = False
    return dataclasses.replace(scheduler, **changes)


def save_stable_diffusion(
    model: eqx.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Write a model as a directory that diffusers' `StableDiffusionPipeline` opens
    without changes.

    Other contents of the directory that the model was loaded from (a tokenizer, a
    safety checker) are copied, unless they exist in the new one. For a model that was
    not loaded, save the tokenizer first, as the folder `tokenizer`.

    All parts are written under temporary names, and renamed at the end. The index is
    removed before the renames and written after them. So if a save is killed between
    two renames, the directory does not open, and you can save again. Programs that save
    to one directory take turns, as in `save_pretrained`. With several processes, all
    must call this function.

    **Arguments:**

    - `directory`: created if it does not exist. `~` is expanded.
    - `max_shard_bytes`: as for `save_pretrained`.

    **Raises:** the errors of `save_pretrained`, and `TypeError` if the model is not a
    `StableDiffusion`. All parts are checked before anything is written.
    """
    if not isinstance(model, StableDiffusion):
        raise TypeError(
            "save_stable_diffusion: expected a StableDiffusion, got a "
            f"{type(model).__name__}."
        )
    directory = local_path("save_stable_diffusion: directory", directory)
    saves = [
        plan_save(
            f"save_stable_diffusion: {name}",
            getattr(model, name),
            directory / name,
            max_shard_bytes=max_shard_bytes,
        )
        for name in PARTS
    ]

    def together(
        write: Callable[[Iterator[np.ndarray]], object], save: Save | None = None
    ) -> None:
        """Run `write` on process 0, with the arrays of a part if it needs them. All
        processes learn of an error."""
        pieces = [] if save is None else save.pieces
        arrays = {} if save is None else save.arrays
        write_together("save_stable_diffusion", directory, pieces, arrays, write)

    # The stack is used only on process 0. Closing it lets other programs write there.
    with contextlib.ExitStack() as stack:
        together(lambda _: _open_to_write(directory, model.index, stack))
        for save in saves:
            together(lambda fetched, save=save: save.stage(fetched, stack), save)
        together(lambda _: _put_in_force(directory, model, saves))


def _open_to_write(
    directory: Path, index: PipelineIndex, stack: contextlib.ExitStack
) -> None:
    """Become the only writer of the directory, until the stack is closed."""
    if index.source is not None:
        source = Path(index.source)
        folders = _folders(source, directory, json.loads(index.rest))
        check_links(source, directory, folders)
    directory.mkdir(parents=True, exist_ok=True)
    stack.enter_context(only_writer("save_stable_diffusion", directory))
    stack.enter_context(tidied_after_error(directory))
    for folder in (directory, directory / "scheduler"):
        if folder.is_dir():
            tidy(folder)


def _put_in_force(directory: Path, model: StableDiffusion, saves: list[Save]) -> None:
    """Rename the files of all parts, which have been written."""
    # A mixture of two models would open. Without the index, a save that is killed here
    # does not.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(directory / INDEX)
    for save in saves:
        save.commit()
    _write(directory, model.index, model.scheduler)


def _write(directory: Path, index: PipelineIndex, scheduler: Scheduler) -> None:
    """Write everything except the networks; the index comes last."""
    rest: dict[str, Json] = json.loads(index.rest)
    if index.source is not None:
        carry_over(Path(index.source), directory)
        for folder in _folders(Path(index.source), directory, rest):
            copy_folder(folder, directory / folder.name)
    # diffusers writes `[null, null]` for a part that a pipeline does not have.
    rest = {"tokenizer": TOKENIZER, **dict.fromkeys(OPTIONAL, ABSENT), **rest}
    found: dict[str, Json] = {}
    for name, entry in rest.items():
        is_part = isinstance(entry, list)
        if is_part and not (directory / name).is_dir():
            found[name] = ABSENT
        else:
            found[name] = entry
    found.setdefault("_diffusers_version", VERSION)
    found.setdefault("requires_safety_checker", found["safety_checker"] != ABSENT)
    named = ["diffusers", type(scheduler).__name__]
    (directory / "scheduler").mkdir(exist_ok=True)
    _write_json(
        directory / "scheduler" / SCHEDULER,
        {"_diffusers_version": VERSION, **scheduler.to_json()},
    )
    _write_json(
        directory / INDEX,
        {**found, **PARTS, "scheduler": named, "_class_name": PIPELINE},
    )


def _write_json(file: Path, entries: Mapping[str, Json]) -> None:
    write_beside(file, (json.dumps(entries, indent=2, sort_keys=True) + "\n").encode())


def _folders(source: Path, directory: Path, entries: Mapping[str, Json]) -> list[Path]:
    """Return the folders that an index names, except this library's networks and
    folders that the other directory has.
    """
    # An index from elsewhere could name any folder of the computer.
    names = [
        name
        for name, x in entries.items()
        if isinstance(x, list) and Path(name).name == name
    ]
    return [
        source / name
        for name in names
        if (source / name).is_dir() and not (directory / name).exists()
    ]
