"""Sharded birth of a model: of its traced program, what makes a leaf is compiled with the leaf's sharding."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PyTree

from redco_eqx._birth.flat import (
    Canonical,
    FlatProgram,
    Value,
    cut_out,
    flatten,
    run_jaxpr,
    run_stepwise,
    variables,
)
from redco_eqx._birth.unstack import draws_by_counter, one_layer, stack_layers
from redco_eqx._distributed.agreement import agree, is_shared
from redco_eqx._jaxprs.program import program_digest
from redco_eqx._jaxprs.read import ELEMENTWISE, is_key, shape_of, type_of
from redco_eqx._sharding.mesh import check_mesh, in_own_context, put_global, replicated
from redco_eqx._sharding.rules import Overrides, shard_rules
from redco_eqx._step.state import is_pair
from redco_eqx._tree import is_array, leaves_with_paths
from redco_eqx._types import Key, as_key, check_function

# The plan of a birth: which values of the traced program are computed where.
#
# Small values (keys, scalars) are computed as they come. What is made of them element by element is computed
# with the leaf's sharding, each shard where it lies. The rest is computed on one device.


# Up to this many elements a value is small.
SMALL = 1024

Way: TypeAlias = Literal["given", "spread", "whole", "layers"]


@dataclasses.dataclass(frozen=True)
class Birth:
    """How one leaf is made.

    - `way`: `"given"`: it is known once the small values are. `"spread"`: by a program that makes each shard
        where it lies. `"whole"`: by a program on one device. `"layers"`: by such a program for each layer.
    - `program`: makes `leaf`, or one layer of it, of a shape `(1, ...)`.
    - `inputs`: the variables that it takes; all of them are known before.
    - `per_layer`: for each input, whether it has an entry for each layer, of which the program takes one.
    """

    leaf: Var
    way: Way
    program: Jaxpr
    inputs: list[Var]
    per_layer: list[bool]


def plan(program: FlatProgram) -> list[Birth]:
    """How each output of `program`, which has no effects, is made."""
    ways = _ways(program)
    births = []
    for leaf in program.outputs:
        cut = cut_out(program, leaf, lambda var: ways[var] == "given")
        birth = Birth(leaf, ways[leaf], cut, cut.invars, [False] * len(cut.invars))
        layer = one_layer(cut) if birth.way == "whole" else None
        if layer is not None:
            birth = dataclasses.replace(birth, way="layers", program=layer[0], per_layer=layer[1])
        births.append(birth)
    return births


def _ways(program: FlatProgram) -> dict[Var, Way]:
    """How each value of the program is to be made, were it a leaf."""
    ways: dict[Var, Way] = dict.fromkeys(program.values, "given")
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
    """Whether a value is computed as it comes, on one device, unless it is drawn."""
    return is_key(var) or math.prod(shape_of(var)) <= SMALL


def _is_elementwise(equation: JaxprEqn) -> bool:
    """Whether a shard of the result is made of the same shard of the operands, or of none."""
    name, result = equation.primitive.name, equation.outvars[0]
    if name == "random_bits":
        config: Any = jax.config
        return draws_by_counter(equation) and config.jax_threefry_partitionable
    if name == "reshape":
        before, after = shape_of(equation.invars[0]), shape_of(result)
        return [n for n in before if n != 1] == [n for n in after if n != 1]
    moves = ("broadcast_in_dim", "iota", "squeeze", "transpose")
    return (name in ELEMENTWISE or name in moves) and not is_key(result)


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

    Other arrays are made whole on one device, one at a time, and then placed; a stack, one layer at a time.
    They are: orthogonal matrices and other decompositions; sorts and permutations; what is normalised by a sum
    over the array; a part of a larger draw, or what is put together of several (slice, concatenation,
    reshape, `.at[...].set`); what a loop draws (`jax.random.gamma`); draws from keys of other kinds (`rbg`), or
    with `jax_threefry_partitionable` off; and what is computed from a large array outside of `make_model`. Of
    these, a stack is made whole, too, where its layers cannot be told apart: it is one draw (from one key for
    all layers; or from `rbg` keys, which JAX draws together under `vmap`), or made by a loop or `.at[...].set`.
    If anything in `make_model` has an effect (`jax.debug.print`), all of it is run one operation at a time.

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
    key = as_key("init_model", key)
    decided_by: dict[str, Any] = {
        "loss_fn": loss_fn,
        "batch": batch,
        "max_bytes_per_device": max_bytes_per_device,
    }
    traced = trace(make_model, mesh, key=key, overrides=overrides, **decided_by)
    if any(equation.effects for equation in traced.program.equations):
        arrays = _one_by_one(traced)  # in order
    else:
        births = plan(traced.program)
        small = compute_small(traced.program, births)
        arrays = [make(birth, small, sharding) for birth, sharding in zip(births, traced.shardings)]
    return eqx.combine(jax.tree.unflatten(traced.treedef, arrays), traced.static)


@dataclasses.dataclass(frozen=True)
class Traced:
    """What `make_model` computes, where each of its arrays is to lie, and the rest of the model."""

    program: FlatProgram
    paths: list[str]
    shardings: list[NamedSharding]
    treedef: Any
    static: PyTree


def trace(
    make_model: Callable[[Key], PyTree],
    mesh: Mesh,
    *,
    key: Key,
    overrides: Overrides = (),
    loss_fn: Callable[..., Any] | None = None,
    batch: PyTree = None,
    max_bytes_per_device: int | None = None,
) -> Traced:
    """Traces `make_model` and asks the rules. Raises `ValueError` if one array is two leaves."""
    statics = []

    def make_arrays(key: Key) -> list[Array]:
        made = make_model(key)
        dynamic, static = eqx.partition(made, lambda x: isinstance(x, jax.Array))
        statics.append((jax.tree.structure(dynamic), static))
        return jax.tree.leaves(dynamic)

    key = _on_this_process(key)
    closed = jax.make_jaxpr(make_arrays)(key)
    if is_shared(mesh):  # where each process makes other parts of an array, nothing later would tell
        facts = {
            "key": str(jax.random.key_data(key)),
            "the checksum of make_model's program": program_digest(closed),
        }
        agree(mesh, "init_model", facts)
    treedef, static = statics[-1]
    program = flatten(closed, [key])
    paths = [path for path, _ in leaves_with_paths(jax.tree.unflatten(treedef, range(treedef.num_leaves)))]
    first: dict[Var, str] = {}
    for path, var in zip(paths, program.outputs):
        if first.setdefault(var, path) != path:
            raise ValueError(
                f"init_model: {first[var]} and {path} are one and the same array, which would be updated "
                "twice, apart. Tie them by eqx.nn.Shared, or copy one (jnp.copy)."
            )
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in closed.out_avals]
    abstract = eqx.combine(jax.tree.unflatten(treedef, abstract), static)
    decided_by: dict[str, Any] = {
        "loss_fn": loss_fn,
        "batch": batch,
        "max_bytes_per_device": max_bytes_per_device,
    }
    if not is_pair(abstract):
        layout = shard_rules(abstract, mesh, overrides=overrides, **decided_by)
    else:
        model, model_state = abstract
        if loss_fn is None and batch is None:
            layout = shard_rules(model, mesh, overrides=overrides)
        else:  # a loss takes the pair, whose first is the model
            of_pair = [(f"0.{pattern}", spec) for pattern, spec in overrides]
            layout, _ = shard_rules(abstract, mesh, overrides=of_pair, **decided_by)
        layout = (layout, jax.tree.map(lambda _: replicated(mesh), model_state))
    # NumPy constants are not part of the program: they stay as they are.
    layout = eqx.filter(layout, jax.tree.map(lambda x: isinstance(x, jax.ShapeDtypeStruct), abstract))
    return Traced(program, paths, jax.tree.leaves(layout), treedef, static)


def _on_this_process(key: Key) -> Key:
    """A copy of `key` on the default device, wherever it lies."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
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
    inputs = list(dict.fromkeys(var for birth in births for var in birth.inputs))
    given = [birth.leaf for birth in births if birth.way == "given"]
    values: dict[Var, Value] = {}
    run_stepwise(program, [*inputs, *given], values.__setitem__)
    # One transfer for all. Programs take NumPy arrays: those are the same for every process, and lie nowhere.
    fetched = [var for var in inputs if is_small(var)]
    data = [jax.random.key_data(values[var]) if is_key(var) else values[var] for var in fetched]
    return Small(values, {**values, **dict(zip(fetched, jax.device_get(data)))})


