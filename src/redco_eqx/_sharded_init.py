"""Create a sharded model: the part of its program that makes a leaf is compiled with
the leaf's sharding."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from redco_eqx._base.captured import check_captured
from redco_eqx._base.jaxprs import (
    CALLS,
    ELEMENTWISE,
    Operand,
    body,
    called,
    dtype_of,
    program_digest,
    shape_of,
    type_of,
)
from redco_eqx._base.pairs import is_pair
from redco_eqx._base.protocols import Key, as_key, check_functions
from redco_eqx._base.tree import is_array, is_key, leaves_with_paths
from redco_eqx._distributed.consensus import agree, is_shared
from redco_eqx._sharding.mesh import check_mesh, in_own_context, put_global, replicated
from redco_eqx._sharding.rules import Overrides, check_arguments, shard_rules
from redco_eqx._step.buffers import check_apart
from redco_eqx._step.static import check_static

# Splitting up a traced program: small values are computed in order, and the rest leaf
# by leaf.
#
# Small values (keys, scalars) are computed on one device. Arrays made from these
# element by element are computed with the leaf's sharding, each shard where it lies.
# The rest is computed on one device.


Concrete: TypeAlias = jax.Array | np.ndarray
"""The value of a variable when the program runs."""

# Up to this many elements a value is small.
SMALL = 1024


@dataclasses.dataclass(frozen=True)
class Initializer:
    """The way to make one array of the model.

    - `leaf`: the variable of the array in the traced program.
    - `way`: `"given"` if the value is small, and so already known; `"spread"` if a
        program makes each shard on its own device; `"whole"` if a program makes the
        array on one device.
    - `program`: makes `leaf` from its inputs, which are known values.
    """

    leaf: Var
    way: str
    program: Jaxpr


def initializers_of(
    closed: ClosedJaxpr, key: Key
) -> tuple[list[Initializer], dict[Var, Concrete]]:
    """Find a way to make each result of `closed` from `key`, and compute the small
    values along the way."""
    jaxpr = closed.jaxpr
    consts = [
        _on_this_process(x) if is_key(x) else np.asarray(x) for x in closed.consts
    ]
    values: dict[Var, Concrete] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, key])
    )
    equations: list[JaxprEqn] = []

    def known(value: Concrete, aval: Any) -> Var:
        var = Var(aval)
        values[var] = value
        return var

    def follow(jaxpr: Jaxpr, names: dict[Var, Var]) -> list[Var]:
        """Go through a program with these names as inputs, and return its results."""

        def operand(atom: Operand) -> Var:
            # Turn numbers into operands, as when Python runs the program. Layers that
            # differ only in a number, such as the index in keys[0], keys[1], ..., then
            # still have equal programs.
            if isinstance(atom, Literal):
                return known(np.asarray(atom.val, dtype_of(atom)), atom.aval)
            return names.get(atom, atom)

        for equation in jaxpr.eqns:
            inputs: list[Any] = [operand(atom) for atom in equation.invars]
            outputs: list[Any] = [Var(x.aval) for x in equation.outvars]
            inner = None
            if equation.primitive.name in CALLS and len(outputs) > 1:
                inner = called(equation)
            if inner is not None and not inner.constvars:
                # Several arrays of the model: make each one alone.
                results = follow(inner, dict(zip(inner.invars, inputs)))
                names.update(zip(equation.outvars, results))
                continue
            names.update(zip(equation.outvars, outputs))
            if _is_plain_slice(equation):
                # The starts become operands, too, so that slices at different places
                # (such as the rows of split keys) have equal programs.
                starts = equation.params["start_indices"]
                for start in (np.asarray(start, np.uint32) for start in starts):
                    inputs.append(known(start, jax.typeof(start)))
                sizes = {"slice_sizes": shape_of(equation.outvars[0])}
                equation = equation.replace(
                    primitive=jax.lax.dynamic_slice_p, params=sizes
                )
            equation = equation.replace(invars=inputs, outvars=outputs)
            are_small = all(map(is_small, [*inputs, *outputs]))
            if are_small and values.keys() >= set(inputs):
                values.update(_computed(closed.jaxpr, equation, values))
            else:
                equations.append(equation)
        return [operand(atom) for atom in jaxpr.outvars]

    leaves = follow(jaxpr, {})
    producers: dict[Var, int] = {}
    for i, equation in enumerate(equations):
        producers.update(dict.fromkeys(equation.outvars, i))
    spread = _spread(equations, {var for var in values if is_small(var)})

    def initializer(leaf: Var) -> Initializer:
        needed: set[int] = set()
        left = [leaf]
        while left:
            var = left.pop()
            if var not in values and producers[var] not in needed:
                needed.add(producers[var])
                left += _variables(equations[producers[var]].invars)
        own = [equations[i] for i in sorted(needed)]
        inputs: dict[Var, None] = {}  # in the order of their first use
        for equation in own:
            operands = _variables(equation.invars)
            inputs.update(dict.fromkeys(var for var in operands if var in values))
        if leaf in values:
            way = "given"
        elif leaf in spread:
            way = "spread"
        else:
            way = "whole"
        program = jaxpr.replace(
            constvars=(), invars=list(inputs), outvars=[leaf], eqns=own
        )
        return Initializer(leaf, way, program)

    return [initializer(leaf) for leaf in leaves], values


def _is_plain_slice(equation: JaxprEqn) -> bool:
    """True for a slice that leaves out no elements between its ends."""
    if equation.primitive.name != "slice":
        return False
    return set(equation.params["strides"] or (1,)) == {1}


def _computed(
    template: Jaxpr, equation: JaxprEqn, values: dict[Var, Any]
) -> dict[Var, Any]:
    """Compute the results of an equation without literals from these values."""
    inputs = _variables(equation.invars)
    alone = template.replace(
        constvars=(), invars=inputs, outvars=equation.outvars, eqns=[equation]
    )
    operands = [values[var] for var in inputs]
    results = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*operands)
    return dict(zip(equation.outvars, results))


def _spread(equations: Sequence[JaxprEqn], given: set[Var]) -> set[Var]:
    """The values whose shards each device can make alone, from the `given` values."""
    found = set(given)
    for equation in equations:
        inputs = _variables(equation.invars)
        inner = called(equation) if equation.primitive.name in CALLS else None
        if inner is not None:
            made = _spread(inner.eqns, _those_of(found, equation.invars, inner.invars))
            found |= _those_of(made, inner.outvars, equation.outvars)
            continue
        are_small = all(map(is_small, [*inputs, *equation.outvars]))
        if found.issuperset(inputs) and (are_small or _is_elementwise(equation)):
            found.update(equation.outvars)
    return found


def _those_of(
    found: set[Var], atoms: Sequence[Operand], names: Sequence[Var]
) -> set[Var]:
    """The `names` on the other side of a call that belong to `atoms` in `found`, or to
    literals."""
    return {
        name
        for name, atom in zip(names, atoms)
        if isinstance(atom, Literal) or atom in found
    }


def _variables(atoms: Sequence[Operand]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_small(var: Var) -> bool:
    """True for a value that is computed on one device, in the program's order."""
    return is_key(type_of(var)) or math.prod(shape_of(var)) <= SMALL


