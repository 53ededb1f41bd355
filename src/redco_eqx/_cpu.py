"""Threads for the virtual devices of a CPU."""

import os
import re

import jax

_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_THREADS = "PJRT_NPROC"  # read by XLA when the CPU's client is made


def give_threads() -> None:
    """Lets JAX's CPU client, if it is yet to be made, have three threads for each virtual device.

    It has one for each, or one for each core if these are more. A collective keeps its thread until all
    devices have come to it, and XLA runs collectives that do not depend on one another in any order. So some
    devices may wait in one and the others in another, with no thread left to go on with either; after 40
    seconds the process is aborted. A scan over layers beside the gradient of a table is enough. Three a device
    are enough for three collectives at a time; more only cost time.

    What the environment says already stays. Needed by jaxlib 0.10.2; with 0.12.0 the test's program ran
    with one thread for each device. No upstream issue known.
    """
    flags = [int(n) for n in _FLAG.findall(os.environ.get("XLA_FLAGS", ""))]
    num_devices = max([getattr(jax.config, "jax_num_cpu_devices", -1), *flags])
    if num_devices > 1:
        os.environ.setdefault(_THREADS, str(max(3 * num_devices, os.cpu_count() or 1)))
