"""The program that a layout is for: the loss and its gradient, or a prediction, traced
with abstract arrays."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr  # pyright: ignore[reportPrivateImportUsage]

from redco_eqx._base.jaxprs import body
from redco_eqx._base.pairs import pair_hint
from redco_eqx._base.protocols import Mean, SplitActivations, check_takes_model
from redco_eqx._base.tree import is_array, to_arrays

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A traced step.

    - `jaxpr`: the program. It takes the model's arrays, the batch and the key, flat.
    - `paths`: those of the model's arrays that the program takes.
    - `fixed`: for each of these arrays, the reason why it is not trained; empty if it
        is. `STATE` is not split.
    - `trained`: for each of these arrays, the index of the result that is its gradient,
        or `None`.
    - `num_batch`: the number of inputs after the model's arrays that are the batch.
    - `splits`: true if the loss asks for a layout of the activations, see
        `split_activations`.
    """

    jaxpr: Jaxpr
    paths: list[str]
    fixed: list[str]
    trained: list[int | None]
    num_batch: int
    splits: bool = False

    def by_leaf(self, of_paths: Mapping[str, T]) -> dict[int, T]:
        """The entries for paths that the program takes, by the index of the array."""
        return {
            i: of_paths[path] for i, path in enumerate(self.paths) if path in of_paths
        }


def trace_step(function: Callable[..., Any], model: Any, batch: Any) -> TracedStep:
    """Trace `function(model, batch, key)`, and its gradient if it returns a loss.

    Raises `ValueError` if there is no batch, or the function does not run on abstract
    arrays, and `TypeError` as `check_takes_model` does.
    """
    check_takes_model("shard_rules", lambda: model, loss_fn=function)
    dynamic, static = eqx.partition(model, _is_input)
    arrays = [_abstract(x) for x in jax.tree.leaves(dynamic)]
    treedef = jax.tree.structure(dynamic)
    in_state = jax.tree.broadcast(
        jax.tree.map(_is_state, dynamic, is_leaf=_is_state), dynamic
    )
    fixed = [_why_fixed(x, flag) for x, flag in zip(arrays, jax.tree.leaves(in_state))]
    batch_arrays, batch_static = eqx.partition(batch, is_array)
    rows = [_abstract(x) for x in jax.tree.leaves(batch_arrays)]
    if not rows or any(not x.shape for x in rows):
        raise ValueError(
            "shard_rules: batch has no arrays with a leading dim. Pass what the data "
            "loader gives to loss_fn, as arrays or as jax.ShapeDtypeStruct."
        )
    if len({x.shape[0] for x in rows}) > 1:
        raise ValueError(
            "shard_rules: the arrays of batch differ in their leading dim: "
            f"{[list(x.shape) for x in rows]}. It must be the number of examples in "
            "each of them."
        )
    batch_treedef = jax.tree.structure(batch_arrays)
    key = jax.eval_shape(lambda: jax.random.key(0))

    is_loss = True

    def run(arrays: list[Any], rows: list[Any], key: Any) -> tuple[Any, list[Any]]:
        nonlocal is_loss
        whole = eqx.combine(jax.tree.unflatten(treedef, arrays), static)
        given = eqx.combine(jax.tree.unflatten(batch_treedef, rows), batch_static)
        result = function(whole, given, key)
        loss = _loss_of(result)
        is_loss = loss is not None
        return loss, [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]

    chosen = [i for i, reason in enumerate(fixed) if not reason]

    def step(arrays: list[Any], rows: list[Any], key: Any) -> Any:
        def loss_of(variables: list[Any]) -> Any:
            own = list(arrays)
            for i, x in zip(chosen, variables):
                own[i] = x
            return run(own, rows, key)

        return jax.value_and_grad(loss_of, has_aux=True)([arrays[i] for i in chosen])

    def trace(function: Callable[..., Any]) -> ClosedJaxpr:
        return jax.make_jaxpr(function)(arrays, rows, key)

    try:
        try:
            closed = trace(step)
        except Exception:
            closed = trace(lambda *arguments: run(*arguments)[1])
            if is_loss:  # a prediction has no gradient
                raise
    except Exception as error:
        line = str(error).strip().partition("\n")[0]
        shapes = ", ".join(f"{x.dtype}{list(x.shape)}" for x in rows[:4])
        others = ", ..." if len(rows) > 4 else ""
        remedy = pair_hint(error, model) or (
            "Pass a batch that fits it, and use no Python branches and no NumPy "
            "functions on arrays; or pass neither loss_fn nor batch: then the path "
            "rules decide, by names and shapes."
        )
        raise ValueError(
            "shard_rules: loss_fn(model, batch, key) could not be traced: "
            f"{type(error).__name__}: {line} It was called with abstract arrays: a "
            f"batch of {shapes}{others}. {remedy}"
        ) from error
    jaxpr = body(closed)
    trained: list[int | None] = [None] * len(arrays)
    if is_loss:
        first = len(jaxpr.outvars) - len(chosen)
        for n, i in enumerate(chosen):
            trained[i] = first + n
    splits = isinstance(function, SplitActivations)
    return TracedStep(
        jaxpr, list(to_arrays(dynamic)), fixed, trained, len(rows), splits
    )


def _is_state(x: Any) -> bool:
    return isinstance(x, eqx.nn.State)


STATE = "state of the model, whole on every device"


def _why_fixed(x: jax.ShapeDtypeStruct, in_state: bool) -> str:
    if in_state:
        return STATE
    return "" if jnp.issubdtype(x.dtype, jnp.inexact) else f"{x.dtype} is not trained"


def _is_input(x: Any) -> bool:
    """True for an input of the program. NumPy arrays are constants, which the function
    may use in NumPy."""
    return is_array(x) and not isinstance(x, np.ndarray | np.generic)


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        x.shape, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    )


def _loss_of(result: Any) -> Any | None:
    """The loss, if a loss function returned `result`: a scalar or a `Mean`, alone or as
    the first of several results."""
    first = result[0] if isinstance(result, tuple) and result else result
    if isinstance(first, Mean):
        first = first.value
    if not isinstance(first, jax.Array) or first.shape != ():
        return None
    return first if jnp.issubdtype(first.dtype, jnp.floating) else None
