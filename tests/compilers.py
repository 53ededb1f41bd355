"""Which compilers for other devices are installed: for TPUs (`nox -s aot`), for GPUs
(`nox -s gpu`)."""

import importlib.util
import os

import jax

HAS_TPU = importlib.util.find_spec("libtpu") is not None
HAS_GPU = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def use_cpu() -> None:
    """Let tests run where there is a compiler, but no device."""
    if HAS_TPU or HAS_GPU:
        jax.config.update("jax_platforms", "cpu")
        os.environ["XLA_FLAGS"] = ""  # those that make CPU programs compile fast