def make(birth: Birth, small: Small, sharding: NamedSharding) -> Array:
    """The array of one leaf, in its place."""
    if birth.way == "given":
        return put_global(small.values[birth.leaf], sharding)
    run = compiled(birth, small, sharding)
    if birth.way == "spread":
        return run(*operands(birth, small))
    if birth.way == "whole":
        value = put_global(run(*operands(birth, small)), sharding)
    else:
        aval = type_of(birth.leaf)
        layers = (run(*operands(birth, small, layer)) for layer in range(aval.shape[0]))
        value = stack_layers(layers, aval.shape, aval.dtype, sharding)
    return jax.block_until_ready(value)  # or the next would be made, whole, beside this one


def operands(birth: Birth, small: Small, layer: int = 0) -> list[Value]:
    """What the program of a leaf takes; for this layer, if it makes one."""
    values = [small.host[var] for var in birth.inputs]
    return [x[layer : layer + 1] if split else x for x, split in zip(values, birth.per_layer)]


def compiled(birth: Birth, small: Small, sharding: NamedSharding) -> Callable[..., Array]:
    """The program of a leaf under `jit`, the same for all leaves whose programs and shardings are equal."""
    impls = [jax.random.key_impl(small.values[var]) if is_key(var) else None for var in birth.inputs]
    return _jit(Canonical(birth.program), sharding if birth.way == "spread" else None, tuple(impls))


@functools.lru_cache(maxsize=128)
def _jit(
    program: Canonical, sharding: NamedSharding | None, impls: tuple[Hashable, ...]
) -> Callable[..., Array]:
    """A program of NumPy arrays; where there is a PRNG implementation, the array is the data of its key."""

    def wrap(x: Array, impl: Hashable) -> Array:
        return x if impl is None else jax.random.wrap_key_data(x, impl=impl)

    def run(*operands: Array) -> Array:
        return run_jaxpr(program.jaxpr, [wrap(x, impl) for x, impl in zip(operands, impls)])[0]

    return jax.jit(run, out_shardings=sharding)


def _one_by_one(traced: Traced) -> list[Array]:
    """The arrays, of a program that is run one equation at a time, each placed as soon as it is computed."""
    shardings = dict(zip(traced.program.outputs, traced.shardings))
    arrays: dict[Var, Array] = {}

    def place(var: Var, value: Value) -> None:
        arrays[var] = put_global(value, shardings[var])

    run_stepwise(traced.program, traced.program.outputs, place)
    return [arrays[var] for var in traced.program.outputs]
