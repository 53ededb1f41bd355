"""Mixtures of experts (Shazeer et al. 2017): each token goes to a few of many MLPs, and
no token is dropped."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from redco_eqx.layers import activation_axes
from redco_eqx.types import Key
from redco_eqx_models._blocks.context import Hidden

Activation: TypeAlias = Callable[[Array], Array]

Chosen: TypeAlias = Int[Array, "b t chosen"]
"""The numbers of the experts that each token goes to."""


class ExpertMatrix(eqx.Module):
    """The matrices of one projection in all experts, stored `(expert, out, in)`. In
    files, each has its own key.

    - `expert_split`: `column` or `row`, as `mix_experts` splits it. `shard_rules` reads
        this.
    """

    weight: Float[Array, "experts out in"]
    in_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)
    expert_split: str = eqx.field(static=True)

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        split: str,
        std: float,
        key: Key,
    ):
        self.weight = std * jax.random.normal(
            key, (num_experts, out_features, in_features)
        )
        self.in_features = in_features
        self.out_features = out_features
        self.expert_split = split


def mix_experts(
    x: Hidden,
    probabilities: Float[Array, "b t experts"],
    gate: ExpertMatrix,
    up: ExpertMatrix,
    down: ExpertMatrix,
    *,
    num_chosen: int,
    normalise: bool,
    activation: Activation,
    sequence_parallel: bool,
) -> tuple[Hidden, Chosen]:
    """Return the weighted sum of the outputs of the experts that each token goes to,
    and their numbers.

    On TPUs the tokens of a device are sorted by expert, and multiplied in groups.
    Elsewhere XLA has no kernel for this, and each device computes all experts for all
    of its tokens. Over `tensor`, each expert is split inside, as `column` and `row`
    split an MLP, with one sum of the size of `x` forward, and one backward.
    Distributing the experts over the devices would send the same amount, and wait for
    the busiest device.

    **Arguments:**

    - `probabilities`: the softmax of the router's output, in float32.
    - `gate`, `up`, `down`: the projections of all experts.
    - `num_chosen`: the number of experts per token.
    - `normalise`: true if the weights of a token's experts add up to 1.
    - `activation`: applied to the gate.
    - `sequence_parallel`: pass true if the stream is split over `tensor` along the
        token dimension.
    """

    # The rule for operations of `redco_eqx` finds the block by this scope, and takes
    # each expert as split inside.
    @jax.named_scope("redco_eqx.row.experts")
    def mix(*given: Array) -> Array:
        groups = functools.partial(in_groups, activation)
        dense = functools.partial(all_for_all, activation)
        return jax.lax.platform_dependent(*given, tpu=groups, default=dense)

    def whole_length(x: Array) -> Array:
        return jax.lax.all_gather(x, "tensor", axis=1, tiled=True)

    def body(x: Array, probabilities: Array, *matrices: Array) -> tuple[Array, Array]:
        weights, chosen = jax.lax.top_k(probabilities, num_chosen)
        if normalise:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        if sequence_parallel:
            output = mix(
                whole_length(x), whole_length(weights), whole_length(chosen), *matrices
            )
            output = jax.lax.psum_scatter(
                output, "tensor", scatter_dimension=1, tiled=True
            )
            return output, chosen
        if not is_split:
            return mix(x, weights, chosen, *matrices), chosen
        # Their gradients are then summed over the shards once, at the end.
        x = jax.lax.pcast(x, "tensor", to="varying")
        weights = jax.lax.pcast(weights, "tensor", to="varying")
        output = mix(x, weights, chosen, *matrices)
        return jax.lax.psum(output, "tensor"), chosen

    matrices = gate.weight, up.weight, down.weight
    axes = activation_axes(x, matrices, num_rows=x.shape[0], num_heads=down.in_features)
    is_split = axes is not None and axes.num_head_shards > 1
    sequence_parallel = sequence_parallel and is_split
    if axes is None or axes.mesh.size == 1:
        output, chosen = body(x, probabilities, *matrices)
    else:
        if sequence_parallel:
            _check_length(x, axes.num_head_shards)
        inner = PartitionSpec(axes.rows, "tensor" if sequence_parallel else None)
        axis = "tensor" if is_split else None
        column = PartitionSpec(None, axis)
        row = PartitionSpec(None, None, axis)
        output, chosen = jax.shard_map(
            body,
            mesh=axes.mesh,
            in_specs=(inner, inner, column, column, row),
            out_specs=(inner, inner),
        )(x, probabilities, *matrices)
    # `remat="row_out"` keeps arrays of this name, as the outputs of `row`.
    return checkpoint_name(output, "row_out"), chosen


def _check_length(x: Hidden, num_shards: int) -> None:
    if x.shape[1] % num_shards:
        raise ValueError(
            "mix_experts: sequence_parallel=True splits dim 1 of (batch, length, "
            f"features) over tensor={num_shards}, but the input has shape "
            f"{tuple(x.shape)}. Pad the length to a multiple of {num_shards}, or pass "
            "sequence_parallel=False."
        )


def in_groups(
    activation: Activation,
    x: Hidden,
    weights: Float[Array, "b t chosen"],
    chosen: Chosen,
    *matrices: Array,
) -> Hidden:
    """Sort the tokens by expert, and multiply them in groups."""
    gate, up, down = matrices
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    # The length is static, so an expert that no token goes to has a group of size 0.
    sizes = jnp.bincount(chosen.reshape(-1), length=len(gate)).astype(jnp.int32)

    def product(rows: Array, matrix: Array) -> Array:
        # `ragged_dot` takes matrices `(in, out)`.
        return jax.lax.ragged_dot(rows, jnp.swapaxes(matrix, 1, 2), sizes)

    # Each token has as many rows as it has experts, one after another.
    rows = x.reshape(-1, x.shape[-1])[order // chosen.shape[-1]]
    hidden = activation(product(rows, gate)) * product(rows, up)
    # transformers multiplies the outputs of the experts by these weights. The last
    # projection is linear, so the order does not matter, and here the rows are those of
    # a shard, before the sum over `tensor`.
    hidden = hidden * weights.reshape(-1)[order][:, None].astype(x.dtype)
    # The second `argsort` inverts the first.
    outputs = product(hidden, down)[jnp.argsort(order)]
    return jnp.sum(outputs.reshape(*chosen.shape, -1), axis=2)


def all_for_all(
    activation: Activation,
    x: Hidden,
    weights: Float[Array, "b t chosen"],
    chosen: Chosen,
    *matrices: Array,
) -> Hidden:
    """Compute all experts for all tokens, which is less than compilers make of groups
    without a kernel."""
    gate, up, down = matrices
    is_chosen = chosen[..., None] == jnp.arange(len(gate))
    # An expert that was not chosen has the weight 0, so the sum leaves it out.
    weights = jnp.sum(weights[..., None] * is_chosen, axis=2).astype(x.dtype)
    hidden = activation(jnp.einsum("btd,eid->btei", x, gate))
    hidden = hidden * jnp.einsum("btd,eid->btei", x, up) * weights[..., None]
    return jnp.einsum("btei,edi->btd", hidden, down)


def routing_sums(
    probabilities: Float[Array, "b t experts"],
    chosen: Chosen,
    real: Bool[Array, "b t"] | None,
) -> Float[Array, "2 experts"]:
    """Return, for each expert, the number of times that it was chosen, and the sum of
    its probabilities, over the tokens that are not padding.
    """
    weights = jnp.ones(chosen.shape[:2])
    if real is not None:
        weights = real.astype(jnp.float32)
    times = jnp.sum(chosen[..., None] == jnp.arange(probabilities.shape[-1]), axis=2)

    def over_tokens(x: Array) -> Array:
        return jnp.einsum("bt,bte->e", weights, x.astype(jnp.float32))

    return jnp.stack([over_tokens(times), over_tokens(probabilities)])
