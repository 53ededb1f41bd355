"""Every public name stands in the reference of the site, once."""

import importlib
import pathlib
import re

import pytest

REFERENCE = pathlib.Path(__file__).parents[2] / "docs" / "pages" / "api"
LISTED = re.findall(
    r"^::: (\S+)$", "\n".join(page.read_text() for page in REFERENCE.glob("*.md")), re.MULTILINE
)
FACES = ["redco_eqx", *(f"redco_eqx.{face}" for face in ("errors", "layers", "loop", "models", "types"))]


@pytest.mark.parametrize("face", FACES)
def test_each_name_of_a_face_is_listed_once(face):
    modules = {name.rpartition(".")[2] for name in FACES}
    names = [f"{face}.{name}" for name in importlib.import_module(face).__all__ if name not in modules]
    assert sorted(names) == sorted(name for name in LISTED if name.rpartition(".")[0] == face)
