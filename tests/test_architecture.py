"""The architecture: imports point one way, importing has no effect, and what is public
is documented."""

import ast
import graphlib
import importlib
import inspect
import pathlib
import re
from collections import defaultdict

from architecture import subpackages
from fit_helpers import printed

import redco_eqx as rx

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = {
    "redco_eqx": ROOT / "src/redco_eqx",
    "redco_eqx_models": ROOT / "models/src/redco_eqx_models",
}
# The files of both packages. Those of the second one stand below `models`.
TEXTS = {
    pathlib.Path("models" if name == "redco_eqx_models" else "")
    / path.relative_to(package): path.read_text()
    for name, package in PACKAGES.items()
    for path in sorted(package.rglob("*.py"))
}
TREES = {path: ast.parse(text) for path, text in TEXTS.items()}
CORE = [path for path in TEXTS if path.parts[0] != "models"]
MODELS = [path for path in TEXTS if path.parts[0] == "models"]
# What only re-exports, by name.
PUBLIC = [
    pathlib.Path(f"{name}.py")
    for name in ("__init__", "errors", "layers", "types", "models/__init__")
]
INSIDE = [path for path in TEXTS if path not in PUBLIC]

PURE = ("_base", "_dataflow", "_sharding", "_parallel", "_step")
EFFECTS = {
    "os",
    "sys",
    "time",
    "pathlib",
    "signal",
    "threading",
    "socket",
    "subprocess",
    "tqdm",
}
EXCEPT = {
    # Threads for virtual devices, before JAX starts them.
    pathlib.Path("_sharding/mesh.py"): {"os"},
    # Which modules are installed, and what is imported.
    pathlib.Path("_step/compile_cache.py"): {"pathlib", "sys"},
}


def subpackage_of(path: pathlib.Path | tuple[str, ...]) -> str:
    parts = path.with_suffix("").parts if isinstance(path, pathlib.Path) else path
    return "/".join(parts[:2]) if parts[0] == "models" else parts[0]


