"""Programs that XLA's partitioner gets right."""

from collections.abc import Callable
from typing import TypeVar

from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from redco_eqx._program.convolutions import Kernels, replace_convolution
from redco_eqx._program.fourier import replace_fft
from redco_eqx._program.rewrite import rewrite
from redco_eqx._program.trace import Program, trace

F = TypeVar("F", bound=Callable[..., PyTree])
_NONE: Kernels = {}


def for_partitioner(program: Program, mesh: Mesh | AbstractMesh | None, kernels: Kernels = _NONE) -> Program:
    """`program` with what the partitioner would get wrong on `mesh` replaced; `None` is one device.

    - `kernels`: see [`Kernels`][].

    Raises `ValueError`, naming the line, for what cannot be made right.
    """
    if mesh is None or mesh.size == 1:
        return program
    jaxpr = program.closed.jaxpr
    return program.replace(
        rewrite(jaxpr, lambda e: replace_convolution(e, mesh, kernels) or replace_fft(e, mesh))
    )


def partitioned(function: F, mesh: Mesh | AbstractMesh | None, kernels: Kernels = _NONE) -> F:
    """`function`, whose arguments and results are PyTrees of arrays, by way of [`for_partitioner`][]."""

    def run(*arguments: PyTree) -> PyTree:
        return for_partitioner(trace(function, *arguments), mesh, kernels)(*arguments)

    return run  # pyright: ignore[reportReturnType]
