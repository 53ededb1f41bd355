"""Paths, predicates, `to_arrays`/`from_arrays`, `cast`."""

from typing import Any, NamedTuple

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from redco_eqx import batch_sharding, cast, from_arrays, make_mesh, to_arrays
from redco_eqx._base.tree import children, describe, is_array, is_trainable, leaves_with_paths

KEY = jax.random.key(0)
ABSTRACT = jax.ShapeDtypeStruct((2,), jnp.float32)


class Pair(NamedTuple):
    left: Any
    right: Any


class Block(eqx.Module):
    layers: list[eqx.nn.Linear]
    table: dict[str, Any]
    size: int


def make_block() -> Block:
    keys = jax.random.split(KEY)
    return Block(
        [eqx.nn.Linear(2, 3, key=keys[0]), eqx.nn.Linear(3, 2, use_bias=False, key=keys[1])],
        {"rope": np.ones((4,), np.float32), "nested": ({"key": KEY}, Pair(jnp.arange(2), None))},
        7,
    )


BLOCK_PATHS = [
    "layers.0.weight",
    "layers.0.bias",
    "layers.1.weight",
    "table.nested.0.key",
    "table.nested.1.left",
    "table.rope",
]


# Paths.


def test_paths_spell_how_a_leaf_is_reached():
    assert list(to_arrays(make_block())) == BLOCK_PATHS


def test_paths_of_the_abstract_model_are_those_of_the_concrete_one():
    assert list(to_arrays(eqx.filter_eval_shape(make_block))) == BLOCK_PATHS


def test_a_bare_array_has_the_empty_path():
    assert list(to_arrays(jnp.ones(2))) == [""]


class Normed(eqx.Module):
    stem: eqx.nn.BatchNorm
    blocks: list[eqx.nn.BatchNorm]

    def __init__(self):
        self.stem = eqx.nn.BatchNorm(2, "batch", mode="ema")
        self.blocks = [eqx.nn.BatchNorm(3, "batch", mode="ema") for _ in range(2)]


def test_entries_of_a_state_are_named_after_the_layer_that_owns_them():
    model, state = eqx.nn.make_with_state(Normed)()
    names = [
        f"{layer}.{entry}"
        for layer in ("stem", "blocks.0", "blocks.1")
        for entry in ("ema_first_time_index", "ema_state_index.0", "ema_state_index.1")
    ]
    assert list(to_arrays(state)) == names
    assert {path: x.shape for path, x in to_arrays(state).items() if "state_index.0" in path} == {
        "stem.ema_state_index.0": (2,),
        "blocks.0.ema_state_index.0": (3,),
        "blocks.1.ema_state_index.0": (3,),
    }
    # Within a larger tree: the same names behind the path of the state.
    inside = to_arrays({"model": model, "state": state})
    assert [path for path in inside if path.startswith("state.")] == [f"state.{name}" for name in names]


def test_entries_of_a_state_keep_the_order_of_its_leaves():
    _, state = eqx.nn.make_with_state(Normed)()
    leaves = jax.tree.leaves(state)
    found = [x for _, x in leaves_with_paths(state)]
    assert len(found) == len(leaves)
    assert all(x is y for x, y in zip(found, leaves))


def test_children_are_direct():
    names = [name for name, _ in children(make_block())]
    assert names == ["layers", "table", "size"]
    assert [name for name, _ in children([1, (2, 3)])] == ["0", "1"]
    assert children(3) == []
    assert children(jnp.ones(2)) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": jnp.ones(1)}, "a.b": jnp.zeros(1)},
        {"a": [jnp.ones(1)], "a.0": jnp.zeros(1)},
        {"a": {1: jnp.ones(1)}, "a.1": jnp.zeros(1)},
    ],
)
def test_two_leaves_with_one_path_are_refused(tree):
    path = sorted(tree)[-1]
    with pytest.raises(ValueError, match=rf"two leaves have the path '{path}'"):
        to_arrays(tree)


def test_one_path_for_an_array_and_for_something_else_is_no_conflict():
    assert list(to_arrays({"a": {"b": jnp.ones(1)}, "a.b": "text"})) == ["a.b"]


