"""Directories of Stable Diffusion in the format of diffusers: an index, and a folder per part."""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import equinox as eqx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from redco_eqx._parallel.linear import Remat
from redco_eqx._paths import local_path
from redco_eqx.models._blocks.attention import Implementation
from redco_eqx.models._blocks.config import Json
from redco_eqx.models._diffusion.model import VERSION
from redco_eqx.models._diffusion.scheduler import Scheduler
from redco_eqx.models._diffusion.schedulers import DDIMScheduler, DDPMScheduler, PNDMScheduler
from redco_eqx.models._files.directory import carry_over, check_links, part, read_json, write_beside
from redco_eqx.models._files.load import load_pretrained
from redco_eqx.models._files.pieces import write_together
from redco_eqx.models._files.save import save_pretrained
from redco_eqx.models._text_to_image.stable_diffusion import PipelineIndex, StableDiffusion

INDEX = "model_index.json"
SCHEDULER = "scheduler_config.json"
PIPELINE = "StableDiffusionPipeline"
PARTS = {
    "text_encoder": ["transformers", "CLIPTextModel"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
SCHEDULERS: dict[str, Any] = {kind.__name__: kind for kind in (DDIMScheduler, DDPMScheduler, PNDMScheduler)}
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
    """Load the model from a directory that diffusers' `StableDiffusionPipeline` or `save_stable_diffusion`
    wrote.

    It reads Stable Diffusion 1 and 2, and models trained from them. The tokenizer stays in its folder, for
    `transformers.CLIPTokenizer.from_pretrained(directory / "tokenizer")`. A safety checker and its feature
    extractor are not loaded, so they check nothing, but saving copies them.

    As in diffusers' pipeline, `steps_offset` is 1 and `clip_sample` is false, whatever old files say.

    **Arguments:**

    - `directory`: with `model_index.json`.
    - `mesh`, `dtype`, `remat`, `attention`: as for `load_pretrained`, for each part.
    - `scheduler`: replaces the directory's scheduler, which then does not have to be DDPM, DDIM or PNDM.

    **Raises:**

    - `FileNotFoundError` if the directory, its index, or a part does not exist.
    - `ValueError` for a different pipeline, a part of a different class, a scheduler that is not supported,
        parts that do not fit each other, or anything that `load_pretrained` rejects.
    """
    directory = Path(directory).expanduser()
    file = directory / INDEX
    if not file.is_file():
        raise FileNotFoundError(f"load_stable_diffusion: {file} does not exist. It names the model's parts.")
    index = read_json(file)
    for name, expected in {"_class_name": PIPELINE, **PARTS}.items():
        if index.get(name) != expected:
            raise ValueError(f"{file}: {name}={index.get(name)!r} is not supported, only {expected!r}.")
    if scheduler is None:
        scheduler = _read_scheduler(directory / "scheduler", index.get("scheduler"))
    parts = {
        name: load_pretrained(directory / name, mesh, dtype=dtype, remat=remat, attention=attention)
        for name in PARTS
    }
    rest = {name: x for name, x in index.items() if name not in {*PARTS, "_class_name", "scheduler"}}
    source = PipelineIndex(json.dumps(rest, sort_keys=True), os.fspath(directory.absolute()))
    return StableDiffusion(**parts, scheduler=scheduler, index=source)


def _read_scheduler(directory: Path, entry: Json) -> Scheduler:
    name = entry[1] if isinstance(entry, list) and len(entry) == 2 else entry
    if name not in SCHEDULERS:
        raise ValueError(
            f"{directory.parent / INDEX}: scheduler={name!r} is not supported, only {', '.join(SCHEDULERS)}. "
            "Pass one of these as scheduler=, created with the betas and prediction_type of "
            f"{directory.name}/{SCHEDULER}."
        )
    file = directory / SCHEDULER
    if not file.is_file():
        raise FileNotFoundError(f"load_stable_diffusion: {file} does not exist, but it says how to add noise.")
    try:
        scheduler: Scheduler = SCHEDULERS[name].from_json(read_json(file))
    except ValueError as error:
        raise ValueError(f"load_stable_diffusion: {directory}: {error}") from error
    changes = {"steps_offset": 1, **({"clip_sample": False} if hasattr(scheduler, "clip_sample") else {})}
    return dataclasses.replace(scheduler, **changes)


def save_stable_diffusion(
    model: eqx.Module, directory: str | os.PathLike[str], *, max_shard_bytes: int = 5 * 2**30
) -> None:
    """Write a model as a directory that diffusers' `StableDiffusionPipeline` opens without changes.

    Other contents of the directory that the model was loaded from (a tokenizer, a safety checker) are copied,
    unless they exist in the new one. For a model that was not loaded, save the tokenizer first, as the folder
    `tokenizer`.

    Each part changes atomically, as in `save_pretrained`, and the index changes last. The parts together do
    not change atomically. With several processes, all must call this function.

    **Arguments:**

    - `directory`: created if it does not exist. `~` is expanded.
    - `max_shard_bytes`: as for `save_pretrained`.

    **Raises:** the errors of `save_pretrained`, and `TypeError` if the model is not a `StableDiffusion`.
    """
    if not isinstance(model, StableDiffusion):
        raise TypeError(f"save_stable_diffusion: expected a StableDiffusion, got a {type(model).__name__}.")
    directory = local_path("save_stable_diffusion: directory", directory)

    def check(_: object) -> None:
        if model.index.source is not None:
            source = Path(model.index.source)
            check_links(source, directory, _folders(source, directory, json.loads(model.index.rest)))

    write_together("save_stable_diffusion", directory, (), {}, check)
    for name in PARTS:
        save_pretrained(getattr(model, name), directory / name, max_shard_bytes=max_shard_bytes)
    write_together(
        "save_stable_diffusion", directory, (), {}, lambda _: _write(directory, model.index, model.scheduler)
    )


def _write(directory: Path, index: PipelineIndex, scheduler: Scheduler) -> None:
    """Write everything except the networks; the index comes last."""
    rest: dict[str, Json] = json.loads(index.rest)
    if index.source is not None:
        carry_over(Path(index.source), directory)
        for folder in _folders(Path(index.source), directory, rest):
            target = directory / folder.name
            shutil.rmtree(part(target), ignore_errors=True)
            shutil.copytree(folder, part(target))
            os.replace(part(target), target)
    rest = {"tokenizer": TOKENIZER, **dict.fromkeys(OPTIONAL, ABSENT), **rest}
    found = {
        name: entry if not isinstance(entry, list) or (directory / name).is_dir() else ABSENT
        for name, entry in rest.items()
    }
    found.setdefault("_diffusers_version", VERSION)
    found.setdefault("requires_safety_checker", found["safety_checker"] != ABSENT)
    named = ["diffusers", type(scheduler).__name__]
    (directory / "scheduler").mkdir(exist_ok=True)
    _write_json(directory / "scheduler" / SCHEDULER, {"_diffusers_version": VERSION, **scheduler.to_json()})
    _write_json(directory / INDEX, {**found, **PARTS, "scheduler": named, "_class_name": PIPELINE})


def _write_json(file: Path, entries: Mapping[str, Json]) -> None:
    write_beside(file, json.dumps(entries, indent=2, sort_keys=True) + "\n")


def _folders(source: Path, directory: Path, entries: Mapping[str, Json]) -> list[Path]:
    """Return the folders that an index names, except this library's networks and folders that the other
    directory has.
    """
    names = [name for name, x in entries.items() if isinstance(x, list) and Path(name).name == name]
    return [source / name for name in names if (source / name).is_dir() and not (directory / name).exists()]
