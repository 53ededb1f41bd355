"""Eight virtual CPU devices for every test; compiled fast, since nothing here runs
long.

With `TESTS_ON=device` in the environment, what JAX finds instead: on one GPU, tests
that take more devices are skipped.
"""

import atexit
import contextlib
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator

ON_DEVICE = os.environ.get("TESTS_ON") == "device"

if "JAX_COMPILATION_CACHE_DIR" not in os.environ and not ON_DEVICE:
    # Workers, and the processes that tests start, inherit it: half of what a test
    # compiles, another one did.
    cache = tempfile.mkdtemp(prefix="redco_eqx_tests_")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# After the environment, which JAX reads when it is imported.
import beartype  # noqa: E402, F401
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# The same examples in each run, so that a change is judged alone.
# `HYPOTHESIS_PROFILE=default` draws new ones.
settings.register_profile("same", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

if not ON_DEVICE:
    # Tests compile far more than they run: LLVM's optimizations cost minutes, and
    # change no layout.
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
    # One module for LLVM, not up to 32.
    flags += ["--xla_cpu_parallel_codegen_split_count=1"]
    # Some later version lacks this flag, and would end the process.
    if jax.__version__.startswith("0.10."):
        # Fusions compiled through MLIR take twice the time.
        flags += ["--xla_cpu_use_fusion_emitters=false"]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    jax.config.update("jax_num_cpu_devices", 8)
    # As `make_mesh` does: some tests use JAX before it.
    os.environ.setdefault("PJRT_NPROC", "24")

# Beartype checks a function inside another one when it is defined, which may be in the
# thread that makes batches. It catches warnings meanwhile. But Python has one list of
# filters for all threads, and two threads that restore it leave the wrong one: a test
# of warnings of the main thread lost one in ten.
for module in list(sys.modules.values()):
    if module.__name__.startswith("beartype.") and hasattr(module, "catch_warnings"):
        vars(module)["catch_warnings"] = lambda **_: contextlib.nullcontext([])

# A shell makes its background jobs ignore Ctrl-C, and so would the tests of it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def no_programs_of_other_modules() -> Iterator[None]:
    """Drops what a module compiled, which the next one hardly shares: gigabytes in
    all."""
    yield
    jax.clear_caches()


@pytest.fixture
def double() -> Iterator[None]:
    """Computes in float64, where a tolerance tells rounding from anything else."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def annotations_unchecked() -> Iterator[None]:
    """Checks no annotation, as with a user: a test of the library's own message must
    get that far with an argument of another type."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    try:
        return (yield)
    except (ValueError, AssertionError) as error:
        if ON_DEVICE and re.search(r"make_mesh: .* but there are \d+ \(", str(error)):
            pytest.skip("takes more devices")
        raise


pytest_runtest_call = pytest_runtest_setup
