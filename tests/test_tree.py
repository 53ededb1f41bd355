"""Paths, predicates, `to_arrays`/`from_arrays`, `cast`, `by_path`; and what is shown,
in a notebook too."""

import json
import os
import pathlib
import textwrap
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from fit_helpers import SGD, assert_identical, mlp_state, raised
from hypothesis import given, settings
from hypothesis import strategies as st

import redco_eqx as rx
from redco_eqx import batch_sharding, cast, from_arrays, make_mesh, to_arrays
from redco_eqx._base.tree import leaves_with_paths

KEY = jax.random.key(0)


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
        [
            eqx.nn.Linear(2, 3, key=keys[0]),
            eqx.nn.Linear(3, 2, use_bias=False, key=keys[1]),
        ],
        {
            "rope": np.ones((4,), np.float32),
            "nested": ({"key": KEY}, Pair(jnp.arange(2), None)),
        },
        7,
    )


# Paths.


def test_paths_spell_how_a_leaf_is_reached():
    layers = ["layers.0.weight", "layers.0.bias", "layers.1.weight"]
    paths = [*layers, "table.nested.0.key", "table.nested.1.left", "table.rope"]
    assert (
        list(to_arrays(make_block()))
        == list(to_arrays(eqx.filter_eval_shape(make_block)))
        == paths
    )
    assert list(to_arrays(jnp.ones(2))) == [""]


def make_normed():
    norms = [eqx.nn.BatchNorm(size, "batch", mode="ema") for size in (2, 3, 3)]
    return {"blocks": norms[1:], "stem": norms[0]}


def test_entries_of_a_state_are_named_after_their_layer_and_can_be_replaced():
    model, state = eqx.nn.make_with_state(make_normed)()
    entries = ("ema_first_time_index", "ema_state_index.0", "ema_state_index.1")
    names = [
        f"{layer}.{entry}"
        for layer in ("blocks.0", "blocks.1", "stem")
        for entry in entries
    ]
    assert list(to_arrays(state)) == names
    shapes = {
        path: x.shape for path, x in to_arrays(state).items() if "state_index.0" in path
    }
    assert list(shapes.values()) == [(3,), (3,), (2,)]
    leaves = jax.tree.leaves(state)
    found = leaves_with_paths(state)
    # In the order of its leaves.
    assert all(x is y for (_, x), y in zip(found, leaves, strict=True))
    # Within a larger tree: the same names behind the path of the state.
    arrays = to_arrays((model, state))
    assert [path for path in arrays if path[0] == "1"] == [
        f"1.{name}" for name in names
    ]

    changed = {path: x if x.dtype == bool else x + 1 for path, x in arrays.items()}
    new_model, new_state = from_arrays((model, state), changed)
    np.testing.assert_array_equal(new_model["stem"].weight, 2)  # which begins as ones
    assert isinstance(new_state, eqx.nn.State)
    assert_identical(
        jax.tree.leaves(new_state), [x for path, x in changed.items() if path[0] == "1"]
    )


def test_two_leaves_with_one_path_are_refused():
    for inside in ({"b": jnp.ones(1)}, [jnp.ones(1)], {1: jnp.ones(1)}):
        path = f"a.{next(iter(inside)) if isinstance(inside, dict) else 0}"
        tree = {"a": inside, path: jnp.zeros(1)}
        raised(ValueError, to_arrays, tree, match=rf"two leaves have the path '{path}'")
    # An array and something else are no conflict.
    assert list(to_arrays({"a": {"b": jnp.ones(1)}, "a.b": "text"})) == ["a.b"]


TREES = st.recursive(
    st.none()
    | st.integers()
    | st.just("text")
    | st.sampled_from([np.ones(2), np.zeros((1, 3), np.int8)]),
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
def test_a_path_leads_to_its_leaf_and_from_arrays_is_the_inverse(tree):
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
    # The order of the given mapping does not matter.
    result = from_arrays(
        tree, {path: 2 * x for path, x in reversed(to_arrays(tree).items())}
    )
    expected = jax.tree.map(lambda x: 2 * x if isinstance(x, np.ndarray) else x, tree)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(result), jax.tree.leaves(expected)):
        np.testing.assert_array_equal(x, y)


