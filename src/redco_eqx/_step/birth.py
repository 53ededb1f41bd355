"""`init_model`: a model that is born on its mesh."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from redco_eqx._sharding.mesh import put, replicated
from redco_eqx._sharding.rules import Overrides, shard_rules
from redco_eqx._step.state import is_pair
from redco_eqx._tree import leaves_with_paths
from redco_eqx._types import Key

M = TypeVar("M")


def init_model(make_model: Callable[[Key], M], mesh: Mesh, *, key: Key, overrides: Overrides = ()) -> M:
    """`make_model(key)`, born on `mesh` in the layout of `shard_rules`.

    The initialisation is run one operation at a time and each array is placed as soon as it is there, so
    no more than one is unsharded at any moment, and the values are those of `make_model(key)`.

    **Arguments:**

    - `make_model`: makes the model from a key. Its arrays must not depend on anything outside.
    - `mesh`, `overrides`: as for `shard_rules`.
    - `key`: a PRNG key.

    **Returns:**

    The model, or what else `make_model` returns (the pair of `eqx.nn.make_with_state`, say).

    **Raises:**

    `ValueError` as `shard_rules` does, before anything is computed.
    """
    statics = []

    def make_arrays(key: Key) -> list[Any]:
        made = make_model(key)
        dynamic, static = eqx.partition(made, lambda x: isinstance(x, jax.Array))
        statics.append((jax.tree.structure(dynamic), static))
        return jax.tree.leaves(dynamic)

    program = jax.make_jaxpr(make_arrays)(key)
    treedef, static = statics[-1]
    paths = [path for path, _ in leaves_with_paths(jax.tree.unflatten(treedef, range(treedef.num_leaves)))]
    first: dict[Any, str] = {}
    for path, var in zip(paths, program.jaxpr.outvars):
        if not isinstance(var, jex_core.Literal) and first.setdefault(var, path) != path:
            raise ValueError(
                f"init_model: {first[var]} and {path} are one and the same array, which would be updated "
                "twice, apart. Tie them by eqx.nn.Shared, or copy one (jnp.copy)."
            )
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in program.out_avals]
    abstract = eqx.combine(jax.tree.unflatten(treedef, abstract), static)
    if is_pair(abstract):
        model, model_state = abstract
        layout = shard_rules(model, mesh, overrides=overrides)
        layout = (layout, jax.tree.map(lambda _: replicated(mesh), model_state))
    else:
        layout = shard_rules(abstract, mesh, overrides=overrides)
    # NumPy constants are not part of the program: they stay as they are.
    layout = eqx.filter(layout, jax.tree.map(lambda x: isinstance(x, jax.ShapeDtypeStruct), abstract))
    arrays = _evaluate(program, key, jax.tree.leaves(layout))
    return eqx.combine(jax.tree.unflatten(treedef, arrays), static)


def _evaluate(program: Any, key: Key, shardings: list[NamedSharding]) -> list[Array]:
    """The outputs of a traced program, each placed as soon as it is computed; the rest is dropped early."""
    jaxpr = program.jaxpr
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, program.consts))
    env[jaxpr.invars[0]] = key
    last_use = {var: i for i, equation in enumerate(jaxpr.eqns) for var in _variables(equation.invars)}
    results: list[Any] = [None] * len(shardings)

    def keep(var: Any, value: Any) -> None:
        for index, output in enumerate(jaxpr.outvars):
            if output is var:
                results[index] = put(value, shardings[index])

    for var, value in env.items():
        keep(var, value)
    for index, output in enumerate(jaxpr.outvars):
        if isinstance(output, jex_core.Literal):
            results[index] = put(jnp.asarray(output.val), shardings[index])
    for i, equation in enumerate(jaxpr.eqns):
        variables = list(dict.fromkeys(_variables(equation.invars)))
        single = jaxpr.replace(
            constvars=(), invars=variables, outvars=equation.outvars, eqns=[equation], effects=equation.effects
        )
        run = jex_core.jaxpr_as_fun(jex_core.ClosedJaxpr(single, ()))
        values = run(*(env[var] for var in variables))
        for var, value in zip(equation.outvars, values):
            keep(var, value)
            if var in last_use:
                env[var] = value
        for var in variables:
            if last_use[var] == i:
                del env[var]
        values = value = None  # or the last array would live on, whole, while the next is made
    return results


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]
