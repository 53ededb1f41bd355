"""Virtual devices of a CPU have threads for collectives that wait at the same time."""

import os
from functools import partial

import pytest
from fit_helpers import printed

START = """
import pathlib
from functools import partial
import jax, jax.numpy as jnp, optax
jax.config.update("jax_num_cpu_devices", 8)
import redco_eqx as rx
mesh = rx.make_mesh(fsdp=8)
"""
THREADS = """
jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.ones(8)))
print(len(list(pathlib.Path("/proc/self/task").iterdir())))
"""


@pytest.mark.skipif(
    not os.path.exists("/proc/self/task"),
    reason="threads are counted as Linux lists them",
)
def test_three_threads_for_each_device_unless_the_environment_says_how_many():
    started = partial(printed, START + THREADS, without=("PJRT_NPROC", "XLA_FLAGS"))
    assert int(started()) - int(started(PJRT_NPROC="8")) >= 16
