"""`TrainState`, `init_state`, `init_model`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from redco_eqx import TrainState, batch_sharding, init_model, init_state, make_mesh, shard_rules, to_arrays
from redco_eqx._sharding.mesh import replicated
from redco_eqx._step.optimizer import check_optimizer
from redco_eqx._step.state import EVALUATE, ORDER, PREDICT, TRAIN, stream

KEY = jax.random.key(0)
ADAM = optax.adam(1e-3)


class Mixed(eqx.Module):
    """Leaves of every kind."""

    layers: list[eqx.nn.Linear]
    scale: Any
    table: Any
    count: Any
    seed: Any
    activation: Callable[[Any], Any]
    rate: float
    missing: None = None

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.layers = [eqx.nn.Linear(64, 128, key=keys[0]), eqx.nn.Linear(128, 64, key=keys[1])]
        self.scale = jnp.full((3,), 0.5, jnp.bfloat16)
        self.table = np.linspace(0, 1, 5, dtype=np.float32)
        self.count = jnp.arange(4)
        self.seed = keys[2]
        self.activation = lambda x: x**2
        self.rate = 0.5


FLOATING = ["layers.0.bias", "layers.0.weight", "layers.1.bias", "layers.1.weight", "scale"]


def donate(state: TrainState) -> TrainState:
    """A step that takes the buffers over."""

    def step(state):
        params = jax.tree.map(lambda x: x + 1, state.params)
        return dataclasses.replace(state, params=params, step=state.step + 1)

    return jax.block_until_ready(jax.jit(step, donate_argnums=0)(state))


class Tied(eqx.Module):
    """Two leaves, to be tied or not."""

    embedding: Any
    head: Any


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(tensor=2, fsdp=2)


# What the state is made of.


def test_every_leaf_of_a_state_is_an_array():
    state = init_state(Mixed(KEY), ADAM, key=KEY)
    assert len(jax.tree.leaves(state)) > 10
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    hash(jax.tree.structure(state))


def test_the_arrays_of_the_model_are_shared_out_by_path():
    model = Mixed(KEY)
    state = init_state(model, ADAM, key=KEY)
    assert sorted(state.params) == FLOATING
    assert sorted(state.frozen) == ["count", "seed", "table"]
    assert state.model_state == {}
    helpers.assert_identical({**state.params, **state.frozen}, to_arrays(model))
    helpers.assert_identical(state.key, KEY)
    assert state.step.dtype == jnp.int32
    assert state.step == 0


def test_the_model_comes_back():
    model = Mixed(KEY)
    state = init_state(model, ADAM, key=KEY)
    assert jax.tree.structure(state.model) == jax.tree.structure(model)
    helpers.assert_identical(to_arrays(state.model), to_arrays(model))
    assert state.model.activation is model.activation
    assert state.model.rate == 0.5


def test_the_optimizer_starts_as_plain_optax_starts_it():
    model = Mixed(KEY)
    state = init_state(model, ADAM, key=KEY)
    helpers.assert_identical(
        jax.tree.leaves(state.opt_state),
        jax.tree.leaves(ADAM.init({path: x for path, x in to_arrays(model).items() if path in FLOATING})),
    )


def test_without_an_optimizer_there_is_no_optimizer_state():
    state = init_state(Mixed(KEY), key=KEY)
    assert state.opt_state == ()
    assert sorted(state.params) == FLOATING


def test_no_leaf_has_a_weak_type():
    # A weak type is gone after the first update, and the step would compile again for it.
    state = init_state({"a": jnp.asarray(1.0), "b": jnp.full((2,), 2.0)}, ADAM, key=KEY)
    weak = [path for path, x in jax.tree_util.tree_leaves_with_path(state) if jax.typeof(x).weak_type]
    assert weak == []


# What is trained.


def trained(model: Any, trainable: Any) -> list[str]:
    state = init_state(model, ADAM, key=KEY, trainable=trainable)
    assert sorted({**state.params, **state.frozen}) == sorted(to_arrays(model))
    assert not set(state.params) & set(state.frozen)
    return sorted(state.params)


def test_a_tree_of_booleans_chooses():
    model = Mixed(KEY)
    nothing = jax.tree.map(lambda _: False, model)
    spec = eqx.tree_at(lambda m: (m.layers[1].weight, m.scale), nothing, (True, True))
    assert trained(model, spec) == ["layers.1.weight", "scale"]


def test_a_prefix_of_booleans_chooses():
    model = {"body": eqx.nn.Linear(2, 2, key=KEY), "head": eqx.nn.Linear(2, 2, key=KEY)}
    assert trained(model, {"body": False, "head": True}) == ["head.bias", "head.weight"]


def test_a_function_chooses():
    def matrices(x):
        return eqx.is_array(x) and x.ndim == 2

    assert trained(Mixed(KEY), matrices) == ["layers.0.weight", "layers.1.weight"]


@pytest.mark.parametrize(
    "trainable",
    [True, eqx.is_array, eqx.is_array_like, lambda x: True],
    ids=["true", "is_array", "is_array_like", "function"],
)
def test_numpy_tables_integers_and_keys_are_never_trained(trainable):
    assert trained(Mixed(KEY), trainable) == FLOATING


def test_the_optimizer_sees_only_what_is_trained():
    model = Mixed(KEY)
    spec = eqx.tree_at(lambda m: m.layers[0].weight, jax.tree.map(lambda _: False, model), True)
    state = init_state(model, ADAM, key=KEY, trainable=spec)
    assert {x.shape for x in jax.tree.leaves(state.opt_state)} == {(), (128, 64)}


# Where it lies.


@pytest.mark.parametrize("name", helpers.MESHES)
def test_everything_lies_on_the_mesh_of_the_model(name):
    mesh = helpers.mesh_of(name)
    model, shardings = helpers.place(Mixed(KEY), mesh)
    state = init_state(model, ADAM, key=KEY)
    wanted = to_arrays_of_shardings(shardings)
    assert name == "one" or name == "data8" or any(not s.is_fully_replicated for s in wanted.values())
    arrays: Any = {**state.params, **state.frozen}
    for path, x in arrays.items():
        assert x.sharding.mesh == mesh, path
        assert x.sharding.is_equivalent_to(wanted[path], x.ndim), path
    for x in (state.key, state.step):
        assert x.is_fully_replicated
        assert x.devices() == set(mesh.devices.flat)
    moments = state.opt_state[0]
    for path, x in state.params.items():
        assert moments.mu[path].sharding.is_equivalent_to(x.sharding, x.ndim), path
        assert moments.nu[path].sharding.is_equivalent_to(x.sharding, x.ndim), path
    assert moments.count.devices() == set(mesh.devices.flat)


def to_arrays_of_shardings(shardings: Any) -> dict[str, Any]:
    pairs = jax.tree_util.tree_leaves_with_path(shardings)
    return {jax.tree_util.keystr(path, simple=True, separator="."): s for path, s in pairs}


def test_a_model_that_was_never_placed_stays_on_its_device():
    device = jax.devices()[3]
    state = init_state(jax.device_put(eqx.filter(Mixed(KEY), eqx.is_array), device), ADAM, key=KEY)
    for x in jax.tree.leaves(state):
        assert x.devices() == {device}
        assert isinstance(x.sharding, NamedSharding)


def test_numpy_leaves_are_replicated(mesh):
    model = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, P("tensor"))), "table": np.ones(3)}
    state = init_state(model, key=KEY)
    assert state.frozen["table"].sharding.is_equivalent_to(replicated(mesh), 1)
    assert state.params["w"].sharding == NamedSharding(mesh, P("tensor"))


@pytest.mark.xfail(reason="eqx.filter_shard makes JAX arrays of NumPy tables; only init_model keeps them")
def test_numpy_tables_are_not_trained_once_they_are_placed(mesh):
    model = Mixed(KEY)
    placed = eqx.filter_shard(model, shard_rules(model, mesh))
    assert sorted(init_state(placed, ADAM, key=KEY).params) == FLOATING


def test_the_sharding_of_the_key_does_not_matter(mesh):
    model = helpers.place(Mixed(KEY), mesh)[0]
    elsewhere = jax.device_put(KEY, jax.devices()[5])
    helpers.assert_identical(init_state(model, key=elsewhere).key, KEY)


# Abstract, and under transformations.


def make_plain(key: Any) -> Mixed:
    # Without its NumPy table, which `eqx.filter_eval_shape` would not tell from an array of JAX.
    return eqx.tree_at(lambda m: m.table, Mixed(key), jnp.arange(5))


OPTIMIZERS = {
    "adam": ADAM,
    "none": None,
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "inject": optax.inject_hyperparams(optax.adamw)(1e-3),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["one", "2x2x2"])
def test_the_abstract_state_is_the_shape_of_the_concrete_one(name, optimizer):
    mesh = helpers.mesh_of(name)
    chosen = OPTIMIZERS[optimizer]
    abstract = eqx.filter_eval_shape(make_plain, KEY)
    shardings = shard_rules(abstract, mesh)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) if hasattr(x, "shape") else x,
        abstract,
        shardings,
    )
    found = init_state(abstract, chosen, key=KEY)
    state = init_state(helpers.place(make_plain(KEY), mesh)[0], chosen, key=KEY)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(state), strict=True)
    for (path, x), y in pairs:
        assert isinstance(x, jax.ShapeDtypeStruct), path
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        assert x.sharding is not None, path
        assert x.sharding.is_equivalent_to(y.sharding, y.ndim), path
    # The model's lambda was made twice.
    assert jax.tree.structure(found) == jax.tree.structure(state)


def test_an_abstract_state_without_a_mesh():
    found = init_state(eqx.filter_eval_shape(make_plain, KEY), ADAM, key=KEY)
    state = init_state(make_plain(KEY), ADAM, key=KEY)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_init_state_under_vmap_is_an_ensemble():
    keys = jax.random.split(KEY, 3)

    def make(key):
        model = {"linear": eqx.nn.Linear(4, 8, key=key), "table": np.ones(2), "f": jnp.tanh}
        return init_state(model, ADAM, key=key)

    ensemble = eqx.filter_vmap(make)(keys)
    assert isinstance(ensemble, TrainState)
    assert all(isinstance(x, jax.Array) and x.shape[0] == 3 for x in jax.tree.leaves(ensemble))
    alone = [make(key) for key in keys]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *alone)
    helpers.assert_close(ensemble, stacked, rtol=1e-6)


@pytest.mark.parametrize("transform", ["jit", "eval_shape"])
def test_init_state_under_a_trace(transform):
    def make(key):
        return init_state(Mixed(key), ADAM, key=key)

    state = make(KEY)
    found = jax.jit(make)(KEY) if transform == "jit" else jax.eval_shape(make, KEY)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    if transform == "jit":
        helpers.assert_close(found, state, rtol=1e-6)


def test_a_concrete_model_with_a_traced_key():
    model = Mixed(KEY)
    state = jax.jit(lambda key: init_state(model, ADAM, key=key))(jax.random.key(3))
    helpers.assert_identical(state, init_state(model, ADAM, key=jax.random.key(3)))


def build_odd(kind: str, seed: int) -> Any:
    """A model with something in it that Python compares by identity."""
    keys = jax.random.split(jax.random.key(seed))
    linear = eqx.nn.Linear(4, 8, key=keys[0])
    if kind == "lambda":
        return eqx.nn.Sequential([linear, eqx.nn.Lambda(lambda x: x**2)])
    if kind == "partial":
        return eqx.nn.Sequential(
            [linear, eqx.nn.Lambda(functools.partial(jax.nn.leaky_relu, negative_slope=0.2))]
        )
    assert kind == "shared"
    pair = (eqx.nn.Embedding(8, 4, key=keys[1]), linear)
    return eqx.nn.Shared(pair, where=lambda p: p[1].weight, get=lambda p: p[0].weight)


@pytest.mark.parametrize("kind", ["lambda", "partial", "shared"])
def test_states_of_models_built_alike_can_be_mapped_over_together(kind):
    states = [init_state(build_odd(kind, seed), ADAM, key=KEY) for seed in range(2)]
    total = jax.tree.map(lambda x, y: x if x.dtype == KEY.dtype else x + y, *states)
    path = next(iter(states[0].params))
    np.testing.assert_array_equal(total.params[path], states[0].params[path] + states[1].params[path])


@pytest.mark.parametrize("kind", ["lambda", "partial", "shared"])
def test_states_of_models_built_alike_share_a_compiled_function(kind):
    states = [init_state(build_odd(kind, seed), ADAM, key=KEY) for seed in range(2)]
    f = jax.jit(lambda state: state.step + 1)
    with helpers.count_compilations() as compiled:
        for state in states:
            f(state)
    assert len(compiled) == 1


# Models with state.


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norms: list[eqx.nn.BatchNorm]

    def __init__(self, key: Any):
        self.linear = eqx.nn.Linear(4, 4, key=key)
        self.norms = [eqx.nn.BatchNorm(4, "batch", mode="ema") for _ in range(2)]


def test_a_pair_of_model_and_state(mesh):
    model, model_state = eqx.nn.make_with_state(Normed)(KEY)
    values = to_arrays(model_state)
    state = init_state((helpers.place(model, mesh)[0], model_state), ADAM, key=KEY)
    assert list(state.model_state) == [
        f"norms.{i}.{name}"
        for i in range(2)
        for name in ("ema_first_time_index", "ema_state_index.0", "ema_state_index.1")
    ]
    helpers.assert_identical(state.model_state, values)
    assert "norms.0.weight" in state.params
    assert not set(state.model_state) & {*state.params, *state.frozen}
    # Running statistics are floating, and yet are not trained.
    paths = {
        entry.key for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state[0].mu) for entry in path
    }
    assert paths == set(state.params)
    for x in state.model_state.values():
        assert x.devices() == set(mesh.devices.flat)
        assert x.is_fully_replicated
    found_model, found_state = state.model
    assert isinstance(found_state, eqx.nn.State)
    helpers.assert_identical(to_arrays(found_model), to_arrays(model))
    helpers.assert_identical(to_arrays(found_state), values)


# What is refused.


def test_one_array_in_two_leaves_is_refused_by_both_names():
    weight = jnp.ones((4, 4))
    with pytest.raises(ValueError, match=r"embedding and head are one and the same array") as error:
        init_state(Tied(weight, weight), ADAM, key=KEY)
    assert "eqx.nn.Shared" in str(error.value)


@pytest.mark.parametrize(("devices", "source"), [(1, 0), (8, 0), (8, 5)])
def test_one_buffer_behind_two_arrays_is_refused(devices, source):
    # Two arrays, but on one device one memory: donating both ends the process.
    sharding = replicated(make_mesh(data=devices))
    weight = jax.device_put(jnp.ones((4, 4)), jax.devices()[source])
    model = Tied(jax.device_put(weight, sharding), jax.device_put(weight, sharding))
    assert model.embedding is not model.head
    first, second = (
        {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
        for x in (model.embedding, model.head)
    )
    assert first & second
    with pytest.raises(ValueError, match=r"embedding and head"):
        init_state(model, ADAM, key=KEY)


@pytest.mark.parametrize("spec", [P(), P("tensor")], ids=str)
@pytest.mark.parametrize("name", ["one", "tensor8"])
def test_a_tied_model_is_refused_when_it_is_born_too(name, spec):
    # Split arrays are copies: nothing would tell later that they were tied.
    def make_tied(key):
        weight = jax.random.normal(key, (8, 8))
        return Tied(weight, weight)

    def start():
        born = init_model(make_tied, helpers.mesh_of(name), key=KEY, overrides=[("*", spec)])
        return init_state(born, ADAM, key=KEY)

    with pytest.raises(ValueError, match=r"embedding and head") as error:
        start()
    assert "eqx.nn.Shared" in str(error.value)


def test_one_array_in_model_and_state_is_refused():
    model, model_state = eqx.nn.make_with_state(Normed)(KEY)
    mean = to_arrays(model_state)["norms.0.ema_state_index.0"]
    model = eqx.tree_at(lambda m: m.linear.bias, model, mean)
    with pytest.raises(ValueError, match=r"linear\.bias and norms\.0\.ema_state_index\.0"):
        init_state((model, model_state), ADAM, key=KEY)


def test_equal_arrays_and_shared_constants_are_taken():
    table = np.ones((4, 4), np.float32)
    model = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4)), "c": table, "d": table, "e": jnp.ones((0,))}
    donate(init_state(model, ADAM, key=jax.random.key(1)))
    np.testing.assert_array_equal(table, 1)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_an_array_in_a_static_field_is_refused_by_path():
    class Bad(eqx.Module):
        weight: Any
        table: Any = eqx.field(static=True)

    with pytest.raises(ValueError, match=r"layers\.0\.table is a static field that holds an array"):
        init_state({"layers": [Bad(jnp.ones(2), np.ones(2))]}, ADAM, key=KEY)
    with pytest.raises(ValueError, match=r"layers\.0\.table is a static field of type list"):
        init_state({"layers": [Bad(jnp.ones(2), [1])]}, ADAM, key=KEY)


def test_two_meshes_are_refused_by_path(mesh):
    model = {
        "a": jax.device_put(jnp.ones(8), replicated(mesh)),
        "b": jax.device_put(jnp.ones(8), replicated(make_mesh())),
    }
    with pytest.raises(ValueError, match=r"a lies on a mesh of 8.*, but b on a mesh of 8") as error:
        init_state(model, ADAM, key=KEY)
    assert "eqx.filter_shard" in str(error.value)


def test_a_mesh_and_a_single_device_are_refused_by_path(mesh):
    model = {"a": jax.device_put(jnp.ones(8), replicated(mesh)), "b": jnp.ones(8)}
    with pytest.raises(ValueError, match=r"a lies on a mesh of 8 devices.*, but b on \S+0") as error:
        init_state(model, ADAM, key=KEY)
    assert "eqx.filter_shard" in str(error.value)


def test_two_single_devices_are_refused():
    model = {"a": jnp.ones(8), "b": jax.device_put(jnp.ones(8), jax.devices()[1])}
    with pytest.raises(ValueError, match=r"a lies on \S+0, but b on \S+1"):
        init_state(model, ADAM, key=KEY)


def test_deleted_arrays_are_refused_by_path():
    model = {"a": jnp.ones(8), "b": jnp.ones(8)}
    jax.jit(lambda x: x + 1, donate_argnums=0)(model["b"])
    with pytest.raises(ValueError, match="init_state: b has been deleted"):
        init_state(model, ADAM, key=KEY)


def test_the_state_takes_the_arrays_of_the_model():
    model = {"a": jnp.ones(8)}
    donate(init_state(model, ADAM, key=jax.random.key(1)))
    with pytest.raises(ValueError, match=r"a has been deleted\. It was donated"):
        init_state(model, ADAM, key=KEY)


@pytest.mark.parametrize("devices", [1, 8])
def test_the_key_is_not_taken_over(devices):
    # It is what the caller goes on with: `batches(..., key=key)`.
    key = jax.random.key(1)
    model = jax.device_put({"a": jnp.ones(8)}, replicated(make_mesh(data=devices)))
    state = donate(init_state(model, ADAM, key=key))
    helpers.assert_identical(jax.random.fold_in(key, 0), jax.random.fold_in(state.key, 0))


def test_nothing_to_train_is_refused():
    model = {"table": np.ones(3), "count": jnp.arange(2)}
    with pytest.raises(ValueError, match="none of the 2 arrays of the model is trainable"):
        init_state(model, ADAM, key=KEY)
    assert init_state(model, key=KEY).params == {}


def test_two_leaves_of_one_path_are_refused():
    with pytest.raises(ValueError, match=r"two leaves have the path 'a\.b'"):
        init_state({"a": {"b": jnp.ones(1)}, "a.b": jnp.zeros(1)}, ADAM, key=KEY)


def test_a_legacy_key_is_taken():
    state = init_state({"a": jnp.ones(1)}, key=jax.random.PRNGKey(7))
    assert state.key.dtype == KEY.dtype
    helpers.assert_identical(state.key, jax.random.key(7))


@pytest.mark.parametrize("key", [jnp.ones(2), np.zeros(2, np.uint32)], ids=["floats", "numpy"])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(Exception, match="key"):
        init_state({"a": jnp.ones(1)}, key=key)


@pytest.mark.parametrize(
    "key", [jax.random.split(KEY), jax.random.split(jax.random.PRNGKey(0))], ids=["typed", "raw"]
)
def test_several_keys_are_refused(key):
    with pytest.raises(Exception, match="key"):
        init_state({"a": jnp.ones(1)}, key=key)


# The optimizer that fits.


def test_the_optimizer_of_the_state_fits():
    for optimizer in (ADAM, optax.adam(5.0), optax.chain(optax.scale_by_adam(), optax.scale(-1.0))):
        check_optimizer("fit", init_state(Mixed(KEY), ADAM, key=KEY), optimizer)


@pytest.mark.parametrize(
    "other", [optax.sgd(0.1, momentum=0.9), optax.adam(1e-3, mu_dtype=jnp.bfloat16), optax.chain(ADAM, ADAM)]
)
def test_another_optimizer_is_refused_by_path(other):
    state = init_state(Mixed(KEY), ADAM, key=KEY)
    with pytest.raises(ValueError, match=r"at opt_state\.\S+ it keeps .*, but the state holds"):
        check_optimizer("fit", state, other)


# Streams of randomness.


def test_no_two_streams_or_steps_share_a_key():
    state = init_state({"a": jnp.ones(1)}, key=KEY)
    seen = set()
    for tag in (TRAIN, EVALUATE, PREDICT, ORDER):
        for step in range(20):
            at = dataclasses.replace(state, step=jnp.int32(step))
            seen.add(helpers.host(stream(at, tag)).tobytes())
    assert len(seen) == 80
    assert helpers.host(KEY).tobytes() not in seen


# Sharded birth.


class Typed(eqx.Module):
    """Leaves of many dtypes and origins."""

    constants: Any
    outside: Any
    given: Any
    keys: Any
    orthogonal: Any
    normal: Any
    computed: Any

    def __init__(self, key: Any):
        keys = jax.random.split(key, 4)
        self.constants = [
            jnp.zeros(()),
            jnp.ones((), jnp.bfloat16),
            jnp.asarray(3, jnp.int8),
            jnp.asarray(True),
            jnp.zeros((2, 3), jnp.float16),
            jnp.float32(0.1),
        ]
        self.outside = OUTSIDE
        self.given = key
        self.keys = keys
        self.orthogonal = jax.nn.initializers.orthogonal()(keys[0], (3, 3))
        self.normal = 0.02 * jax.random.normal(keys[1], (64, 64), jnp.bfloat16)
        self.computed = jnp.sum(self.normal, axis=0)


OUTSIDE = jnp.arange(3.0)
MAKERS: dict[str, Callable[[Any], Any]] = {"mixed": Mixed, "typed": Typed}  # more: tests/birth


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("maker", MAKERS)
def test_a_model_is_born_with_the_same_values_in_the_layout_of_the_rules(maker, mesh):
    make = MAKERS[maker]
    model = make(KEY)
    born = init_model(make, mesh, key=KEY)
    helpers.assert_identical(to_arrays(born), to_arrays(model))
    wanted = to_arrays_of_shardings(shard_rules(model, mesh))
    for path, x in to_arrays(born).items():
        if isinstance(to_arrays(model)[path], np.ndarray):
            assert isinstance(x, np.ndarray), path  # a constant stays one
        else:
            assert x.sharding.is_equivalent_to(wanted[path], x.ndim), path
            assert x.sharding.mesh == mesh, path
    if maker == "mixed":
        assert sum(not s.is_fully_replicated for s in wanted.values()) >= 2


def test_overrides_decide_at_birth(mesh):
    born = init_model(Mixed, mesh, key=KEY, overrides=[("layers.0.weight", P("fsdp", "tensor"))])
    wanted = NamedSharding(mesh, P("fsdp", "tensor"))
    assert born.layers[0].weight.sharding.is_equivalent_to(wanted, 2)


def test_a_model_with_state_is_born_as_a_pair(mesh):
    make = eqx.nn.make_with_state(Normed)
    born, born_state = init_model(make, mesh, key=KEY)
    model, model_state = make(KEY)
    helpers.assert_identical(to_arrays(born), to_arrays(model))
    helpers.assert_identical(to_arrays(born_state), to_arrays(model_state))
    for x in jax.tree.leaves(eqx.filter((born, born_state), eqx.is_array)):
        assert x.sharding.mesh == mesh
    state = init_state((born, born_state), ADAM, key=KEY)
    assert len(state.model_state) == 6


def test_a_model_born_can_be_trained_and_donated(mesh):
    state = donate(init_state(init_model(Mixed, mesh, key=KEY), ADAM, key=jax.random.key(1)))
    expected = to_arrays(Mixed(KEY))["layers.0.bias"] + 1
    helpers.assert_close(state.params["layers.0.bias"], expected, rtol=1e-6)


def test_a_bad_layout_is_refused_before_anything_is_computed(mesh):
    computed = []

    def make(key):
        def compute():
            computed.append(True)
            return np.zeros((8, 8), np.float32)

        return {"w": jax.pure_callback(compute, jax.ShapeDtypeStruct((8, 8), jnp.float32))}

    with pytest.raises(ValueError, match="matches no array"):
        init_model(make, mesh, key=KEY, overrides=[("nothing", P())])
    explicit = jax.make_mesh((8,), ("data",))
    with pytest.raises(ValueError, match="AxisType"):
        init_model(make, explicit, key=KEY)
    assert computed == []
    init_model(make, mesh, key=KEY)
    assert computed == [True]


def test_never_more_than_one_leaf_is_unsharded(mesh):
    """Each leaf is made by a callback, which looks how many others are whole on one device."""
    shape = (64, 256)
    layout = batch_sharding(mesh)
    found: list[int] = []

    def compute():
        whole = [x for x in jax.live_arrays() if x.shape == shape and len(x.devices()) == 1]
        found.append(len(whole))
        return np.zeros(shape, np.float32)

    def make(key):
        return [jax.pure_callback(compute, jax.ShapeDtypeStruct(shape, jnp.float32)) for _ in range(6)]

    born = init_model(make, mesh, key=KEY, overrides=[("*", layout.spec)])
    assert len(found) == 6
    assert max(found) == 0  # besides the one that is being made
    assert all(x.sharding.is_equivalent_to(layout, 2) for x in born)
    # The measure does see what is whole.
    del born
    made = make(KEY)
    jax.block_until_ready(made)
    assert max(found) >= 4
