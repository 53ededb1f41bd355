"""FSDP inside a program: parameters that are split over `fsdp`, gathered where they are used."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex_core
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from redco_eqx._mesh import axis_size, without_axis

_MARK = "gathered layer by layer"


def is_split(sharding: NamedSharding) -> bool:
    """Whether this layout uses `fsdp`, of more than one device."""
    names = [
        name for entry in sharding.spec if entry for name in ([entry] if isinstance(entry, str) else entry)
    ]
    return "fsdp" in names and axis_size(sharding.mesh, "fsdp") > 1


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


def gather_tree(tree: PyTree, shardings: PyTree) -> PyTree:
    """Each array of `tree` gathered that its entry in `shardings` splits over `fsdp`."""

    def one(x: Any, sharding: NamedSharding | None) -> Any:
        return x if sharding is None or not is_split(sharding) else gather(x, sharding)

    return jax.tree.map(one, tree, shardings)


def mark(tree: PyTree, shardings: PyTree) -> PyTree:
    """Notes in the trace that these arrays are gathered later, and need not be before."""

    def one(x: Any, sharding: NamedSharding | None) -> Any:
        return x if sharding is None or not is_split(sharding) else checkpoint_name(x, _MARK)

    return jax.tree.map(one, tree, shardings)


def marked(jaxpr: Any) -> set[int]:
    """Which inputs of a traced function reach a [`mark`][], as they are or after a cast."""
    inputs = {var: {i} for i, var in enumerate(jaxpr.invars)}
    return set().union(*_marks(jaxpr, inputs))


def _marks(jaxpr: Any, sources: dict[Any, set[int]]) -> Iterator[set[int]]:
    for equation in jaxpr.eqns:
        variables = [x for x in equation.invars if not isinstance(x, jex_core.Literal)]
        known = [sources.get(x, set()) for x in variables]
        if not any(known):
            continue
        if equation.primitive.name == "name" and equation.params["name"] == _MARK:
            yield known[0]
        inner = [program for program in map(_program, equation.params.values()) if program is not None]
        for program in inner:
            if len(program.invars) == len(equation.invars):
                pairs = zip(program.invars, equation.invars)
                known_inside = {a: sources[b] for a, b in pairs if b in variables and b in sources}
                yield from _marks(program, known_inside)
        out = equation.outvars[0]
        if not inner and len(variables) == 1 and out.aval.shape == variables[0].aval.shape:
            sources[out] = known[0]


def _program(parameter: Any) -> Any:
    """The program that a parameter of an equation holds, if it does."""
    program = getattr(parameter, "jaxpr", parameter)
    return program if hasattr(program, "eqns") else None