def _is_elementwise(equation: JaxprEqn) -> bool:
    """True if a shard of the result needs only the same shard of the operands, or no
    operand."""
    name = equation.primitive.name
    result = equation.outvars[0]
    if name == "random_bits":
        config: Any = jax.config
        # The bits of a threefry key depend only on the key and on their place.
        threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        return (
            dtype_of(equation.invars[0]) == threefry.dtype
            and config.jax_threefry_partitionable
        )
    if name == "reshape":
        before = shape_of(equation.invars[0])
        after = shape_of(result)
        return [n for n in before if n != 1] == [n for n in after if n != 1]
    moves = ("broadcast_in_dim", "iota", "squeeze", "transpose")
    return (name in ELEMENTWISE or name in moves) and not is_key(type_of(result))


M = TypeVar("M")


@in_own_context
def init_model(
    make_model: Callable[[Key], M],
    mesh: Mesh,
    *,
    key: Key,
    overrides: Overrides = (),
    loss_fn: Callable[..., Any] | None = None,
    batch: PyTree = None,
) -> M:
    """Create the model `make_model(key)` directly on `mesh`, in the layout of
    `shard_rules`.

    Each device computes its own shard of an array and nothing larger. This works for
    the usual initialisers: constants, and draws from threefry keys (JAX's default) that
    are changed element by element (uniform, normal, truncated normal, and their scaled
    forms). It also works for stacks of layers (`eqx.filter_vmap` over keys).

    Other arrays are created whole on one device, one at a time, and then placed. A
    stack of such arrays is created with all layers at once (a list takes less memory,
    because each layer is created alone). These arrays are:

    - orthogonal matrices and other decompositions;
    - sorts and permutations;
    - arrays that are normalised by a sum over the array;
    - parts of a larger draw, and arrays assembled from several others (slice,
        concatenation, reshape, `.at[...].set`);
    - draws from a loop (`jax.random.gamma`);
    - draws from keys of other kinds (`rbg`), or with `jax_threefry_partitionable` off;
    - arrays that are computed from a large array outside `make_model`.

    If anything in `make_model` has a side effect (`jax.debug.print`), the whole model
    is created on one device, one operation at a time, and then placed.

    The values do not depend on the mesh. They equal those of `make_model(key)` up to
    the last bit of a fused operation: a product followed by a sum may be rounded once
    instead of twice. Layers that are created in the same way share compiled programs,
    so more layers need no more compilation.

    ```python
    def make_model(key):
        return eqx.nn.MLP(16, 16, 64, depth=1, key=key)

    model = rx.init_model(make_model, rx.make_mesh(fsdp=8), key=jax.random.key(0))
    ```

    **Arguments:**

    - `make_model`: makes the model from a key. The model's arrays must not depend on
        anything outside.
    - `mesh`, `overrides`, `loss_fn`, `batch`: as for `shard_rules`.
    - `key`: a PRNG key.

    **Returns:**

    The model, or any other result of `make_model` (for example, the pair of
    `eqx.nn.make_with_state`).

    **Raises:**

    `ValueError` or `TypeError` as `shard_rules` does, before anything is computed, and
    for an abstract mesh.
    """
    check_mesh(mesh)
    if not isinstance(mesh, Mesh):
        raise TypeError(
            "init_model: mesh is abstract, so it has no devices. Pass one of "
            "make_mesh(...)."
        )
    if any(map(is_array, jax.tree.leaves(make_model))):
        # A function from `eqx.filter_jit` has none.
        raise TypeError(
            "init_model: make_model must be a function of a key, but is a "
            f"{type(make_model).__name__}. Pass lambda key: ... that makes the model. "
            "To place a model that you have already made, use eqx.filter_shard(model, "
            "shard_rules(model, mesh))."
        )
    check_functions("init_model", make_model=make_model)
    key = as_key("init_model", key)
    if isinstance(key, Tracer):
        raise TypeError(
            "init_model: key is traced, but init_model places arrays on devices, which "
            "no jit or vmap can do. Call it outside of them, once for each model."
        )
    key = _on_this_process(key)
    closed, arrays, static = trace_arrays(make_model, key)
    check_captured("init_model", static)
    check_static(static)
    if is_shared(mesh):
        # Each process makes other parts of an array, so no later check sees a
        # difference.
        facts = {
            "key": str(jax.random.key_data(key)),
            "the checksum of make_model's program": program_digest(closed),
        }
        agree(mesh, "init_model", facts)
    abstract = eqx.combine(arrays, static)
    layout = _layout(abstract, mesh, overrides, loss_fn=loss_fn, batch=batch)
    is_made = jax.tree.map(lambda x: isinstance(x, jax.ShapeDtypeStruct), abstract)
    shardings = jax.tree.leaves(eqx.filter(layout, is_made))
    if closed.effects:  # they must happen in order
        _check_apart(arrays, closed.jaxpr.outvars)
        made = list(map(put_global, jaxpr_as_fun(closed)(key), shardings))
    else:
        initializers, values = initializers_of(closed, key)
        _check_apart(arrays, [initializer.leaf for initializer in initializers])
        pairs = zip(initializers, shardings)
        made = [make(initializer, values, sharding) for initializer, sharding in pairs]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), made), static)


