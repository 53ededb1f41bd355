"""The house: imports point one way, importing has no effect, and what is public is documented."""

import ast
import graphlib
import inspect
import io
import os
import pathlib
import re
import subprocess
import sys
import tokenize

import pytest
from house import rooms

import redco_eqx as rx
from redco_eqx import models

PACKAGE = pathlib.Path(rx.__file__).parent

PURE = ("_base", "_dataflow", "_sharding", "_parallel", "_step")
EXCEPT = {
    pathlib.Path("_sharding/mesh.py"): {"os"},  # threads for virtual devices, before JAX starts them
    pathlib.Path("_step/kept.py"): {
        "pathlib",
        "sys",
    },  # which modules are installed, and what is imported
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


@pytest.mark.parametrize("path", [p for p in FILES if room_of(p.with_suffix("").parts) in PURE], ids=str)
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


FITTED = """
import equinox as eqx, jax, numpy as np, optax, sys
import redco_eqx as rx

model, optimizer = eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0)), optax.sgd(0.1)
rx.fit(
    rx.init_state(model, optimizer, key=jax.random.key(0)),
    [np.ones(4, np.float32)] * 16,
    collate_fn=np.stack,
    loss_fn=lambda model, batch, key: (jax.vmap(model)(batch) ** 2).mean(),
    optimizer=optimizer,
    batch_size=8,
    num_epochs=1,
    loggers=(),
)
print(*(name for name in sys.modules if name.startswith("redco_eqx")))
"""
LOADED = 4_500
"""Code lines of the core that a `fit` on one device loads."""


def loaded_by(program: str) -> list[str]:
    """The modules of the package that a process has after this program."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    return done.stdout.split()


def test_import_loads_nothing_but_the_names():
    program = "import redco_eqx, sys; print(*(name for name in sys.modules if name.startswith('redco_eqx')))"
    assert loaded_by(program) == ["redco_eqx"]
    assert set(rx.__all__) <= set(dir(rx))


def test_a_fit_loads_what_it_uses():
    names = loaded_by(FITTED)
    rooms = {name.split(".")[1] for name in names if "." in name}
    assert not rooms & {"models", "_planning", "_dataflow", "_compiled", "_birth"}
    files = [PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in names]
    lines = sum(num_code_lines(path.read_text()) for path in files if path.exists())
    assert lines + num_code_lines((PACKAGE / "__init__.py").read_text()) <= LOADED


def test_path_rules_do_not_load_what_reads_programs():
    program = FITTED.partition("model, optimizer")[0] + (
        "rx.shard_rules(eqx.nn.MLP(4, 1, 8, 1, key=jax.random.key(0)), rx.make_mesh())\n"
        "print(*(name for name in sys.modules if name.startswith('redco_eqx')))"
    )
    assert not any("_dataflow" in name for name in loaded_by(program))


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
    assert [path.stem for path in files] == ["cluster"]


CORE = [path for path in FILES if path.parts[0] != "models"]
CEILINGS = {"code lines": 9_910, "files": 77, "rooms": 12, "parameters of fit": 15, "lines of a function": 80}
"""Each issue that adds to the core takes from it as much, or says why it cannot."""


def num_code_lines(text: str) -> int:
    """Lines that are neither blank, nor a comment, nor in a docstring."""
    strings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    skipped = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def test_the_house_is_no_larger_than_was_agreed():
    functions = [
        (node.end_lineno or 0) - body[0].lineno + 1
        for path in CORE
        for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
        if isinstance(node, ast.FunctionDef)
        if (body := node.body[1:] if ast.get_docstring(node) else node.body)
    ]
    found = {
        "code lines": sum(num_code_lines((PACKAGE / path).read_text()) for path in CORE),
        "files": len(CORE),
        "rooms": len({path.parts[0] for path in CORE if len(path.parts) > 1}),
        "parameters of fit": len(inspect.signature(rx.fit).parameters),
        "lines of a function": max(functions),
    }
    assert {name: n for name, n in found.items() if n > CEILINGS[name]} == {}


def test_no_name_of_the_core_means_two_things():
    homes: dict[str, set[pathlib.Path]] = {}
    for path in CORE:
        tree = ast.parse((PACKAGE / path).read_text())
        names = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        names |= {
            n.target.id for n in tree.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
        }
        for name in {name for name in names if name[0] != "_"} | (
            {path.name} if path.name != "__init__.py" else set()
        ):
            homes.setdefault(name, set()).add(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_docstrings_begin_with_a_verb_or_the_thing():
    relative = [
        f"{path}: {text.splitlines()[0]}"
        for path in FILES
        for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
        if re.match(r"(What|Whether|How|Which|Where|Who|Of)\b", text := ast.get_docstring(node) or "")
    ]
    assert relative == []


def test_pages_and_docstrings_are_in_plain_words():
    root = pathlib.Path(__file__).parents[1]
    files = [
        *root.glob("*.md"),
        *root.glob("docs/**/*.md"),
        *root.glob("examples/**/*.md"),
        *PACKAGE.rglob("*.py"),
    ]
    strange = re.compile(r"one's own|belongs? into|all that is yours|whoever (likes|wants)", re.IGNORECASE)
    # CONTRIBUTING quotes one of them.
    found = [
        f"{x}: {m[0]}"
        for x in files
        if x.name != "CONTRIBUTING.md"
        for m in strange.finditer(x.read_text("utf-8"))
    ]
    assert found == []
