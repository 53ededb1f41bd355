"""The detecting power of the tests: faults are put into the core one at a time, and the
tests detect some.

    # Draw the mutants, into mutants.json:
    python benchmarks/mutants.py sample
    # Record the lines and the time of each test, once per code:
    python benchmarks/mutants.py measure
    # Forget the fates, but not which test killed a mutant:
    python benchmarks/mutants.py forget
    # Run each mutant against the tests of its subpackage, and print a table:
    python benchmarks/mutants.py run

You may stop `run` and start it again: it goes on where it was.

cosmic-ray makes the mutants. A test that fails or hangs kills a mutant. The test that
killed it the last time is tried first. Then the tests that run the line of a mutant
are tried, the quickest first. If no test is known to run it (the line runs at import,
or in a process that a test starts, or nothing was measured), all tests of its
subpackage are tried.
"""

import collections
import difflib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from typing import Any

REPOSITORY = pathlib.Path(__file__).parents[1]
CORE = REPOSITORY / "src" / "redco_eqx"
LIST = REPOSITORY / "benchmarks" / "mutants.json"
MEASURED = pathlib.Path(tempfile.gettempdir()) / "redco_eqx_mutants"
NUM_MUTANTS, SEED, AT_MOST_SECONDS = 130, 0, 900

WITH_FAMILIES = "models/tests/test_core_with_families.py"

# The tests for each subpackage of the core. "." stands for the files beside the
# subpackages.
TESTS = {
    ".": [
        "tests/test_tree.py",
        "tests/test_refused_arguments.py",
        "tests/sharded_init",
        "tests/step",
        "tests/sharding",
        WITH_FAMILIES,
    ],
    "_base": [
        "tests/test_tree.py",
        "tests/test_refused_arguments.py",
        "tests/traced",
        "tests/compile_cache",
        "tests/step",
        "tests/dataflow",
        "tests/sharded_init",
    ],
    "_checkpoint": [
        "tests/checkpoint",
        "tests/training",
        "tests/test_refused_arguments.py",
    ],
    "_compiled": ["tests/compiled", "tests/planning"],
    "_data": ["tests/data", "tests/training"],
    "_dataflow": ["tests/dataflow", "models/tests/test_layouts_of_families.py"],
    "_distributed": ["tests/distributed", "tests/training"],
    "_parallel": ["tests/parallel", "models/tests"],
    "_planning": ["tests/planning", WITH_FAMILIES],
    "_sharding": [
        "tests/sharding",
        "tests/dataflow",
        "models/tests/test_kinds_of_families.py",
        WITH_FAMILIES,
    ],
    "_step": [
        "tests/step",
        "tests/traced",
        "tests/compile_cache",
        "tests/dataflow",
        "tests/training",
        WITH_FAMILIES,
    ],
    "_training": ["tests/training"],
}

# Left out: `|` is mostly in annotations, and the others always fail at import.
TRIVIAL = ("BitOr_", "RemoveDecorator", "VariableReplacer", "VariableInserter")


def room_of(path: pathlib.Path) -> str:
    parts = path.relative_to(CORE).parts
    return parts[0] if len(parts) > 1 else "."


def operators() -> dict[str, Any]:
    from cosmic_ray import plugins  # pyright: ignore[reportMissingImports]

    names = sorted(
        name for name in plugins.operator_names() if not any(x in name for x in TRIVIAL)
    )
    return {name: plugins.get_operator(name)() for name in names}


