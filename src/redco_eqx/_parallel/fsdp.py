"""FSDP: one parameter that is split over `fsdp`, gathered for use."""

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from redco_eqx._sharding.mesh import axes_of, axis_size, without_axis


def is_split(sharding: NamedSharding) -> bool:
    """Whether this layout uses `fsdp`, of more than one device."""
    return "fsdp" in axes_of(sharding.spec) and axis_size(sharding.mesh, "fsdp") > 1


def gather(x: Array, sharding: NamedSharding) -> Array:
    """`x`, laid out by `sharding`, whole over `fsdp`: one all-gather. Backward one reduce-scatter.

    A plain constraint would do forward, but transposes to itself: the gradient would be summed whole.
    """
    spec = PartitionSpec(*(without_axis(entry, "fsdp") for entry in sharding.spec))
    whole = NamedSharding(sharding.mesh, spec)

    @jax.custom_vjp
    def gathered(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, whole)

    def forward(x: Array) -> tuple[Array, None]:
        return gathered(x), None

    def backward(residual: None, gradient: Array) -> tuple[Array]:
        return (jax.lax.with_sharding_constraint(gradient, sharding),)

    gathered.defvjp(forward, backward)
    return gathered(x)
