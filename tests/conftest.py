"""Eight virtual CPU devices for every test; compiled fast, since nothing here runs long."""

import os
import signal
from collections.abc import Iterator

import jax
import pytest

# Tests compile far more than they run: LLVM's optimizations cost minutes, and change no layout.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
jax.config.update("jax_num_cpu_devices", 8)

# A shell makes its background jobs ignore Ctrl-C, and so would the tests of it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def no_programs_of_other_modules() -> Iterator[None]:
    """Drops what a module compiled, which the next one hardly shares: gigabytes in all."""
    yield
    jax.clear_caches()
