"""One checkpoint replaces another: at any instant, one of them is in force and whole.

All files of the new checkpoint are first written under temporary names. One rename (or
one removal) then changes the weights. If a file beside them changes too
(`config.json`), the new one waits under the name `config.json.<tag>.part`, and the
metadata of the new weights contains the tag. So it comes into force in the same
instant, and a later save can finish what an earlier one could not. An empty file that
waits says that the file is to be removed.

The caller is the `only_writer` of the directory.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from redco_eqx_models._files.directory import (
    COMPANIONS,
    SHARD,
    files_in_force,
    has_weights_beside,
    index,
    key_of,
    read_if_there,
    single,
    tag_of,
    tags_in_force,
    waiting_file,
)

_TEMPORARY = re.compile(r".+\.[0-9a-f]{16}\.part")


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A new checkpoint, before it is in force.

    - `directory`, `stem`: the directory, and the stem of the names of its weight files.
    - `files`: the names that the weight files will have.
    - `tags`: the tag of each file beside the weights that changes with them.
    - `mark`: a part of the temporary names, different in each save.
    """

    directory: Path
    stem: str
    files: list[Path]
    tags: Mapping[str, str]
    mark: str

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of each weight file."""
        # With several files, the index has the tags, because it comes into force last.
        tags = self._named_tags if len(self.files) == 1 else {}
        # transformers writes this format too.
        return {"format": "pt", **tags}

    def part(self, file: Path) -> Path:
        """Return the temporary path of a file that will be renamed to `file`."""
        return file.with_name(f"{file.name}.{self.mark}.part")

    def commit(self, weight_map: Mapping[str, str], num_bytes: int) -> None:
        """Put the written files in force, then remove those of the previous checkpoint.

        **Arguments:**

        - `weight_map`: the name of the file of each key.
        - `num_bytes`: the size of all arrays.
        """
        directory = self.directory
        stem = self.stem
        files = self.files
        old = files_in_force(directory, stem)
        named = directory / index(stem)
        if len(files) > 1:
            metadata = {"total_size": num_bytes, **self._named_tags}
            contents = {"metadata": metadata, "weight_map": dict(weight_map)}
            _write(self.part(named), (json.dumps(contents, indent=2) + "\n").encode())
            for file in files:
                os.replace(self.part(file), file)
            # The files that the index names reach the disk before it.
            _sync(directory)
            os.replace(self.part(named), named)
            _sync(directory)
            # Readers prefer a single file, so its removal puts the index in force.
            if (directory / single(stem)).exists():
                os.unlink(directory / single(stem))
        else:
            # The files that wait for the weights reach the disk before these.
            _sync(directory)
            os.replace(self.part(files[0]), files[0])
        _sync(directory)
        for name, tag in self.tags.items():
            _put_in_force(waiting_file(directory, name, tag), directory / name)
        _sync(directory)
        stale = {
            file
            for file in directory.iterdir()
            if re.fullmatch(stem + SHARD, file.name)
        } | old
        if len(files) == 1 and named.exists():
            os.unlink(named)
        for file in sorted(stale.difference(files)):
            os.unlink(file)

    @property
    def _named_tags(self) -> dict[str, str]:
        return {key_of(name): tag for name, tag in self.tags.items()}


def begin(
    directory: Path, stem: str, num_files: int, contents: Mapping[str, bytes | None]
) -> Exchange:
    """Tidy the directory of a new checkpoint, and write the files beside its weights.

    **Arguments:**

    - `directory`: an existing directory.
    - `num_files`: the number of weight files.
    - `contents`: the content of each file beside the weights; `None` for a file that is
        to be removed.
    """
    tidy(directory)
    tags = {}
    is_new = not has_weights_beside(directory, contents)
    is_new = is_new and not any((directory / name).exists() for name in contents)
    for name, content in contents.items():
        before = read_if_there(directory / name)
        after = content or b""
        if before == after:
            continue
        if is_new:
            # Nothing in force is replaced, so the file need not wait for the weights.
            write_beside(directory / name, after)
        else:
            tags[name] = tag_of(before, after)
            _write(waiting_file(directory, name, tags[name]), after)
    files = _free_names(directory, stem, num_files)
    return Exchange(directory, stem, files, tags, secrets.token_hex(8))


def _free_names(directory: Path, stem: str, num_files: int) -> list[Path]:
    """Return names for weight files. Several files do not take the names of those in
    force."""
    if num_files == 1:
        return [directory / single(stem)]
    used = files_in_force(directory, stem)
    for own in itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2))):
        files = [
            directory / f"{own}-{i + 1:05d}-of-{num_files:05d}.safetensors"
            for i in range(num_files)
        ]
        if not used.intersection(files):
            return files
    raise AssertionError


def tidy(directory: Path) -> None:
    """Finish an interrupted save if its weights are in force. Remove the temporary
    files of all others."""
    for stem, names in COMPANIONS.items():
        for name, tag in tags_in_force(directory, stem, names).items():
            _put_in_force(waiting_file(directory, name, tag), directory / name)
            _sync(directory)
    for path in list(directory.iterdir()):
        if not _TEMPORARY.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)


@contextlib.contextmanager
def tidied_after_error(directory: Path) -> Iterator[None]:
    """Tidy the directory if an error ends the block."""
    try:
        yield
    except Exception:
        # The error itself matters more than one of the tidying.
        with contextlib.suppress(OSError):
            tidy(directory)
        raise


def temporary(file: Path) -> Path:
    """Return a new temporary path for a file, before it gets its name. `tidy` knows
    it."""
    return file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")


def write_beside(file: Path, content: bytes) -> None:
    """Write a small file, whole or not at all."""
    # A rename within a directory is atomic: a reader finds the old file or the new one.
    written = temporary(file)
    _write(written, content)
    os.replace(written, file)


def sync_file(file: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with file.open("rb") as f:
        os.fsync(f.fileno())


def _put_in_force(waiting: Path, file: Path) -> None:
    if waiting.stat().st_size:
        os.replace(waiting, file)
        return
    if file.exists():
        os.unlink(file)
    os.unlink(waiting)


def _write(file: Path, content: bytes) -> None:
    """Write a file, and wait until it is on the disk."""
    with file.open("wb") as f:
        f.write(content)
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
