"""A step as a program that is right on its mesh: traced, gathered where used, partitioned."""

import math
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jaxtyping import Array

from redco_eqx._jaxprs.program import Program, trace, zero_outputs
from redco_eqx._parallel.linear import traced_mesh
from redco_eqx._parallel.scan import keep_products
from redco_eqx._sharding.mesh import axes_of, for_use, stored_axes
from redco_eqx._step.gather import gather_where_used
from redco_eqx._step.layout import Layout
from redco_eqx._step.mends import for_partitioner
from redco_eqx._step.state import TrainState, is_pair
from redco_eqx._tree import first_few
from redco_eqx._types import Batch, Key

Inputs: TypeAlias = tuple[dict[str, Array], dict[str, Array], dict[str, Array], Batch, Key]
"""Parameters, frozen arrays and model state, each by path; batch and key."""

_PAIR = (
    "It is given the pair (model, eqx.nn.State) where init_state was: init_state((model, model_state), ...)."
)


def on_arrays(state: TrainState, use: Callable[[Any, Batch, Key], Any]) -> Callable[..., Any]:
    """`use(model, batch, key)` as a function of [`Inputs`][]."""

    def run(
        params: dict[str, Array],
        frozen: dict[str, Array],
        model_state: dict[str, Array],
        batch: Batch,
        key: Key,
    ) -> Any:
        model = state.build(params, model_state, frozen)
        try:
            return use(model, batch, key)
        except Exception as error:
            if is_pair(model) and isinstance(error, TypeError | AttributeError):
                error.add_note("The function was given the pair (model, eqx.nn.State), as init_state was.")
            elif "unpack" in str(error) or "subscriptable" in str(error):
                error.add_note(f"The function was given a {type(model).__name__} alone. {_PAIR}")
            raise

    return run


def program_of(function: Callable[..., Any], inputs: Inputs, layout: Layout | None) -> Program:
    """The program of a function of [`Inputs`][]."""
    program, _ = _gathered(function, inputs, layout)
    return _for_mesh(program, inputs, layout)


def gradient_program(loss_of: Callable[..., Any], inputs: Inputs, layout: Layout | None) -> Program:
    """The program of `jax.value_and_grad(loss_of, has_aux=True)`; `loss_of` itself is traced once."""
    program, keeps_weights = _gathered(loss_of, inputs, layout)
    loss = jax.checkpoint(program, policy=keep_products) if keeps_weights else program
    gradient = trace(jax.value_and_grad(loss, has_aux=True), *inputs)
    _warn_unused(gradient, sorted(inputs[0]))
    return _for_mesh(gradient, inputs, layout)


def _gathered(function: Callable[..., Any], inputs: Inputs, layout: Layout | None) -> tuple[Program, bool]:
    """Traced, with [`gather_where_used`][]."""
    program = trace(function, *inputs)
    known = layout or {}
    of_arrays = [known.get(path) for arrays in inputs[:2] for path in sorted(arrays)]  # as JAX sorts a dict
    num_others = len(program.closed.jaxpr.invars) - len(of_arrays)
    return gather_where_used(program, [*of_arrays, *[None] * num_others])


def _for_mesh(program: Program, inputs: Inputs, layout: Layout | None) -> Program:
    """`for_partitioner` on the mesh of the layout, or else on that where the arrays lie."""
    if not layout:
        return for_partitioner(program, traced_mesh(inputs))
    kernels: dict[int, set[str]] = {}
    arrays = {**inputs[0], **inputs[1]}
    for path, sharding in layout.items():
        shape = arrays[path].shape
        # What is gathered for use is still made split, as a gradient.
        axes = {*axes_of(for_use(sharding.spec)), *stored_axes(sharding.spec)[:1]}
        for part in (shape, shape[1:]):  # alone, or of a stack
            if len(part) > 2 and axes:
                kernels.setdefault(math.prod(part), set()).update(axes)
    return for_partitioner(program, next(iter(layout.values())).mesh, kernels)


def _warn_unused(gradient: Program, paths: list[str]) -> None:
    """Warns of parameters on which the loss does not depend."""
    first = gradient.results.num_leaves - len(paths)
    unused = [paths[i - first] for i in zero_outputs(gradient) if i >= first]
    if unused:
        warnings.warn(
            f"the loss does not depend on {len(unused)} trainable arrays, whose gradient is always zero: "
            f"{first_few(unused)}. Leave them out by `trainable` of init_state, or use them.",
            stacklevel=5,
        )
