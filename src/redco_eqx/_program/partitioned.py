"""Programs that XLA's partitioner gets right."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

from jax.sharding import AbstractMesh, Mesh

from redco_eqx._program.convolutions import replace_convolution
from redco_eqx._program.fourier import replace_fft
from redco_eqx._program.rewrite import rewrite
from redco_eqx._program.trace import Program, trace

F = TypeVar("F", bound=Callable[..., Any])


def for_partitioner(
    program: Program, mesh: Mesh | AbstractMesh | None, split_sizes: Collection[int] = ()
) -> Program:
    """`program` with what the partitioner would get wrong on `mesh` replaced; `None` is one device.

    - `split_sizes`: see `replace_convolution`.

    Raises `ValueError`, naming the line, for what cannot be made right.
    """
    if mesh is None or mesh.size == 1:
        return program
    jaxpr = program.closed.jaxpr
    return program.replace(
        rewrite(jaxpr, lambda e: replace_convolution(e, mesh, split_sizes) or replace_fft(e, mesh))
    )


def partitioned(function: F, mesh: Mesh | AbstractMesh | None, split_sizes: Collection[int] = ()) -> F:
    """`function`, whose arguments and results are PyTrees of arrays, by way of [`for_partitioner`][]."""

    def run(*arguments: Any) -> Any:
        return for_partitioner(trace(function, *arguments), mesh, split_sizes)(*arguments)

    return run  # pyright: ignore[reportReturnType]
