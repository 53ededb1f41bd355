"""The gradient of a batch: at once, from one microbatch after the other, or from the
data shards of each microbatch by themselves."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.extend.core import Jaxpr, JaxprEqn, jaxprs_in_params  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from redco_eqx._base.jaxprs import Program, body, source_line, trace
from redco_eqx._base.protocols import Batch, Key, Mean, Metrics
from redco_eqx._base.rewriting import replace_operations
from redco_eqx._sharding.mesh import axes_of, axis_size, mapped_over
from redco_eqx._step.layout import Layout, constrain, mesh_of, microbatches
from redco_eqx._step.passes import Inputs, program_of, split_kernels
from redco_eqx._step.workarounds import for_partitioner, replace_mapped_convolution


class Gradient(NamedTuple):
    """The loss of a batch with its gradients, the metrics, and the new model state."""

    loss: Mean
    metrics: Metrics
    model_state: dict[str, Array]
    grads: dict[str, Array]


GradientFn: TypeAlias = Callable[[dict[str, Array]], Gradient]
"""Computes the gradient of one batch at these parameters."""


def gradient_of(
    function: Callable[..., Any],
    inputs: Inputs,
    layout: Layout | None,
    *,
    num_microbatches: int,
    reduce_once: bool,
    splits: bool,
    reshard: bool | None,
) -> GradientFn:
    """Return the gradient of the batch in `inputs`, as a function of the parameters.

    `function` returns `(loss, (Mean of the loss, metrics, model state))`. It is traced
    here, and not in each call: a line search calls the gradient several times.

    - `num_microbatches`, `reduce_once`: see `train_step`.
    - `splits`, `reshard`: see `program_of`.
    """
    params, frozen, model_state, batch, key = inputs
    mesh = mesh_of(layout, inputs)
    has_shards = mesh is not None and axis_size(mesh, "data") > 1
    by_shard = mesh if reduce_once and has_shards else None

    def traced(inputs: Inputs) -> Program:
        return program_of(
            function,
            inputs,
            layout,
            splits=splits,
            differentiates=True,
            reshard=reshard,
        )

    if num_microbatches == 1 and by_shard is None:
        whole = traced(inputs)

        def of_batch(params: dict[str, Array]) -> Gradient:
            (_, (loss, metrics, state)), grads = whole(
                params, frozen, model_state, batch, key
            )
            return Gradient(loss, metrics, state, constrain(grads, layout))

        return of_batch
    must_divide = layout is not None or by_shard is not None
    batch = microbatches(batch, num_microbatches, mesh, must_divide=must_divide)
    if by_shard is not None:
        batch = _by_data_shard(batch, by_shard)
    parts = _Parts(num_microbatches, by_shard)
    first = jax.tree.map(lambda x: x[0], batch)
    one_part = (params, frozen, model_state, first, parts.key(key, 0))
    if by_shard is None:
        gradient = traced(one_part)
    else:
        gradient = _for_each_shard(traced, one_part, by_shard, layout)

    def of_parts(params: dict[str, Array]) -> Gradient:
        inputs = (params, frozen, model_state, batch, key)
        return _of_parts(gradient, inputs, layout, parts)

    return of_parts


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of a batch whose gradients are accumulated.

    - `number`: the number of microbatches.
    - `mesh`: the mesh over whose axis `data` each microbatch is cut into parts, too;
        `None` if it is not cut.
    """

    number: int
    mesh: Mesh | AbstractMesh | None

    def key(self, key: Key, index: Any) -> Any:
        """The key of a microbatch, or those of its data shards."""
        key = jax.random.fold_in(key, index)
        if self.mesh is None:
            return key
        # No two shards may draw the same random numbers.
        shards = jnp.arange(self.mesh.shape["data"])
        return jax.vmap(lambda shard: jax.random.fold_in(key, shard))(shards)

    def zeros(self, params: dict[str, Array]) -> dict[str, Array]:
        """Sums of gradients to begin with, in float32 or wider."""
        leading = () if self.mesh is None else (self.mesh.shape["data"],)
        return {
            path: jnp.zeros(leading + p.shape, jnp.promote_types(p.dtype, jnp.float32))
            for path, p in params.items()
        }

    def constrain(
        self, sums: dict[str, Array], layout: Layout | None
    ) -> dict[str, Array]:
        """Lay out sums of gradients: each data shard keeps its own."""
        if self.mesh is None:
            return constrain(sums, layout)
        own = {}
        for path, x in sums.items():
            if layout is None:
                rest = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
            else:
                rest = [*layout[path].spec]
            own[path] = NamedSharding(self.mesh, PartitionSpec("data", *rest))
        return constrain(sums, own)


