"""The files of a checkpoint directory: which ones are in force.

Weights are named by a stem: `model` for transformers, `diffusion_pytorch_model` for
diffusers, `adapter_model` for peft. Readers prefer `model.safetensors` to
`model.safetensors.index.json` (diffusers prefers the index, while it exists). A save
that was stopped may have left files that belong to the weights under other names; see
`exchange.py`.
"""

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from redco_eqx_models._blocks.config import Json
from redco_eqx_models._files.paths import local_path
from redco_eqx_models._files.safetensors import read_metadata

CONFIG = "config.json"
GENERATION = "generation_config.json"
CARD = "README.md"
ADAPTER_CONFIG = "adapter_config.json"

COMPANIONS = {
    "model": (CONFIG, GENERATION, CARD),
    "diffusion_pytorch_model": (CONFIG, GENERATION, CARD),
    "adapter_model": (ADAPTER_CONFIG,),
}
"""The files beside the weights of each stem that come into force together with them."""

SHARD = r"(-\d+)?-\d{5}-of-\d{5}\.safetensors"
_TAG = re.compile(r"[0-9a-f]{16}")
_TRIES = 20

T = TypeVar("T")


def local_directory(what: str, directory: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a directory to read. `what` reads it, for messages.

    Raises `ValueError` for an address, `TypeError` if it is not a path.
    """
    return local_path(f"{what}: directory", directory)


def single(stem: str) -> str:
    """Return the file name for weights that are stored in a single file."""
    return f"{stem}.safetensors"


def index(stem: str) -> str:
    """Return the name of the index of weights in several files."""
    return f"{stem}.safetensors.index.json"


def read_json(file: Path) -> dict[str, Json]:
    """Read a JSON object. Raises `ValueError`, naming the file, for anything else."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"{file} must be a JSON object, but is a {type(value).__name__}."
        )
    return value


def file_in_force(what: str, directory: Path, name: str) -> Path | None:
    """Return the file that has the content of a file beside the weights; `None` if
    there is none.

    This is the file itself, except after a save that was stopped between two renames. A
    warning then says which other file belongs to the weights. A file that claims this
    falsely, in a directory from elsewhere, is not read.

    **Arguments:**

    - `what`: the function that reads, for messages.
    - `name`: the name of the file, such as `config.json`.
    """
    file = directory / name
    for stem, names in COMPANIONS.items():
        if name not in names:
            continue
        tag = _tags(directory, stem, [name]).get(name)
        if tag is None:
            continue
        waiting = waiting_file(directory, name, tag)
        if not _belongs(waiting, file, tag):
            warnings.warn(
                f"{what}: {name} is read, and {waiting} is not, although the weights "
                f"name it: one of the two has changed since. Remove {waiting.name}, "
                f"or rename it to {name} if it belongs to the weights.",
                stacklevel=4,
            )
            continue
        warnings.warn(
            f"{what}: a save into {directory} was stopped. {waiting.name} belongs to "
            f"the weights, and is read instead of {name}. Other programs read {name}. "
            "Save the model again to finish.",
            stacklevel=4,
        )
        # An empty file that waits says that the file is to be removed.
        return waiting if waiting.stat().st_size else None
    return file if file.is_file() else None


def unchanged(what: str, directory: Path, read: Callable[[], T]) -> T:
    """Return the result of `read`, which opens the files in force, all of one save. If
    another program finishes a save meanwhile, read again.

    Raises the errors of `read`, and `OSError` if the directory changes all the time.
    """
    for _ in range(_TRIES):
        before = _state(directory)
        try:
            result = read()
        except (OSError, ValueError):
            if _state(directory) == before:
                raise
            continue
        if _state(directory) == before:
            return result
    raise OSError(
        f"{what}: other programs keep saving to {directory}. Load it when they have "
        "ended."
    )


def _state(directory: Path) -> list[tuple[str, int, int]]:
    """Return an identity of each file that has a name which readers know."""
    names = set[str]()
    for stem, beside in COMPANIONS.items():
        names |= {single(stem), index(stem), *beside}
    found = []
    for name in sorted(names):
        # A file that does not exist has no identity.
        with contextlib.suppress(OSError):
            stat = (directory / name).stat()
            # A save renames a new file, which has another inode. The time is for
            # systems that use the number of an inode again at once.
            found.append((name, stat.st_ino, stat.st_mtime_ns))
    return found


def tags_in_force(directory: Path, stem: str, names: Iterable[str]) -> dict[str, str]:
    """Return the tags of the files that wait, and are in force because the weights
    are."""
    tags = _tags(directory, stem, names)
    return {
        name: tag
        for name, tag in tags.items()
        if _belongs(waiting_file(directory, name, tag), directory / name, tag)
    }


