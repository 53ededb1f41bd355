"""Targets of a plan: chips with their memory and peak speed, and devices that need not
be present."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh

from redco_eqx._sharding.mesh import AXES, AXIS_TYPES, make_mesh

# The memory of accelerators, and the speeds that rank plans, from the makers' data
# sheets.


GIB = 2**30


def gib(num_bytes: int) -> str:
    """Format a number of bytes as GiB: `1.25`."""
    return f"{num_bytes / GIB:.2f}"


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts devices.

    - `memory`: bytes; for a TPU, those that the compiler allows a program to use, if
        known.
    - `flops`: the peak number of floating-point operations per second, in dense
        bfloat16 products (float16 on V100).
    - `bandwidth`: the peak number of bytes per second that a device sends to others in
        the same server or pod.
    """

    memory: int
    flops: float
    bandwidth: float


class Architecture(NamedTuple):
    """The kind of a GPU: its `capability` in CUDA, and fields of XLA's
    `GpuDeviceInfoProto` (bytes, GHz)."""

    capability: tuple[int, int]
    fpus_per_core: int
    threads_per_core_limit: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_cache_size: int
    clock_rate_ghz: float


@dataclasses.dataclass(frozen=True)
class GPU(Chip):
    """A GPU, with the facts that NVIDIA's compiler needs about one that is not present.

    - `name`: the name that the driver reports.
    - `num_cores`: number of streaming multiprocessors.
    - `memory_bandwidth`: bytes per second.
    - `kind`: the architecture.
    """

    name: str
    num_cores: int
    memory_bandwidth: float
    kind: Architecture

    @property
    def description(self) -> str:
        """The text of a `stream_executor.GpuTargetConfigProto`."""
        limits = self.kind._asdict()
        major, minor = limits.pop("capability")
        limits |= {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "core_count": self.num_cores,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "memory_bandwidth": int(self.memory_bandwidth),
            "device_memory_size": self.memory,
        }
        fields = " ".join(f"{name}: {value}" for name, value in limits.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} "
            f"minor: {minor} }} }}\n"
            f'platform_name: "CUDA"\ndevice_description_str: "{self.name}"\n'
            "dnn_version_info { major: 9 minor: 8 }\nruntime_version { major: 12 "
            "minor: 9 patch: 0 }\n"
        )


# The data sheets give the links of a chip in gigabits per second, both ways; divided by
# 16, that is gigabytes one way.
TPUS = {
    "v2": Chip(8 * GIB, 22.5e12, 496e9 / 16),
    "v3": Chip(16 * GIB, 61.5e12, 656e9 / 16),
    "v4": Chip(int(30.75 * GIB), 275e12, 2400e9 / 16),
    "v5e": Chip(int(15.75 * GIB), 197e12, 1600e9 / 16),
    "v5p": Chip(95 * GIB, 459e12, 4800e9 / 16),
    "v6e": Chip(int(31.25 * GIB), 918e12, 3584e9 / 16),
}

_CORES = {"v2": 2, "v3": 2}
"""The number of devices that JAX has for a chip, if it is not one."""

_V100 = Architecture((7, 0), 64, 2048, 96 * 1024, 96 * 1024, 6 * 2**20, 1.53)
_A100 = Architecture((8, 0), 64, 2048, 164 * 1024, 163 * 1024, 40 * 2**20, 1.41)
_H100 = Architecture((9, 0), 128, 2048, 228 * 1024, 227 * 1024, 50 * 2**20, 1.98)
_3080 = Architecture((8, 6), 128, 1536, 100 * 1024, 99 * 1024, 5 * 2**20, 1.71)
GPUS = {
    "rtx3080-10g": GPU(
        10 * GIB, 59.5e12, 16e9, "NVIDIA GeForce RTX 3080", 68, 760e9, _3080
    ),
    "v100-16g": GPU(16 * GIB, 125e12, 150e9, "Tesla V100-SXM2-16GB", 80, 900e9, _V100),
    "a100-40g": GPU(
        40 * GIB, 312e12, 300e9, "NVIDIA A100-SXM4-40GB", 108, 1555e9, _A100
    ),
    "a100-80g": GPU(
        80 * GIB, 312e12, 300e9, "NVIDIA A100-SXM4-80GB", 108, 2039e9, _A100
    ),
    "h100": GPU(80 * GIB, 989e12, 450e9, "NVIDIA H100 80GB HBM3", 132, 3352e9, _H100),
    "h200": GPU(141 * 10**9, 989e12, 450e9, "NVIDIA H200", 132, 4800e9, _H100),
}


_NO_TRIALS = {"xla_gpu_enable_triton_gemm": False}
"""Without a GPU for trying out Triton's products, XLA may choose tiles that do not
compile. cuBLAS can compute all products."""

