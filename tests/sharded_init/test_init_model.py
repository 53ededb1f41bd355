"""`init_model`: each array is made where it lies, with the values of `make_model(key)`,
on any mesh."""

import math
import pathlib
import re
from typing import Any

import equinox as eqx
import helpers
import initializers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import assert_identical, compilations, host
from hosts import harness

from redco_eqx import _sharded_init as sharded_init
from redco_eqx import init_model, make_mesh, shard_rules, to_arrays
from redco_eqx._base.tree import leaves_with_paths

# Most models here are arrays without layers, about which the path rules only guess.
pytestmark = pytest.mark.filterwarnings("ignore:shard_rules. names and shapes do not")

KEY = jax.random.key(7)


def plan(make: Any, mesh: Any) -> tuple[list[tuple[str, Any, jax.NamedSharding]], Any]:
    """For each leaf its path, how it is made, and its sharding; and the values that the
    programs read."""
    closed, arrays, static = sharded_init.trace_arrays(make, KEY)
    shardings = dict(leaves_with_paths(shard_rules(eqx.combine(arrays, static), mesh)))
    made, values = sharded_init.initializers_of(closed, KEY)
    paths = [path for path, _ in leaves_with_paths(arrays)]
    return [
        (path, initializer, shardings[path])
        for path, initializer in zip(paths, made, strict=True)
    ], values


def largest(compiled: Any) -> int:
    """The number of elements of the largest array in a compiled program."""
    shapes = re.findall(r"\b(?:pred|bf16|[suf]\d+)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(int(n) for n in shape.split(",")) for shape in shapes)


def to_rounding(x: Any, y: Any, path: Any = "") -> None:
    """Equal up to last bits of the largest: of a product and a sum rounded once, or
    another order of a sum."""
    assert (x.shape, x.dtype) == (y.shape, y.dtype), path
    x, y = host(x), host(y)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        np.testing.assert_array_equal(x, y, err_msg=path)
    elif x.size:
        x, y = x.astype(np.float64), y.astype(np.float64)
        atol = 4 * float(jnp.finfo(jnp.float32).eps) * np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=path)


# Where it is computed, and what


@pytest.mark.parametrize("name", initializers.SPREAD)
def test_a_device_makes_its_own_shard_and_nothing_larger(name):
    split = 0
    planned, values = plan(initializers.SPREAD[name], make_mesh(tensor=4, fsdp=2))
    for path, initializer, sharding in planned:
        shape = initializer.leaf.aval.shape
        if math.prod(shape) <= sharded_init.SMALL:
            continue
        assert initializer.way == "spread", path
        run: Any = sharded_init.compiled(initializer, sharding)
        compiled = run.lower(
            *[values[var] for var in initializer.program.invars]
        ).compile()
        shard = math.prod(sharding.shard_shape(shape))
        # A draw of many is made of a few, of 32 bits, each as large as the shard.
        assert largest(compiled) <= shard, path
        assert compiled.memory_analysis().temp_size_in_bytes <= 16 * shard + 4096, path
        assert not re.search(r"all-|collective-|reduce-scatter", compiled.as_text()), (
            path
        )
        split += shard < math.prod(shape)
    assert split > 0


def test_the_measure_sees_what_is_whole():
    sharding = jax.NamedSharding(make_mesh(tensor=8), jax.P("tensor"))
    whole = jax.jit(
        lambda key: initializers.orthogonal(key, (64, 64)), out_shardings=sharding
    )
    assert largest(whole.lower(KEY).compile()) >= 64 * 64


def test_other_arrays_are_made_whole():
    for name, make in initializers.OTHERS.items():
        ((_, initializer, _),), _ = plan(make, make_mesh(tensor=4, fsdp=2))
        assert initializer.way == "whole", name
    with jax.threefry_partitionable(False):
        ((_, initializer, _),), _ = plan(
            initializers.SPREAD["embedding"], make_mesh(tensor=8)
        )
        assert initializer.way == "whole"


@pytest.mark.parametrize(
    "make", [initializers.everything, initializers.SPREAD["jitted"]]
)
def test_values_are_those_of_make_model_on_every_mesh(make):
    born = to_arrays(init_model(make, helpers.mesh_of("one"), key=KEY))
    for path, x in to_arrays(make(KEY)).items():
        to_rounding(born[path], x, path)
    mesh = helpers.mesh_of("2x2x2")
    again = init_model(make, mesh, key=KEY)
    assert_identical(to_arrays(again), born)
    layout = dict(leaves_with_paths(shard_rules(again, mesh)))
    for path, x in to_arrays(again).items():
        assert x.sharding.is_equivalent_to(layout[path], x.ndim), path


