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
    mesh without devices, the compiler is known only if it has an `abstract_device`.
    """
    return _platform(mesh) not in ("", "cpu")


def narrows(mesh: Mesh | AbstractMesh) -> bool:
    """True if the compiler gathers float32 weights in bfloat16 if only products at the
    default precision read them."""
    return _platform(mesh) == "tpu"


def _platform(mesh: Mesh | AbstractMesh) -> str:
    """The platform of the devices; empty if it is not known."""
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0].platform
    device = mesh.abstract_device
    return "" if device is None else device.platform
