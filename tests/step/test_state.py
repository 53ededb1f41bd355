"""`TrainState`, `init_state`, and `init_model`."""

import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import Normed, assert_identical, counting_step, paired, raised
from helpers import (
    KEY,
    assert_close,
    assert_same_layout,
    by_path,
    place,
)
from jax.sharding import NamedSharding, PartitionSpec

from redco_eqx import (
    TrainState,
    init_model,
    init_state,
    make_mesh,
    shard_rules,
    to_arrays,
)
from redco_eqx._sharding.mesh import replicated

ADAM = optax.adam(1e-3)


class Mixed(eqx.Module):
    """Leaves of every kind."""

    layers: list[eqx.nn.Linear]
    scale: Any
    table: Any
    count: Any
    seed: Any
    activation: Any
    rate: float
    missing: None = None

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Linear(64, 128, key=keys[0]),
            eqx.nn.Linear(128, 64, key=keys[1]),
        ]
        self.scale = jnp.full((3,), 0.5, jnp.bfloat16)
        self.table = np.linspace(0, 1, 5, dtype=np.float32)
        self.count = jnp.arange(4)
        self.seed = keys[2]
        self.activation = jnp.square
        self.rate = 0.5


MIXED = Mixed(KEY)
FLOATING = [
    "layers.0.bias",
    "layers.0.weight",
    "layers.1.bias",
    "layers.1.weight",
    "scale",
]


def donate(state: TrainState) -> TrainState:
    """A step that takes the buffers over."""
    step = jax.jit(counting_step, donate_argnums=0)
    return jax.block_until_ready(step(state, {"weight": jnp.zeros(1)})[0])


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(tensor=2, fsdp=2)


# What the state is made of.


def test_the_arrays_of_the_model_are_shared_out_by_path_and_come_back():
    state = init_state(MIXED, ADAM, key=KEY)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert (sorted(state.params), sorted(state.frozen)) == (
        FLOATING,
        ["count", "seed", "table"],
    )
    assert state.model_state == {}
    assert_identical({**state.params, **state.frozen}, to_arrays(MIXED))
    assert_identical(state.key, KEY)
    assert (state.step, state.step.dtype) == (0, jnp.int32)

    assert jax.tree.structure(state.model) == jax.tree.structure(MIXED)
    assert_identical(to_arrays(state.model), to_arrays(MIXED))
    assert (state.model.activation, state.model.rate) == (MIXED.activation, 0.5)

    plain = ADAM.init(
        {path: x for path, x in to_arrays(MIXED).items() if path in FLOATING}
    )
    assert_identical(jax.tree.leaves(state.opt_state), jax.tree.leaves(plain))
    without = init_state(MIXED, key=KEY)
    assert (without.opt_state, sorted(without.params)) == ((), FLOATING)
    # A weak type would be gone after the first update, and the step would compile again
    # for it.
    state = init_state({"a": jnp.asarray(1.0), "b": jnp.full((2,), 2.0)}, ADAM, key=KEY)
    assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(state))


def test_what_is_trained():
    nothing = jax.tree.map(lambda _: False, MIXED)
    spec = eqx.tree_at(lambda m: (m.layers[1].weight, m.scale), nothing, (True, True))
    pair = {"body": eqx.nn.Linear(2, 2, key=KEY), "head": eqx.nn.Linear(2, 2, key=KEY)}
    cases: list[tuple[Any, Any, list[str]]] = [
        (MIXED, spec, ["layers.1.weight", "scale"]),
        (pair, {"body": False, "head": True}, ["head.bias", "head.weight"]),
        (
            MIXED,
            lambda x: eqx.is_array(x) and x.ndim == 2,
            ["layers.0.weight", "layers.1.weight"],
        ),
        # NumPy tables, integers, keys and quantised weights are never trained.
        ({"a": jnp.ones(2), "b": jnp.ones(2, jnp.float8_e4m3fn)}, True, ["a"]),
        (MIXED, True, FLOATING),
        (MIXED, eqx.is_array_like, FLOATING),
    ]
    for model, trainable, expected in cases:
        state = init_state(
            model, optax.sgd(0.1, momentum=0.9), key=KEY, trainable=trainable
        )
        assert sorted(state.params) == expected
        assert sorted([*state.params, *state.frozen]) == sorted(to_arrays(model))
        assert len(jax.tree.leaves(state.opt_state)) == len(expected)