_UNKNOWN = Chip(0, 1e14, 1e10)
"""A stand-in for an unknown device, to rank plans. Only the ratio of the two speeds
matters."""


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to plan for.

    - `name`: the name that the caller used.
    - `devices`: the devices of the topology; none if nothing is to be compiled, which
        needs no compiler.
    - `chip`: the memory and the speeds of one device; the `memory` is 0 if no limit is
        known.
    - `compiler`: `"tpu"`, `"gpu"` or `"cpu"`.
    - `compiler_options`: options for the compiler.
    - `num_absent`: the number of devices if there are no `devices`.
    """

    name: str
    devices: tuple[Any, ...]
    chip: Chip
    compiler: str
    compiler_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    num_absent: int = 0

    @property
    def num_devices(self) -> int:
        return len(self.devices) or self.num_absent

    def mesh(self, **sizes: int) -> Mesh | AbstractMesh:
        """Make a mesh of the devices, as `make_mesh` does."""
        if self.devices:
            return make_mesh(**sizes, devices=self.devices)
        tensor = sizes.get("tensor", 1)
        fsdp = sizes.get("fsdp", 1)
        data = sizes.get("data", -1)
        if data == -1:
            data = self.num_absent // (tensor * fsdp)
        device = AbstractDevice(self.name, None, platform=self.compiler)
        return AbstractMesh(
            (data, fsdp, tensor), AXES, AXIS_TYPES, abstract_device=device
        )

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_devices} devices, by the {self.compiler.upper()} "
            "compiler"
        )


def find_target(target: str | Sequence[Any] | None, *, compiles: bool = True) -> Target:
    """Find the devices that `target` stands for (see `plan`).

    `compiles`: false if only the number of the devices of a named target counts. Then
    it needs no compiler, which would say whether it has this topology.

    **Raises:**

    - `ValueError` for a name that is not known.
    - `ImportError` if the compiler is not installed.
    """
    if not isinstance(target, str):
        if target is None:
            devices = tuple(jax.devices())
        else:
            devices = tuple(target) if np.iterable(target) else ()
        if not devices:
            raise ValueError(
                f"plan: target={target!r} has no devices. Pass devices, or a name such "
                'as "h100:8".'
            )
        return Target(
            "these devices", devices, _present(devices[0]), devices[0].platform
        )
    kind, _, shape = target.partition(":")
    if kind in TPUS and re.fullmatch(r"\d+(x\d+){1,2}", shape):
        if compiles:
            return Target(target, _topology(target), TPUS[kind], "tpu")
        num_devices = math.prod(map(int, shape.split("x"))) * _CORES.get(kind, 1)
        return Target(target, (), TPUS[kind], "tpu", num_absent=num_devices)
    if kind in GPUS and re.fullmatch(r"[1-9]\d*", shape):
        if compiles:
            return Target(target, _topology(target), GPUS[kind], "gpu", _NO_TRIALS)
        return Target(target, (), GPUS[kind], "gpu", num_absent=int(shape))
    raise ValueError(
        f"plan: target={target!r} is not known. For a TPU, pass one of "
        f"{', '.join(TPUS)} with its topology "
        f'("v4:2x2x4", "v5e:4x4"). For a GPU server, pass one of {", ".join(GPUS)} '
        'with its number of GPUs ("h100:8"). Or pass devices, or leave target out for '
        "those of this machine."
    )


def chip_of(device: Any) -> Chip | None:
    """Find the data sheet of a device of this machine, or `None` if its kind is not
    known."""
    known = TPUS | {chip.name.lower(): chip for chip in GPUS.values()}
    # JAX calls a v5e "TPU v5 lite".
    kind = device.device_kind.lower().removeprefix("tpu ").replace(" lite", "e")
    return known.get(kind)


def _present(device: Any) -> Chip:
    """Describe a device of this machine."""
    chip = chip_of(device) or _UNKNOWN
    # A CPU has no statistics.
    statistics = device.memory_stats() or {}
    memory = int(statistics.get("bytes_limit", chip.memory))
    return dataclasses.replace(chip, memory=memory)


class _Compiler(NamedTuple):
    """A compiler for devices that are not present.

    - `modules`: those that may have it.
    - `package`, `size`: the package that installs it, and its size.
    """

    modules: tuple[str, ...]
    package: str
    size: str


_COMPILERS = {
    "TPU": _Compiler(("libtpu",), "jax[tpu]", "700 MB"),
    "GPU": _Compiler(
        ("jax_cuda12_plugin", "jax_cuda13_plugin"), "jax[cuda12]", "5.5 GB"
    ),
}
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
}


@cache
def _topology(name: str) -> tuple[Any, ...]:
    """Make devices that need not be present."""
    kind, _, shape = name.partition(":")
    of = "TPU" if kind in TPUS else "GPU"
    modules, package, size = _COMPILERS[of]
    if not any(map(importlib.util.find_spec, modules)):
        raise ImportError(
            f'plan: {name} needs the {of} compiler: python -m pip install "{package}" '
            f"({size}; it needs no "
            f"{of})."
        )
    if of == "TPU":
        # The compiler reads these when it is loaded. They keep it from asking for the
        # metadata of a machine, and allow other processes to load it, too.
        for variable, value in _TPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        given = {"platform": "tpu", "topology_name": name}
        if kind == "v4":
            # The two cores of a chip are one device, as JAX has them on a v4.
            given["chip_config_name"] = "megacore"
    else:
        given = {
            "platform": "cuda",
            "topology_name": "plan",
            "topology": f"1x1x{shape}",
        }
        given["target_config"] = GPUS[kind].description
    try:
        return tuple(topologies.get_topology_desc(**given).devices)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"plan: the compiler knows no topology {name!r}: {line}"
        ) from error
