"""FSDP inside a program: parameters that are split over `fsdp`, gathered where they are used."""

from typing import Any

import jax
import jax.extend.core as jex_core
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from redco_eqx._sharding.mesh import axes_of, axis_size, without_axis

_MARK = "gathered layer by layer"


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
    """Which inputs of a traced function are gathered later wherever they are used, as they are or after a cast.

    Sums to a scalar, as of squares for weight decay, are no use that would have to gather.
    """
    later: set[int] = set()
    other: set[int] = set()
    _follow(jaxpr, {var: {i} for i, var in enumerate(jaxpr.invars)}, later, other)
    return later - other


def _follow(jaxpr: Any, sources: dict[Any, set[int]], later: set[int], other: set[int]) -> None:
    """Adds to `later` the sources that reach a [`mark`][], and to `other` those that are used otherwise."""
    for equation in jaxpr.eqns:
        variables = [x for x in equation.invars if not isinstance(x, jex_core.Literal)]
        known = set().union(*(sources.get(x, set()) for x in variables))
        if not known:
            continue
        if equation.primitive.name == "name" and equation.params["name"] == _MARK:
            later |= known
            continue
        inner = [program for program in map(_program, equation.params.values()) if program is not None]
        if inner and all(len(program.invars) == len(equation.invars) for program in inner):
            for program in inner:
                pairs = zip(program.invars, equation.invars)
                inside = {a: sources[b] for a, b in pairs if b in variables and b in sources}
                _follow(program, inside, later, other)
            continue
        shapes = [out.aval.shape for out in equation.outvars]
        if not inner and len(variables) == 1 and shapes == [variables[0].aval.shape]:
            sources[equation.outvars[0]] = known
        elif any(shapes):
            other |= known
    for out in jaxpr.outvars:
        if not isinstance(out, jex_core.Literal) and out.aval.shape:
            other |= sources.get(out, set())


def _program(parameter: Any) -> Any:
    """The program that a parameter of an equation holds, if it does."""
    program = getattr(parameter, "jaxpr", parameter)
    return program if hasattr(program, "eqns") else None
