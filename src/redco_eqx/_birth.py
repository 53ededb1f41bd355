"""Sharded birth of a model: of its traced program, what makes a leaf is compiled with the leaf's sharding."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import AbstractValue
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from redco_eqx._base.jaxprs import CHECKPOINTS, ELEMENTWISE, Atom, dtype_of, program_digest, shape_of, type_of
from redco_eqx._base.protocols import Key, as_key, check_function
from redco_eqx._base.tree import is_array, is_key, leaves_with_paths
from redco_eqx._distributed.consensus import agree, is_shared
from redco_eqx._sharding.mesh import check_mesh, in_own_context, put_global, replicated
from redco_eqx._sharding.rules import Overrides, shard_rules
from redco_eqx._step.state import is_pair

# A traced program with its calls inlined, and the programs of single values that are cut out of it.


Value: TypeAlias = jax.Array | np.ndarray
"""What a variable stands for when the program runs."""

# What these primitives call is run in their place, on the same operands.
_INLINED = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", *CHECKPOINTS)


@dataclasses.dataclass(frozen=True)
class FlatProgram:
    """A program without calls.

    - `equations`: in the order in which they were traced.
    - `values`: what is known from the start: arguments, constants, and the literals outside of any call.
        Those are operands, as they are when Python runs the program, so layers that differ in such a number
        alone still have equal programs. Literals inside of a call stay in its equations.
    - `outputs`: its results.
    - `producers`: for each variable that an equation makes, the index of that equation.
    - `template`: the jaxpr that all programs cut out of this one are copies of, but for these fields.
    """

    equations: list[JaxprEqn]
    values: dict[Var, Value]
    outputs: list[Var]
    producers: dict[Var, int]
    template: Jaxpr


def flatten(program: ClosedJaxpr, arguments: Sequence[Value]) -> FlatProgram:
    """`program` on `arguments`, with its calls inlined."""
    equations: list[JaxprEqn] = []
    values: dict[Var, Value] = {}

    def known(value: Value, aval: AbstractValue) -> Var:
        var = Var(aval)
        values[var] = value
        return var

    def lift(atom: Atom) -> Var:
        return known(np.asarray(atom.val, dtype_of(atom)), atom.aval) if isinstance(atom, Literal) else atom

    def inline(jaxpr: Jaxpr, consts: Sequence[Value], operands: Sequence[Atom], outermost: bool) -> list[Atom]:
        env: dict[Var, Atom] = {var: known(value, var.aval) for var, value in zip(jaxpr.constvars, consts)}
        env.update(zip(jaxpr.invars, operands))

        def read(atom: Atom) -> Atom:
            if isinstance(atom, Literal):
                return lift(atom) if outermost else atom
            return env[atom]

        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            if equation.primitive.name == "slice" and set(equation.params["strides"] or (1,)) == {1}:
                # Where it starts is an operand here: keys[0], keys[1], ... are one program.
                starts = [np.asarray(start, np.uint32) for start in equation.params["start_indices"]]
                inputs += [known(start, jax.typeof(start)) for start in starts]
                sizes = {"slice_sizes": shape_of(equation.outvars[0])}
                equation = equation.replace(primitive=jax.lax.dynamic_slice_p, params=sizes)
            called = _called_by(equation)
            if called is None:
                results = [Var(var.aval) for var in equation.outvars]
                equations.append(equation.replace(invars=inputs, outvars=results))
                outputs: list[Atom] = [*results]
            else:
                outputs = inline(*called, inputs, False)
            if outermost:
                outputs = [rounded(atom) for atom in outputs]
            env.update(zip(equation.outvars, outputs))
        return [read(atom) for atom in jaxpr.outvars]

    def rounded(atom: Atom) -> Atom:
        aval = type_of(atom)
        if not jnp.issubdtype(aval.dtype, jnp.floating) or aval.dtype.itemsize >= 4:
            return atom
        # Within one program, XLA computes in more bits than bfloat16 has, and would not round here.
        info = jnp.finfo(aval.dtype)
        rounding = jax.make_jaxpr(lambda x: jax.lax.reduce_precision(x, info.nexp, info.nmant))(aval)
        return inline(rounding.jaxpr, (), [atom], False)[0]

    operands = [known(value, var.aval) for var, value in zip(program.jaxpr.invars, arguments)]
    outputs = [lift(atom) for atom in inline(program.jaxpr, program.consts, operands, True)]
    producers = {var: i for i, equation in enumerate(equations) for var in equation.outvars}
    return FlatProgram(equations, values, outputs, producers, program.jaxpr)


def _called_by(equation: JaxprEqn) -> tuple[Jaxpr, Sequence[Value]] | None:
    """The jaxpr that an equation calls, and its constants."""
    called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if equation.primitive.name not in _INLINED or not isinstance(called, Jaxpr | ClosedJaxpr):
        return None
    if isinstance(called, ClosedJaxpr):
        return called.jaxpr, called.consts
    return None if called.constvars else (called, ())


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The variables among the operands of an equation, each once."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, Literal)))


def cut_out(program: FlatProgram, targets: Sequence[Var], given: Callable[[Var], bool]) -> Jaxpr:
    """The program that makes `targets` out of variables that are `given`: its inputs, in order of first use."""
    needed: set[int] = set()
    stack = [*targets]
    while stack:
        var = stack.pop()
        if not given(var) and program.producers[var] not in needed:
            needed.add(program.producers[var])
            stack += variables(program.equations[program.producers[var]].invars)
    equations = [program.equations[i] for i in sorted(needed)]
    inputs = [v for v in variables(a for e in equations for a in e.invars) if given(v)]
    return program.template.replace(constvars=(), invars=inputs, outvars=[*targets], eqns=equations)


@dataclasses.dataclass(frozen=True)
class Canonical:
    """A jaxpr without constants that equals every other which computes the same, whatever their variables are
    called: by its key."""

    jaxpr: Jaxpr = dataclasses.field(compare=False)
    key: Hashable


def _canonical_key(jaxpr: Jaxpr) -> Hashable:
    numbers: dict[Atom, int] = {}

    def name(atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        return numbers.setdefault(atom, len(numbers))

    inputs = tuple((name(var), var.aval) for var in (*jaxpr.constvars, *jaxpr.invars))
    equations = tuple(
        (
            equation.primitive,
            tuple((field, _frozen(value)) for field, value in sorted(equation.params.items())),
            tuple(name(atom) for atom in equation.invars),
            tuple((name(var), var.aval) for var in equation.outvars),
        )
        for equation in jaxpr.eqns
    )
    return inputs, equations, tuple(name(atom) for atom in jaxpr.outvars)


def _frozen(value: object) -> Hashable:
    """A parameter of an equation as a key. What can be compared in no other way is equal to itself alone: by
    its `id`, which nothing else takes while the jaxpr beside the key keeps it alive."""
    if isinstance(value, ClosedJaxpr):
        return _canonical_key(value.jaxpr), tuple(map(id, value.consts))
    if isinstance(value, Jaxpr):
        return _canonical_key(value)
    if isinstance(value, tuple | list):
        return tuple(_frozen(entry) for entry in value)
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


# The plan of a birth: which values of the traced program are computed where.
#
# Small values (keys, scalars) are computed as they come. What is made of them element by element is computed
# with the leaf's sharding, each shard where it lies. The rest is computed on one device.


# Up to this many elements a value is small.
SMALL = 1024


@dataclasses.dataclass(frozen=True)
class Birth:
    """The making of one array of the model.

    - `leaf`: its variable in the traced program.
    - `way`: `"given"`: it is known once the small values are. `"spread"`: by a program that makes each shard
        where it lies. `"whole"`: by a program on one device.
    - `program`: makes `leaf` of values that are known before, its inputs.
    """

    leaf: Var
    way: str
    program: Jaxpr


def births_of(program: FlatProgram) -> list[Birth]:
    """Plan how each output of `program`, which has no effects, is made."""
    ways = _ways(program)
    return [
        Birth(leaf, ways[leaf], cut_out(program, [leaf], lambda var: ways[var] == "given"))
        for leaf in program.outputs
    ]


def _ways(program: FlatProgram) -> dict[Var, str]:
    """Decide for each value of the program how it would be made, were it a leaf."""
    ways: dict[Var, str] = dict.fromkeys(program.values, "given")
    small = {var for var in program.values if is_small(var)}
    for equation in program.equations:
        inputs = variables(equation.invars)
        drawn = equation.primitive.name == "random_bits" or any(ways[var] == "spread" for var in inputs)
        spreads = _is_elementwise(equation) and all(var in small or ways[var] == "spread" for var in inputs)
        if small.issuperset(inputs) and all(is_small(var) for var in equation.outvars):
            small.update(equation.outvars)
            # What is drawn is fused, however small, to be rounded as in the initialiser's own `jit`.
            way = "spread" if spreads and drawn else "given"
        else:
            way = "spread" if spreads else "whole"
        ways.update(dict.fromkeys(equation.outvars, way))
    return ways


def is_small(var: Var) -> bool:
    """True of a value that is computed as it comes, on one device, unless it is drawn."""
    return is_key(type_of(var)) or math.prod(shape_of(var)) <= SMALL


def _is_elementwise(equation: JaxprEqn) -> bool:
    """True if a shard of the result is made of the same shard of the operands, or of none."""
    name, result = equation.primitive.name, equation.outvars[0]
    if name == "random_bits":
        config: Any = jax.config
        # The bits of a threefry key depend on the key and their place alone.
        threefry = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
        return dtype_of(equation.invars[0]) == threefry.dtype and config.jax_threefry_partitionable
    if name == "reshape":
        before, after = shape_of(equation.invars[0]), shape_of(result)
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
    max_bytes_per_device: int | None = None,
) -> M:
    """`make_model(key)`, born on `mesh` in the layout of `shard_rules`.

    Each array is computed where it lies: a device makes its own shard of it and nothing larger, also of a
    stack of layers (`eqx.filter_vmap` over keys). This holds for the usual initialisers: constants, and draws
    from threefry keys (JAX's default) that are changed element by element (uniform, normal, truncated normal,
    and their scaled forms).

    Other arrays are made whole on one device, one at a time, and then placed; so is a stack of them, all
    layers at once (a list of layers takes less: there each is made for itself). They are: orthogonal matrices
    and other decompositions; sorts and permutations; what is normalised by a sum over the array; a part of a
    larger draw, or what is put together of several (slice, concatenation, reshape, `.at[...].set`); what a loop
    draws (`jax.random.gamma`); draws from keys of other kinds (`rbg`), or with `jax_threefry_partitionable`
    off; and what is computed from a large array outside of `make_model`. If anything in `make_model` has an
    effect (`jax.debug.print`), all of it is made on one device, one operation at a time, and then placed.

    The values do not depend on the mesh. They are those of `make_model(key)` up to the last bit of a fused
    operation: a product and a sum that follow each other may be rounded once instead of twice. Layers that
    are made alike share their compiled programs, so depth does not add to the compilation.

    ```python
    def make_model(key):
        return eqx.nn.MLP(16, 16, 64, depth=1, key=key)

    model = rx.init_model(make_model, rx.make_mesh(fsdp=8), key=jax.random.key(0))
    ```

    **Arguments:**

    - `make_model`: makes the model from a key. Its arrays must not depend on anything outside.
    - `mesh`, `overrides`, `loss_fn`, `batch`, `max_bytes_per_device`: as for `shard_rules`.
    - `key`: a PRNG key.

    **Returns:**

    The model, or what else `make_model` returns (the pair of `eqx.nn.make_with_state`, say).

    **Raises:**

    `ValueError` as `shard_rules` does, before anything is computed.
    """
    check_mesh(mesh)
    if any(map(is_array, jax.tree.leaves(make_model))):  # what `eqx.filter_jit` makes has none
        raise TypeError(
            f"init_model: make_model must be a function of a key, but is a {type(make_model).__name__}. Pass "
            "lambda key: ... that makes the model; one that is made already is placed by "
            "eqx.filter_shard(model, shard_rules(model, mesh))."
        )
    check_function("init_model", "make_model", make_model, "key")
    key = _on_this_process(as_key("init_model", key))
    closed, arrays, static = trace_arrays(make_model, key)
    if is_shared(mesh):  # where each process makes other parts of an array, nothing later would tell
        facts = {
            "key": str(jax.random.key_data(key)),
            "the checksum of make_model's program": program_digest(closed),
        }
        agree(mesh, "init_model", facts)
    abstract = eqx.combine(arrays, static)
    layout = _layout(
        abstract, mesh, overrides, loss_fn=loss_fn, batch=batch, max_bytes_per_device=max_bytes_per_device
    )
    is_made = jax.tree.map(lambda x: isinstance(x, jax.ShapeDtypeStruct), abstract)
    shardings = jax.tree.leaves(eqx.filter(layout, is_made))
    program = flatten(closed, [key])
    _check_apart(arrays, program.outputs)
    if closed.effects:  # in order
        made = [put_global(x, sharding) for x, sharding in zip(jaxpr_as_fun(closed)(key), shardings)]
    else:
        births = births_of(program)
        small = compute_small(program, births)
        made = [make(birth, small, sharding) for birth, sharding in zip(births, shardings)]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), made), static)


def trace_arrays(make_model: Callable[[Key], PyTree], key: Key) -> tuple[ClosedJaxpr, PyTree, PyTree]:
    """The program of `make_model`, its results as abstract arrays, and the rest of what it returns.

    NumPy arrays are of the rest (`eqx.filter_make_jaxpr` counts them among the results): constants, which stay
    as they are.
    """
    rest = []

    def make_arrays(key: Key) -> PyTree[Array]:
        arrays, static = eqx.partition(make_model(key), lambda x: isinstance(x, jax.Array))
        rest.append(static)
        return arrays

    closed, arrays = jax.make_jaxpr(make_arrays, return_shape=True)(key)
    return closed, arrays, rest[-1]


def _layout(abstract: PyTree, mesh: Mesh, overrides: Overrides, **decided_by: Any) -> PyTree:
    """`shard_rules` of a model, or of the pair of one and its state, which every device has whole."""
    if not is_pair(abstract):
        return shard_rules(abstract, mesh, overrides=overrides, **decided_by)
    model, model_state = abstract
    if decided_by["loss_fn"] is None and decided_by["batch"] is None:
        layout = shard_rules(model, mesh, overrides=overrides, **decided_by)
    else:  # a loss takes the pair, whose first is the model
        of_pair = [(f"0.{pattern}", spec) for pattern, spec in overrides]
        layout, _ = shard_rules(abstract, mesh, overrides=of_pair, **decided_by)
    return layout, jax.tree.map(lambda _: replicated(mesh), model_state)


def _check_apart(arrays: PyTree, outputs: Sequence[Var]) -> None:
    """Raises `ValueError` if one array is two leaves."""
    first: dict[Var, str] = {}
    for (path, _), var in zip(leaves_with_paths(arrays), outputs):
        if first.setdefault(var, path) != path:
            raise ValueError(
                f"init_model: {first[var]} and {path} are one and the same array, which would be updated "
                "twice, apart. Tie them by eqx.nn.Shared, or copy one (jnp.copy)."
            )


def _on_this_process(key: Key) -> Key:
    """A copy of `key` on the default device, wherever it lies."""
    if not is_key(key):
        return jnp.asarray(np.array(key))
    data = jnp.asarray(np.array(jax.random.key_data(key)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


@dataclasses.dataclass(frozen=True)
class Small:
    """The small values that leaves are made of: as JAX made them, and on the host (of a key, its data)."""

    values: dict[Var, Value]
    host: dict[Var, Value]


def compute_small(program: FlatProgram, births: Sequence[Birth]) -> Small:
    """Computes what the programs of the leaves take, and the leaves that are given."""
    inputs = list(dict.fromkeys(var for birth in births for var in birth.program.invars))
    given = [birth.leaf for birth in births if birth.way == "given"]
    made = [var for var in dict.fromkeys([*inputs, *given]) if var not in program.values]
    jaxpr = cut_out(program, made, program.values.__contains__)
    results = jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*[program.values[var] for var in jaxpr.invars])
    values = {**program.values, **dict(zip(made, results))}
    # One transfer for all. Programs take NumPy arrays: those are the same for every process, and lie nowhere.
    fetched = [var for var in inputs if is_small(var)]
    data = [jax.random.key_data(values[var]) if is_key(type_of(var)) else values[var] for var in fetched]
    return Small(values, {**values, **dict(zip(fetched, jax.device_get(data)))})


def make(birth: Birth, small: Small, sharding: NamedSharding) -> Array:
    """The array of one leaf, in its place."""
    if birth.way == "given":
        return put_global(small.values[birth.leaf], sharding)
    value = compiled(birth, small, sharding)(*operands(birth, small))
    if birth.way == "spread":
        return value
    # Waited for, or the next would be made, whole, beside this one.
    return jax.block_until_ready(put_global(value, sharding))


def operands(birth: Birth, small: Small) -> list[Value]:
    """The arguments of the program of an array."""
    return [small.host[var] for var in birth.program.invars]


def compiled(birth: Birth, small: Small, sharding: NamedSharding) -> Callable[..., Array]:
    """The program of a leaf under `jit`, the same for all leaves whose programs and shardings are equal."""
    program = birth.program
    impls = [jax.random.key_impl(small.values[x]) if is_key(type_of(x)) else None for x in program.invars]
    out_sharding = sharding if birth.way == "spread" else None
    return _jit(Canonical(program, _canonical_key(program)), out_sharding, tuple(impls))


@functools.lru_cache(maxsize=128)
def _jit(
    program: Canonical, sharding: NamedSharding | None, impls: tuple[Hashable, ...]
) -> Callable[..., Array]:
    """A program of NumPy arrays; where there is a PRNG implementation, the array is the data of its key."""

    def wrap(x: Array, impl: Hashable) -> Array:
        return x if impl is None else jax.random.wrap_key_data(x, impl=impl)

    def run(*operands: Array) -> Array:
        return jaxpr_as_fun(ClosedJaxpr(program.jaxpr, ()))(*map(wrap, operands, impls))[0]

    return jax.jit(run, out_shardings=sharding)