def test_from_arrays_names_every_misfit():
    block = make_block()
    arrays = dict(to_arrays(block))
    del arrays["layers.0.bias"], arrays["table.rope"]
    arrays["layers.0.weight"] = jnp.ones((2, 3))
    arrays["layers.1.weight"] = arrays["layers.1.weight"].astype(jnp.bfloat16)
    arrays["layers.9.weight"] = jnp.ones(4)
    error = raised(ValueError, from_arrays, block, arrays, match="do not fit")
    for misfit in (
        "missing: layers.0.bias float32[3]",
        "missing: table.rope float32[4]",
        "unexpected: layers.9.weight float32[4]",
        "layers.0.weight: expected float32[3,2], got float32[2,3]",
        "layers.1.weight: expected float32[2,3], got bfloat16[2,3]",
    ):
        assert misfit in str(error)
    assert "table.nested" not in str(error)


# Cast.


def test_cast_touches_floating_arrays_only():
    sharding = batch_sharding(make_mesh())
    single = jax.device_put(np.ones(8, np.float32), sharding)
    brain = jnp.ones(2, jnp.bfloat16)
    floating = {
        "single": single,
        "double": np.ones(2),
        "scalar": np.float32(1),
        "brain": brain,
    }
    others = {
        "integer": jnp.arange(2),
        "boolean": np.ones(2, bool),
        "complex": jnp.ones(2, jnp.complex64),
        "key": KEY,
        "python": 1.5,
        "function": jnp.sin,
        "none": None,
        "abstract": jax.ShapeDtypeStruct((8,), jnp.int32),
    }
    result = cast({**floating, **others}, jnp.float16)
    for name, x in floating.items():
        assert result[name].dtype == jnp.float16, name
        np.testing.assert_array_equal(result[name], x)
    for name, x in others.items():
        assert result[name] is x, name
    assert isinstance(result["double"], np.ndarray)  # a constant stays one
    assert result["single"].sharding.is_equivalent_to(sharding, 1)
    assert cast(np.ones(2, np.float32), jnp.bfloat16).dtype == ml_dtypes.bfloat16
    abstract = cast(
        jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding), jnp.bfloat16
    )
    assert abstract == jax.ShapeDtypeStruct((8, 2), jnp.bfloat16, sharding=sharding)


# A notebook, executed: Ctrl-C ends the cell and not the kernel, and what is shown is
# short.

SETUP = """
    import signal, sys
    from fit_helpers import Collate, counted, linear_state
    import redco_eqx as rx
    collate_fn = Collate(5, signal.SIGINT)  # as Jupyter's button does
    state = linear_state()
    explanation = rx.explain(state.model, rx.make_mesh())
    def fit(state):
        return counted(state, collate_fn=collate_fn, num_steps=20)
"""
CELLS = [
    SETUP,
    "state = fit(state)",
    "state = sys.last_value.state\nint(state.step), state",
    "int(fit(state).step)",
    "explanation",
]


def shown(cell: Any, mime: str) -> str:
    return "".join(
        output.data[mime]
        for output in cell.outputs
        if "data" in output and mime in output.data
    )


def test_an_interrupt_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip(
        "nbclient", reason="nbclient and ipykernel are of the group `tests`"
    )
    from nbformat import v4

    monkeypatch.setenv(
        "PYTHONPATH", str(pathlib.Path(__file__).parent), prepend=os.pathsep
    )
    notebook = v4.new_notebook(
        cells=[v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS]
    )
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", allow_errors=True
    ).execute()
    first, interrupted, recovered, further, explained = notebook.cells
    assert first.outputs == []
    (error,) = [
        output for output in interrupted.outputs if output.output_type == "error"
    ]
    assert error.ename == "TrainingInterrupted"
    assert "after step 5" in error.evalue
    assert "sys.last_value.state" in "\n".join(error.traceback)
    assert len(error.traceback) < 4
    assert "To exit" not in json.dumps(interrupted.outputs)
    assert shown(recovered, "text/plain").startswith(
        "(5, TrainState(2 parameters of 24 B"
    )
    assert shown(further, "text/plain") == "25"
    header, *_ = shown(explained, "text/plain").splitlines()
    names = ["path", "shape", "spec", "role", "per", "device", "reason"]
    assert header.split() == names