# Where it lies.


def test_everything_lies_on_the_mesh_of_the_model(mesh):
    model, shardings = place(MIXED, mesh)
    state = init_state(model, ADAM, key=jax.device_put(KEY, jax.devices()[5]))
    assert repr(state).startswith(f"TrainState({len(FLOATING)} parameters of ")
    wanted = by_path(shardings)
    assert sum(not s.is_fully_replicated for s in wanted.values()) >= 2
    arrays: Any = {**state.params, **state.frozen}
    for path, x in arrays.items():
        assert x.sharding.mesh == mesh, path
        assert x.sharding.is_equivalent_to(wanted[path], x.ndim), path
    moments = state.opt_state[0]
    for x in (state.key, state.step, moments.count, state.frozen["table"]):
        assert x.is_fully_replicated
        assert x.devices() == set(mesh.devices.flat)
    for of_params in (moments.mu, moments.nu):
        assert_same_layout(of_params, state.params)
    assert_identical(state.key, KEY)


def test_a_model_that_was_never_placed_stays_on_its_device():
    device = jax.devices()[3]
    state = init_state(
        jax.device_put(eqx.filter(MIXED, eqx.is_array), device), ADAM, key=KEY
    )
    for x in jax.tree.leaves(state):
        assert x.devices() == {device}
        assert isinstance(x.sharding, jax.NamedSharding)


# Abstract, and under transformations.


def make_plain(key: Any) -> Mixed:
    # Without its NumPy table, which `eqx.filter_eval_shape` would not tell from an
    # array of JAX.
    return eqx.tree_at(lambda m: m.table, Mixed(key), jnp.arange(5))


def test_the_abstract_state_is_the_shape_of_the_concrete_one(mesh):
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=16)
    abstract = eqx.filter_eval_shape(make_plain, KEY)
    shardings = shard_rules(abstract, mesh)

    placed = jax.tree.map(
        lambda x, s: x.update(sharding=s) if hasattr(x, "shape") else x,
        abstract,
        shardings,
    )
    state = init_state(place(make_plain(KEY), mesh)[0], optimizer, key=KEY)
    for model in (abstract, placed):
        found = init_state(model, optimizer, key=KEY)
        for path, x, y in paired(found, state):
            assert isinstance(x, jax.ShapeDtypeStruct), path
            assert (x.shape, x.dtype) == (y.shape, y.dtype), path
            assert model is abstract or x.sharding is not None, path
            assert x.sharding is None or x.sharding.is_equivalent_to(
                y.sharding, y.ndim
            ), path
        assert jax.tree.structure(found) == jax.tree.structure(state)


def test_a_callback_that_runs_meanwhile_is_waited_for():
    """It needs Python's lock, and an array of the model waits for it."""
    mesh = make_mesh(tensor=4)
    step = jax.jit(
        lambda x: (jax.debug.callback(lambda _: time.sleep(0.2), x.mean()), 2 * x)[1]
    )
    model = [
        step(
            jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("data")))
        )
    ]
    state = init_state(eqx.filter_shard(model, shard_rules(model, mesh)), key=KEY)
    np.testing.assert_array_equal(state.params["0"], 2 * np.ones((8, 8)))


def test_init_state_under_transformations():
    def make(key):
        model = {
            "w": jax.random.normal(key, (2, 4)),
            "table": np.ones(2),
            "f": jnp.tanh,
        }
        return init_state(model, ADAM, key=key)

    keys = jax.random.split(KEY, 3)
    alone = [make(key) for key in keys]
    traced = jax.jit(make)(keys[0])
    assert jax.tree.structure(traced) == jax.tree.structure(alone[0])
    assert_close(traced, alone[0], rtol=1e-6)
    ensemble = eqx.filter_vmap(make)(keys)
    assert isinstance(ensemble, TrainState)
    assert_close(ensemble, jax.tree.map(lambda *xs: jnp.stack(xs), *alone), rtol=1e-6)


