"""The repository's own tests on the one device that is there."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

from .settings import Setting

REPOSITORY = pathlib.Path(__file__).parents[2]
FOLDERS = (
    "sharded_init",
    "checkpoint",
    "data",
    "compile_cache",
    "parallel",
    "planning",
    "step",
    "traced",
    "training",
)
"""Whose tests have something to say on one device. Others are of meshes, processes,
compilers and documents."""
FAMILIES = ("models/tests",)
PARITY = ("tests/parity", "models/tests/parity")
SOME = ("models/tests/test_attention.py",)
"""For a small run."""


def run(setting: Setting, *, is_small: bool) -> dict[str, Any]:
    """How many pass, fail, and are left out because they take more devices, by
    `every_test.py`. Tolerances are made for products in float32 (`highest`), not for
    those in TF32. What fails with `JAX_PLATFORMS=cpu` and `TESTS_ON=device` too fails
    for want of devices."""
    if is_small:
        paths = SOME
    elif setting.model == "parity":
        paths = PARITY
    else:
        paths = (*(f"tests/{folder}" for folder in FOLDERS), *FAMILIES)
    num_workers = min(os.cpu_count() or 1, 14)
    options = ["-q", "--continue-on-collection-errors", "--tb=no", "-rfE"]
    options += ["-n", str(num_workers)]
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *paths],
        cwd=REPOSITORY,
        env={**os.environ, **_variables(setting, is_small=is_small)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    last_line = lines[-1] if lines else ""
    counts = re.findall(r"(\d+) (passed|failed|skipped|error)s?", last_line)
    if not counts:
        last = (done.stderr.splitlines() or ["?"])[-1]
        return {"error": f"pytest ended with {done.returncode}: {last}"[:200]}
    found: dict[str, Any] = {kind: int(num) for num, kind in counts if kind != "error"}
    failures = sorted({line for line in lines if line.startswith(("FAILED", "ERROR"))})
    # Each worker reports its own.
    found["broken"] = sum(line.startswith("ERROR") for line in failures)
    seconds = time.perf_counter() - begun
    return {
        **found,
        "seconds": seconds,
        "failures": failures,
        "jax": importlib.metadata.version("jax"),
    }


def _variables(setting: Setting, *, is_small: bool) -> dict[str, str]:
    """The variables of the environment in which the tests run."""
    precision = "highest" if setting.precision == "highest" else "tensorfloat32"
    given_flags = os.environ.get("XLA_FLAGS", "")
    variables = {
        "TESTS_ON": "device",
        "JAX_DEFAULT_MATMUL_PRECISION": precision,
        # Tests start processes of their own, which share the device's memory.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        # Some tests compare runs bit for bit.
        "XLA_FLAGS": f"{given_flags} --xla_gpu_deterministic_ops=true",
    }
    if is_small:
        variables["JAX_PLATFORMS"] = "cpu"
    return variables
