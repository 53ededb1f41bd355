"""The files of a checkpoint directory: which ones are in force, and how one checkpoint replaces another.

Weights are named by a stem: `model` for transformers, `diffusion_pytorch_model` for diffusers. Readers prefer
`model.safetensors` to `model.safetensors.index.json` (diffusers prefers the index, while it exists). So one
rename (or one removal) of either changes the weights, after all files of the new checkpoint exist under names
that the old one does not use. If the configuration changes with the weights, the new one waits beside the old
one as `config.json.<tag>.part`. It is in force as soon as the weights that carry its tag are.
"""

import contextlib
import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from redco_eqx.models._blocks.config import Json
from redco_eqx.models._files.safetensors import read_metadata

CONFIG = "config.json"
GENERATION = "generation_config.json"
STEMS = ("model", "diffusion_pytorch_model")

_SHARD = r"(-\d+)?-\d{5}-of-\d{5}\.safetensors"
_TAG = re.compile(r"[0-9a-f]{16}")
_WRITTEN = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|npz|part)(\.index\.json)?|(generation_)?config\.json"
)
"""Files that are not copied to another directory: weights in any format, and the files that saving writes."""
_BLOB = re.compile(r".*/models--[^/]+/blobs/[0-9a-f]{40,64}")
"""A file in the cache of the hub, to which the names in a snapshot link."""
_PART = re.compile(
    rf"(({'|'.join(STEMS)})({_SHARD}|\.safetensors(\.index\.json)?)|config\.json(\.[0-9a-f]{{16}})?)\.part"
)


def single(stem: str) -> str:
    """Return the file name for weights that are stored in a single file."""
    return f"{stem}.safetensors"


def index(stem: str) -> str:
    """Return the name of the index of weights in several files."""
    return f"{stem}.safetensors.index.json"


def part(file: Path) -> Path:
    """Return the temporary path for writing a file, before it gets its name."""
    return file.with_name(f"{file.name}.part")


