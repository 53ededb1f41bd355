"""Keys of files that begin otherwise than a model's: those of a wrapper, or of a larger
model."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from redco_eqx import to_arrays
from redco_eqx_models._blocks.model import Model
from redco_eqx_models._files.names import count_stored, match_keys
from redco_eqx_models._leaves import first_few

T = TypeVar("T")

_WRAPPERS = {"_orig_mod.": "torch.compile", "module.": "DataParallel"}


def rename_keys(
    directory: Path, stored: Mapping[str, T], rename: Mapping[str, str | None]
) -> dict[str, T]:
    """Return the arrays under keys with new beginnings, without those whose beginning
    becomes `None`.

    Raises `ValueError` if a beginning fits no key, or two keys become one; `TypeError`
    if these are no texts.
    """
    if not isinstance(rename, Mapping):
        raise TypeError(
            "load_pretrained: rename must be a mapping, but is a "
            f"{type(rename).__name__}. Pass "
            'rename={"old beginning of keys": "new one"}.'
        )
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str | None):
            raise TypeError(
                f"load_pretrained: rename has {old!r}: {new!r}, but both must be texts "
                "(or the second None, to leave keys out)."
            )
    found: dict[str, T] = {}
    origin: dict[str, str] = {}
    used = set()
    for key, array in stored.items():
        # Of the beginnings that fit, the longest.
        old = max((x for x in rename if key.startswith(x)), key=len, default=None)
        name = key
        if old is not None:
            used.add(old)
            new = rename[old]
            if new is None:
                continue
            name = new + key.removeprefix(old)
        if name in found:
            raise ValueError(
                f"load_pretrained: rename={dict(rename)} makes {origin[name]} and "
                f"{key} in {directory} one key, {name}. Leave one of them out: rename "
                "a longer beginning of it to None."
            )
        found[name] = array
        origin[name] = key
    unused = [old for old in rename if old not in used]
    if unused:
        raise ValueError(
            f"load_pretrained: rename has {unused[0]!r}, but no key in {directory} "
            "begins with it (or all that do begin with a longer one). The keys are "
            f"{first_few(list(stored), most=3)}."
        )
    return found


def hint_of_beginning(keys: Iterable[str], family: type[Model], model: Model) -> str:
    """Return a line of an error: the beginning that keeps the keys from fitting the
    model, and the remedy.

    **Arguments:**

    - `keys`: the keys in the files.
    - `family`, `model`: the model, abstract; its number of layers does not matter.

    **Returns:** `""` if there is no such beginning.
    """
    keys = list(keys)
    outside = [
        path
        for path in to_arrays(model)
        if not path.startswith(tuple(f"{s}." for s in family.stacks))
    ]
    num_keys: Counter[str] = Counter()
    arrays: dict[str, set[str]] = {}
    others = []
    for key in keys:
        beginning, path = _split(key, outside, family)
        if beginning is not None:
            num_keys[beginning] += 1
            arrays.setdefault(beginning, set()).add(path)
        if beginning != "":
            others.append(key)
    if not num_keys:
        return ""
    # A part of a larger model may look a little like this one.
    best = max(
        num_keys, key=lambda beginning: (len(arrays[beginning]), num_keys[beginning])
    )
    if best == "":
        return ""
    left_out = sorted({_first_part(key) for key in others if not key.startswith(best)})
    entries = [f"{best!r}: ''", *(f"{x!r}: None" for x in left_out)]
    source = ""
    if best in _WRAPPERS:
        source = f", as {_WRAPPERS[best]} writes them"
    num = sum(key.startswith(best) for key in keys)
    return (
        f"\n  {num} keys begin with {best!r}{source}. Pass "
        f"rename={{{', '.join(entries)}}}."
    )


def _first_part(key: str) -> str:
    first, dot, _ = key.partition(".")
    return first + dot


def _split(key: str, outside: list[str], family: type[Model]) -> tuple[str | None, str]:
    """Return the shortest beginning without which the key is one of the model, and its
    path or stack there."""
    cuts = [0, *(i + 1 for i, x in enumerate(key) if x == ".")]
    for cut in cuts:
        rest = key[cut:]
        for stack in family.stacks:
            if count_stored([rest], stack, family):
                return key[:cut], stack
        if found := match_keys([rest], outside, family).found:
            return key[:cut], next(iter(found))
    return None, ""