OUTSIDE = jnp.linspace(0, 1, 4096).reshape(64, 64)


def odd(key: Any) -> dict[str, Any]:
    """Leaves of other origins."""
    weight = jax.random.normal(key, (64, 64))
    both = (
        eqx.nn.Embedding(64, 64, key=key),
        eqx.nn.Linear(64, 64, use_bias=False, key=key),
    )
    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    return {
        "weight": weight,
        "copied": jnp.copy(weight),
        "outside": OUTSIDE,
        "scaled": 2 * OUTSIDE,
        "table": np.linspace(0, 1, 5, dtype=np.float32),
        "large": jnp.asarray(np.linspace(0, 1, 2048, dtype=np.float32)),
        "shared": eqx.nn.Shared(both, lambda x: x[1].weight, lambda x: x[0].weight),
        "keys": jax.random.split(key, 3),
        "callback": jax.pure_callback(lambda: np.eye(64, dtype=np.float32), shape),
    }


def test_leaves_of_other_origins_and_keys_that_are_not_typed_or_lie_on_the_mesh():
    mesh = helpers.mesh_of("2x2x2")
    there = jax.device_put(KEY, jax.NamedSharding(mesh, jax.P()))
    for key, typed in (
        (KEY, KEY),
        (there, KEY),
        (jax.random.PRNGKey(0), jax.random.key(0)),
    ):
        born = init_model(odd, mesh, key=key)
        model = odd(typed)
        assert_identical(to_arrays(born), to_arrays(model))
    assert isinstance(born["table"], np.ndarray)
    assert len(jax.tree.leaves(born["shared"])) == len(jax.tree.leaves(model["shared"]))
    assert born["shared"]()[1].weight is born["shared"]()[0].weight


def test_effects_keep_their_order():
    said: list[int] = []

    def make(key: Any) -> list[Any]:
        layers = []
        for i, layer_key in enumerate(jax.random.split(key, 3)):
            layers.append(initializers.SPREAD["embedding"](layer_key))
            jax.debug.callback(lambda i=i: said.append(i), ordered=True)
        return layers

    born = init_model(make, helpers.mesh_of("2x2x2"), key=KEY)
    jax.effects_barrier()
    assert said == [0, 1, 2]
    for x, y in zip(born, make(KEY)):
        to_rounding(x.weight, y.weight)
        assert not x.weight.sharding.is_fully_replicated


# How often it is compiled


def make_deep(depth: int, key: Any) -> list[Any]:
    """Layers that differ in their keys and in a number."""
    layers = []
    for i, layer_key in enumerate(jax.random.split(key, depth)):
        linear = eqx.nn.Linear(40, 2048, key=layer_key)
        weight = initializers.normalised(jax.random.fold_in(key, i)) / math.sqrt(2 + i)
        key = jax.random.split(key, 3)[1]
        layers.append(
            (linear, weight, 0.02 / (i + 1) * jax.random.normal(key, (40, 40)))
        )
    return layers


def test_compilations_grow_neither_with_depth_nor_by_a_jit_nor_by_a_second_model():
    """Without care, the body of a jitted constructor would be compiled once for each of
    its arrays."""
    mesh = helpers.mesh_of("2x2x2")

    def count(make: Any, *keys: Any) -> int:
        jax.clear_caches()
        sharded_init._jit.cache_clear()
        with compilations() as compiled:
            for key in keys:
                init_model(make, mesh, key=key)
        return len(compiled)

    once = count(lambda key: make_deep(5, key), KEY)
    assert count(lambda key: make_deep(9, key), KEY) == once
    assert count(lambda key: make_deep(5, key), KEY, jax.random.key(1)) == once
    jitted, plain = (
        count(lambda key, make=make: make(key=key), KEY)
        for make in (initializers.JITTED, initializers.block)
    )
    assert jitted <= plain


# Several processes


def test_two_processes(tmp_path):
    program = pathlib.Path(initializers.__file__)
    processes = harness.start_loopback(
        tmp_path, program=program, num_devices=2, JAX_ENABLE_X64=0
    )
    assert processes.leave(120)[0] == [0, 0], processes.text()
