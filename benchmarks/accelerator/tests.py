"""The repository's own tests on the one device that is there."""

import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

from .settings import Setting

REPOSITORY = pathlib.Path(__file__).parents[2]
SOME = ["tests/parallel/test_attention.py", "tests/sharding/test_mesh.py"]
"""For a small run."""


def run(setting: Setting, *, is_small: bool) -> dict[str, Any]:
    """How many pass, fail, and are left out because they take more devices, by `tests/conftest.py`. Tolerances
    are made for products in float32 (`highest`), not for those in TF32."""
    paths = ["tests/parity"] if setting.model == "parity" else ["tests"]
    precision = "highest" if setting.precision == "highest" else "tensorfloat32"
    variables = {"TESTS_ON": "device", "JAX_DEFAULT_MATMUL_PRECISION": precision}
    if is_small:
        paths, variables = SOME, {**variables, "JAX_PLATFORMS": "cpu"}
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", "--tb=no", "-rfE", *paths],
        cwd=REPOSITORY, env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    found = {kind: int(num) for num, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1])}
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {**found, "seconds": time.perf_counter() - begun, "failures": failures[:50]}