def _tags(directory: Path, stem: str, names: Iterable[str]) -> dict[str, str]:
    """Return the tags in the metadata of the weights, of files that wait."""
    metadata = _metadata(directory, stem)
    found = {}
    for name in names:
        tag = metadata.get(key_of(name))
        # The weights may come from anyone, and the tag becomes a part of a name.
        if (
            isinstance(tag, str)
            and _TAG.fullmatch(tag)
            and waiting_file(directory, name, tag).is_file()
        ):
            found[name] = tag
    return found


def _metadata(directory: Path, stem: str) -> dict[str, Json]:
    source = _source(directory, stem)
    if source is None:
        return {}
    if source.name == single(stem):
        return dict(read_metadata(source))
    metadata: Json = None
    with contextlib.suppress(ValueError):
        # `weight_files` refuses an index that is not valid.
        metadata = read_json(source).get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _belongs(waiting: Path, file: Path, tag: str) -> bool:
    """Return true if `waiting` was written for these weights, to replace the file that
    is still there.

    Otherwise it is from elsewhere, or stale: a copy of a directory may contain it from
    an instant in a save.
    """
    return tag == tag_of(read_if_there(file), waiting.read_bytes())


def tag_of(before: bytes, after: bytes) -> str:
    """Return the tag for the change of a file from one content to another. A file that
    is absent is empty."""
    both = hashlib.sha256(before).digest() + hashlib.sha256(after).digest()
    return hashlib.sha256(both).hexdigest()[:16]


def key_of(name: str) -> str:
    """Return the key of a file's tag in the metadata of the weights."""
    return Path(name).stem


def waiting_file(directory: Path, name: str, tag: str) -> Path:
    """Return the path at which a file waits until the weights are in force."""
    return directory / f"{name}.{tag}.part"


def read_if_there(file: Path) -> bytes:
    """Return the content of a file; nothing if it does not exist."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        return b""


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
        raise ValueError(
            f"{source} has no weight_map, an object that names the file of each key."
        )
    files = {}
    for key, name in weight_map.items():
        # An index from elsewhere could name any file of the computer.
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"{source} puts {key} into {name!r}, which is not the name of a file "
                "beside it."
            )
        files[key] = directory / name
    absent = sorted({file.name for file in files.values() if not file.is_file()})
    if absent:
        raise FileNotFoundError(
            f"{source} names {', '.join(absent)}, but there is no such file beside it."
        )
    return files


def _no_weights(directory: Path, stem: str) -> Exception:
    pickles = []
    for pattern in ("*.bin", "*.pt", "*.pth"):
        pickles += [file.name for file in directory.glob(pattern)]
    pickles.sort()
    if pickles:
        kind = "diffusers.AutoModel"
        if stem == "model":
            kind = "transformers.AutoModelForCausalLM"
        return ValueError(
            f"{directory} holds weights only as a pickle, {pickles[0]}. It is not "
            "opened, because that could run any code that its author put in. Convert "
            "it once where you trust it: "
            f"{kind}.from_pretrained(old).save_pretrained(new)."
        )
    gguf = sorted(file.name for file in directory.glob("*.gguf"))
    if gguf:
        return ValueError(
            f"{directory} holds weights only as {gguf[0]}, a format of llama.cpp that "
            "is not read here. Take the checkpoint that it was converted from, with "
            "safetensors."
        )
    others = sorted(file.name for file in directory.glob("*.safetensors*"))
    if others:
        return FileNotFoundError(
            f"{directory} has neither {single(stem)} nor {index(stem)}, but "
            f"{', '.join(others[:5])}. If that is the variant you want, rename it to "
            f"{single(stem)} (an index to {index(stem)})."
        )
    return FileNotFoundError(
        f"{directory} has neither {single(stem)} nor {index(stem)}."
    )


def _source(directory: Path, stem: str) -> Path | None:
    """Return the file that defines the weights: the single file, or the index."""
    # In the order of transformers' `from_pretrained`.
    files = (directory / name for name in (single(stem), index(stem)))
    return next((file for file in files if file.is_file()), None)


def has_weights_beside(directory: Path, names: Iterable[str]) -> bool:
    """Return true if the directory has weights to which one of these files belongs."""
    wanted = set(names)
    stems = [stem for stem, own in COMPANIONS.items() if wanted.intersection(own)]
    return any(_source(directory, stem) is not None for stem in stems)


def files_in_force(directory: Path, stem: str) -> set[Path]:
    """Return the files that the index in force names; none if there is a single file,
    or a broken index."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        files = weight_files(directory, stem)
        if not isinstance(files, Path):
            return set(files.values())
    return set()
