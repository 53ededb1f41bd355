"""The house: imports point one way, importing has no effect, and what is public is documented."""

import ast
import graphlib
import inspect
import pathlib
import re
import subprocess
import sys

import pytest
from house import rooms

import redco_eqx as rx
from redco_eqx import models

PACKAGE = pathlib.Path(rx.__file__).parent

PURE = ("_jaxprs", "_dataflow", "_sharding", "_parallel", "_step")
EXCEPT = {
    pathlib.Path("_sharding/mesh.py"): {"os"},  # threads for virtual devices, before JAX starts them
    pathlib.Path("_step/kept.py"): {"pathlib", "sys"},  # which modules are installed, and what is imported
}
EFFECTS = {"os", "sys", "time", "pathlib", "signal", "threading", "socket", "subprocess", "tqdm"}


ROOMS = rooms()
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
# What only re-exports, by name.
FACES = [pathlib.Path(name) for name in (
    "__init__.py", "errors.py", "layers.py", "types.py", "models/__init__.py",
)]  # fmt: skip


def room_of(parts: tuple[str, ...]) -> str:
    return "/".join(parts[:2]) if parts[0] == "models" else parts[0]


def imported(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Each module of the package that a file imports, as its parts below `redco_eqx`."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text())):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("redco_eqx") for alias in node.names)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "redco_eqx":
            parts = tuple((node.module or "").split(".")[1:])
            inside = [(*parts, alias.name) for alias in node.names]
            is_file = {name: (PACKAGE / pathlib.Path(*name)).with_suffix(".py").exists() for name in inside}
            found |= {name if is_file[name] else parts for name in inside}
    return found


def test_the_list_of_rooms_is_in_order_and_complete():
    names = list(ROOMS)
    for i, (room, imports) in enumerate(ROOMS.items()):
        assert imports <= set(names[:i]), f"{room} imports {imports - set(names[:i])}, which are not above it"
    assert {room_of(path.with_suffix("").parts) for path in FILES if path not in FACES} == set(names)


@pytest.mark.parametrize("room", list(ROOMS))
def test_a_room_imports_what_its_row_says(room):
    files = [path for path in FILES if path not in FACES and room_of(path.with_suffix("").parts) == room]
    arrows = {room_of(parts) for path in files for parts in imported(path)} - {room}
    assert arrows == ROOMS[room]


def test_files_do_not_import_each_other_in_a_circle():
    graph = {path.with_suffix("").parts: imported(path) for path in FILES}
    sorter = graphlib.TopologicalSorter(graph)
    assert len(list(sorter.static_order())) >= len(FILES)


@pytest.mark.parametrize("path", [p for p in FILES if p.parts[0] in PURE], ids=str)
def test_pure_rooms_touch_nothing_outside(path):
    tree = ast.parse((PACKAGE / path).read_text())
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {(n.module or "").split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not names & EFFECTS - EXCEPT.get(path, set())


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
            doc = re.sub(r"```.*?```", "", inspect.getdoc(thing) or "", flags=re.DOTALL)  # without examples
            for parameter in inspect.signature(thing).parameters:
                assert f"`{parameter}`" in doc or "as for" in doc or len(doc) < 400, (name, parameter)


def test_only_one_file_knows_what_jax_keeps_private():
    files = [path for path in PACKAGE.rglob("*.py") if "jax._src" in path.read_text()]
    assert [path.stem for path in files] == ["jax_internals"]
