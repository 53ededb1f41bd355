"""A function of arrays as a program that XLA's partitioner gets right."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from redco_eqx._program.convolutions import replace_convolution
from redco_eqx._program.fourier import replace_fft
from redco_eqx._program.rewrite import rewrite

F = TypeVar("F", bound=Callable[..., Any])


def partitioned(function: F, mesh: Mesh | AbstractMesh | None) -> F:
    """`function`, traced, and what the partitioner would get wrong on `mesh` replaced.

    Its arguments and results are PyTrees of arrays. It can be differentiated and mapped over as before, and is
    traced once a call. Without a mesh, or on one device, it is `function` itself.

    Raises `ValueError`, naming the line, for what cannot be made right.
    """
    if mesh is None or mesh.size == 1:
        return function

    def run(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        program = rewrite(closed, lambda e: replace_convolution(e, mesh) or replace_fft(e, mesh))
        results = jex_core.jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
        # A constant result is a plain number here.
        arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in results]
        return jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    return run  # pyright: ignore[reportReturnType]
