"""Only where the TPU compiler is installed (`nox -s aot`): elsewhere nothing here is collected."""

import importlib.util
import os

import jax

if importlib.util.find_spec("libtpu") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    jax.config.update("jax_platforms", "cpu")  # there is a compiler, but no device
    os.environ["XLA_FLAGS"] = ""  # those that make CPU programs compile fast