def sites(
    path: pathlib.Path, known: dict[str, Any]
) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return every place of a file that can be mutated, with the operators that can
    mutate it and their occurrence."""
    from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]

    tree = get_ast(path.read_text())
    places = collections.defaultdict(list)
    for name, operator in known.items():
        occurrence = 0
        for node in ast_nodes(tree):
            for start, _ in operator.mutation_positions(node):
                places[start].append((name, occurrence))
                occurrence += 1
    return places


def mutated(path: pathlib.Path, operator: Any, occurrence: int) -> str:
    from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]

    code = mutate_code(path.read_text(), operator, occurrence)
    assert code is not None
    return code


def changes(before: str, after: str) -> list[str]:
    lines = difflib.ndiff(before.splitlines(), after.splitlines())
    return [line for line in lines if line[:2] in ("- ", "+ ")]


def found(mutant: dict[str, Any], known: dict[str, Any]) -> tuple[int, str] | None:
    """Return the line of a mutant and the mutated file. Code moves after the draw, so
    its change is looked up by its text: the nearest occurrence. None if the code is no
    longer there."""
    path = REPOSITORY / mutant["file"]
    if not path.exists():
        return None
    before = path.read_text()
    places = [
        (abs(occurrence - mutant["occurrence"]), line, occurrence)
        for (line, _), made in sites(
            path, {mutant["operator"]: known[mutant["operator"]]}
        ).items()
        for _, occurrence in made
    ]
    for _, line, occurrence in sorted(places):
        after = mutated(path, known[mutant["operator"]], occurrence)
        if [text.split() for text in changes(before, after)] == [
            text.split() for text in mutant["change"]
        ]:
            return line, after
    return None


def is_python(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def sample() -> list[dict[str, Any]]:
    """Draw random sites from each subpackage, in proportion to the sites there, and an
    operator for each site."""
    known, draw = operators(), random.Random(SEED)
    by_room: dict[str, list[Any]] = collections.defaultdict(list)
    for path in sorted(CORE.rglob("*.py")):
        places = sorted(sites(path, known).items())
        by_room[room_of(path)] += [(path, place, made) for place, made in places]
    total = sum(len(places) for places in by_room.values())
    mutants = []
    for places in by_room.values():
        count = max(2, round(NUM_MUTANTS * len(places) / total))
        for path, (line, _), made in draw.sample(places, count):
            before = path.read_text()
            valid = [x for x in made if is_python(mutated(path, known[x[0]], x[1]))]
            # The result is not a program, such as with `**` before keywords.
            if not valid:
                continue
            name, occurrence = draw.choice(valid)
            after = mutated(path, known[name], occurrence)
            file, change = str(path.relative_to(REPOSITORY)), changes(before, after)
            mutants.append(
                {
                    "file": file,
                    "line": line,
                    "operator": name,
                    "occurrence": occurrence,
                    "change": change,
                }
            )
    return mutants


def write(mutants: list[dict[str, Any]]) -> None:
    LIST.write_text(json.dumps(mutants, indent=1) + "\n")


def forget() -> None:
    """Forget the fates of the mutants, but not the test that killed one."""
    mutants = json.loads(LIST.read_text())
    for mutant in mutants:
        for name in ("killed", "tests", "seconds"):
            mutant.pop(name, None)
    write(mutants)


def measure() -> None:
    """Run the tests once under coverage. Record the lines that each test function runs,
    and its seconds."""
    shutil.rmtree(MEASURED, ignore_errors=True)
    MEASURED.mkdir()
    config = MEASURED / "rc"
    config.write_text(
        "[run]\ndynamic_context = test_function\nparallel = true\n"
        f"source = {CORE}\ndata_file = {MEASURED / 'data'}\n"
    )
    coverage = [sys.executable, "-m", "coverage"]

    def run_tests(folder: str) -> None:
        times = MEASURED / f"{folder.replace('/', '.')}.xml"
        command = [
            *coverage,
            "run",
            f"--rcfile={config}",
            "-m",
            "pytest",
            "-q",
            folder,
            f"--junitxml={times}",
        ]
        subprocess.run(command, cwd=REPOSITORY)

    def size(folder: str) -> int:
        return sum(
            path.stat().st_size
            for path in [REPOSITORY / folder, *(REPOSITORY / folder).rglob("*.py")]
        )

    named = {folder for of_room in TESTS.values() for folder in of_room}
    # Each test once.
    folders = {
        x for x in named if not any(x.startswith(f"{other}/") for other in named)
    }
    with ThreadPoolExecutor(max_workers=2) as pool:
        list(pool.map(run_tests, sorted(folders, key=size, reverse=True)))
    subprocess.run(
        [*coverage, "combine", f"--rcfile={config}"], cwd=REPOSITORY, check=True
    )


def in_module(name: str) -> str:
    """Return the last two parts of `models.tests.test_lora.test_x`, which is all that
    coverage knows of it."""
    return ".".join(name.split(".")[-2:])


def tests_of() -> tuple[dict[str, dict[int, set[str]]], dict[str, float]]:
    """Return `{file: {line: test functions that run it}}`, and the seconds of each, by
    pytest's names."""
    import coverage  # pyright: ignore[reportMissingImports]

    seconds: dict[str, float] = collections.defaultdict(float)
    for times in MEASURED.glob("*.xml"):
        for case in xml.etree.ElementTree.parse(times).iter("testcase"):
            name = case.get("name", "").partition("[")[0]
            seconds[f"{case.get('classname')}.{name}"] += float(case.get("time", 0))
    data = coverage.CoverageData(str(MEASURED / "data"))
    data.read()
    by_function = {in_module(name): name for name in seconds}
    lines = {}
    for file in data.measured_files():
        contexts = data.contexts_by_lineno(file)
        lines[str(pathlib.Path(file).relative_to(REPOSITORY))] = {
            line: {by_function[in_module(c)] for c in cs if in_module(c) in by_function}
            for line, cs in contexts.items()
        }
    return lines, seconds


