"""The two packages: one version, and nothing imported that is not declared."""

import ast
import pathlib
import re
import sys
import tomllib
from importlib import metadata
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HOMES = {"redco_eqx": ROOT, "redco_eqx_models": ROOT / "models"}
PROJECTS: dict[str, dict[str, Any]] = {
    name: tomllib.loads((home / "pyproject.toml").read_text("utf-8"))["project"]
    for name, home in HOMES.items()
}
# By another name than its distribution's.
DISTRIBUTIONS = {"PIL": "pillow", "orbax": "orbax-checkpoint"}
# A part of a declared package, which requires exactly the version that fits.
PARTS = {"jaxlib": "jax", "etils": "orbax-checkpoint"}


def names(requirements: list[str]) -> set[str]:
    """The distributions that requirements name, without versions and extras."""
    found = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    return {match[0].replace("_", "-").lower() for match in found if match}


def declared(name: str) -> set[str]:
    """The distributions that a package requires, always or by an extra."""
    extras = PROJECTS[name]["optional-dependencies"].values()
    return names(
        [*PROJECTS[name]["dependencies"], *(x for extra in extras for x in extra)]
    )


def imported(name: str) -> set[str]:
    """The top-level modules of others that the sources import, also inside
    functions."""
    found: set[str] = set()
    for path in (HOMES[name] / "src" / name).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {name}


def test_both_have_one_version_and_the_second_requires_it_of_the_first() -> None:
    versions = {project["version"] for project in PROJECTS.values()}
    assert len(versions) == 1
    required = PROJECTS["redco_eqx_models"]["dependencies"]
    (of_core,) = [x for x in required if re.match(r"redco[_-]eqx\b(?![_-]models)", x)]
    assert of_core == f"redco_eqx=={versions.pop()}"


def test_the_core_requires_what_it_says_and_knows_nothing_of_the_models() -> None:
    required = names(PROJECTS["redco_eqx"]["dependencies"])
    assert required == {
        "jax",
        "equinox",
        "optax",
        "jaxtyping",
        "einops",
        "numpy",
        "tqdm",
        "scipy",
    }
    assert declared("redco_eqx") - required == {"orbax-checkpoint", "tensorboardx"}


@pytest.mark.parametrize("name", HOMES)
def test_what_the_sources_import_is_declared(name: str) -> None:
    modules = imported(name)
    assert {"jax", "equinox", "numpy"} <= modules
    by_distribution = {DISTRIBUTIONS.get(x, PARTS.get(x, x)): x for x in modules}
    found = {
        x.replace("_", "-").lower(): module for x, module in by_distribution.items()
    }
    assert {x: m for x, m in found.items() if x not in declared(name)} == {}
    for part, whole in PARTS.items():
        if part in modules:
            assert part in names(metadata.requires(whole) or []), part
