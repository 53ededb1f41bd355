"""Only where the TPU compiler is installed (`nox -s aot`): elsewhere nothing here is collected."""

import importlib.util

if importlib.util.find_spec("libtpu") is None:
    collect_ignore_glob = ["test_*.py"]
