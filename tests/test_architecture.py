"""The house: imports point one way, importing has no effect, and what is public is documented."""

import ast
import inspect
import pathlib
import subprocess
import sys

import pytest

import redco_eqx as rx
from redco_eqx import models

PACKAGE = pathlib.Path(rx.__file__).parent

# A file imports only from rows above its own.
ROWS = [
    ["_types", "_tree", "_mesh", "_interrupt", "_hlo", "_hlo_groups", "_chain", "_private"],
    ["_store", "_launch"],
    ["_leave", "_presence"],
    ["_rendezvous", "_agreement", "_watchdog"],
    ["_distributed", "_throttle"],
    ["_checksum", "_record", "_processes", "_epochs"],
    ["_static", "_layers", "_log", "_hlo_loops", "_listing", "_ambient", "_fsdp", "_sums", "_remat"],
    ["_links", "_collectives", "_split", "_program"],
    ["_roles"],
    ["_rules"],
    ["_explain", "_state", "_parallel"],
    ["_steps", "_data", "_snapshot", "_scan_layers", "_vocabulary"],
    ["_evaluate", "_loop", "_checkpoint", "_restore", "_jit_step"],
    ["_evaluation", "_report", "_checks", "_saving"],
    ["_training"],
    ["_fit"],
    ["__init__"],
]
LEVEL = {name: level for level, row in enumerate(ROWS) for name in row}

# The models know no trainer, and of the core only these.
MODEL_ROWS = [
    ["_layers", "_rope", "_sampling", "_names", "_safetensors"],
    ["_attention", "_config"],
    ["_context"],
    ["_model"],
    ["_decoder"],
    ["_llama", "_gpt2", "_gptj", "_opt", "_generate", "_directory", "_slices"],
    ["_families", "_save"],
    ["_load"],
    ["__init__"],
]
MODEL_LEVEL = {name: level for level, row in enumerate(MODEL_ROWS) for name in row}
CORE_OF_MODELS = {"_types", "_tree", "_mesh", "_rules", "_parallel", "_scan_layers", "_vocabulary"}


def imported(path: pathlib.Path, package: str = "redco_eqx") -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (f"{node.module}.").startswith(f"{package}."):
            parts = (node.module or "").removeprefix(package).split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("redco_eqx") for alias in node.names)
    return names


def test_every_file_has_a_row():
    assert {path.stem for path in PACKAGE.glob("*.py")} | {"_program"} == set(LEVEL)


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_point_one_way(path):
    wrong = {name for name in imported(path) if LEVEL[name] >= LEVEL[path.stem]}
    assert not wrong, f"{path.stem} imports {wrong}, which are not above it"


def test_every_file_of_the_models_has_a_row():
    assert {path.stem for path in (PACKAGE / "models").glob("*.py")} == set(MODEL_LEVEL)


@pytest.mark.parametrize("path", sorted((PACKAGE / "models").glob("*.py")), ids=lambda path: path.stem)
def test_models_import_one_way(path):
    inside = imported(path, "redco_eqx.models")
    wrong = {name for name in inside if MODEL_LEVEL[name] >= MODEL_LEVEL[path.stem]}
    assert not wrong, f"models.{path.stem} imports {wrong}, which are not above it"
    assert imported(path) - {"models"} <= CORE_OF_MODELS


def test_import_does_not_touch_a_device():
    # The number of virtual devices can be set only before the backend is used.
    program = (
        "import redco_eqx, jax; jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices()) == 3"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env={"JAX_PLATFORMS": "cpu", "PATH": ""})


@pytest.mark.parametrize("module", [rx, models], ids=["redco_eqx", "models"])
def test_public_names_are_sorted_and_documented(module):
    assert module.__all__ == sorted(module.__all__, key=lambda name: (name[0].islower(), name))
    for name in module.__all__:
        thing = getattr(module, name)
        assert inspect.getdoc(thing), name
        if inspect.isfunction(thing):
            doc = inspect.getdoc(thing) or ""
            for parameter in inspect.signature(thing).parameters:
                assert f"`{parameter}`" in doc or "as for" in doc or len(doc) < 400, (name, parameter)


def test_only_one_file_knows_what_jax_keeps_private():
    files = [path for path in PACKAGE.rglob("*.py") if "jax._src" in path.read_text()]
    assert [path.stem for path in files] == ["_private"]
