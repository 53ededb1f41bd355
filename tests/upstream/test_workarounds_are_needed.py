"""Each program in `benchmarks/upstream` still shows its fault, in plain JAX.

Where one no longer does, write the version into its docstring (`Mended in:`). When the
oldest supported version has no fault, delete the workaround, its row in
`docs/pages/concepts/mesh.md`, and the program.
"""

import os
import re
import subprocess
import sys
import tomllib

import jax
import pages
import pytest

PROGRAMS = sorted((pages.ROOT / "benchmarks" / "upstream").glob("*.py"))
FIELDS = ("Symptom", "Expected", "Seen with", "Ends with", "Upstream", "Here")


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:3]))


def field(text: str, name: str) -> str | None:
    found = re.search(rf"^- {name}: (.+?)(?=\n- |\n\"\"\")", text, re.M | re.S)
    return found and " ".join(found[1].split())


@pytest.mark.parametrize("path", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_the_fault_is_there_until_the_version_that_mends_it(path):
    text = path.read_text()
    ran = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    mended = field(text, "Mended in")
    if mended and number(jax.__version__) >= number(mended):
        assert ran.returncode == 0, ran.stderr
    else:
        assert ran.returncode != 0, f"JAX {jax.__version__} has mended it: {__doc__}"
        ends = field(text, "Ends with")
        assert ends
        assert re.search(ends, ran.stderr), ran.stderr


@pytest.mark.parametrize("path", PROGRAMS, ids=[path.stem for path in PROGRAMS])
def test_its_text_can_be_filed_and_a_supported_version_has_the_fault(path):
    text = path.read_text()
    assert [name for name in FIELDS if not field(text, name)] == []
    of_project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text())["project"]
    [oldest] = [
        requirement.removeprefix("jax>=")
        for requirement in of_project["dependencies"]
        if requirement.startswith("jax>=")
    ]
    mended = field(text, "Mended in")
    assert not mended or number(mended) > number(oldest), "delete the workaround"
