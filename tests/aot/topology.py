"""A mesh of TPUs that are not there: enough for their compiler."""

import os
from functools import cache
from typing import Any

import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

# Read when libtpu is loaded: do not ask for a machine's metadata, and let several processes load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

# Collectives that are fused with other work are printed in pieces: keep them apart to count them.
OPTIONS: dict[str, str | bool] = {"xla_tpu_enable_async_collective_fusion": "false"}


@cache
def devices(name: str) -> tuple[Any, ...]:
    """Those of a topology such as `v5e:2x4`."""
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")
    more = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    return tuple(topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices)


def mesh(name: str, *, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """`make_mesh` on the devices of a topology."""
    found = list(devices(name))
    shape = (len(found) // (fsdp * tensor), fsdp, tensor)
    grid = mesh_utils.create_device_mesh(shape, found, allow_split_physical_axes=True)
    return Mesh(np.asarray(grid), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
