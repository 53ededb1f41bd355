"""Sessions, as in `nox -s tests`: quickstart, tests, parity, gradients, symptoms,
test_examples, examples, long, faults, hosts, newest, aot, docs, build, lint, types,
bench, sharding, mutants, peers, gpu."""

import os
import pathlib
import shutil
from collections.abc import Sequence

import nox

nox.options.sessions = ["tests", "lint", "types"]
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "uv|virtualenv"  # uv installs in seconds

# Of pytest-xdist: tests, or files, over two processes.
PARALLEL = ("-n", "2", "--dist", "worksteal")
BY_FILE = ("-n", "2", "--dist", "loadfile")

# Models that others published, installed without their pins, and the packages that they
# import.
FOREIGN = [
    "esm2quinox",
    "e1jax",
    "jaxonmodels",
    "flowjax",
    "paramax",
    "lineax",
    "gatv2-eqx",
    "diffrax",
    "optimistix",
]
IMPORTED = ["loguru", "beartype", "ftfy", "regex", "pydantic", "torch==2.13.0"]

# The peers of the comparison, each in a separate environment. Transformers 4 is the
# last with Flax models.
FLAX = ["transformers==4.57.6", "jax==0.10.2"]
PEERS = {
    "ours": ["-e", ".", "-e", "./models"],
    "of_redco": ["redco==0.4.23", *FLAX],
    "of_scalax": ["scalax==0.2.6", "flax", "optax", *FLAX],
    "of_parallax": ["-e", ".", "-e", "./models", "google-parallax==0.0.2"],
    # 190 packages; it does not name the last two.
    "of_easydel": ["easydel==0.3.0", "torch==2.13.0", "pillow"],
}


def newest_python() -> str:
    """Return the path of Python 3.13 or 3.12, on the path or in pyenv; if there is
    none, the name of 3.13."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    for number in ("3.13", "3.12"):
        of_pyenv = map(str, pyenv.glob(f"versions/{number}.*/bin/python{number}"))
        for path in (*of_pyenv, shutil.which(f"python{number}")):
            # A shim fails if another version is active.
            if path and "shims" not in pathlib.Path(path).parts:
                return path
    return "3.13"  # nox says that it is missing, which is an error in CI


CORE = ["-e", ".[checkpoint]"]
BOTH = [*CORE, "-e", "./models[all]"]
PROJECT = nox.project.load_toml("pyproject.toml")


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group."""
    return nox.project.dependency_groups(PROJECT, name)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train a small language model on 8 virtual devices, in a few minutes."""
    session.install("-e", ".")
    session.run("python", "examples/quickstart.py", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of both packages, on two processes that share compiled programs."""
    session.install("-e", ".", "-e", "./models", *group("tests"))
    session.run("pytest", *PARALLEL, "--durations", "10", *session.posargs)


@nox.session
def parity(session: nox.Session) -> None:
    """Compare the models with torch and transformers, which also open their files."""
    session.install(*BOTH, *group("tests"), *group("parity"))
    folders = ["tests/parity", "models/tests/parity"]
    session.run("pytest", *folders, *PARALLEL, *session.posargs)


@nox.session
def gradients(session: nox.Session) -> None:
    """Compare gradients of generated programs on every mesh with one device (more:
    `GRADIENTS_SHARES=10`)."""
    session.install("-e", ".", *group("tests"))
    session.run("pytest", "tests/gradients", *PARALLEL, *session.posargs)