def trace_arrays(
    make_model: Callable[[Key], PyTree], key: Key
) -> tuple[ClosedJaxpr, PyTree, PyTree]:
    """The program of `make_model`, its results as abstract arrays, and everything else
    that it returns.

    NumPy arrays belong to everything else (`eqx.filter_make_jaxpr` would trace them as
    results): they are constants, which stay as they are.
    """
    rest = []

    def make_arrays(key: Key) -> PyTree[Array]:
        arrays, static = eqx.partition(
            make_model(key), lambda x: isinstance(x, jax.Array)
        )
        rest.append(static)
        return arrays

    closed, arrays = jax.make_jaxpr(make_arrays, return_shape=True)(key)
    return closed, arrays, rest[-1]


def _layout(
    abstract: PyTree, mesh: Mesh, overrides: Overrides, **decided_by: Any
) -> PyTree:
    """`shard_rules` for a model, or for the pair of a model and its state. Every device
    holds the whole state."""
    if not is_pair(abstract):
        return shard_rules(abstract, mesh, overrides=overrides, **decided_by)
    model, model_state = abstract
    if decided_by["loss_fn"] is None and decided_by["batch"] is None:
        layout = shard_rules(model, mesh, overrides=overrides, **decided_by)
    else:  # a loss takes the pair, whose first part is the model
        check_arguments(model, mesh, overrides)
        of_pair = [(f"0.{pattern}", spec) for pattern, spec in overrides]
        layout, _ = shard_rules(abstract, mesh, overrides=of_pair, **decided_by)
    return layout, jax.tree.map(lambda _: replicated(mesh), model_state)