TREES = st.recursive(
    st.none() | st.integers() | st.just("text") | st.sampled_from([np.ones(2), np.zeros((1, 3), np.int8)]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=50)
@given(TREES)
def test_a_path_leads_to_its_leaf(tree):
    def follow(node: Any, path: str) -> Any:
        for part in path.split(".") if path else []:
            if isinstance(node, Pair):
                node = getattr(node, part)
            else:
                node = node[part] if isinstance(node, dict) else node[int(part)]
        return node

    pairs = leaves_with_paths(tree)
    assert [leaf for _, leaf in pairs] == jax.tree.leaves(tree)
    for path, leaf in pairs:
        assert follow(tree, path) is leaf


@settings(deadline=None, max_examples=50)
@given(TREES)
def test_from_arrays_is_the_inverse_of_to_arrays(tree):
    doubled = {path: 2 * x for path, x in to_arrays(tree).items()}
    result = from_arrays(tree, doubled)
    expected = jax.tree.map(lambda x: 2 * x if isinstance(x, np.ndarray) else x, tree)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(x, y)


# From arrays, and back.


def test_from_arrays_replaces_arrays_and_keeps_the_rest():
    block = make_block()
    arrays = {path: jnp.copy(x) for path, x in to_arrays(block).items()}
    result = from_arrays(block, arrays)
    assert all(x is arrays[path] for path, x in to_arrays(result).items())
    assert result.size == 7
    assert jax.tree.structure(result) == jax.tree.structure(block)
    # The order of the given mapping does not matter.
    backward = from_arrays(block, dict(reversed(arrays.items())))
    assert all(x is arrays[path] for path, x in to_arrays(backward).items())


def test_from_arrays_fills_an_abstract_tree():
    block = make_block()
    result = from_arrays(eqx.filter_eval_shape(make_block), to_arrays(block))
    helpers.assert_identical(eqx.filter(result, eqx.is_array), eqx.filter(block, eqx.is_array))


def test_from_arrays_fills_a_state():
    model, state = eqx.nn.make_with_state(Normed)()
    arrays = {path: x + 1 for path, x in to_arrays((model, state)).items() if x.dtype != bool}
    arrays = {**to_arrays((model, state)), **arrays}
    new_model, new_state = from_arrays((model, state), arrays)
    np.testing.assert_array_equal(new_model.stem.weight, 2)  # which begins as ones
    assert isinstance(new_state, eqx.nn.State)
    helpers.assert_identical(jax.tree.leaves(new_state), [arrays[path] for path in arrays if path[0] == "1"])


def test_from_arrays_names_every_misfit():
    block = make_block()
    arrays = dict(to_arrays(block))
    del arrays["layers.0.bias"], arrays["table.rope"]
    arrays["layers.0.weight"] = jnp.ones((2, 3))
    arrays["layers.1.weight"] = arrays["layers.1.weight"].astype(jnp.bfloat16)
    arrays["layers.9.weight"] = jnp.ones(4)
    with pytest.raises(ValueError, match="do not fit") as error:
        from_arrays(block, arrays)
    message = str(error.value)
    assert "missing: layers.0.bias float32[3]" in message
    assert "missing: table.rope float32[4]" in message
    assert "unexpected: layers.9.weight float32[4]" in message
    assert "layers.0.weight: expected float32[3,2], got float32[2,3]" in message
    assert "layers.1.weight: expected float32[2,3], got bfloat16[2,3]" in message
    assert "table.nested" not in message


# Predicates.


@pytest.mark.parametrize(
    ("x", "array", "trainable"),
    [
        (jnp.ones(2), True, True),
        (jnp.ones(2, jnp.bfloat16), True, True),
        (jnp.ones(2, jnp.complex64), True, True),
        (ABSTRACT, True, True),
        (jnp.arange(2), True, False),
        (jnp.ones(2, bool), True, False),
        (KEY, True, False),
        (jax.ShapeDtypeStruct((2,), jnp.int32), True, False),
        (np.ones(2, np.float32), True, False),
        (np.float32(1), True, False),
        (1.0, False, False),
        (None, False, False),
        ("text", False, False),
        (jnp.sin, False, False),
    ],
    ids=lambda x: str(getattr(x, "dtype", x))[:20],
)
def test_predicates(x, array, trainable):
    assert is_array(x) == array
    assert is_trainable(x) == trainable


def test_predicates_hold_under_a_trace():
    seen = []

    def f(x, i):
        seen.extend([is_array(x), is_trainable(x), is_array(i), is_trainable(i)])
        return x

    jax.eval_shape(f, jnp.ones(2), jnp.arange(2))
    assert seen == [True, True, True, False]


def test_describe():
    assert describe(jnp.ones((4, 8))) == "float32[4,8]"
    assert describe(np.int8(3)) == "int8[]"


# Cast.


def test_cast_touches_floating_arrays_only():
    tree = {
        "single": jnp.ones(2),
        "double": np.ones(2),
        "scalar": np.float32(1),
        "brain": jnp.ones(2, jnp.bfloat16),
        "integer": jnp.arange(2),
        "boolean": np.ones(2, bool),
        "complex": jnp.ones(2, jnp.complex64),
        "key": KEY,
        "python": 1.5,
        "function": jnp.sin,
        "none": None,
    }
    result = cast(tree, jnp.float16)
    for name in ("single", "double", "scalar", "brain"):
        assert result[name].dtype == jnp.float16, name
        np.testing.assert_array_equal(result[name], tree[name])
    for name in ("integer", "boolean", "complex", "key", "python", "function", "none"):
        assert result[name] is tree[name], name
    assert isinstance(result["double"], np.ndarray)  # a constant stays one


def test_cast_to_bfloat16_of_numpy():
    assert cast(np.ones(2, np.float32), jnp.bfloat16).dtype == ml_dtypes.bfloat16


def test_cast_of_an_abstract_array_keeps_shape_and_sharding():
    sharding = batch_sharding(make_mesh())
    tree = {
        "x": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding),
        "i": jax.ShapeDtypeStruct((8,), jnp.int32),
    }
    result = cast(tree, jnp.bfloat16)
    assert result["x"] == jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=sharding)
    assert result["i"] is tree["i"]


def test_cast_keeps_the_sharding_of_an_array():
    x = jax.device_put(jnp.ones((8, 2)), batch_sharding(make_mesh()))
    assert cast(x, jnp.bfloat16).sharding.is_equivalent_to(x.sharding, 2)
    assert x.sharding.spec == P(("data", "fsdp"))


def test_gradients_of_a_cast_come_back_in_the_dtype_of_the_parameters():
    weight = jnp.ones(3)
    gradient = jax.grad(lambda w: jnp.sum(cast(w, jnp.bfloat16) * 2).astype(jnp.float32))(weight)
    assert gradient.dtype == jnp.float32
    np.testing.assert_array_equal(gradient, 2)