def _of_parts(
    gradient: Program, inputs: Inputs, layout: Layout | None, parts: _Parts
) -> Gradient:
    """The gradient of the whole batch, from one microbatch after the other.

    Each gradient is that of the mean of its part, so it counts with the weight of that
    mean. The model state is handed on from one microbatch to the next.
    """
    params, frozen, model_state, batch, key = inputs

    def accumulate(
        carry: tuple[Any, Any], part: tuple[Array, Batch]
    ) -> tuple[tuple[Any, Any], Any]:
        sums, model_state = carry
        index, microbatch = part
        (_, (loss, metrics, model_state)), grads = gradient(
            params, frozen, model_state, microbatch, parts.key(key, index)
        )

        def added(total: Array, grad: Array) -> Array:
            # One weight for each data shard, if there are several.
            dims = range(loss.weight.ndim, grad.ndim)
            weight = jnp.expand_dims(loss.weight, tuple(dims))
            return total + grad * weight.astype(total.dtype)

        sums = jax.tree.map(added, sums, grads)
        return (parts.constrain(sums, layout), model_state), (loss, metrics)

    begin = (parts.constrain(parts.zeros(params), layout), model_state)
    (sums, model_state), stacked = jax.lax.scan(
        accumulate, begin, (jnp.arange(parts.number), batch)
    )
    loss, metrics = jax.tree.map(jnp.sum, stacked)
    if parts.mesh is not None:
        # The one sum over `data`.
        sums = constrain(jax.tree.map(lambda x: jnp.sum(x, axis=0), sums), layout)
    # A batch whose weights are all 0 has the gradient 0, not NaN.
    scale = jnp.where(
        loss.weight == 0, 0, 1 / jnp.where(loss.weight == 0, 1, loss.weight)
    )
    grads = jax.tree.map(
        lambda t, p: (t * scale.astype(t.dtype)).astype(p.dtype), sums, params
    )
    return Gradient(loss, metrics, model_state, constrain(grads, layout))


# The data shards of a batch by themselves, so that their gradients are summed once.

ShardInputs: TypeAlias = tuple[
    dict[str, Array], dict[str, Array], dict[str, Array], Batch, Any
]
"""As [`Inputs`][], but the batch and the keys have a leading dim over `data`."""


def _by_data_shard(batch: Batch, mesh: Mesh | AbstractMesh) -> Batch:
    """Cut microbatches, of shape (number, rows, ...), into their data shards, of shape
    (number, shards, rows, ...). No row moves to another device."""

    def cut(x: Array) -> Array:
        x = rearrange(x, "k (d b) ... -> k d b ...", d=mesh.shape["data"])
        others = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 3)
        rows = "fsdp" if "fsdp" in mesh.shape else None
        spec = PartitionSpec(None, "data", rows, *others)
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(cut, batch)


def _for_each_shard(
    traced: Callable[[Inputs], Program],
    inputs: ShardInputs,
    mesh: Mesh | AbstractMesh,
    layout: Layout | None,
) -> Program:
    """Return the program of a gradient for each data shard by itself. Nothing is summed
    over `data`: all results have a leading dim over it.
    """
    params, frozen, model_state, batch, keys = inputs
    one = jax.tree.map(lambda x: x[0], (batch, keys))
    with mapped_over("data"):
        program = traced((params, frozen, model_state, *one))
    _check_names_no_axis(program.closed.jaxpr, "data")

    def by_shard(equation: JaxprEqn) -> Callable[..., Array] | None:
        return replace_mapped_convolution(equation, mesh, "data")

    program = program.replace(replace_operations(program.closed.jaxpr, by_shard))
    each = jax.vmap(program, in_axes=(None, None, None, 0, 0), spmd_axis_name="data")
    try:
        mapped = trace(each, *inputs)
    except NotImplementedError as error:
        raise ValueError(
            "reduce_once=True maps the loss over data shards by jax.vmap, but it has "
            f"an operation that cannot be mapped: {error} Pass reduce_once=False."
        ) from error
    return for_partitioner(
        mapped, mesh, split_kernels({**params, **frozen}, layout or {})
    )


def _check_names_no_axis(jaxpr: Jaxpr, axis: str) -> None:
    """Raise `ValueError`, naming the line, if an operation lays out an array over this
    axis."""
    for equation in _equations(jaxpr):
        specs = [
            x.spec if isinstance(x, NamedSharding) else x
            for x in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_layout)
            if _is_layout(x)
        ]
        if any(axis in axes_of(spec) for spec in specs):
            raise ValueError(
                f"reduce_once=True: {source_line(equation)} lays out an array over "
                f"{axis!r}, but the loss is called for each shard of {axis!r} by "
                "itself. Take the axes of the rows from rx.layers.activation_axes, "
                "leave the layout out, or pass reduce_once=False."
            )


def _is_layout(x: Any) -> bool:
    return isinstance(x, NamedSharding | PartitionSpec)


def _equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """All operations of a program, and of the programs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(body(inner))
