"""A stack made a layer at a time: of the program that makes all layers, the one that makes a single layer.

The *stack dim* of an array is the one that numbers the layers; `None` if all layers share the array. The
program of a layer runs the same equations with that dim of size 1. This is right where no equation mixes
entries along it. `jax.vmap` makes such programs, and here it is checked for each equation; where there is no
rule for a primitive, the stack cannot be made so.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Shaped

from redco_eqx._birth.flat import as_jaxpr, called_by, run_jaxpr, variables
from redco_eqx._jaxprs.read import ELEMENTWISE, dtype_of, shape_of, type_of
from redco_eqx._sharding.mesh import put_global

Dim: TypeAlias = int | None
Size: TypeAlias = int | np.integer
Params: TypeAlias = dict[str, Any]
StackDims: TypeAlias = Sequence[Any]
"""A `Dim` for each operand; that of a single operand is known."""

# What moves elements without the first dim, besides.
_PLACEWISE = ELEMENTWISE | {"broadcast_in_dim", "iota", "squeeze", "transpose"}
# Of the last two dims.
DECOMPOSITIONS = ("cholesky", "eigh", "geqrf", "householder_product", "lu", "qr", "svd", "triangular_solve")
# Over the dims `axes`.
REDUCTIONS = (
    "argmax",
    "argmin",
    "reduce_and",
    "reduce_max",
    "reduce_min",
    "reduce_or",
    "reduce_prod",
    "reduce_sum",
)
# What runs along one dim, and the parameter that says along which.
ALONG = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis"}
ALONG |= {"concatenate": "dimension", "sort": "dimension", "split": "axis"}


class _NotSeparableError(Exception):
    """An equation mixes layers, or there is no rule for it."""


def one_layer(program: Jaxpr) -> tuple[Jaxpr, list[bool]] | None:
    """The program of one layer, and for each input whether it has an entry per layer, of which one is taken.

    `None` if what `program` makes is not a stack, or cannot be made a layer at a time.
    """
    shape = shape_of(program.outvars[0])
    if len(shape) < 2 or shape[0] < 2:
        return None
    avals = [type_of(var) for var in program.invars]
    per_layer = [x.shape[:1] == shape[:1] for x in avals]

    def make_layer(*operands: Array) -> ArrayLike:
        values, dims = _run(program, operands, [0 if split else None for split in per_layer])
        if dims != [0]:
            raise _NotSeparableError
        return values[0]

    abstract = [
        jax.ShapeDtypeStruct((1, *x.shape[1:]) if split else x.shape, x.dtype)
        for x, split in zip(avals, per_layer)
    ]
    try:
        made = jax.make_jaxpr(make_layer)(*abstract)
    except _NotSeparableError:
        return None
    fits = not made.consts and made.out_avals[0].shape == (1, *shape[1:])
    return (made.jaxpr, per_layer) if fits else None


def stack_layers(
    layers: Iterable[Shaped[Array, "1 ..."]], shape: tuple[int, ...], dtype: DTypeLike, sharding: NamedSharding
) -> Array:
    """Layers, each of shape `(1, *shape[1:])` and whole on one device, as one array laid out by `sharding`.

    The next layer is asked for once the last one is in its place.
    """
    stack = jax.jit(functools.partial(jnp.zeros, shape, dtype), out_shardings=sharding)()
    place = NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec[1:]))
    for index, layer in enumerate(layers):
        stack = jax.block_until_ready(_write(stack, put_global(layer, place), index, sharding))
    return stack


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(
    stack: Shaped[Array, "layers *one"],
    layer: Shaped[Array, "1 *one"],
    index: ArrayLike,
    sharding: NamedSharding,
) -> Shaped[Array, "layers *one"]:
    stack = jax.lax.dynamic_update_slice_in_dim(stack, layer, index, 0)
    return jax.lax.with_sharding_constraint(stack, sharding)


def _run(
    program: Jaxpr, operands: Sequence[ArrayLike], dims: Sequence[Dim]
) -> tuple[list[ArrayLike], list[Dim]]:
    """The results of a program for one layer, and their stack dims."""
    values: dict[Var, ArrayLike] = dict(zip(program.invars, operands))
    where: dict[Var, Dim] = dict(zip(program.invars, dims))
    makers = {var: equation for equation in program.eqns for var in equation.outvars}
    for equation in program.eqns:
        inputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in equation.invars]
        stacked = [None if isinstance(atom, Literal) else where[atom] for atom in equation.invars]
        name, called = equation.primitive.name, called_by(equation)
        if all(dim is None for dim in stacked):
            names = variables(equation.invars)
            single = as_jaxpr(program, [equation], names, equation.outvars)
            results, found = run_jaxpr(single, [values[var] for var in names]), [None]
        elif called is not None and not called[1]:
            results, found = _run(called[0], inputs, stacked)
        elif name == "cond" and stacked[0] is None:
            results, found = _run_branches(equation.params["branches"], inputs, stacked[1:])
        elif name in MOVES:
            params, dim = MOVES[name](equation, stacked)
            results, found = _bind(equation, inputs, params), [dim]
        else:
            dim = _kept_dim(equation, stacked)
            for i, atom in enumerate(equation.invars):
                if stacked[i] is None and not isinstance(atom, Literal):
                    inputs[i] = _of_one_layer(inputs[i], makers.get(atom), dim)
            results, found = _bind(equation, inputs, {}), [dim]
        values.update(zip(equation.outvars, results))
        where.update(zip(equation.outvars, found * len(results) if len(found) == 1 else found))
    made = [atom for atom in program.outvars if isinstance(atom, Var)]
    if len(made) < len(program.outvars):
        raise _NotSeparableError
    return [values[var] for var in made], [where[var] for var in made]


def _bind(equation: JaxprEqn, inputs: Sequence[ArrayLike], changed: Params) -> Sequence[Array]:
    results = equation.primitive.bind(*inputs, **{**equation.params, **changed})
    return results if equation.primitive.multiple_results else [results]


def _run_branches(
    branches: Sequence[ClosedJaxpr], inputs: Sequence[ArrayLike], stacked: Sequence[Dim]
) -> tuple[Sequence[Array], list[Dim]]:
    """The branch that the first of `inputs` chooses, for all layers the same."""
    found: list[list[Dim]] = []

    def run(jaxpr: Jaxpr, *operands: Array) -> list[ArrayLike]:
        values, dims = _run(jaxpr, operands, stacked)
        found.append(dims)
        return values

    if any(branch.consts for branch in branches):
        raise _NotSeparableError
    results = jax.lax.switch(inputs[0], [functools.partial(run, b.jaxpr) for b in branches], *inputs[1:])
    if any(dims != found[0] for dims in found):
        raise _NotSeparableError
    return results, found[0]


def _kept_dim(equation: JaxprEqn, stacked: Sequence[Dim]) -> int:
    """The stack dim of the results, where it is that of all operands that have one."""
    name, params = equation.primitive.name, equation.params
    dims = {dim for dim in stacked if dim is not None}
    dim = dims.pop()
    rank = max(len(shape_of(atom)) for atom in equation.invars)
    separate = (
        name in _PLACEWISE
        or (name in ALONG and params[ALONG[name]] != dim)
        or (name == "rev" and dim not in params["dimensions"])
        or (name in DECOMPOSITIONS and dim < rank - 2)
        or (name == "random_bits" and draws_by_counter(equation))
    )
    if dims or not separate:
        raise _NotSeparableError
    return dim


def draws_by_counter(equation: JaxprEqn) -> bool:
    """Whether the bits of an equation `random_bits` each depend on their key and their place alone."""
    threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    return dtype_of(equation.invars[0]) == threefry.dtype


def _of_one_layer(x: ArrayLike, maker: JaxprEqn | None, dim: int) -> ArrayLike:
    """An operand that all layers share, where another has a stack dim: it must be the same along that dim."""
    if jnp.ndim(x) == 0 or jnp.shape(x)[dim] == 1:
        return x
    broadcast = maker is not None and maker.primitive.name == "broadcast_in_dim"
    if maker is not None and broadcast and dim not in maker.params["broadcast_dimensions"]:
        return jax.lax.slice_in_dim(jnp.asarray(x), 0, 1, axis=dim)
    raise _NotSeparableError


# Where the stack dim goes, and the parameters for which that dim has size 1.


def _replaced(sizes: Sequence[Size], dim: int, size: int = 1) -> tuple[Size, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _without(dim: int, removed: Sequence[Size]) -> int:
    """The place of a dim once others are removed."""
    if dim in removed:
        raise _NotSeparableError
    return dim - sum(1 for other in removed if other < dim)


def _broadcast_in_dim(equation: JaxprEqn, stacked: StackDims) -> tuple[Params, int]:
    dim = int(equation.params["broadcast_dimensions"][stacked[0]])
    return {"shape": _replaced(equation.params["shape"], dim)}, dim


def _reshape(equation: JaxprEqn, stacked: StackDims) -> tuple[Params, int]:
    before, after, dim = shape_of(equation.invars[0]), equation.params["new_sizes"], stacked[0]
    for new, size in enumerate(after):
        if size == before[dim] and math.prod(after[:new]) == math.prod(before[:dim]):
            return {"new_sizes": _replaced(after, new)}, new
    raise _NotSeparableError


def _slice(equation: JaxprEqn, stacked: StackDims) -> tuple[Params, int]:
    params, dim = equation.params, stacked[0]
    limits, strides = params["limit_indices"], params["strides"]
    if shape_of(equation.outvars[0])[dim] != shape_of(equation.invars[0])[dim]:
        raise _NotSeparableError
    return {"limit_indices": _replaced(limits, dim), "strides": strides and _replaced(strides, dim)}, dim


def _gather(equation: JaxprEqn, stacked: StackDims) -> tuple[Params, int]:
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    operand, indices = stacked
    rank = len(shape_of(equation.outvars[0]))
    if indices is not None:
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims)
        if operand is not None and (operand, indices) not in pairs:
            raise _NotSeparableError
        return {}, [dim for dim in range(rank) if dim not in numbers.offset_dims][indices]
    removed = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if operand in numbers.start_index_map or sizes[operand] != shape_of(equation.invars[0])[operand]:
        raise _NotSeparableError
    return {"slice_sizes": _replaced(sizes, operand)}, int(numbers.offset_dims[_without(operand, removed)])


def _dot_general(equation: JaxprEqn, stacked: StackDims) -> tuple[Params, int]:
    contracting, batch = equation.params["dimension_numbers"]
    left, right = stacked
    if left is not None and right is not None:
        if (left, right) not in zip(*batch):
            raise _NotSeparableError
        return {}, list(batch[0]).index(left)
    side = 0 if right is None else 1
    free = _without(stacked[side], (*contracting[side], *batch[side]))
    before = len(batch[0])
    if side == 1:
        before += len(shape_of(equation.invars[0])) - len(contracting[0]) - len(batch[0])
    return {}, before + free


MOVES: dict[str, Callable[[JaxprEqn, StackDims], tuple[Params, int]]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "dot_general": _dot_general,
    "gather": _gather,
    "reshape": _reshape,
    "slice": _slice,
    "squeeze": lambda equation, stacked: ({}, _without(stacked[0], equation.params["dimensions"])),
    "transpose": lambda equation, stacked: ({}, list(equation.params["permutation"]).index(stacked[0])),
} | dict.fromkeys(REDUCTIONS, lambda equation, stacked: ({}, _without(stacked[0], equation.params["axes"])))