@nox.session
def symptoms(session: nox.Session) -> None:
    """Try what went wrong for users of other libraries, also the cases that take long:
    docs/pages/symptoms.md."""
    session.install(*BOTH, *group("tests"))
    marks = ["-m", "long or not long"]
    session.run("pytest", "tests/symptoms", *marks, *PARALLEL, *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Try kills, damaged files, full disks, signals: a table of the losses (fewer
    tries: `-- --reduced`)."""
    session.install(*CORE, *group("tests"))
    session.run("python", "tests/faults/run.py", *session.posargs)


@nox.session
def hosts(session: nox.Session) -> None:
    """Run processes on two hosts, under SLURM and XManager, and faults: a table (root;
    parts: `-- slurm`)."""
    session.install(*CORE, "uv")
    session.run("python", "tests/hosts/run.py", *session.posargs)


@nox.session
def test_examples(session: nox.Session) -> None:
    """Run each example at a tiny size, and compare the result of its training with a
    baseline."""
    session.install(*BOTH, *group("tests"), *group("examples"))
    session.run("pytest", "tests/examples", *BY_FILE, *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """Run the tests that take longest, which the other sessions leave out."""
    session.install(*BOTH, *group("tests"), *group("examples"))
    folders = ["tests", "tests/examples", "models/tests"]
    session.run("pytest", *folders, "-m", "long", *BY_FILE, *session.posargs)


@nox.session
def examples(session: nox.Session) -> None:
    """Run all examples with their defaults: the table and pictures in `examples/`."""
    session.install(*BOTH, *group("examples"))
    session.run("python", "examples/run_all.py", *session.posargs)


@nox.session(python=newest_python())
def newest(session: nox.Session) -> None:
    """Run the tests of both packages with the newest Python and JAX (a share of them:
    `-- --reduced`)."""
    session.install("-e", ".", "-e", "./models", *group("tests"), *group("types"))
    if session.posargs == ["--reduced"]:  # in one process, beside another session
        session.run(
            "pytest",
            "tests/step",
            "tests/checkpoint",
            "tests/sharding",
            "tests/planning/test_planning.py",
        )
    else:
        session.run("pytest", *PARALLEL)
        session.install(*BOTH, *group("parity"))
        session.run(
            "pytest", "models/tests/parity/test_families.py", "-k", "llama or gpt2"
        )
        session.run("python", "examples/quickstart.py")
        session.run("pyright", "src", "models/src", "--pythonversion", "3.13")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style (ruff check and ruff format), and the schema and the safety of the
    GitHub workflows."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    workflows = sorted(
        str(path) for path in pathlib.Path(".github/workflows").glob("*.yml")
    )
    session.run(
        "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows
    )
    session.run("zizmor", "--offline", "--quiet", ".github")


@nox.session
def types(session: nox.Session) -> None:
    """Check static types with pyright."""
    session.install(*BOTH, *group("tests"), *group("types"), *group("examples"))
    session.run("pyright", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Run every block of the site, and build the site with its notebook executed, into
    `site/`."""
    session.install(*BOTH, *group("tests"), *group("docs"))
    session.run("pytest", "tests/docs", *PARALLEL, *session.posargs)
    session.run(
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "-f",
        "docs/mkdocs.yml",
        env={"NO_MKDOCS_2_WARNING": "1"},
    )


@nox.session
def build(session: nox.Session) -> None:
    """Build and check both packages, and use each: installed, from the zip files, and
    from bytecode alone."""
    session.install("build", "twine", "pip")
    base = pathlib.Path(session.create_tmp()).resolve()
    built, other, bytecode = base / "dist", base / "other", base / "bytecode"
    for directory in (built, other, bytecode):
        shutil.rmtree(directory, ignore_errors=True)
    for source in (".", "models"):
        session.run("python", "-m", "build", "--outdir", str(built), source)
    session.run("twine", "check", "--strict", *map(str, sorted(built.iterdir())))
    smoke = [
        pathlib.Path(x).resolve() for x in ("tests/smoke.py", "models/tests/smoke.py")
    ]

    def use(
        place: str, *programs: pathlib.Path, path: Sequence[pathlib.Path] = ()
    ) -> None:
        environment = {
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with session.chdir(base):  # not in the directory of the sources
            for program in programs:
                session.run("python", str(program), place, env=environment)

    wheels, sources = (sorted(built.glob(end)) for end in ("*.whl", "*.tar.gz"))
    for core, models in (wheels, sources):
        session.run(
            "python", "-m", "pip", "uninstall", "-qy", "redco_eqx", "redco_eqx_models"
        )
        session.install(str(core))
        use("site-packages", smoke[0])  # before the models are there
        session.install(str(core), str(models))
        use("site-packages", *smoke)
    use(".whl", *smoke, path=wheels)

    for wheel in wheels:
        shutil.unpack_archive(wheel, bytecode, "zip")
    session.run("python", "-m", "compileall", "-q", "-b", str(bytecode))
    for path in bytecode.rglob("*.py"):
        path.unlink()
    use(str(bytecode), *smoke, path=[bytecode])

    # The models do not accept the core of another version.
    copy = other / "core"
    shutil.copytree("src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(name, copy)
    version = PROJECT["project"]["version"]
    text = (
        pathlib.Path("pyproject.toml")
        .read_text("utf-8")
        .replace(f'"{version}"', '"999"', 1)
    )
    (copy / "pyproject.toml").write_text(text, "utf-8")
    session.run("python", "-m", "build", "--wheel", "--outdir", str(other), str(copy))
    shutil.copy(wheels[1], other)
    pip = ["python", "-m", "pip", "install", "--dry-run", "--no-index", "--find-links"]
    session.run(*pip, str(built), f"redco_eqx=={version}", "redco_eqx_models")
    said = session.run(
        *pip,
        str(other),
        "redco_eqx==999",
        "redco_eqx_models",
        success_codes=[1],
        silent=True,
    )
    if f"depends on redco_eqx=={version}" not in str(said).replace("-", "_"):
        session.error(
            f"pip refused the core of another version, but not for its version: {said}"
        )


@nox.session
def aot(session: nox.Session) -> None:
    """Compile steps with the TPU compiler, without a TPU: communication and memory. 700
    MB to install."""
    session.install("-e", ".", "-e", "./models", "jax[tpu]==0.10.2", *group("tests"))
    session.run("pytest", "tests/aot", "models/tests/aot", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure overhead of a step and of `fit`, collectives, generation, compile time,
    checkpoints: tables."""
    session.install(*BOTH)
    session.install(*IMPORTED)
    session.install("--no-deps", *FOREIGN)
    session.install("google-parallax")  # another engine of layouts, to compare with
    for script in (
        "overhead",
        "first_step",
        "evaluation",
        "collectives",
        "accumulation",
        "experts",
        "layouts",
        "activations",
        "plans",
        "generation",
        "checkpoints",
        "collation",
        "muon",
    ):
        session.run("python", f"benchmarks/{script}.py", *session.posargs)


@nox.session
def sharding(session: nox.Session) -> None:
    """Compiles steps of published models at their true sizes: bytes predicted and sent,
    memory: a table."""
    session.install("-e", ".", "-e", "./models")
    session.install(*IMPORTED)
    session.install("--no-deps", *FOREIGN)
    session.run("python", "benchmarks/sharding.py", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Put faults into the core one at a time, and count those that tests see: a table,
    in an hour or two."""
    session.install(*BOTH, *group("tests"), "cosmic-ray>=8.7", "coverage>=7.10")
    for part in session.posargs or ("measure", "forget", "run"):
        session.run("python", "benchmarks/mutants.py", part)


@nox.session
def peers(session: nox.Session) -> None:
    """Compare a step with redco, scalax, EasyDeL and google-parallax, each with its
    environment: a table."""
    # Pip takes minutes to find versions of EasyDeL's packages.
    session.install("-e", ".", "uv")
    pythons = []
    for script, packages in PEERS.items():
        home = pathlib.Path(session.virtualenv.location) / script
        python = str(home / "bin" / "python")
        if not home.exists():
            session.run_install(
                "uv",
                "venv",
                "-q",
                "--python",
                f"{session.virtualenv.bin}/python",
                str(home),
            )
        session.run_install("uv", "pip", "install", "-q", "--python", python, *packages)
        pythons.append(f"{script}={python}")
    session.run("python", "benchmarks/peers.py", *pythons)


@nox.session
def gpu(session: nox.Session) -> None:
    """Measure the library on a GPU: a table. 5.5 GB. Without a GPU:
    `-- --compile h200:1 llama paper`."""
    session.install(*BOTH, "jax[cuda12]", *group("tests"), *group("parity"))
    session.run("pytest", "models/tests/aot/test_gpu.py")
    session.run("python", "benchmarks/gpu.py", *session.posargs)
