"""One of the two processes of `test_init_model.py::test_two_processes`; arguments: port, process."""

import os
import pathlib
import sys

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import births  # noqa: E402
import helpers  # noqa: E402
import numpy as np  # noqa: E402

from redco_eqx import init_model, make_mesh, to_arrays  # noqa: E402
from redco_eqx._sharding.mesh import one_device_mesh  # noqa: E402

assert len(jax.devices()) == 4
mesh = make_mesh(tensor=2, fsdp=2)
alone = one_device_mesh(jax.local_devices()[0])
key = jax.random.key(0)


def make(key):
    keys = jax.random.split(key, 3)
    return {
        "stack": births.SPREAD["initialisers stacked"](keys[0]),
        "whole stack": births.OTHERS["orthogonal stacked"](keys[1]),
        "whole": births.OTHERS["normalised"](keys[2]),
        "keys": keys,
    }


def print_each(key):
    jax.debug.callback(lambda: None)
    return births.SPREAD["embedding"](key)


for maker in (make, print_each):
    born = to_arrays(init_model(maker, mesh, key=key))
    expected = to_arrays(init_model(maker, alone, key=key))
    assert any(not x.is_fully_replicated for x in born.values())
    for path, x in born.items():
        assert x.sharding.mesh == mesh, path
        whole = helpers.host(expected[path])
        for shard in x.addressable_shards:
            piece = whole[shard.index]
            assert np.array_equal(helpers.host(shard.data), piece), path
