"""Only where the compiler for TPUs (`nox -s aot`) or for GPUs (`nox -s gpu`) is
installed."""

import compilers

FOR_TPUS, FOR_GPUS = ["test_tpu_of_families.py", "test_plans.py"], ["test_gpu.py"]
collect_ignore = [
    *([] if compilers.HAS_TPU else FOR_TPUS),
    *([] if compilers.HAS_GPU else FOR_GPUS),
]
compilers.use_cpu()
