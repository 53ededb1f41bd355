"""Every public function gives the same under each mesh that `jax.set_mesh` may have set."""

from functools import partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY
from helpers import mlp_batch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import redco_eqx as rx
from redco_eqx import models

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
BATCH = {name: x for name, x in mlp_batch(0).items() if name != "weight"}
EXAMPLES = [{name: x[i] for name, x in BATCH.items()} for i in range(12)]


def make_model(key: Any) -> Any:
    up, down = jax.random.normal(key, (2, 64, 64)) / 8
    return {"up": up, "down": jax.nn.initializers.orthogonal()(key, (64, 64)) + down}


def loss_fn(model: Any, batch: Any, key: Any, spec: Any = None) -> Any:
    hidden = jnp.tanh(batch["x"] @ model["up"])
    if spec is not None:
        hidden = jax.lax.with_sharding_constraint(hidden, spec)
    return jnp.mean((hidden @ model["down"] - batch["y"]) ** 2)


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return batch["x"] @ model["up"]


def collate_fn(examples: Any) -> Any:
    return jax.tree.map(lambda *rows: np.stack(rows), *examples)


PIPELINE: Any = {"collate_fn": collate_fn, "batch_size": 8}


def briefly(mesh: Any, directory: Any) -> dict[str, Any]:
    """Return the results of the functions that place, compile and read, as arrays on the host, by name."""
    state = rx.init_state(rx.init_model(make_model, mesh, key=KEY), OPTIMIZER, key=KEY)
    step = rx.jit_step(partial(rx.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER), donate=False)
    found = {"repr": repr(state), "jit_step": step(state, BATCH)}
    return jax.tree.map(lambda x: helpers.host(x) if isinstance(x, jax.Array) else x, found)


def everything(mesh: Any, directory: Any) -> dict[str, Any]:
    """Return the result of each function, as arrays on the host, by name."""
    program: Any = {"loss_fn": loss_fn, "batch": BATCH}
    step: Any = {"loss_fn": loss_fn, "optimizer": OPTIMIZER}
    found: dict[str, Any] = {}

    model = rx.init_model(make_model, mesh, key=KEY, **program)
    shardings = rx.shard_rules(model, mesh, **program)
    found["explain"] = str(rx.explain(model, mesh, **program))
    state = rx.init_state(model, OPTIMIZER, key=KEY)
    found["repr"] = repr(state)
    found["batches"] = list(rx.batches(EXAMPLES, mesh=mesh, **PIPELINE))
    found["jit_step"] = rx.jit_step(partial(rx.train_step, shardings=shardings, **step), donate=False)(
        state, BATCH
    )
    found["own step"] = rx.jit_step(
        lambda state, batch: jnp.sum(batch["x"] @ state.params["up"]), donate=False
    )(state, BATCH)
    found["eval_step"] = rx.jit_step(partial(rx.eval_step, loss_fn=loss_fn), donate=False)(state, BATCH)
    found["loss"] = float(found["eval_step"]["loss"])
    found["predict_step"] = rx.jit_step(partial(rx.predict_step, predict_fn=predict_fn), donate=False)(
        state, BATCH
    )
    found["evaluate"] = rx.evaluate(state, EXAMPLES, loss_fn=loss_fn, **PIPELINE)
    found["predict"] = rx.predict(state, EXAMPLES, predict_fn=predict_fn, **PIPELINE)
    rx.save(directory, state)
    optimizer: Any = {"optimizer": OPTIMIZER, "bytes_per_device": 2**30, "progress": False}
    found["plan"] = rx.plan(model, **program, **optimizer, estimate=True).mesh
    found["restore"] = rx.restore(directory, state)
    evaluation = rx.Evaluation(EXAMPLES)
    copy = jax.tree.map(jnp.copy, state)
    found["fit"], _ = rx.fit(
        copy, EXAMPLES, num_epochs=2, evaluation=evaluation, loggers=(), **PIPELINE, **step
    )
    return jax.tree.map(lambda x: helpers.host(x) if isinstance(x, jax.Array) else x, found)


def under_own_jit(mesh: Any, model: Any) -> Any:
    state = rx.init_state(model, OPTIMIZER, key=KEY)
    step = partial(
        rx.train_step,
        loss_fn=loss_fn,
        optimizer=OPTIMIZER,
        shardings=rx.shard_rules(model, mesh),
        num_microbatches=2,
    )
    several = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
    state, metrics = jax.jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, several)
    evaluated = jax.jit(partial(rx.eval_step, loss_fn=loss_fn))(state, BATCH)
    predicted = jax.jit(partial(rx.predict_step, predict_fn=predict_fn))(state, BATCH)
    return jax.tree.map(helpers.host, (state, metrics, evaluated, predicted))


