"""The state of an optimizer, laid out as the parameters that it belongs to."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from redco_eqx._kept.captured import Captured
from redco_eqx._kept.programs import kept, signature
from redco_eqx._sharding.mesh import replicated
from redco_eqx._step.state import TrainState
from redco_eqx._tree import describe, join, path_of


def init_optimizer(
    optimizer: optax.GradientTransformation,
    params: dict[str, Any],
    layout: dict[str, NamedSharding] | None,
) -> PyTree:
    """`optimizer.init(params)`, each moment with the sharding of its parameter, and never whole."""

    def init(params: dict[str, Any]) -> PyTree:
        # Weak types would change at the first update, and compile the step twice.
        return jax.tree.map(
            lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), optimizer.init(params)
        )

    if layout is None:
        abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in params.values())
        return jax.eval_shape(init, params) if abstract else init(params)
    shapes = jax.eval_shape(init, params)
    shardings = like_params(shapes, params, {path: layout[path] for path in params})
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in params.values()):
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    jitted = jax.jit(init, out_shardings=shardings)
    # Also the optimizer may be part of a trace: one of a learning rate that is differentiated by.
    if any(isinstance(x, Tracer) for x in params.values()) or Captured((optimizer,)).has_tracer:
        return jitted(params)
    key = "init_optimizer", signature(params)
    return kept((optimizer,), key, lambda: jitted.lower(params).compile())(params)


def like_params(
    opt_state: PyTree, params: dict[str, Any], shardings: dict[str, NamedSharding]
) -> PyTree[NamedSharding]:
    """For each array of an optimizer state, the sharding of the parameter that it belongs to.

    An array with a parameter's shape takes its sharding. One that lacks a single dim (Adafactor's factored
    moments) takes what is left of it, if that is unambiguous. All else is replicated.
    """
    whole = replicated(next(iter(shardings.values())).mesh)

    def one(keypath: tuple[Any, ...], x: Any) -> NamedSharding:
        owner = next((e.key for e in reversed(keypath) if getattr(e, "key", None) in shardings), None)
        if owner is None:
            return whole
        shape, sharding = params[owner].shape, shardings[owner]
        if x.shape == shape:
            return sharding
        spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
        left = {
            spec[:dim] + spec[dim + 1 :]
            for dim in range(len(shape))
            if shape[:dim] + shape[dim + 1 :] == x.shape
        }
        return NamedSharding(whole.mesh, PartitionSpec(*left.pop())) if len(left) == 1 else whole

    return jax.tree_util.tree_map_with_path(one, opt_state)


def check_optimizer(state: TrainState, optimizer: optax.GradientTransformation) -> None:
    """Refuses, by `ValueError`, an optimizer whose state is not the one that `state` holds."""

    def describe_all(tree: PyTree) -> dict[str, str]:
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {path_of(keypath): describe(x) for keypath, x in flat}

    expected = describe_all(jax.eval_shape(optimizer.init, state.params))
    found = describe_all(state.opt_state)
    for path in sorted({*expected, *found}):
        if expected.get(path) != found.get(path):
            raise ValueError(
                f"the optimizer does not fit the state: at {join('opt_state', path)} it keeps "
                f"{expected.get(path, 'nothing')}, but the state holds {found.get(path, 'nothing')}. Pass the "
                "optimizer that was given to init_state."
            )
