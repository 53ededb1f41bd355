"""Files beside the weights, which go along to another directory: a tokenizer's,
licences, whole folders."""

import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from redco_eqx_models._files.directory import GENERATION
from redco_eqx_models._files.exchange import sync_file, temporary

_WRITTEN = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|npz|part)(\.index\.json)?|(generation_)?config\.json"
)
"""Files that are not copied to another directory: weights in any format, and the files
that saving writes."""
_BLOB = re.compile(r".*/models--[^/]+/blobs/[0-9a-f]{40,64}")
"""A file in the cache of the hub, to which the names in a snapshot link."""


def carry_over(source: Path, directory: Path) -> None:
    """Copy the files beside a checkpoint (a tokenizer's, licences) that the other
    directory does not have."""
    if not source.is_dir() or source.resolve() == directory.resolve():
        return
    for file in sorted(source.iterdir()):
        target = directory / file.name
        is_weights = _WRITTEN.fullmatch(file.name) is not None
        is_hidden = file.name.startswith(".")
        if is_weights or is_hidden or not file.is_file() or target.exists():
            continue
        copy = temporary(target)
        shutil.copyfile(file, copy)
        sync_file(copy)
        os.replace(copy, target)


def copy_folder(folder: Path, target: Path) -> None:
    """Copy a folder, whole or not at all."""
    copy = temporary(target)
    shutil.copytree(folder, copy)
    os.replace(copy, target)


def check_links(source: Path, directory: Path, folders: Iterable[Path] = ()) -> None:
    """Raise `ValueError` for links that `carry_over`, and copying `folders`, would
    follow out of both `source` and the cache of the hub: a checkpoint from elsewhere
    may contain a link to any file that the user who loads it can read.
    """
    root = source.resolve()
    if root == directory.resolve():
        return
    files = []
    for file in source.glob("[!.]*"):
        is_new = file.is_file() and not (directory / file.name).exists()
        if is_new and not _WRITTEN.fullmatch(file.name):
            files.append(file)
    # `load_pretrained` has read this one, and saving writes its content.
    files.append(source / GENERATION)
    for folder in folders:
        files += [folder, *folder.rglob("*")]
    for file in files:
        real = file.resolve()
        is_inside = real.is_relative_to(root) or _BLOB.fullmatch(real.as_posix())
        if not is_inside or (file.is_symlink() and file.is_dir()):
            raise ValueError(
                f"{file} is a link to {real}, but only links to files of the same "
                "checkpoint, or of the hub's cache, are copied with it. If it is "
                "intended, replace it with a copy of its target."
            )