WHOLE = ("its own", "the same, Explicit")


def contexts() -> dict[str, tuple[Any, Any]]:
    own = rx.make_mesh(tensor=4)
    explicit = jax.make_mesh((2, 4), ("dp", "tp"))
    return {
        "its own": (own, own),
        "the same, Explicit": (rx.make_mesh(mesh=explicit, names=("data", "tensor")), explicit),
        "in another order": (rx.make_mesh(mesh=explicit, names=("tensor", "data")), explicit),
        "of more devices": (rx.make_mesh(data=2), own),
    }


def test_a_mesh_that_is_set_changes_nothing(tmp_path):
    pytest.importorskip("orbax.checkpoint", exc_type=ImportError)
    once: dict[Any, Any] = {}
    for name, (mesh, outer) in contexts().items():
        give = everything if name in WHOLE else briefly
        if mesh not in once:
            once[mesh] = give(mesh, tmp_path / "before")
        expected = once[mesh]
        with jax.set_mesh(outer):
            found = give(mesh, tmp_path / name)
            assert jax.sharding.get_mesh() == outer
        assert found.keys() == expected.keys()
        for function in found:
            what = f"{function} under {name}"
            for x, y in zip(jax.tree.leaves(found[function]), jax.tree.leaves(expected[function]), strict=True):
                np.testing.assert_array_equal(x, y, err_msg=what)


def test_steps_under_a_jit_of_ones_own_work_or_say_what_to_do():
    for name, (mesh, outer) in contexts().items():
        model = rx.init_model(make_model, mesh, key=KEY)
        expected = under_own_jit(mesh, model)
        with jax.set_mesh(outer):
            if name in WHOLE:
                helpers.assert_identical(under_own_jit(mesh, model), expected)
                continue
            state = rx.init_state(model, OPTIMIZER, key=KEY)
            with (
                helpers.count_compilations() as compiled,
                pytest.raises(ValueError, match="Call jit_step in place"),
            ):
                jax.jit(partial(rx.eval_step, loss_fn=loss_fn))(state, BATCH)
            assert not compiled


def test_a_loss_may_name_the_axes_of_the_mesh_that_is_set(tmp_path):
    mesh = rx.make_mesh(tensor=4)
    named = partial(loss_fn, spec=P("data", "tensor"))
    model = rx.init_model(make_model, mesh, key=KEY)
    state = rx.init_state(model, OPTIMIZER, key=KEY)
    row = rx.evaluate(state, EXAMPLES, loss_fn=loss_fn, **PIPELINE)
    with jax.set_mesh(mesh):
        found = rx.evaluate(state, EXAMPLES, loss_fn=named, **PIPELINE)
        assert found["loss"] == pytest.approx(row["loss"], rel=1e-5)
        rx.fit(state, EXAMPLES, loss_fn=named, optimizer=OPTIMIZER, num_epochs=1, loggers=(), **PIPELINE)


def test_models_generate_and_their_layers_communicate():
    own = rx.make_mesh(tensor=4)
    explicit = jax.make_mesh((2, 4), ("dp", "tp"))
    mesh = rx.make_mesh(mesh=explicit, names=("data", "tensor"))
    config = models.GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=4)
    model = rx.init_model(lambda key: models.GPT2LMHeadModel(config, key=key), mesh, key=KEY)
    prompts = np.arange(8).reshape(2, 4)
    expected = np.asarray(models.generate(model, prompts, max_new_tokens=3))
    for outer in (explicit, own):
        with jax.set_mesh(outer):
            np.testing.assert_array_equal(models.generate(model, prompts, max_new_tokens=3), expected)


def test_inside_a_shard_map_nothing_changes():
    mesh, model = rx.make_mesh(), make_model(KEY)
    state = jax.device_put(rx.init_state(model, key=KEY), NamedSharding(mesh, P()))

    def each(state: Any, x: Any) -> Any:
        return rx.eval_step(state, {"x": x, "y": x}, loss_fn=loss_fn)["loss"].value[None]

    specs: Any = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(each, mesh=mesh, check_vma=False, **specs))(state, BATCH["x"])
    expected = [loss_fn(model, {"x": x, "y": x}, None) for x in np.split(BATCH["x"], 8)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
