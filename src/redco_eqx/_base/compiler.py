"""Properties of XLA's compilers for CPUs, GPUs and TPUs that decide how many bytes a layout sends."""

from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh


class Compiler(NamedTuple):
    """Properties of a compiler, as measured on its programs (`benchmarks/plans.py`, `collectives.py`).

    - `merges`: it adds the results of products before it sums them over devices, and makes reduce-scatters.
    - `keeps_whole`: it keeps all whole gradients of a list of layers until the end of a step. Then gathered
        weights can be kept from forward to backward for no more memory.
    - `narrows`: it gathers float32 weights in bfloat16 if only products at the default precision read them.
    """

    merges: bool
    keeps_whole: bool
    narrows: bool


CPU = Compiler(merges=False, keeps_whole=True, narrows=False)
GPU = Compiler(merges=True, keeps_whole=False, narrows=False)
TPU = Compiler(merges=True, keeps_whole=False, narrows=True)
UNKNOWN = Compiler(merges=False, keeps_whole=False, narrows=False)


def compiler_of(mesh: Mesh | AbstractMesh) -> Compiler:
    """The compiler for the devices of a mesh; `UNKNOWN` for a mesh without devices."""
    if not isinstance(mesh, Mesh):
        return UNKNOWN
    return {"cpu": CPU, "tpu": TPU}.get(mesh.devices.flat[0].platform, GPU)
