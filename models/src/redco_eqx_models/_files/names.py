"""Leaf paths and keys of files: equal, except for stacked layers, matrices stored as
one, and old spellings."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from redco_eqx import to_arrays
from redco_eqx_models._blocks.decoder import is_vocabulary
from redco_eqx_models._blocks.model import Model
from redco_eqx_models._leaves import first_few

OLD_SPELLINGS = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
"""Old names of norms' arrays, in files converted from TensorFlow."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """The place of a leaf in files.

    - `path`: the path of the leaf.
    - `shape`: the shape of the whole leaf.
    - `keys`: one key, or one per number of a layer of a stack and of an expert, in
        their order.
    - `stack`: the path of the stack, if the leaf's first dim is the layer number.
    - `numbered`: the leading dims that are numbers of layers and of experts.
    - `fused`: whether the last two dims are one in files.
    - `start`, `num_rows`: for an array that files join with others, its first row
        there, and the number of rows of all. For a padded vocabulary, 0 and the number
        of rows without padding.
    """

    path: str
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    stack: str | None
    fused: bool
    numbered: tuple[int, ...] = ()
    start: int = 0
    num_rows: int | None = None

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        """The shape of the array without padding rows."""
        if self.num_rows is None or self.numbered:
            return self.shape
        return (min(self.shape[0], self.num_rows), *self.shape[1:])

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the array under each key."""
        shape = self.shape[len(self.numbered) :]
        if self.num_rows is not None:
            return (self.num_rows, *shape[1:])
        if self.fused:
            return (*shape[:-2], shape[-2] * shape[-1])
        return shape

    @property
    def places(self) -> list[tuple[tuple[int, ...], str]]:
        """The place in the leaf of each key's array."""
        return list(zip(np.ndindex(self.numbered), self.keys, strict=True))


def entries_of(model: Model) -> list[Entry]:
    """Return an entry per array of a `Model`, abstract or not, in the model's order."""
    entries = []
    arrays = to_arrays(model)
    for path, x in arrays.items():
        stack = next((s for s in model.stacks if path.startswith(f"{s}.")), None)
        rest = "" if stack is None else path.removeprefix(f"{stack}.")
        if rest.partition(".")[0].isdigit():
            # A list of layers has their numbers in its paths, as the keys of files.
            stack = None
        fused = any(re.search(pattern, path) for pattern in model.fused)
        key, parts = _joined(path, model)
        rows = (0, None)
        if parts:
            # In a stack, the dim of the layers comes before the rows.
            dim = 0 if stack is None else 1
            sizes = [arrays[part].shape[dim] for part in parts]
            rows = sum(sizes[: parts.index(path)]), sum(sizes)
        elif is_vocabulary(model, path.rpartition(".")[0]):
            rows = 0, model.config.vocab_size
        inner = next((f".{s}." for s in model.inner_stacks if f".{s}." in path), None)
        numbered = tuple(x.shape[: (stack is not None) + (inner is not None)])
        template = _key(key, model)
        if stack is not None:
            template = f"{stack}.{{}}{key.removeprefix(stack)}"
        if inner is not None:
            template = template.replace(inner, f"{inner}{{}}.")
        keys = tuple(template.format(*index) for index in np.ndindex(numbered))
        entries.append(Entry(path, tuple(x.shape), keys, stack, fused, numbered, *rows))
    return entries


def shapes_of(entries: Iterable[Entry]) -> dict[str, tuple[int, ...]]:
    """Return the shape of the array under each key of the entries."""
    shapes = {}
    for entry in entries:
        shapes |= dict.fromkeys(entry.keys, entry.file_shape)
    return shapes


def _key(path: str, model: Model) -> str:
    module, _, array = path.rpartition(".")
    if module not in model.in_first_layer:
        return path
    return f"{model.in_first_layer[module]}.{array}".removeprefix(".")


def _joined(path: str, model: Model) -> tuple[str, list[str]]:
    """Return the path in files, and the paths of all arrays that are joined under it,
    if there are any."""
    outer, _, kind = path.rpartition(".")
    outer, _, own = outer.rpartition(".")
    for name, parts in model.config.joined.items():
        # A branch of LoRA beside a part has other kinds of arrays.
        if own in parts and kind in ("weight", "bias"):
            paths = [f"{outer}.{part}.{kind}" for part in parts]
            return f"{outer}.{name}.{kind}", paths
    return path, []


@dataclasses.dataclass(frozen=True)
class Match:
    """The correspondence between the keys in files and those of a model.

    - `found`: `{key of the model: key in the files}`. For a tied head and its table one
        is enough.
    - `tied`: `{key in the files: key of the model}`, for heads that the model does not
        have because the configuration ties them to the table of the other key.
    - `dropped`: keys of heads that the model does not have.
    - `unexpected`: other keys in the files without a place in the model.
    - `twice`: `(key of the model, two keys in the files)`.
    """

    found: dict[str, str]
    tied: dict[str, str]
    dropped: list[str]
    unexpected: list[str]
    twice: list[tuple[str, str, str]]


def match_keys(
    keys: Iterable[str], wanted: Iterable[str], family: type[Model]
) -> Match:
    """Match a model's keys to those of files, including under older names that `family`
    declares."""
    wanted = set(wanted)
    match = Match({}, {}, [], [], [])
    for key in keys:
        spellings = _spellings(key, family)
        name = next((name for name in spellings if name in wanted), None)
        tied = next((name for name in spellings if name in family.tied), None)
        if name is not None and name in match.found:
            match.twice.append((name, match.found[name], key))
        elif name is not None:
            match.found[name] = key
        elif tied is not None:
            match.tied[key] = family.tied[tied]
        elif any(re.search(pattern, key) for pattern in family.dropped):
            match.dropped.append(key)
        elif not any(re.search(pattern, key) for pattern in family.ignored):
            match.unexpected.append(key)
    for head, table in list(match.tied.items()):
        if table in wanted and table not in match.found:
            # Written once, under the other of its two names.
            match.found[table] = head
            del match.tied[head]
    return match


def list_problems(problems: Mapping[str, Sequence[str]]) -> str:
    """Return a line of an error for each kind of problem that some arrays have; `""` if
    there are none."""
    return "".join(
        f"\n  {len(x)} {kind}: {first_few(x)}" for kind, x in problems.items() if x
    )


def count_stored(keys: Iterable[str], stack: str, family: type[Model]) -> int:
    """Return the number of layers of a stack that have keys, in any spelling."""
    layer = re.compile(rf"{re.escape(stack)}\.(\d+)\.")
    last = -1
    for key in keys:
        for name in _spellings(key, family):
            match = layer.match(name)
            if match:
                last = max(last, int(match[1]))
    return last + 1


def _spellings(key: str, family: type[Model]) -> list[str]:
    """Return the names that a key of a file may have in the model, the key itself
    first."""
    names = [key]
    for old, new in (*OLD_SPELLINGS, *family.renamed.items()):
        if re.search(old, key):
            names.append(re.sub(old, new, key))
    # The file is of a larger model, of which this one is a part.
    for outer in family.outer:
        inner = [name.removeprefix(outer) for name in names if name.startswith(outer)]
        names += inner
    # The file is of the bare model, which this one has as a part.
    spellings = list(names)
    for prefix in family.prefixes:
        spellings += [prefix + name for name in names]
    return spellings
