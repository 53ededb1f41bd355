"""The layout that a step keeps to."""

from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import Array, PyTree

from redco_eqx._parallel.mesh import traced_mesh
from redco_eqx._step.state import TrainState, is_pair
from redco_eqx._tree import first_few, to_paths

Layout: TypeAlias = dict[str, NamedSharding]
"""The sharding of each array of the model, by path."""


def layout_of(shardings: PyTree, state: TrainState) -> Layout:
    """A tree of shardings, by path; of a pair `(model, state)` those of the model.

    Raises `ValueError`, naming it, if a parameter has none.
    """
    if is_pair(shardings):
        shardings, _ = shardings
    found = to_paths(shardings, lambda x: isinstance(x, NamedSharding))
    missing = [path for path in state.params if path not in found]
    if missing:
        raise ValueError(
            f"shardings has no NamedSharding for {first_few(missing)}. Pass shard_rules(model, mesh) of the "
            "same model."
        )
    return {path: found[path] for path in (*state.params, *state.frozen) if path in found}


def mesh_of(layout: Layout | None, state: TrainState) -> Mesh | AbstractMesh | None:
    """The mesh of the layout, or else the one on which the state lies; `None` if it lies on none."""
    return next(iter(layout.values())).mesh if layout else traced_mesh(state)


def constrain(params: dict[str, Array], layout: Layout | None) -> dict[str, Array]:
    """Arrays by path, laid out; as they are without a layout."""
    if layout is None:
        return params
    return jax.lax.with_sharding_constraint(params, {path: layout[path] for path in params})
