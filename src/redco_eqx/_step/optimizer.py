"""The state of an optimizer, with the layout of its parameters, and the learning rate
in it."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from redco_eqx._base.captured import first_module
from redco_eqx._base.tree import children, describe, is_array, join
from redco_eqx._sharding.mesh import replicated
from redco_eqx._step.compile_cache import compile_once
from redco_eqx._step.state import TrainState


def check_is_optimizer(where: str, optimizer: object) -> None:
    """Raise `TypeError` unless the value is an optax optimizer."""
    if callable(getattr(optimizer, "init", None)) and callable(
        getattr(optimizer, "update", None)
    ):
        return
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    what = (
        "optimizer must be from optax, such as optax.adam(1e-3), but is a "
        f"{type(optimizer).__name__}."
    )
    if callable(optimizer) and getattr(optax, name, None) is optimizer:
        what = (
            f"optimizer is the function {name}, which creates one. Call it, as in "
            f"optax.{name}(1e-3)."
        )
    elif isinstance(optimizer, eqx.Module):
        what = f"optimizer is a {name}. The model comes first, then the optimizer."
    elif callable(optimizer):
        what = (
            f"optimizer is the function {name}, but must be an optimizer of optax. "
            "Pass a schedule of the learning rate to one, optax.adam(schedule). Call a "
            "function that makes one."
        )
    raise TypeError(f"{where}: {what}")


_UNSUPPORTED = {
    "LookaheadState": (
        "optax.lookahead keeps two sets of parameters, and a state has one. To "
        "evaluate an average of the parameters that the optimizer's state keeps, use "
        "Evaluation(state_fn=...)."
    ),
    "HutchinsonState": (
        "optax.contrib.sophia, by its default estimator, differentiates the loss "
        "forwards, which is not possible where weights are gathered. Pass it another "
        "hessian_diagonal_fn."
    ),
    "DifferentiallyPrivateAggregateState": (
        "it needs the gradient of each example, but a step has their mean. Write a "
        "step that has them: see examples/differential_privacy."
    ),
}


def check_supported(opt_state: PyTree) -> None:
    """Raise `ValueError` for an optax optimizer, which it names, that needs more than a
    step passes to it."""
    for node in jax.tree.leaves(
        opt_state, is_leaf=lambda x: type(x).__name__ in _UNSUPPORTED
    ):
        name = type(node).__name__
        if name in _UNSUPPORTED:
            raise ValueError(f"the optimizer keeps a {name}: {_UNSUPPORTED[name]}")


def init_optimizer(
    optimizer: optax.GradientTransformation,
    params: dict[str, Any],
    layout: dict[str, NamedSharding] | None,
) -> PyTree:
    """Run `optimizer.init(params)`. Each moment gets the sharding of its parameter, and
    is never whole."""

    def init(params: dict[str, Any]) -> PyTree:
        # Weak types would change at the first update, and the step would be compiled
        # twice.
        return jax.tree.map(
            lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype),
            optimizer.init(params),
        )

    is_abstract = any(isinstance(x, jax.ShapeDtypeStruct) for x in params.values())
    if layout is None:
        return jax.eval_shape(init, params) if is_abstract else init(params)
    try:
        shapes = jax.eval_shape(init, params)
    except Exception as error:
        found = first_module(optimizer.init)
        if found is not None:
            # The last part of the path is the name of the argument of optax.
            name = found.name.rpartition(".")[2]
            raise ValueError(
                f"init_state: the optimizer's {name} is a tree like the model, a "
                f"{type(found.value).__name__}, but the optimizer gets the parameters "
                f"as {{path: array}}. Pass {name}=rx.by_path(...) of this tree."
            ) from error
        error.add_note(
            "The optimizer's init gets the parameters as {path: array}. Use "
            "redco_eqx.by_path(tree) to pass optax masks and labels over a model."
        )
        raise
    check_supported(shapes)
    shardings = like_params(shapes, params, layout)
    if is_abstract:
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            shapes,
            shardings,
        )
    jitted = jax.jit(init, out_shardings=shardings, keep_unused=True)
    # Also under `jax.disable_jit`, where JAX would trace nothing: the layout is that of
    # a compiled program.
    with jax.disable_jit(False):
        return _init_by(jitted, params)


def _init_by(jitted: Any, params: dict[str, Any]) -> PyTree:
    """Run the compiled `init`, as part of the surrounding trace if there is one."""
    trace = jitted.trace(params)
    # The parameters may belong to another trace, or a number of the optimizer (for a
    # gradient with respect to the learning rate, for example), which is then one more
    # input of the program.
    if any(isinstance(x, Tracer) for x in params.values()) or len(
        trace.jaxpr.in_avals
    ) > len(params):
        return jitted(params)
    return compile_once(trace.lower(), params)[0](params)


def update(
    optimizer: optax.GradientTransformation,
    grads: dict[str, Array],
    opt_state: PyTree,
    params: dict[str, Array],
    value: Array,
    value_and_grad: Callable[[dict[str, Array]], tuple[Array, dict[str, Array]]],
) -> tuple[Any, PyTree]:
    """Call `optimizer.update` with whichever of the extra arguments it accepts.

    **Arguments:**

    - `value_and_grad`: the value and gradient of the loss. An optimizer that evaluates
        or differentiates the loss elsewhere gets exactly the gradient that the step
        computes.
    """

    @jax.custom_vjp
    def value_fn(params: dict[str, Array]) -> Array:
        return value_and_grad(params)[0]

    def backward(
        grads: dict[str, Array], cotangent: Array | float
    ) -> tuple[dict[str, Array]]:
        # Optax's line search passes a Python number.
        return (jax.tree.map(lambda g: g * jnp.asarray(cotangent, g.dtype), grads),)

    value_fn.defvjp(value_and_grad, backward)
    named = {"value": value, "grad": grads, "value_fn": value_fn}
    named["grad_fn"] = lambda params, _: value_and_grad(params)[1]
    parameters = inspect.signature(optimizer.update).parameters
    # Line searches accept any arguments, but raise an error for those that `value_fn`
    # does not take.
    takes_any = any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )
    extra = {
        name: named[name]
        for name in named
        if name in parameters or (takes_any and name != "grad_fn")
    }
    return optimizer.update(grads, opt_state, params, **extra)


def like_params(
    opt_state: PyTree, params: dict[str, Any], layout: dict[str, NamedSharding]
) -> PyTree[NamedSharding]:
    """Return the sharding of each array of an optimizer state, according to the
    parameter that it belongs to.

    An array with the shape of a parameter gets the parameter's sharding, and so does a
    stack of such arrays (L-BFGS's memory). An array that lacks a single dim
    (Adafactor's factored moments) gets the sharding of the remaining dims, if that is
    unambiguous. All other arrays are replicated.
    """
    whole = replicated(next(iter(layout.values())).mesh)

    def one(keypath: tuple[Any, ...], x: Any) -> NamedSharding:
        owner = next(
            (e.key for e in reversed(keypath) if getattr(e, "key", None) in params),
            None,
        )
        if owner is None:
            return whole
        shape = params[owner].shape
        sharding = layout[owner]
        if x.shape == shape:
            return sharding
        if x.shape[1:] == shape:
            return NamedSharding(whole.mesh, PartitionSpec(None, *sharding.spec))
        spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
        left = {
            spec[:dim] + spec[dim + 1 :]
            for dim in range(len(shape))
            if shape[:dim] + shape[dim + 1 :] == x.shape
        }
        return (
            NamedSharding(whole.mesh, PartitionSpec(*left.pop()))
            if len(left) == 1
            else whole
        )

    return jax.tree_util.tree_map_with_path(one, opt_state)


def check_optimizer(
    where: str,
    state: TrainState,
    optimizer: optax.GradientTransformation,
    *,
    exactly: bool = True,
) -> None:
    """Raise `TypeError` if it is not an optimizer, and `ValueError` if it does not fit
    `state`.

    An optimizer does not fit if its state has different classes from `state.opt_state`
    or, with `exactly`, arrays with different shapes or dtypes.
    """
    check_is_optimizer(where, optimizer)
    expected = _nodes(
        jax.eval_shape(optimizer.init, state.params), "opt_state", exactly
    )
    found = _nodes(state.opt_state, "opt_state", exactly)
    path = next(
        (
            path
            for path in {**expected, **found}
            if expected.get(path) != found.get(path)
        ),
        None,
    )
    if path is None:
        return
    if state.opt_state == ():
        without = (
            "This state may be for evaluation only. To train, use init_state(model, "
            "optimizer, key=...)."
        )
    else:
        without = "Pass the optimizer that was given to init_state."
    raise ValueError(
        f"{where}: the optimizer does not fit the state: at {path} it keeps "
        f"{expected.get(path, 'nothing')}, but the state holds "
        f"{found.get(path, 'nothing')}. {without}"
    )


def _nodes(tree: PyTree, path: str, exactly: bool) -> dict[str, str]:
    """Name each node by its path, from the root. Two optimizers may differ in nodes
    that contain no array."""
    if jax.tree_util.all_leaves([tree]):
        return {path: describe(tree) if exactly and is_array(tree) else "an array"}
    found = {path: type(tree).__name__}
    for name, child in children(tree):
        found |= _nodes(child, join(path, name), exactly)
    return found


def learning_rate_of(opt_state: PyTree) -> Array | None:
    """The learning rate that `optax.inject_hyperparams` keeps in the state, or
    `None`."""
    found = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
    # A moment of a parameter may have this name, too.
    own = (
        value
        for path, value in found
        if "hyperparams" in str(path[-2:-1]) and jnp.shape(value) == ()
    )
    return next(own, None)