# Models with state.


def test_a_pair_of_model_and_state(mesh):
    make = eqx.nn.make_with_state(Normed)
    model, model_state = make(KEY)
    values = to_arrays(model_state)
    pair: Any = init_model(make, mesh, key=KEY)
    assert_identical(to_arrays(pair), to_arrays((model, model_state)))
    state = init_state(pair, ADAM, key=KEY)
    names = [
        "norm.ema_first_time_index",
        "norm.ema_state_index.0",
        "norm.ema_state_index.1",
    ]
    assert list(state.model_state) == names
    assert_identical(state.model_state, values)
    assert "norm.weight" in state.params
    # Running statistics are floating, and yet are not trained.
    assert not set(state.model_state) & {*state.params, *state.frozen}
    assert set(state.opt_state[0].mu) == set(state.params)
    for x in state.model_state.values():
        assert x.devices() == set(mesh.devices.flat)
        assert x.is_fully_replicated
    assert isinstance(state.model[1], eqx.nn.State)
    assert_identical(to_arrays(state.model), to_arrays((model, model_state)))

    shared = eqx.tree_at(lambda m: m.linear.bias, model, values[names[1]])
    with pytest.raises(ValueError, match=r"linear\.bias and norm\.ema_state_index\.0"):
        init_state((shared, model_state), ADAM, key=KEY)


# What is refused.


def place_twice(num_devices: int, source: int) -> dict[str, Any]:
    """Two arrays, but on device `source` one memory: donating both ends the process."""
    sharding = replicated(make_mesh(data=num_devices))
    weight = jax.device_put(jnp.ones((4, 4)), jax.devices()[source])
    return {name: jax.device_put(weight, sharding) for name in ("embedding", "head")}


def test_one_array_in_two_leaves_is_refused_by_both_names():
    tied = dict.fromkeys(("embedding", "head"), jnp.ones((4, 4)))
    for model in (tied, place_twice(1, 0), place_twice(8, 5)):
        message = r"embedding and head are one and the same array.*eqx\.nn\.Shared"
        raised(ValueError, init_state, model, ADAM, key=KEY, match=message)
    # Split arrays are copies: nothing would tell later that they were tied.
    for spec in (jax.P(), jax.P("tensor")):
        with pytest.raises(ValueError, match=r"embedding and head"):
            init_model(
                lambda key: tied, make_mesh(tensor=2), key=KEY, overrides=[("*", spec)]
            )
    table = np.ones((4, 4), np.float32)
    equal = {
        "a": jnp.ones((4, 4)),
        "b": jnp.ones((4, 4)),
        "c": table,
        "d": table,
        "e": jnp.ones((0,)),
    }
    donate(init_state(equal, ADAM, key=jax.random.key(1)))
    np.testing.assert_array_equal(table, 1)


def on_two(first: Any, second: Any) -> dict[str, Any]:
    return {
        "a": jax.device_put(jnp.ones(8), first),
        "b": jax.device_put(jnp.ones(8), second),
    }


def with_a_deleted_array() -> dict[str, Any]:
    model = on_two(jax.devices()[0], jax.devices()[0])
    model["b"].delete()
    return model


