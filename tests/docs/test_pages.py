"""Every Python block of the site runs, page by page, and prints what the page says that it prints."""

import pathlib
import re

import pytest

PAGES = pathlib.Path(__file__).parents[2] / "docs" / "pages"
WITH_CODE = sorted(
    str(page.relative_to(PAGES)) for page in PAGES.rglob("*.md") if "```python" in page.read_text()
)


def blocks(page: str) -> list[tuple[str, str]]:
    """The fenced blocks of a page, each with its language, after those of the page that it goes on from."""
    text = (PAGES / page).read_text()
    before = re.match(r"---\nafter: (\S+)\n---\n", text)
    found = re.findall(r"^```(\w+)[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    return [*(blocks(before[1]) if before else []), *found]


def words(line: str) -> list[str]:
    """A line without its spacing and the places in files, which a reader has elsewhere."""
    return re.sub(r"[\w.]+\.py:\d+", "", line).split()


@pytest.mark.parametrize("page", WITH_CODE)
@pytest.mark.filterwarnings("error::DeprecationWarning:page")
def test_the_blocks_of_a_page_run_and_print_what_stands_below_them(page, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "page"}
    printed: list[list[str]] = []
    for language, block in blocks(page):
        if language == "python":
            exec(compile(block, "train.py", "exec"), namespace)
            out, err = capfd.readouterr()
            printed = [words(line) for line in (out + err).splitlines()]
        elif language == "text":
            for line in block.splitlines():
                assert words(line) in printed, line
