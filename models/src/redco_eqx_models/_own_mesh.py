"""Generation on the mesh of the model, whatever mesh `jax.set_mesh` has set."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
from jax.sharding import AbstractMesh

A = ParamSpec("A")
R = TypeVar("R")


def on_own_mesh(function: Callable[A, R]) -> Callable[A, R]:
    """Run `function(model, ...)` as if `jax.set_mesh` had set no mesh, or the one that
    the model lies on.

    JAX refuses a layout on one mesh while another one is set. Inside a `shard_map`
    nothing changes.
    """

    @functools.wraps(function)
    def run(*args: A.args, **kwargs: A.kwargs) -> R:
        current = jax.sharding.get_abstract_mesh()
        own = _mesh_of((args, kwargs))
        if current.empty or current.manual_axes or own is None or own == current:
            return function(*args, **kwargs)
        try:
            no_mesh: Any = jax.set_mesh(None)  # pyright: ignore[reportArgumentType]
        except ValueError:
            raise ValueError(
                "this jit runs under jax.set_mesh with a mesh whose axes are "
                f"{dict(current.shape)}, but the model lies on one whose axes are "
                f"{dict(own.shape)}. Call the jitted function outside of that "
                "jax.set_mesh."
            ) from None
        with no_mesh:
            return function(*args, **kwargs)

    return run


def _mesh_of(tree: Any) -> AbstractMesh | None:
    """Return the mesh of the first array that is on one, also while it is traced."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array):
            mesh = jax.typeof(x).sharding.mesh
            if not mesh.empty:
                return mesh.abstract_mesh
    return None
