"""The subpackages of the package and what each imports, by CONTRIBUTING.md: a test
holds that to the real imports."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[1] / "CONTRIBUTING.md"


def subpackages() -> dict[str, set[str]]:
    """The rows of the table, from the ground up."""
    rows = re.findall(
        r"^\| `([\w/]+)` \|.*\| (?:`(.*)` )?\|$", PAGE.read_text(), re.MULTILINE
    )
    return {subpackage: set(imports.split()) for subpackage, imports in rows}
