"""The program of a step. It is traced, and then changed in passes: weights are
gathered, the loss is differentiated, activations are laid out, and operations are
corrected for XLA.

All of them are changes of a traced program, not of a model or of its layers, so they
serve models that know nothing of a mesh.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jaxtyping import Array

from redco_eqx._base.jaxprs import Operand, Program, trace
from redco_eqx._base.pairs import noting_pairs
from redco_eqx._base.protocols import Batch, Key
from redco_eqx._base.tree import first_few
from redco_eqx._base.warn import warn
from redco_eqx._sharding.mesh import axis_size, tensor_dim
from redco_eqx._step.gather import gather_where_used, is_split
from redco_eqx._step.layout import Layout, mesh_of
from redco_eqx._step.state import TrainState
from redco_eqx._step.workarounds import for_partitioner

Inputs: TypeAlias = tuple[
    dict[str, Array], dict[str, Array], dict[str, Array], Batch, Key
]
"""Parameters, frozen arrays and model state (each by path), the batch, and the key."""


def on_arrays(
    state: TrainState, use: Callable[[Any, Batch, Key], Any]
) -> Callable[..., Any]:
    """Turn `use(model, batch, key)` into a function of [`Inputs`][]."""

    def run(params: Any, frozen: Any, model_state: Any, batch: Batch, key: Key) -> Any:
        model = dataclasses.replace(state, frozen=frozen).build(params, model_state)
        with noting_pairs(lambda: model):
            return use(model, batch, key)

    return run


def program_of(
    function: Callable[..., Any],
    inputs: Inputs,
    layout: Layout | None,
    *,
    splits: bool,
    differentiates: bool = False,
    reshard: bool | None = True,
) -> Program:
    """Return the program of a function of [`Inputs`][]. The function itself is traced
    once, or twice if its activations are left to the compiler.

    - `splits`: lays out the activations over `tensor`, unless that sends more.
    - `differentiates`: returns the program of
        `jax.value_and_grad(function, has_aux=True)` instead.
    - `reshard`: the `reshard_after_forward` of `train_step`.
    """
    unchanged = function
    mesh = mesh_of(layout, inputs)
    layout = layout or {}
    has_tensor = mesh is not None and axis_size(mesh, "tensor") > 1
    splits = splits and has_tensor and bool(layout)
    given: Any = inputs
    if splits:
        # To lay out activations, trace as on one device.
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
    # In the order in which JAX sorts a dict, which is that of the program's inputs.
    weights = [layout.get(path) for arrays in inputs[:2] for path in sorted(arrays)]
    if any(sharding is not None and is_split(sharding) for sharding in weights):
        function = _gathered(
            function,
            given,
            weights,
            reshard=reshard,
            splits=splits,
            differentiates=differentiates,
        )
        # The program with gathers is traced again, now with the mesh.
        given = inputs
    if differentiates:
        function = jax.value_and_grad(function, has_aux=True)
    program = trace(function, *given)
    unsplit = program
    if splits:
        laid_out = _laid_out(program, inputs, layout, differentiates)
        if laid_out is None:
            return program_of(
                unchanged,
                inputs,
                layout,
                splits=False,
                differentiates=differentiates,
                reshard=reshard,
            )
        program = laid_out
    if differentiates:
        _warn_unused(unsplit, sorted(inputs[0]))
    return for_partitioner(
        program, mesh, split_kernels({**inputs[0], **inputs[1]}, layout)
    )


def _gathered(
    function: Callable[..., Any],
    inputs: Any,
    weights: list[NamedSharding | None],
    *,
    reshard: bool | None,
    splits: bool,
    differentiates: bool,
) -> Callable[..., Any]:
    """Return the function with its weights gathered where they are used. If it is to
    be differentiated and needs a `jax.checkpoint`, it becomes one."""
    program = trace(function, *inputs)
    num_others = len(program.closed.jaxpr.invars) - len(weights)
    program, policy = gather_where_used(
        program, [*weights, *[None] * num_others], reshard=reshard, splits=splits
    )
    if differentiates and policy is not None:
        return jax.checkpoint(program, policy=policy)
    return program


def split_kernels(arrays: dict[str, Any], layout: Layout) -> set[int]:
    """The numbers of elements of the arrays (or of abstract ones) that `tensor`
    splits, alone or as one layer of a stack."""
    sizes = set()
    for path, sharding in layout.items():
        if tensor_dim(sharding.spec) is not None:
            shape = arrays[path].shape
            sizes |= {math.prod(shape), math.prod(shape[1:])}
    return sizes


def _laid_out(
    program: Program, inputs: Inputs, layout: Layout, is_gradient: bool
) -> Program | None:
    """Return the program with each value laid out over `tensor`, or `None` if the
    activations are left to the compiler."""
    from redco_eqx._dataflow.tracing import TracedStep
    from redco_eqx._step.constraints import lay_out

    params, frozen, model_state, batch, _ = inputs
    names = [*sorted(params), *sorted(frozen), *sorted(model_state)]
    jaxpr = program.closed.jaxpr
    first = len(jaxpr.outvars) - len(params)
    trained = [
        first + i if is_gradient and i < len(params) else None
        for i in range(len(names))
    ]
    num_rows = len(jax.tree.leaves(batch))
    traced = TracedStep(jaxpr, names, [""] * len(names), trained, num_rows)
    dims = {path: tensor_dim(sharding.spec) for path, sharding in layout.items()}
    laid_out = lay_out(traced, next(iter(layout.values())).mesh, dims)
    return None if laid_out is None else program.replace(laid_out)


def _warn_unused(gradient: Program, paths: list[str]) -> None:
    """Warn about parameters whose gradient is zero for any input, because the loss does
    not use them, or only behind `stop_gradient`."""
    jaxpr = gradient.closed.jaxpr
    made = {var: equation for equation in jaxpr.eqns for var in equation.outvars}

    def is_zero(atom: Operand) -> bool:
        if (
            not isinstance(atom, Literal)
            and atom in made
            and made[atom].primitive.name == "broadcast_in_dim"
        ):
            (atom,) = made[atom].invars
        return isinstance(atom, Literal) and bool(atom.val == 0)

    grads = jaxpr.outvars[len(jaxpr.outvars) - len(paths) :]
    unused = [path for path, atom in zip(paths, grads) if is_zero(atom)]
    if unused:
        warn(
            f"the gradient of {len(unused)} trainable arrays is always zero, because "
            "the loss does not use their values, or only behind stop_gradient: "
            f"{first_few(unused)}. Leave them out with `trainable` of init_state, or "
            "use them."
        )
