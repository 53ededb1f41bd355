"""The fenced blocks of a Markdown page, for the tests that run what a reader would."""

import importlib
import inspect
import pathlib
import re
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ROOT / "docs" / "pages"

_FENCE = r"^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```"
_PART = re.compile(rf"{_FENCE}|^::: (?P<name>\S+)$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """`name` is that of the public thing whose docstring has the block; `None` if it
    stands on the page."""

    language: str
    code: str
    name: str | None = None


def blocks(text: str) -> list[Block]:
    """In order; where a page has `::: name`, the site shows a docstring, and its blocks
    are taken."""
    found: list[Block] = []
    for part in _PART.finditer(text):
        if part["name"] is None:
            found.append(Block(part["language"], part["code"]))
        else:
            of_doc = re.finditer(
                _FENCE, _docstring(part["name"]), re.DOTALL | re.MULTILINE
            )
            found += [
                Block(fence["language"], fence["code"], part["name"])
                for fence in of_doc
            ]
    return found


def blocks_of(page: pathlib.Path, language: str | None = None) -> list[Block]:
    """The blocks of a page, or those of a language, after those of the page that it
    goes on from."""
    text = page.read_text()
    before = re.match(r"---\nafter: (\S+)\n---\n", text)
    found = [*(blocks_of(PAGES / before[1]) if before else []), *blocks(text)]
    return [block for block in found if language in (None, block.language)]


def defined(page: str, *marks: str, **given: object) -> dict[str, Any]:
    """The names, with those `given`, after the blocks of a page that contain one of the
    marks."""
    names: dict[str, Any] = dict(given)
    for block in blocks((PAGES / page).read_text()):
        if any(mark in block.code for mark in marks):
            exec(compile(block.code, page, "exec"), names)
    return names


def public(path: str) -> object:
    """Return the object of a public name such as `redco_eqx.layers.row`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _docstring(path: str) -> str:
    """Its own: an alias has that of what it stands for, which the site does not
    show."""
    thing = public(path)
    is_ours = str(getattr(thing, "__module__", "")).startswith("redco_eqx")
    return inspect.cleandoc(getattr(thing, "__doc__", None) or "") if is_ours else ""
