"""Only where the compiler for TPUs (`nox -s aot`) or for GPUs (`nox -s gpu`) is installed."""

import importlib.util
import os

import jax

HAS_TPU = importlib.util.find_spec("libtpu") is not None
HAS_GPU = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))

collect_ignore = [*([] if HAS_TPU else ["test_tpu.py", "test_plans.py"]), *([] if HAS_GPU else ["test_gpu.py"])]
if HAS_TPU or HAS_GPU:
    jax.config.update("jax_platforms", "cpu")  # there is a compiler, but no device
    os.environ["XLA_FLAGS"] = ""  # those that make CPU programs compile fast
