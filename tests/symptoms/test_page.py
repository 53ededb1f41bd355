"""Each row of the page `symptoms.md` names a test that exists, and the page has every
test that was written for a thread."""

import pathlib
import re

import pages
import pytest

PAGE = (pages.PAGES / "symptoms.md").read_text()
ROWS = re.findall(r"^\| (?!what happened|---)(.+) \|$", PAGE, re.MULTILINE)
TESTS = [re.findall(r"`([\w/]+\.py)::(\w+)`", row) for row in ROWS]


@pytest.mark.parametrize("found", TESTS, ids=[row.split(" | ")[0] for row in ROWS])
def test_the_test_of_a_row_exists(found):
    assert len(found) == 1
    [(path, name)] = found
    text = (pages.ROOT / path).read_text()
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)


def test_every_symptom_has_a_row():
    here = pathlib.Path(__file__)
    names = {
        name
        for path in here.parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
        if path != here
    }
    assert names <= {name for found in TESTS for _, name in found}