def node_of(name: str) -> str:
    """Turn `tests.step.test_state.test_x` into `tests/step/test_state.py::test_x`."""
    module, _, function = name.rpartition(".")
    return f"{module.replace('.', '/')}.py::{function}"


def last_killer(mutant: dict[str, Any]) -> list[str]:
    """Return the test function that killed a mutant the last time, in every file that
    has one of this name: tests move too."""
    _, _, test = mutant.get("by", "").partition("::")
    name = test.partition("[")[0]
    if not name:
        return []
    return [
        f"{path.relative_to(REPOSITORY)}::{name}"
        for folder in ("tests", "models/tests")
        for path in sorted((REPOSITORY / folder).rglob("test_*.py"))
        if f"def {name}(" in path.read_text()
    ]


def killed_by(nodes: list[str], copy: pathlib.Path) -> str:
    """Run tests with the package in `copy`. Return the first that failed, or `""`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as arguments:
        arguments.write("\n".join(nodes))
        arguments.flush()
        environment = {
            **os.environ,
            "PYTHONPATH": str(copy),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q"]
        command += ["-p", "no:cacheprovider", f"@{arguments.name}"]
        try:
            run = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment,
                capture_output=True,
                text=True,
                timeout=AT_MOST_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return "a test that hangs"
    for line in run.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split(" - ")[0]
    return f"status {run.returncode}" if run.returncode else ""


def fate(
    mutant: dict[str, Any], lines: Any, seconds: Any, known: dict[str, Any]
) -> dict[str, Any]:
    """Run the tests on a copy of the package with the mutant in it."""
    path = REPOSITORY / mutant["file"]
    folders, site = TESTS[room_of(path)], found(mutant, known)
    if site is None:
        return {
            **mutant,
            "killed": None,
            "by": "the code is gone",
            "tests": 0,
            "seconds": 0,
        }
    line, code = site
    names = lines.get(mutant["file"], {}).get(line, set())
    nodes = [
        node_of(name) for name in sorted(names, key=lambda name: (seconds[name], name))
    ]
    nodes = [
        node for node in nodes if any(node.startswith(folder) for folder in folders)
    ]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as base:
        copy = pathlib.Path(base) / "src"
        shutil.copytree(
            CORE, copy / "redco_eqx", ignore=shutil.ignore_patterns("__pycache__")
        )
        target = copy / path.relative_to(REPOSITORY / "src")
        target.write_text(code)
        by = ""
        for tests in (last_killer(mutant), nodes or folders):
            if tests and not by:
                by = killed_by(tests, copy)
    return {
        **mutant,
        "line": line,
        "killed": bool(by),
        "by": by,
        "tests": len(nodes) or "subpackage",
        "seconds": round(time.monotonic() - began),
    }


def run() -> None:
    known = operators()
    lines, seconds = tests_of() if MEASURED.exists() else ({}, {})
    mutants = json.loads(LIST.read_text())

    def settle(number: int) -> None:
        mutants[number] = settled = fate(mutants[number], lines, seconds, known)
        write(mutants)
        outcome = (
            f"killed by {settled['by']}"
            if settled["killed"]
            else settled["by"] or "SURVIVED"
        )
        print(
            f"{settled['file']}:{settled['line']} {outcome}, {settled['seconds']} s",
            flush=True,
        )

    with ThreadPoolExecutor(max_workers=2) as pool:
        list(
            pool.map(
                settle,
                [n for n, mutant in enumerate(mutants) if "killed" not in mutant],
            )
        )
    counts = collections.Counter(
        (room_of(REPOSITORY / m["file"]), m["killed"]) for m in mutants
    )
    print(f"{'subpackage':<16}{'mutants':>8}{'killed':>8}")
    for subpackage in TESTS:
        killed, alive = counts[subpackage, True], counts[subpackage, False]
        print(f"{subpackage:<16}{killed + alive:>8}{killed:>8}")
    print(f"{'all':<16}{len(mutants):>8}{sum(m['killed'] is True for m in mutants):>8}")


def main() -> None:
    if sys.argv[1:] == ["sample"]:
        LIST.write_text(json.dumps(sample(), indent=1) + "\n")
    elif sys.argv[1:] == ["measure"]:
        measure()
    elif sys.argv[1:] == ["forget"]:
        forget()
    elif sys.argv[1:] == ["run"]:
        run()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
