"""Only where the compiler for TPUs (`nox -s aot`) or for GPUs (`nox -s gpu`) is
installed."""

import compilers

FOR_TPUS = ["test_tpu_of_families.py", "test_plans.py"]
FOR_GPUS = ["test_gpu.py"]

# pytest reads this name.
collect_ignore: list[str] = []
if not compilers.HAS_TPU:
    collect_ignore += FOR_TPUS
if not compilers.HAS_GPU:
    collect_ignore += FOR_GPUS
compilers.use_cpu()
