"""Only where the compiler for TPUs (`nox -s aot`) is installed."""

import compilers

collect_ignore = [] if compilers.HAS_TPU else ["test_tpu.py"]
compilers.use_cpu()
