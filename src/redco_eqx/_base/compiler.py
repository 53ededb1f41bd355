"""Properties of XLA's compilers for CPUs, GPUs and TPUs that decide how many bytes a
layout sends.

They were measured on their programs (`benchmarks/plans.py`, `collectives.py`).
"""

from jax.sharding import AbstractMesh, Mesh


def merges(mesh: Mesh | AbstractMesh) -> bool:
    """True if the compiler adds the results of products before it sums them over
    devices, and makes reduce-scatters.

    The others keep all whole gradients of a list of layers until the end of a step.
    Then gathered weights can be kept from forward to backward for no more memory. Of a
    mesh without devices, no compiler is known.
    """
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform != "cpu"


def narrows(mesh: Mesh | AbstractMesh) -> bool:
    """True if the compiler gathers float32 weights in bfloat16 if only products at the
    default precision read them."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "tpu"
