"""FSDP: one parameter that is split where it is stored, gathered for use."""

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from redco_eqx._sharding.mesh import STORED, axis_size, for_use, stored_axes


def is_split(sharding: NamedSharding) -> bool:
    """Whether an array of this layout is split over more devices where it is stored than for use."""
    return axis_size(sharding.mesh, stored_axes(sharding.spec)) > 1


def gather(x: Array, sharding: NamedSharding) -> Array:
    """`x`, laid out by `sharding`, as it is used: one all-gather. Backward one reduce-scatter.

    A plain constraint would do forward, but transposes to itself: the gradient would be summed whole.
    """
    whole = NamedSharding(sharding.mesh, for_use(sharding.spec))
    over_fsdp = ("fsdp" if entry == STORED else entry for entry in sharding.spec)
    summed = NamedSharding(sharding.mesh, PartitionSpec(*over_fsdp))

    @jax.custom_vjp
    def gathered(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, whole)

    def forward(x: Array) -> tuple[Array, None]:
        return gathered(x), None

    def backward(residual: None, gradient: Array) -> tuple[Array]:
        # Along `tensor` each device has the same gradient, and keeps a part of it. Were that all that is asked
        # for, the compiler would make no more than the part, of activations that it splits and gathers for it.
        gradient = jax.lax.with_sharding_constraint(gradient, summed)
        return (jax.lax.with_sharding_constraint(gradient, sharding),)

    gathered.defvjp(forward, backward)
    return gathered(x)
