"""`init_model`: each array is made where it lies, with the values of `make_model(key)`, on any mesh."""

import math
import pathlib
import re
from typing import Any

import births
import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_two_processes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_eqx import _birth as making
from redco_eqx import init_model, make_mesh, shard_rules, to_arrays
from redco_eqx._base.tree import leaves_with_paths
from redco_eqx.models._families.registry import FAMILIES, PARTS

KEY = jax.random.key(7)


def plan(make: Any, mesh: Any, overrides: Any = ()) -> list[Any]:
    """For each leaf its path, how it is made, its sharding, and its compiled program if it has one."""
    closed, arrays, static = making.trace_arrays(make, KEY)
    shardings = dict(leaves_with_paths(shard_rules(eqx.combine(arrays, static), mesh, overrides=overrides)))
    made, values = making.births_of(closed, KEY)
    planned = []
    for (path, _), birth in zip(leaves_with_paths(arrays), made, strict=True):
        compiled = None
        if birth.way != "given":
            run: Any = making.compiled(birth, shardings[path])
            compiled = run.lower(*[values[var] for var in birth.program.invars]).compile()
        planned.append((path, birth, shardings[path], compiled))
    return planned


def largest(compiled: Any) -> int:
    """The number of elements of the largest array in a compiled program."""
    shapes = re.findall(r"\b(?:pred|bf16|[suf]\d+)\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(int(n) for n in shape.split(",")) for shape in shapes)


def to_rounding(x: Any, y: Any, path: Any = "") -> None:
    """Equal up to last bits of the largest: of a product and a sum rounded once, or another order of a sum."""
    assert (x.shape, x.dtype) == (y.shape, y.dtype), path
    x, y = helpers.host(x), helpers.host(y)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        np.testing.assert_array_equal(x, y, err_msg=path)
    elif x.size:
        x, y = x.astype(np.float64), y.astype(np.float64)
        atol = 4 * float(jnp.finfo(jnp.float32).eps) * np.abs(y).max()
        np.testing.assert_allclose(x, y, rtol=0, atol=atol, err_msg=path)


# Where it is computed


@pytest.mark.parametrize("name", births.SPREAD)
def test_a_device_makes_its_own_shard_and_nothing_larger(name):
    split = 0
    for path, birth, sharding, compiled in plan(births.SPREAD[name], make_mesh(tensor=4, fsdp=2)):
        shape = birth.leaf.aval.shape
        if math.prod(shape) <= making.SMALL:
            continue
        assert birth.way == "spread", path
        shard = math.prod(sharding.shard_shape(shape))
        # A draw of many is made of a few, of 32 bits, each as large as the shard.
        assert largest(compiled) <= shard, path
        assert compiled.memory_analysis().temp_size_in_bytes <= 16 * shard + 4096, path
        assert not re.search(r"all-|collective-|reduce-scatter", compiled.as_text()), path
        split += shard < math.prod(shape)
    assert split > 0


@pytest.mark.parametrize("name", [*FAMILIES, *PARTS])
def test_every_family_is_made_shard_by_shard(name):
    """At its default sizes, its layers stacked where it has layers; only traced."""
    config, model = {**FAMILIES, **PARTS}[name]
    is_stacked = name in FAMILIES
    closed, _, _ = making.trace_arrays(lambda key: model(config(), stacked=is_stacked, key=key), KEY)
    made, _ = making.births_of(closed, KEY)
    assert {birth.way for birth in made if not making.is_small(birth.leaf)} == {"spread"}


def test_the_measure_sees_what_is_whole():
    make, mesh = births.OTHERS["orthogonal"], make_mesh(tensor=8)
    ((_, _, sharding, _),) = plan(make, mesh, [("*", P("tensor"))])
    assert largest(jax.jit(make, out_shardings=sharding).lower(KEY).compile()) >= 64 * 64


@pytest.mark.parametrize("name", births.OTHERS)
def test_other_arrays_are_made_whole(name):
    make, mesh = births.OTHERS[name], make_mesh(tensor=4, fsdp=2)
    ((path, birth, sharding, _),) = plan(make, mesh)
    assert birth.way == "whole"
    born, model = init_model(make, mesh, key=KEY), make(KEY)
    assert born.sharding.is_equivalent_to(sharding, born.ndim)
    to_rounding(born, model, path)


def test_threefry_that_is_not_partitionable_is_drawn_whole():
    with jax.threefry_partitionable(False):
        make = births.SPREAD["embedding"]
        ((_, birth, _, _),) = plan(make, make_mesh(tensor=8))
        assert birth.way == "whole"
        helpers.assert_identical(init_model(make, make_mesh(tensor=8), key=KEY), make(KEY))


# What is computed


@pytest.mark.parametrize(
    "meshes", [("tensor8", "2x2x2"), pytest.param(("data8", "fsdp8"), marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", [*births.SPREAD, *births.OTHERS])
def test_values_are_those_of_make_model_on_every_mesh(name, meshes):
    make = {**births.SPREAD, **births.OTHERS}[name]
    born = to_arrays({"": init_model(make, helpers.mesh_of("one"), key=KEY)})
    for path, x in to_arrays({"": make(KEY)}).items():
        to_rounding(born[path], x, path)
    for mesh in meshes:
        again = to_arrays({"": init_model(make, helpers.mesh_of(mesh), key=KEY)})
        helpers.assert_identical(again, born)


class Odd(eqx.Module):
    """Leaves of other origins."""

    weight: Any
    copied: Any
    outside: Any
    scaled: Any
    table: Any
    large: Any
    shared: Any
    keys: Any
    callback: Any

    def __init__(self, key: Any):
        self.weight = jax.random.normal(key, (64, 64))
        self.copied = jnp.copy(self.weight)
        self.outside = OUTSIDE
        self.scaled = 2 * OUTSIDE
        self.table = np.linspace(0, 1, 5, dtype=np.float32)
        self.large = jnp.asarray(np.linspace(0, 1, 2048, dtype=np.float32))
        embedding = eqx.nn.Embedding(64, 64, key=key)
        head = eqx.nn.Linear(64, 64, use_bias=False, key=key)
        self.shared = eqx.nn.Shared((embedding, head), lambda x: x[1].weight, lambda x: x[0].weight)
        self.keys = jax.random.split(key, 3)
        shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        self.callback = jax.pure_callback(lambda: np.eye(64, dtype=np.float32), shape)


OUTSIDE = jnp.linspace(0, 1, 4096).reshape(64, 64)


@pytest.mark.parametrize("name", ["one", "2x2x2"])
def test_leaves_of_other_origins(name):
    born, model = init_model(Odd, helpers.mesh_of(name), key=KEY), Odd(KEY)
    helpers.assert_identical(to_arrays(born), to_arrays(model))
    assert isinstance(born.table, np.ndarray)
    assert len(jax.tree.leaves(born.shared)) == len(jax.tree.leaves(model.shared))
    assert born.shared()[1].weight is born.shared()[0].weight


def test_a_key_that_is_not_typed():
    key, make = jax.random.PRNGKey(0), births.SPREAD["embedding"]
    helpers.assert_identical(init_model(make, helpers.mesh_of("2x2x2"), key=key), make(key))


def test_a_key_that_lies_on_the_mesh():
    mesh, make = helpers.mesh_of("2x2x2"), births.SPREAD["embedding"]
    key = jax.device_put(KEY, NamedSharding(mesh, P()))
    helpers.assert_identical(init_model(make, mesh, key=key), make(KEY))


def test_a_model_with_state():
    make = eqx.nn.make_with_state(lambda key: eqx.nn.BatchNorm(2048, "batch", mode="ema"))
    born, model = init_model(make, helpers.mesh_of("tensor8"), key=KEY), make(KEY)
    for x, y in zip(born, model):
        helpers.assert_identical(to_arrays(x), to_arrays(y))


def test_effects_keep_their_order():
    said: list[int] = []

    def make(key: Any) -> list[Any]:
        layers = []
        for i, layer_key in enumerate(jax.random.split(key, 3)):
            layers.append(births.SPREAD["embedding"](layer_key))
            jax.debug.callback(lambda i=i: said.append(i), ordered=True)
        return layers

    mesh = helpers.mesh_of("2x2x2")
    born = init_model(make, mesh, key=KEY)
    jax.effects_barrier()
    assert said == [0, 1, 2]
    for x, y in zip(born, make(KEY)):
        to_rounding(x.weight, y.weight)
        assert not x.weight.sharding.is_fully_replicated


# How often it is compiled


class Deep(eqx.Module):
    """Layers that differ in their keys and in a number."""

    layers: list[Any]

    def __init__(self, depth: int, key: Any):
        self.layers = []
        for i, layer_key in enumerate(jax.random.split(key, depth)):
            linear = eqx.nn.Linear(40, 2048, key=layer_key)
            weight = births.orthogonal(jax.random.fold_in(key, i), (40, 40)) / math.sqrt(2 + i)
            key = jax.random.split(key, 3)[1]
            self.layers.append((linear, weight, 0.02 / (i + 1) * jax.random.normal(key, (40, 40))))


def test_compilations_do_not_grow_with_depth():
    counts = []
    for depth in (5, 64):
        jax.clear_caches()
        making._jit.cache_clear()
        with helpers.count_compilations() as compiled:
            init_model(lambda key, depth=depth: Deep(depth, key), helpers.mesh_of("2x2x2"), key=KEY)
        counts.append(len(compiled))
    assert counts[0] == counts[1]


def test_a_jitted_constructor_is_made_array_by_array():
    """As one that is not: its body would otherwise be compiled once for each of its arrays."""
    mesh, counts = helpers.mesh_of("2x2x2"), []
    for make in (births.Block, eqx.filter_jit(births.Block)):
        jax.clear_caches()
        making._jit.cache_clear()
        with helpers.count_compilations() as compiled:
            init_model(lambda key, make=make: make(key=key), mesh, key=KEY)
        counts.append(len(compiled))
    assert counts[1] <= counts[0]


def test_a_second_model_compiles_nothing():
    mesh = helpers.mesh_of("2x2x2")
    init_model(lambda key: births.Block(key=key), mesh, key=jax.random.key(0))
    with helpers.count_compilations() as compiled:
        init_model(lambda key: births.Block(key=key), mesh, key=jax.random.key(1))
    assert compiled == []


# Several processes


def test_two_processes(tmp_path):
    run_two_processes(pathlib.Path(__file__).with_name("_two_process_birth.py"), tmp_path)
