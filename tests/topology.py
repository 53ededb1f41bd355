"""A mesh of TPUs that are not there: enough for their compiler."""

import os
from functools import cache
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

import redco_eqx as rx

# Read when libtpu is loaded: do not ask for a machine's metadata, and let several
# processes load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

# Collectives that are fused with other work are printed in pieces: keep them apart to
# count them.
OPTIONS: dict[str, str | bool] = {"xla_tpu_enable_async_collective_fusion": "false"}


@cache
def devices(name: str) -> tuple[Any, ...]:
    """Those of a topology such as `v5e:2x4`."""
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")
    more = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    return tuple(
        topologies.get_topology_desc(platform="tpu", topology_name=name, **more).devices
    )


def mesh(name: str, *, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """All devices of a topology."""
    return rx.make_mesh(fsdp=fsdp, tensor=tensor, devices=devices(name))