def _check_apart(arrays: PyTree, outputs: Sequence[Operand]) -> None:
    """Raise `ValueError` if two leaves are the same array."""
    paths = [path for path, _ in leaves_with_paths(arrays)]
    # A literal is a new array each time.
    pairs = [(var, path) for var, path in zip(outputs, paths) if isinstance(var, Var)]
    check_apart("init_model", pairs)


def _on_this_process(key: Key) -> Key:
    """A copy of `key` on the default device, wherever `key` lies."""
    data = jax.device_put(np.array(jax.device_get(jax.random.key_data(key))))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def make(
    initializer: Initializer, values: dict[Var, Concrete], sharding: NamedSharding
) -> Array:
    """Make the array of one leaf on its devices."""
    if initializer.way == "given":
        return put_global(values[initializer.leaf], sharding)
    operands = [values[var] for var in initializer.program.invars]
    value = compiled(initializer, sharding)(*operands)
    if initializer.way == "spread":
        return value
    # Wait for this array. Otherwise the next one would be made, whole, at the same
    # time.
    return jax.block_until_ready(put_global(value, sharding))


def compiled(initializer: Initializer, sharding: NamedSharding) -> Callable[..., Array]:
    """The jitted program of a leaf, shared by all leaves with equal programs and
    shardings."""
    program = initializer.program
    canonical = Canonical(program, str(program), tuple(_constants(program)))
    return _jit(canonical, sharding if initializer.way == "spread" else None)


@dataclasses.dataclass(frozen=True)
class Canonical:
    """A jaxpr that equals every other jaxpr with the same computation, whatever the
    names of its variables.

    Jaxprs are compared by text, and by the `id` of each constant. No other object can
    have this `id` while the jaxpr keeps the constant alive.
    """

    jaxpr: Jaxpr = dataclasses.field(compare=False)
    text: str
    constants: tuple[int, ...]


def _constants(jaxpr: Jaxpr) -> Iterator[int]:
    params = [list(equation.params.values()) for equation in jaxpr.eqns]
    for part in jax.tree.leaves(params):
        if isinstance(part, Jaxpr | ClosedJaxpr):
            yield from map(id, getattr(part, "consts", ()))
            yield from _constants(body(part))


@functools.lru_cache(maxsize=128)
def _jit(program: Canonical, sharding: NamedSharding | None) -> Callable[..., Array]:
    """Jit a program of arrays that are the same on every process, and committed to no
    device."""

    def make_leaf(*operands: Array) -> Array:
        values = dict(zip(program.jaxpr.invars, operands))
        for equation in program.jaxpr.eqns:
            found = _computed(program.jaxpr, equation, values)
            values |= {var: _rounded(x) for var, x in found.items()}
        return values[_variables(program.jaxpr.outvars)[0]]

    return jax.jit(make_leaf, out_shardings=sharding)


def _rounded(x: Array) -> Array:
    """Round as single operations do: inside a program, XLA uses more bits than bfloat16
    has."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize >= 4:
        return x
    info = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)