def modules(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Each module that a file imports, as its parts."""
    found = set()
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {tuple(alias.name.split(".")) for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            parts = tuple((node.module or "").split("."))
            inside = [(*parts, alias.name) for alias in node.names]
            is_file = [
                parts[0] in PACKAGES and in_table(x).with_suffix(".py") in TEXTS
                for x in inside
            ]
            found |= {x if known else parts for x, known in zip(inside, is_file)}
    return found


def in_table(parts: tuple[str, ...]) -> pathlib.Path:
    """The path in `TEXTS` of a module of one of the packages."""
    return pathlib.Path("models" if parts[0] == "redco_eqx_models" else "", *parts[1:])


def imported(path: pathlib.Path) -> set[tuple[str, ...]]:
    """Each module of its own package that a file imports, as its parts below the
    package."""
    own = "redco_eqx_models" if path.parts[0] == "models" else "redco_eqx"
    return {in_table(parts).parts for parts in modules(path) if parts[0] == own}


def test_a_subpackage_imports_what_its_row_says_and_stands_above_it():
    table = subpackages()
    assert {subpackage_of(path) for path in INSIDE} == set(table)
    for i, (subpackage, row) in enumerate(table.items()):
        assert row <= set(list(table)[:i]), (
            f"{subpackage} imports {row}, which are not all above it"
        )
        arrows = {
            subpackage_of(x)
            for path in INSIDE
            if subpackage_of(path) == subpackage
            for x in imported(path)
        } - {subpackage}
        assert arrows == row, subpackage


def test_the_second_package_uses_only_public_names_of_the_core():
    """What it can do, every other library can."""
    public = {
        "redco_eqx": set(rx.__all__),
        **{
            f"redco_eqx.{name}": set(vars(getattr(rx, name)))
            for name in ("errors", "layers", "types")
        },
    }
    for path in MODELS:
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.Import):
                assert not [
                    x.name for x in node.names if x.name.startswith("redco_eqx.")
                ], path
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "redco_eqx"
            ):
                assert node.module in public, f"{path}: {node.module}"
                assert {x.name for x in node.names} <= public[node.module], path


def test_the_core_imports_nothing_of_the_second_package():
    assert [path for path in CORE if "redco_eqx_models" in TEXTS[path]] == []


FAMILIES = re.compile(
    r"(?i)hugging|safetensors|transformers|diffusers|llama|gpt-?2|load_pretrained|\bpeft\b"
)
KNOWN = {
    "_base/protocols.py": ["Hugging"],  # a dataset, which is one kind of examples
    "_data/batches.py": ["Hugging"],
    "_data/data.py": ["Hugging"],
    "_data/streams.py": ["Hugging", "Hugging"],  # a stream that keeps its own position
}


def test_the_core_names_no_family_and_no_file_format_of_models():
    found = {str(path): FAMILIES.findall(TEXTS[path]) for path in CORE}
    assert {path: names for path, names in found.items() if names} == KNOWN


def test_the_table_of_names_is_the_list_of_imports():
    """The public module of the core has two lists: imports for type checkers, and a
    table for the program."""
    tree = TREES[pathlib.Path("__init__.py")]
    block = next(node for node in tree.body if isinstance(node, ast.If))
    listed = {
        (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    table = {(f"redco_eqx.{home}", name) for name, home in rx._HOME_OF.items()}
    assert listed == table | {("redco_eqx", name) for name in rx._MODULES}


def test_files_do_not_import_each_other_in_a_circle():
    graph = {path.with_suffix("").parts: imported(path) for path in TEXTS}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(TEXTS)


def test_pure_subpackages_touch_nothing_outside():
    for path in INSIDE:
        if subpackage_of(path) in PURE:
            assert not {parts[0] for parts in modules(path)} & EFFECTS - EXCEPT.get(
                path, set()
            ), path


START = """
import equinox as eqx, jax, sys
import redco_eqx as rx
"""
PRINT = "\nprint(*(name for name in sys.modules if name.startswith('redco_eqx')))"
MODEL = "model = eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0))\n"
FIT = """
from fit_helpers import SGD, fit
fit(rx.init_state(model, SGD, key=jax.random.key(0)), num_epochs=1)
"""
LOADED = [
    "_base",
    "_base.captured",
    "_base.compiler",
    "_base.jaxprs",
    "_base.pairs",
    "_base.protocols",
    "_base.rewriting",
    "_base.tree",
    "_base.warn",
    "_checkpoint",
    "_checkpoint.run_record",
    "_data",
    "_data.batches",
    "_data.checksums",
    "_data.data",
    "_data.order",
    "_data.placement",
    "_data.workers",
    "_distributed",
    "_distributed.cluster",
    "_distributed.consensus",
    "_distributed.process_group",
    "_distributed.whereabouts",
    "_parallel",
    "_parallel.linear",
    "_parallel.scan",
    "_paths",
    "_sharding",
    "_sharding.constraint",
    "_sharding.mesh",
    "_step",
    "_step.buffers",
    "_step.compile_cache",
    "_step.gather",
    "_step.gradient",
    "_step.guard",
    "_step.init",
    "_step.layout",
    "_step.optimizer",
    "_step.passed_through",
    "_step.passes",
    "_step.rounding",
    "_step.state",
    "_step.static",
    "_step.step_functions",
    "_step.steps",
    "_step.window",
    "_step.workarounds",
    "_training",
    "_training.course",
    "_training.evaluation",
    "_training.fit",
    "_training.in_flight",
    "_training.loggers",
    "_training.loop",
    "_training.lost_updates",
    "_training.program",
]
"""The modules that a `fit` of an MLP on one device loads. Anything else is imported
when it is asked for."""


def loaded_by(program: str) -> list[str]:
    """The modules of the package that a process has after this program."""
    return printed(START + program + PRINT).split()


def test_import_touches_no_device_and_loads_nothing_but_the_names():
    # The number of virtual devices can be set only before the backend is used.
    program = (
        "jax.config.update('jax_num_cpu_devices', 3); assert len(jax.devices()) == 3"
    )
    assert loaded_by(program) == ["redco_eqx"]
    assert set(rx.__all__) == {name for name in dir(rx) if not name.startswith("__")}


def test_a_fit_and_the_path_rules_load_what_they_use():
    names = loaded_by(MODEL + FIT)
    assert (
        sorted(name.removeprefix("redco_eqx.") for name in names if "." in name)
        == LOADED
    )
    assert not any(
        "_dataflow" in name
        for name in loaded_by(MODEL + "rx.shard_rules(model, rx.make_mesh())")
    )


def test_public_names_are_sorted_and_documented():
    for module in (rx, importlib.import_module("redco_eqx_models")):
        assert module.__all__ == sorted(
            module.__all__, key=lambda name: (name[0].islower(), name)
        )
        for name in module.__all__:
            thing = getattr(module, name)
            # Without examples.
            doc = re.sub(r"```.*?```", "", inspect.getdoc(thing) or "", flags=re.DOTALL)
            assert doc, name
            if inspect.isfunction(thing):
                for parameter in inspect.signature(thing).parameters:
                    assert (
                        f"`{parameter}`" in doc or "as for" in doc or len(doc) < 400
                    ), (name, parameter)


def test_only_one_file_knows_what_jax_keeps_private():
    assert [path.stem for path, text in TEXTS.items() if "jax._src" in text] == [
        "cluster"
    ]


def test_no_name_of_the_core_means_two_things():
    homes: dict[str, set[pathlib.Path]] = defaultdict(set)
    for path in CORE:
        names = {path.name}
        for node in TREES[path].body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
        for name in names:
            homes[name].add(path)
    assert {
        name: paths
        for name, paths in homes.items()
        if len(paths) > 1 and name[0] != "_"
    } == {}


def test_docstrings_begin_with_a_verb_or_the_thing():
    docs = [
        (path, node, ast.get_docstring(node) or "")
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module)
    ]
    relative = re.compile(r"(What|Whether|How|Which|Where|Who|Of)\b")
    assert [
        f"{path}: {doc.splitlines()[0]}" for path, _, doc in docs if relative.match(doc)
    ] == []
    third_person = re.compile(
        r"(Returns|Raises|Yields|Makes|Computes|Adds|Takes|Turns|Waits)\b"
    )
    functions = [
        (path, node.name)
        for path, node, doc in docs
        if isinstance(node, ast.FunctionDef) and third_person.match(doc)
    ]
    assert functions == [], "the imperative: Return, Raise, ..."
