"""What accelerators have: memory, and the speeds by which plans are ranked. From their makers' data sheets."""

import dataclasses

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts devices.

    - `memory`: bytes; of a TPU what its compiler lets a program have, if that is known.
    - `flops`: dense products in bfloat16 (float16 on V100) in a second, at best.
    - `bandwidth`: bytes in a second that a device sends to others of its server or pod, at best.
    """

    memory: int
    flops: float
    bandwidth: float


@dataclasses.dataclass(frozen=True)
class GPU(Chip):
    """A GPU, with what NVIDIA's compiler asks about one that is not there.

    - `name`: as its driver tells it. `capability`: of CUDA.
    - `num_cores`: streaming multiprocessors, each with `units` for float32 and `shared` bytes of memory, of
        which a block may have `shared_by_block`.
    - `cache`: of the second level, in bytes. `memory_bandwidth`: bytes in a second. `clock`: GHz.
    """

    name: str
    capability: tuple[int, int]
    num_cores: int
    units: int
    shared: int
    shared_by_block: int
    cache: int
    memory_bandwidth: float
    clock: float

    @property
    def description(self) -> str:
        """A `stream_executor.GpuTargetConfigProto`, as text."""
        major, minor = self.capability
        limits = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 48 * 1024,
            "shared_memory_per_core": self.shared,
            "shared_memory_per_block_optin": self.shared_by_block,
            "threads_per_core_limit": 2048 if self.capability != (8, 6) else 1536,
            "core_count": self.num_cores,
            "fpus_per_core": self.units,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "registers_per_core_limit": 2**16,
            "registers_per_block_limit": 2**16,
            "memory_bandwidth": int(self.memory_bandwidth),
            "l2_cache_size": self.cache,
            "clock_rate_ghz": self.clock,
            "device_memory_size": self.memory,
        }
        fields = " ".join(f"{name}: {value}" for name, value in limits.items())
        return (
            f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }}\n"
            f'platform_name: "CUDA"\ndevice_description_str: "{self.name}"\n'
            "dnn_version_info { major: 9 minor: 8 }\nruntime_version { major: 12 minor: 9 patch: 0 }\n"
        )


# Links of a chip, in gigabits per second and both ways added up as the sheets have it, over 16: bytes one way.
TPUS = {
    "v2": Chip(8 * GIB, 22.5e12, 496e9 / 16),
    "v3": Chip(16 * GIB, 61.5e12, 656e9 / 16),
    "v4": Chip(int(30.75 * GIB), 275e12, 2400e9 / 16),
    "v5e": Chip(int(15.75 * GIB), 197e12, 1600e9 / 16),
    "v5p": Chip(95 * GIB, 459e12, 4800e9 / 16),
    "v6e": Chip(int(31.25 * GIB), 918e12, 3584e9 / 16),
}

_V100 = {"units": 64, "shared": 96 * 1024, "shared_by_block": 96 * 1024, "cache": 6 * 2**20, "clock": 1.53}
_A100 = {"units": 64, "shared": 164 * 1024, "shared_by_block": 163 * 1024, "cache": 40 * 2**20, "clock": 1.41}
_H100 = {"units": 128, "shared": 228 * 1024, "shared_by_block": 227 * 1024, "cache": 50 * 2**20, "clock": 1.98}
_3080 = {"units": 128, "shared": 100 * 1024, "shared_by_block": 99 * 1024, "cache": 5 * 2**20, "clock": 1.71}
GPUS = {
    "rtx3080-10g": GPU(
        10 * GIB, 59.5e12, 16e9, "NVIDIA GeForce RTX 3080", (8, 6), 68, memory_bandwidth=760e9, **_3080
    ),
    "v100-16g": GPU(
        16 * GIB, 125e12, 150e9, "Tesla V100-SXM2-16GB", (7, 0), 80, memory_bandwidth=900e9, **_V100
    ),
    "a100-40g": GPU(
        40 * GIB, 312e12, 300e9, "NVIDIA A100-SXM4-40GB", (8, 0), 108, memory_bandwidth=1555e9, **_A100
    ),
    "a100-80g": GPU(
        80 * GIB, 312e12, 300e9, "NVIDIA A100-SXM4-80GB", (8, 0), 108, memory_bandwidth=2039e9, **_A100
    ),
    "h100": GPU(
        80 * GIB, 989e12, 450e9, "NVIDIA H100 80GB HBM3", (9, 0), 132, memory_bandwidth=3352e9, **_H100
    ),
    "h200": GPU(141 * 10**9, 989e12, 450e9, "NVIDIA H200", (9, 0), 132, memory_bandwidth=4800e9, **_H100),
}