def test_what_is_shown_of_a_state_and_of_its_layout_is_short() -> None:
    mesh = rx.make_mesh(tensor=4)
    state = mlp_state(optax.adam(1e-3), mesh)
    abstract = jax.eval_shape(lambda: state)
    seen = [repr(state)]
    jax.eval_shape(lambda state: seen.append(repr(state)), state)
    for x in jax.tree.leaves(state):
        x.delete()
    seen += [repr(state), repr(abstract)]
    assert (
        seen == ["TrainState(4 parameters of 1.1 KiB, 9 arrays of the optimizer)"] * 4
    )

    explanation = rx.explain(abstract.model, mesh)
    assert "304 B per device, 4 arrays on data=2 x fsdp=1 x tensor=4" in repr(
        explanation
    )
    for path, d in explanation.decisions.items():
        assert path in str(explanation)
        assert d.reason in str(explanation)


def test_a_metric_reads_as_a_number() -> None:
    made = {
        "loss": rx.Mean(jnp.float32(5.0), jnp.float32(2.0)),
        "empty": rx.Mean(0.0, 0.0),
    }
    for metrics in (made, jax.jit(lambda: made)()):
        assert f"{metrics['loss']:.3f} {metrics['empty']:.1f}" == "2.500 0.0"
        assert f"{metrics['loss']}" == "2.5"
        assert json.loads(json.dumps(metrics, default=float)) == {
            "loss": 2.5,
            "empty": 0.0,
        }
        assert np.asarray(metrics["loss"]) == np.float32(2.5)
        assert np.asarray(metrics["loss"], np.float64).dtype == np.float64
        assert np.asarray(metrics["loss"]).shape == ()
    texts = []
    jax.eval_shape(lambda mean: texts.append(f"{mean}"), rx.Mean(1.0, 2.0))
    assert texts[0].startswith("Mean(total=")


# Masks and labels over the model


matrices = partial(jax.tree.map, lambda x: eqx.is_array(x) and x.ndim == 2)


def test_masks_and_labels_over_the_model_are_those_by_path() -> None:
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    params = rx.init_state(model, key=jax.random.key(1)).params
    flat = {path: x.ndim == 2 for path, x in params.items()}
    assert rx.by_path(matrices(model))(params) == flat
    labels = eqx.tree_at(
        lambda m: m.layers[-1], jax.tree.map(lambda _: "body", model), "head"
    )
    expected = {
        path: "head" if path.startswith("layers.1") else "body" for path in params
    }
    assert rx.by_path(labels)(params) == expected
    assert rx.by_path("all")(params) == dict.fromkeys(params, "all")
    with pytest.raises(ValueError, match=r"no value for the parameter layers.0.bias"):
        rx.by_path({"layers": [{"weight": True}]})(params)

    both: Any = {"head": optax.adam(1.0), "body": SGD}
    masked = partial(optax.masked, optax.sgd(1.0))
    partition = partial(optax.partition, both)
    for make, over_model, by_hand in (
        (masked, matrices(model), flat),
        (partition, labels, expected),
    ):
        optimizers = make(rx.by_path(over_model)), make(by_hand)
        states = [jax.jit(tx.init)(params) for tx in optimizers]
        assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
        updates = [
            jax.jit(tx.update)(params, x, params)[0]
            for tx, x in zip(optimizers, states)
        ]
        assert_identical(updates[0], updates[1])
    for mask in (matrices(model), {"layers": [{"weight": True}]}):
        optimizer = optax.masked(optax.sgd(1.0), mask)
        error = raised(
            (TypeError, ValueError),
            rx.init_state,
            model,
            optimizer,
            key=jax.random.key(1),
        )
        said = "".join([str(error), *getattr(error, "__notes__", [])])
        assert "by_path(" in said
