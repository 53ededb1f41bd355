"""The layout that a step keeps to."""

from typing import TypeAlias

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from redco_eqx._step.state import TrainState
from redco_eqx._tree import first_few, to_paths

Layout: TypeAlias = dict[str, NamedSharding]
"""The sharding of each array of the model, by path."""


def layout_of(shardings: PyTree, state: TrainState) -> Layout:
    """A tree of shardings, by path. Raises `ValueError`, naming it, if a parameter has none."""
    found = to_paths(shardings, lambda x: isinstance(x, NamedSharding))
    missing = [path for path in state.params if path not in found]
    if missing:
        raise ValueError(
            f"shardings has no NamedSharding for {first_few(missing)}. Pass shard_rules(model, mesh) of the "
            "same model."
        )
    return {path: found[path] for path in (*state.params, *state.frozen) if path in found}


def constrain(params: dict[str, Array], layout: Layout | None) -> dict[str, Array]:
    """Arrays by path, laid out; as they are without a layout."""
    if layout is None:
        return params
    return jax.lax.with_sharding_constraint(params, {path: layout[path] for path in params})
