"""Every Python block of the site runs, page by page, and prints what the page says that
it prints.

In the reference the examples of the docstrings run where the site shows them. Each of
them stands by itself: it knows what is written on the page above it, and not what
another example has made.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pages
import pytest
from fit_helpers import printed

WITH_CODE = sorted(
    str(page.relative_to(pages.PAGES))
    for page in pages.PAGES.rglob("*.md")
    if any(block.language == "python" for block in pages.blocks(page.read_text()))
)
# It plans for devices whose compiler is not here: api/planning.md has the same for
# those at hand.
FOR_OTHER_DEVICES = ("redco_eqx.plan",)


def words(line: str) -> list[str]:
    """A line without its spacing and the places in files, which a reader has
    elsewhere."""
    return re.sub(r"[\w.]+\.py:\d+", "", line).split()


def run(code: str, name: str, namespace: dict) -> None:
    """As a reader does, who has seen one thing done before the next is begun."""
    exec(compile(code, name, "exec"), namespace)
    for x in jax.tree.leaves(
        [x for k, x in namespace.items() if not k.startswith("__")]
    ):
        if isinstance(x, jax.Array) and not x.is_deleted():
            x.block_until_ready()


def copy_of(namespace: dict) -> dict:
    """The same names for an example alone, on arrays of its own: it may donate them, as
    the page may have."""

    def one(x: object) -> object:
        return jnp.copy(x) if isinstance(x, jax.Array) and not x.is_deleted() else x

    return {
        k: x if k.startswith("__") else jax.tree.map(one, x)
        for k, x in namespace.items()
    }


@functools.cache
def begun(page: str) -> dict:
    """The names that a reader of a page has, who goes on with another one."""
    namespace: dict = {"__name__": "page"}
    for block in pages.blocks_of(pages.PAGES / page, "python"):
        run(block.code, "train.py", namespace)
    return namespace


@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.filterwarnings("error::DeprecationWarning:page")
def test_the_blocks_of_a_page_run_and_print_what_stands_below_them(
    page, capfd, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text = (pages.PAGES / page).read_text()
    first = re.match(r"---\nafter: (\S+)\n---\n", text)
    namespace = begun(first[1]) if first else {"__name__": "page"}
    before = copy_of(namespace)
    capfd.readouterr()
    printed: list[list[str]] = []
    for block in pages.blocks(text):
        if block.language == "python" and block.name not in FOR_OTHER_DEVICES:
            run(
                block.code,
                block.name or "train.py",
                copy_of(namespace) if block.name else namespace,
            )
            out, err = capfd.readouterr()
            printed = [words(line) for line in (out + err).splitlines()]
        elif block.language == "text":
            for line in block.code.splitlines():
                assert words(line) in printed, line
    # For the next page. In the same dict, which the functions on the first page look
    # in.
    namespace.clear()
    namespace.update(before)


def test_every_page_is_in_the_navigation_and_its_links_lead_somewhere():
    files = (
        path for path in pages.PAGES.rglob("*") if path.suffix in (".md", ".ipynb")
    )
    every = [path.relative_to(pages.PAGES) for path in files]
    nav = (pages.ROOT / "docs" / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    listed = re.findall(r"(\S+\.(?:md|ipynb))$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(map(str, every))
    for page in every:
        path = pages.PAGES / page
        fenced = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
        links = re.findall(r"\]\((?!\w+:)([^)#\s]+)", fenced.sub("", path.read_text()))
        assert [link for link in links if not (path.parent / link).exists()] == [], page


# The exported program of a page runs where neither this library nor Equinox can be
# imported.

BLOCKED = "import sys; sys.modules['redco_eqx'] = sys.modules['equinox'] = None\n"


def test_an_exported_program_needs_only_jax(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    blocks = [
        block.code for block in pages.blocks_of(pages.PAGES / "howto/use.md", "python")
    ]
    [reader] = [code for code in blocks if "export.deserialize" in code]
    for code in blocks[: blocks.index(reader)]:
        exec(compile(code, "page", "exec"), namespace)
    capfd.readouterr()
    there = printed(
        f"{BLOCKED}{reader}\nprint(predict.call(rows[None].astype(np.float32)).item())"
    )
    np = namespace["np"]
    row = np.frombuffer(b"ArgumentParser(description=text)"[:32], np.uint8) / 128 - 1
    assert there.split() == [
        "(1,)",
        str(namespace["predict"](row[None].astype(np.float32)).item()),
    ]