def read_json(file: Path) -> dict[str, Json]:
    """Read a JSON object. Raises `ValueError`, naming the file, for anything else."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must be a JSON object, but is a {type(value).__name__}.")
    return value


def config_file(directory: Path) -> Path:
    """Return the configuration file in force."""
    tags = filter(None, (_tag(directory, stem) for stem in STEMS))
    waiting = (directory / f"{CONFIG}.{tag}.part" for tag in tags)
    return next((file for file in waiting if file.exists()), directory / CONFIG)


def weight_files(directory: Path, stem: str) -> Path | dict[str, Path]:
    """Return the single file of weights, or the file of each key from the index.

    **Raises:**

    - `FileNotFoundError` if there are no weights, or the index names an absent file.
    - `ValueError` if there are only pickles, or the index is not valid.
    """
    source = _source(directory, stem)
    if source is None:
        raise _no_weights(directory, stem)
    if source.name == single(stem):
        return source
    weight_map = read_json(source).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{source} has no weight_map, an object that names the file of each key.")
    files = {}
    for key, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{source} puts {key} into {name!r}, which is not the name of a file beside it.")
        files[key] = directory / name
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise FileNotFoundError(f"{source} names {', '.join(absent)}, but there is no such file beside it.")
    return files


def _no_weights(directory: Path, stem: str) -> Exception:
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickles:
        kind = "transformers.AutoModelForCausalLM" if stem == "model" else "diffusers.AutoModel"
        return ValueError(
            f"{directory} holds weights only as a pickle, {pickles[0]}. It is not opened, because that could "
            "run any code that its author put in. Convert it once where you trust it: "
            f"{kind}.from_pretrained(old).save_pretrained(new)."
        )
    gguf = sorted(file.name for file in directory.glob("*.gguf"))
    if gguf:
        return ValueError(
            f"{directory} holds weights only as {gguf[0]}, a format of llama.cpp that is not read here. Take "
            "the checkpoint that it was converted from, with safetensors."
        )
    others = sorted(file.name for file in directory.glob("*.safetensors*"))
    if others:
        return FileNotFoundError(
            f"{directory} has neither {single(stem)} nor {index(stem)}, but {', '.join(others[:5])}. If that "
            f"is the variant you want, rename it to {single(stem)} (an index to {index(stem)})."
        )
    return FileNotFoundError(f"{directory} has neither {single(stem)} nor {index(stem)}.")


def _source(directory: Path, stem: str) -> Path | None:
    """Return the file that defines the weights: the single file, or the index."""
    files = (directory / name for name in (single(stem), index(stem)))
    return next((file for file in files if file.is_file()), None)


def _tag(directory: Path, stem: str) -> str:
    source = _source(directory, stem)
    if source is None:
        return ""
    metadata: Json = None
    if source.name == single(stem):
        metadata = dict(read_metadata(source))
    else:
        with contextlib.suppress(ValueError):
            metadata = read_json(source).get("metadata")
    tag = metadata.get("config") if isinstance(metadata, dict) else None
    # The file may come from anyone, and the tag becomes a part of a name.
    return tag if isinstance(tag, str) and _TAG.fullmatch(tag) else ""


def prepare(
    directory: Path, stem: str, num_files: int, config: str, source: str | None
) -> tuple[list[Path], str]:
    """Make room for a new checkpoint. Return names for its files, and the tag of its configuration.

    The caller writes the files as `part(file)`, and the tag, if there is one, into their metadata. Raises
    `ValueError` before anything is written for links in `source` that `carry_over` must not follow.
    """
    if source is not None:
        check_links(Path(source), directory)
    directory.mkdir(parents=True, exist_ok=True)
    tidy(directory)
    present, tag = directory / CONFIG, ""
    if not present.exists():
        write_beside(present, config)
    elif present.read_bytes() != config.encode():
        tag = secrets.token_hex(8)
        _write(directory / f"{CONFIG}.{tag}", config)
    if num_files == 1:
        return [directory / single(stem)], tag
    used = _files_in_force(directory, stem)
    for own in itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2))):
        files = [directory / f"{own}-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
        if not used.intersection(files):
            return files, tag
    raise AssertionError


def commit(
    directory: Path, stem: str, files: list[Path], tag: str, weight_map: Mapping[str, str], num_bytes: int
) -> None:
    """Put the written files in force, then remove those of the previous checkpoint."""
    old = _files_in_force(directory, stem)
    named = directory / index(stem)
    if len(files) > 1:
        metadata = {"total_size": num_bytes, **({"config": tag} if tag else {})}
        _write(named, json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}, indent=2) + "\n")
        for file in files:
            os.replace(part(file), file)
        _sync(directory)  # the files that the index names reach the disk before it
        os.replace(part(named), named)
        _sync(directory)
        if (directory / single(stem)).exists():
            os.unlink(directory / single(stem))
    else:
        os.replace(part(files[0]), files[0])
    _sync(directory)
    if tag:
        os.replace(directory / f"{CONFIG}.{tag}.part", directory / CONFIG)
        _sync(directory)
    stale = {file for file in directory.iterdir() if re.fullmatch(stem + _SHARD, file.name)} | old
    if len(files) == 1 and named.exists():
        os.unlink(named)
    for file in sorted(stale.difference(files)):
        os.unlink(file)


def carry_over(source: Path, directory: Path) -> None:
    """Copy the files beside a checkpoint (a tokenizer's, licences) that the other directory does not have."""
    if not source.is_dir() or source.resolve() == directory.resolve():
        return
    for file in sorted(source.iterdir()):
        target = directory / file.name
        is_weights = _WRITTEN.fullmatch(file.name) is not None
        if file.is_file() and not file.name.startswith(".") and not is_weights and not target.exists():
            shutil.copyfile(file, part(target))
            os.replace(part(target), target)


def check_links(source: Path, directory: Path, folders: Iterable[Path] = ()) -> None:
    """Raise `ValueError` for links that `carry_over`, and copying `folders`, would follow out of both `source`
    and the cache of the hub: a checkpoint from elsewhere may contain a link to any file that the
    user who loads it can read.
    """
    root = source.resolve()
    if root == directory.resolve():
        return
    files = [file for file in source.glob("[!.]*") if file.is_file() and not (directory / file.name).exists()]
    files = [file for file in files if not _WRITTEN.fullmatch(file.name)]
    for file in [*files, source / GENERATION, *(x for folder in folders for x in (folder, *folder.rglob("*")))]:
        real = file.resolve()
        is_inside = real.is_relative_to(root) or _BLOB.fullmatch(real.as_posix())
        if not is_inside or (file.is_symlink() and file.is_dir()):
            raise ValueError(
                f"{file} is a link to {real}, but only links to files of the same checkpoint, or of the hub's "
                "cache, are copied with it. If it is intended, replace it with a copy of its target."
            )


def write_beside(file: Path, text: str) -> None:
    """Write a small file, whole or not at all."""
    _write(file, text)
    os.replace(part(file), file)


def tidy(directory: Path) -> None:
    """Finish an interrupted save if its weights are in force, and remove its files if not."""
    waiting = config_file(directory)
    if waiting.name != CONFIG:
        os.replace(waiting, directory / CONFIG)
        _sync(directory)
    for file in list(directory.iterdir()):
        if _PART.fullmatch(file.name):
            os.unlink(file)


def _files_in_force(directory: Path, stem: str) -> set[Path]:
    """Return the files that the index in force names; none if there is a single file, or a broken index."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        files = weight_files(directory, stem)
        return set() if isinstance(files, Path) else set(files.values())
    return set()


def _write(file: Path, text: str) -> None:
    """Write `part(file)`, and wait until it is on the disk."""
    with part(file).open("w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def _sync(directory: Path) -> None:
    """Wait until the names in a directory are on the disk, if the system can do so."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(directory, os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
