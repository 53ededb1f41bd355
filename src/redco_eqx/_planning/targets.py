"""Where a plan is for: this machine's devices, or those of a pod or a server that is not there."""

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Protocol, runtime_checkable

import jax
from jax.experimental import topologies

from redco_eqx._planning.chips import GPUS, TPUS, Chip

_NO_TRIALS = {"xla_gpu_enable_triton_gemm": False}
"""With no GPU to try Triton's products out on, XLA may take tiles that do not compile: cuBLAS has them all."""

_UNKNOWN = Chip(0, 1e14, 1e10)
"""For the ranks of plans on devices that nothing is known of: the ratio of the two counts."""


MARGINS = {"fsdp": (0.94, 1.79), "": (1.04, 3.16)}
"""The CPU compiler's peak over that by the target's, on meshes with `fsdp` and without: the least and the most
of what `benchmarks/applicability.py estimates-tpu estimates-gpu` measured (`benchmarks/RESULTS.md`)."""


@runtime_checkable
class Device(Protocol):
    """What JAX calls a device, as far as it is needed here."""

    @property
    def platform(self) -> str: ...

    @property
    def device_kind(self) -> str: ...

    def memory_stats(self) -> Mapping[str, int] | None: ...


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to plan for.

    - `name`: as it was asked for.
    - `devices`: of the topology; of this machine for an estimate.
    - `chip`: what one of them has; its `memory` is 0 if no limit is known.
    - `compiler`: `"tpu"`, `"gpu"` or `"cpu"`; the last is an estimate for any other.
    - `compiler_options`: what it is told besides the program.
    """

    name: str
    devices: tuple[Device, ...]
    chip: Chip
    compiler: str
    compiler_options: Mapping[str, bool] = dataclasses.field(default_factory=dict)

    def margin(self, mesh: Mapping[str, int]) -> tuple[float, float] | None:
        """What the peak of an estimate is to be divided by, at least and at most; else `None`."""
        return None if self.compiler != "cpu" else MARGINS["fsdp" if mesh.get("fsdp", 1) > 1 else ""]

    def __str__(self) -> str:
        memory = f"{self.chip.memory / 2**30:.2f} GiB"
        how = (
            "estimated by the CPU compiler"
            if self.compiler == "cpu"
            else f"by the {self.compiler.upper()} compiler"
        )
        return f"{self.name}: {len(self.devices)} devices of {memory}, {how}"


def find_target(
    target: str | Sequence[Device] | None, *, bytes_per_device: int | None, estimate: bool
) -> Target:
    """The devices that `target` stands for (see `plan`).

    **Raises:**

    - `ValueError` for a name that is not known, or too few devices for an estimate.
    - `ImportError` if the compiler is not installed.
    """
    if isinstance(target, str):
        found = _named(target, estimate)
    else:
        devices = tuple(jax.devices() if target is None else target)
        if not devices:
            raise ValueError("plan: target has no devices.")
        found = Target("these devices", devices, _present(devices[0]), devices[0].platform)
    if bytes_per_device is not None:
        if bytes_per_device < 1:
            raise ValueError(f"plan: bytes_per_device={bytes_per_device}, but it must be positive.")
        found = dataclasses.replace(found, chip=dataclasses.replace(found.chip, memory=bytes_per_device))
    if not found.chip.memory:
        raise ValueError(
            f"plan: how much memory devices of kind {found.devices[0].device_kind!r} have is not known. Pass "
            'bytes_per_device=, or a target such as "h100:8" or "v5e:4x4".'
        )
    return found


def _named(target: str, estimate: bool) -> Target:
    kind, _, shape = target.partition(":")
    if kind in TPUS and re.fullmatch(r"\d+(x\d+){1,2}", shape):
        count = math.prod(map(int, shape.split("x"))) * (2 if kind in ("v2", "v3") else 1)
        if not estimate:
            return Target(target, _tpu_devices(target), TPUS[kind], "tpu")
        return _estimated(target, count, TPUS[kind])
    if kind in GPUS and re.fullmatch(r"[1-9]\d*", shape):
        if not estimate:
            return Target(target, _gpu_devices(kind, int(shape)), GPUS[kind], "gpu", _NO_TRIALS)
        return _estimated(target, int(shape), GPUS[kind])
    raise ValueError(
        f"plan: target={target!r} is not known. A TPU topology is one of {', '.join(TPUS)} with its shape "
        f'("v4:2x2x4", "v5e:4x4"); a GPU server one of {", ".join(GPUS)} with its number of GPUs ("h100:8"). '
        "Or pass devices, or nothing for those of this machine."
    )


def _estimated(name: str, count: int, chip: Chip) -> Target:
    devices = jax.local_devices(backend="cpu")
    if len(devices) < count:
        raise ValueError(
            f"plan: an estimate for {name} takes {count} virtual devices, but there are {len(devices)}. "
            f'Call jax.config.update("jax_num_cpu_devices", {count}) before the first use of JAX.'
        )
    return Target(name, tuple(devices[:count]), chip, "cpu")


def _present(device: Device) -> Chip:
    """What is known of a device of this machine."""
    kind = device.device_kind.lower()
    named = next((chip for chip in GPUS.values() if chip.name.lower() == kind), _UNKNOWN)
    for name, chip in TPUS.items():
        if device.platform == "tpu" and name in kind.replace("tpu ", "").replace(" lite", "e"):
            named = chip
    statistics = device.memory_stats() or {}
    return dataclasses.replace(named, memory=int(statistics.get("bytes_limit", named.memory)))


@cache
def _tpu_devices(name: str) -> tuple[Device, ...]:
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            f'plan: for {name} the TPU compiler is needed: python -m pip install "jax[tpu]" (700 MB; no TPU is '
            "needed). Or pass estimate=True."
        )
    # Read when the compiler is loaded: it is not to ask for a machine's metadata, nor to be alone.
    for variable, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    more = {"chip_config_name": "megacore"} if name.startswith("v4:") else {}
    return _topology("tpu", name, topology_name=name, **more)


_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",
}


@cache
def _gpu_devices(kind: str, count: int) -> tuple[Device, ...]:
    if not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)):
        raise ImportError(
            f'plan: for {kind}:{count} the GPU compiler is needed: python -m pip install "jax[cuda12]" (5.5 '
            "GB; no GPU is needed). Or pass estimate=True."
        )
    of_gpu = {"topology": f"1x1x{count}", "target_config": GPUS[kind].description}
    return _topology("cuda", f"{kind}:{count}", topology_name="plan", **of_gpu)


def _topology(platform: str, name: str, **options: str) -> tuple[Device, ...]:
    try:
        return tuple(topologies.get_topology_desc(platform=platform, **options).devices)
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        raise ValueError(f"plan: the compiler knows no topology {name!r}: {line}") from error
