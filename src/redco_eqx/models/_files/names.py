"""Leaf paths and the keys of files: equal, but for stacked layers, fused matrices and old spellings."""

import dataclasses
import re
from collections.abc import Iterable

from redco_eqx._tree import join, to_arrays
from redco_eqx.models._blocks.model import Model
from redco_eqx.models._blocks.vocabulary import is_vocabulary

OLD_SPELLINGS = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
"""Of norms, in files converted from TensorFlow."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a leaf is found in files.

    - `path`: of the leaf.
    - `shape`: of the whole leaf.
    - `keys`: one, or one for each layer of a stack.
    - `stack`: the path of the stack, if the leaf's first dim numbers the layers.
    - `fused`: whether the last two dims are one in files.
    - `num_rows`: how many of its rows files have, if it has others: of a vocabulary that was padded.
    """

    path: str
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    stack: str | None
    fused: bool
    num_rows: int | None = None

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        """The shape of the array without rows that pad it."""
        return self.shape if self.num_rows is None else (self.num_rows, *self.shape[1:])

    @property
    def file_shape(self) -> tuple[int, ...]:
        """The shape of the array under each key."""
        shape = self.unpadded_shape if self.stack is None else self.shape[1:]
        return (*shape[:-2], shape[-2] * shape[-1]) if self.fused else shape


def entries_of(model: Model) -> list[Entry]:
    """An entry for each array of a `Model`, abstract or not, in the model's order."""
    entries = []
    for path, x in to_arrays(model).items():
        stack = next((s for s in model.stacks if path.startswith(f"{s}.")), None)
        rest = "" if stack is None else path.removeprefix(f"{stack}.")
        if rest.partition(".")[0].isdigit():
            stack = None  # a list of layers
        keys = (
            (_key(path, model),) if stack is None else tuple(f"{stack}.{i}.{rest}" for i in range(x.shape[0]))
        )
        fused = any(re.search(pattern, path) for pattern in model.fused)
        num_rows = model.config.vocab_size if is_vocabulary(model, path.rpartition(".")[0]) else None
        entries.append(Entry(path, tuple(x.shape), keys, stack, fused, num_rows))
    return entries


def _key(path: str, model: Model) -> str:
    module, _, array = path.rpartition(".")
    return join(model.in_first_layer[module], array) if module in model.in_first_layer else path


@dataclasses.dataclass(frozen=True)
class Match:
    """How the keys found in files stand to those of a model.

    - `found`: `{key of the model: key in the files}`. Of a tied head and its table one is enough.
    - `tied`: `{key in the files: key of the model}`, of heads that the model does not have because the
        configuration says that they are the table of the other key.
    - `unexpected`: keys in the files that the model has no place for.
    - `twice`: `(key of the model, two keys in the files)`.
    """

    found: dict[str, str]
    tied: dict[str, str]
    unexpected: list[str]
    twice: list[tuple[str, str, str]]


def match_keys(keys: Iterable[str], wanted: Iterable[str], family: type[Model]) -> Match:
    """Finds a model's keys among those of files, also under older spellings that `family` states."""
    wanted = set(wanted)
    match = Match({}, {}, [], [])
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
        elif not any(re.search(pattern, key) for pattern in family.ignored):
            match.unexpected.append(key)
    for head, table in list(match.tied.items()):
        if table in wanted and table not in match.found:  # written once, under the other of its two names
            match.found[table] = head
            del match.tied[head]
    return match


def _spellings(key: str, family: type[Model]) -> list[str]:
    names = [key, *(re.sub(old, new, key) for old, new in OLD_SPELLINGS if re.search(old, key))]
    names += [name.removeprefix(outer) for outer in family.outer for name in names if name.startswith(outer)]
    return [prefix + name for prefix in ("", *family.prefixes) for name in names]
