"""A notebook, executed: Ctrl-C ends the cell and not the kernel, and what is shown is short."""

import json
import textwrap
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import SGD, assert_identical, mlp_state

import redco_eqx as rx

SETUP = """
    import os, signal, sys
    import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
    import redco_eqx as rx
    examples = [np.float32(i / 64) for i in range(64)]
    optimizer = optax.sgd(0.01)
    num_calls = 0
    def collate_fn(examples):
        global num_calls
        num_calls += 1
        if num_calls == 5:
            os.kill(os.getpid(), signal.SIGINT)  # as Jupyter's button does
        return np.stack(examples)[:, None]
    def loss_fn(model, batch, key):
        return jnp.mean(jax.vmap(model)(batch) ** 2)
    model = eqx.nn.Linear(1, 1, key=jax.random.key(0))
    explanation = rx.explain(model, rx.make_mesh())
    state = rx.init_state(model, optimizer, key=jax.random.key(1))
    def fit(state):
        return rx.fit(state, rx.Data(examples, prefetch=0), collate_fn=collate_fn, loss_fn=loss_fn,
                      optimizer=optimizer,
                      batch_size=4, num_steps=20, loggers=())[0]
"""
CELLS = [SETUP, "state = fit(state)", "state = sys.last_value.state\nstate", "fit(state)", "explanation"]


def shown(cell: Any, mime: str) -> str:
    return "".join(output.data[mime] for output in cell.outputs if "data" in output and mime in output.data)


def test_an_interrupt_in_a_notebook() -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are of the group `tests`")
    from nbformat import v4

    notebook = v4.new_notebook(cells=[v4.new_code_cell(textwrap.dedent(cell)) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", allow_errors=True).execute()
    first, interrupted, recovered, further, explained = notebook.cells
    assert first.outputs == []
    (error,) = [output for output in interrupted.outputs if output.output_type == "error"]
    assert error.ename == "TrainingInterrupted"
    assert "after step 5" in error.evalue
    assert "sys.last_value.state" in "\n".join(error.traceback)
    assert len(error.traceback) < 4
    assert "To exit" not in json.dumps(interrupted.outputs)
    assert shown(recovered, "text/plain").startswith("TrainState(step 5, 2 parameters of 8 B")
    assert shown(further, "text/plain").startswith("TrainState(step 25, ")
    header, *_ = shown(explained, "text/plain").splitlines()
    assert header.split() == ["path", "shape", "spec", "role", "per", "device", "reason"]


def test_what_is_shown_of_a_state_and_of_its_layout_is_short() -> None:
    mesh = rx.make_mesh(tensor=4)
    state = mlp_state(optax.adam(1e-3), mesh)
    size, on = "4 parameters of 1.1 KiB", "data=2 x fsdp=1 x tensor=4"
    assert repr(state) == f"TrainState(step 0, {size}, 9 arrays of the optimizer, {on})"
    abstract = jax.eval_shape(lambda: state)
    assert repr(abstract).startswith(f"TrainState(abstract, {size}")
    seen = []
    jax.eval_shape(lambda state: seen.append(repr(state)), state)
    assert seen[0].startswith("TrainState(abstract, ")
    for x in jax.tree.leaves(state):
        x.delete()
    assert repr(state).startswith("TrainState(deleted, ")

    explanation = rx.explain(abstract.model, mesh)
    assert f"304 B per device, 4 arrays on {on}" in repr(explanation)
    for path, d in explanation.decisions.items():
        assert path in str(explanation)
        assert d.reason in str(explanation)


def test_a_metric_reads_as_a_number() -> None:
    made = {"loss": rx.Mean(jnp.float32(5.0), jnp.float32(2.0)), "empty": rx.Mean(0.0, 0.0)}
    for metrics in (made, jax.jit(lambda: made)()):
        assert f"{metrics['loss']:.3f} {metrics['empty']:.1f}" == "2.500 0.0"
        assert f"{metrics['loss']}" == "2.5"
        assert json.loads(json.dumps(metrics, default=float)) == {"loss": 2.5, "empty": 0.0}
        assert np.asarray(metrics["loss"]) == np.float32(2.5)
        assert np.asarray(metrics["loss"], np.float64).dtype == np.float64
        assert np.asarray(metrics["loss"]).shape == ()
    texts = []
    jax.eval_shape(lambda mean: texts.append(f"{mean}"), rx.Mean(1.0, 2.0))
    assert texts[0].startswith("Mean(total=")


# Masks and labels over the model


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: eqx.is_array(x) and x.ndim == 2, tree)


def test_masks_and_labels_over_the_model_are_those_by_path() -> None:
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    params = rx.init_state(model, key=jax.random.key(1)).params
    flat = {path: x.ndim == 2 for path, x in params.items()}
    assert rx.by_path(matrices(model))(params) == flat
    labels = eqx.tree_at(lambda m: m.layers[-1], jax.tree.map(lambda _: "body", model), "head")
    expected = {path: "head" if path.startswith("layers.1") else "body" for path in params}
    assert rx.by_path(labels)(params) == expected
    assert rx.by_path("all")(params) == dict.fromkeys(params, "all")
    with pytest.raises(ValueError, match=r"no value for the parameter layers.0.bias"):
        rx.by_path({"layers": [{"weight": True}]})(params)

    both: Any = {"head": optax.adam(1.0), "body": SGD}
    masked, partition = partial(optax.masked, optax.sgd(1.0)), partial(optax.partition, both)
    for make, over_model, by_hand in ((masked, matrices(model), flat), (partition, labels, expected)):
        optimizers = make(rx.by_path(over_model)), make(by_hand)
        states = [jax.jit(tx.init)(params) for tx in optimizers]
        assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
        updates = [jax.jit(tx.update)(params, x, params)[0] for tx, x in zip(optimizers, states)]
        assert_identical(updates[0], updates[1])
    for mask in (matrices(model), {"layers": [{"weight": True}]}):
        with pytest.raises((TypeError, ValueError)) as caught:
            rx.init_state(model, optax.masked(optax.sgd(1.0), mask), key=jax.random.key(1))
        assert "redco_eqx.by_path(tree)" in "".join(caught.value.__notes__)