# Makes a model, of a mesh; and the message.
UNTRAINABLE: dict[str, tuple[Any, str]] = {
    "on_two_meshes": (
        lambda mesh: on_two(replicated(mesh), replicated(make_mesh())),
        r"a lies on a mesh of 8.*, but b on a mesh of 8.*eqx\.filter_shard",
    ),
    "on_a_mesh_and_a_device": (
        lambda mesh: on_two(replicated(mesh), jax.devices()[0]),
        r"a lies on a mesh of 8 devices.*, but b on \S+0",
    ),
    "on_two_devices": (
        lambda mesh: on_two(*jax.devices()[:2]),
        r"a lies on \S+0, but b on \S+1",
    ),
    "deleted": (lambda mesh: with_a_deleted_array(), "init_state: b has been deleted"),
    "text": (
        lambda mesh: {"a": jnp.ones(1), "b": np.array(["x"])},
        r"b is <U1\[1\].*static field",
    ),
    "too_large_for_32_bits": (
        lambda mesh: {"a": jnp.ones(1), "b": np.array([2**40])},
        r"b has 1099511627776, but JAX stores it as int32",
    ),
    "nothing_trainable": (
        lambda mesh: {"table": np.ones(3), "count": jnp.arange(2)},
        "none of the 2 arrays of the model is trainable",
    ),
    "no_arrays": (
        lambda mesh: {"a": "text"},
        r"model is a dict without arrays.*Pass an Equinox model.*PyTorch",
    ),
    "one_path_twice": (
        lambda mesh: {"a": {"b": jnp.ones(1)}, "a.b": jnp.zeros(1)},
        r"two leaves have the path 'a\.b'",
    ),
}


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_a_model_that_cannot_be_trained_is_refused_by_path(name, mesh):
    make, message = UNTRAINABLE[name]
    raised(ValueError, init_state, make(mesh), ADAM, key=KEY, match=message)


def test_the_state_takes_the_arrays_of_the_model_and_not_the_key():
    # The key is what the caller goes on with: `batches(..., key=key)`.
    key = jax.random.key(1)
    for num_devices in (1, 8):
        model = jax.device_put(
            {"a": jnp.ones(8)}, replicated(make_mesh(data=num_devices))
        )
        state = donate(init_state(model, ADAM, key=key))
        assert_identical(jax.random.fold_in(key, 0), jax.random.fold_in(state.key, 0))
        raised(
            ValueError,
            init_state,
            model,
            ADAM,
            key=KEY,
            match=r"a has been deleted\. It was donated",
        )


def test_keys():
    state = init_state({"a": jnp.ones(1)}, key=jax.random.PRNGKey(7))
    assert state.key.dtype == KEY.dtype
    assert_identical(state.key, jax.random.key(7))


@pytest.mark.parametrize(
    "make",
    [
        lambda: jnp.ones(2),
        lambda: np.zeros(2, np.uint32),
        lambda: jax.random.split(KEY),
        lambda: np.zeros((2, 2), np.uint32),
    ],
    ids=["floats", "numpy", "two_keys", "two_keys_in_numpy"],
)
def test_what_is_not_one_key_is_refused(make):
    raised(Exception, init_state, {"a": jnp.ones(1)}, key=make(), match="key")


# Sharded initialization; more in tests/sharded_init.


def test_a_bad_layout_is_refused_before_anything_is_computed(mesh):
    """Then each leaf is made by a callback, which looks how many others are whole on
    one device."""
    shape = (64, 256)
    found: list[int] = []

    def compute():
        found.append(
            sum(x.shape == shape and len(x.devices()) == 1 for x in jax.live_arrays())
        )
        return np.zeros(shape, np.float32)

    def make(key):
        return [
            jax.pure_callback(compute, jax.ShapeDtypeStruct(shape, jnp.float32))
            for _ in range(6)
        ]

    with pytest.raises(ValueError, match="matches no array"):
        init_model(make, mesh, key=KEY, overrides=[("nothing", jax.P())])
    raised(
        ValueError,
        init_model,
        make,
        jax.make_mesh((8,), ("data",)),
        key=KEY,
        match="AxisType",
    )
    assert found == []
    born = init_model(make, mesh, key=KEY, overrides=[("*", jax.P(("data", "fsdp")))])
    assert found == [0] * 6  # besides the one that is being made
    # The measure does see what is whole.
    del born
    jax.block_until_ready(make(KEY))
    assert max(found) >= 4
