"""Every public function gives the same under each mesh that `jax.set_mesh` may have set."""

from functools import partial
from typing import Any

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import KEY
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import redco_eqx as rx
from redco_eqx import models

OPTIMIZER = optax.sgd(0.1, momentum=0.9)
RNG = np.random.default_rng(0)
BATCH = {name: RNG.normal(size=(8, 16)).astype(np.float32) for name in ("x", "y")}
EXAMPLES = [{name: x[i % 8] for name, x in BATCH.items()} for i in range(12)]


def make_model(key: Any) -> Any:
    up, down = jax.random.normal(key, (2, 16, 16)) / 4
    return {"up": up, "down": down}


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
STEP: Any = {"loss_fn": loss_fn, "optimizer": OPTIMIZER}


def briefly(mesh: Any, directory: Any) -> dict[str, Any]:
    """Return the results of the functions that place, compile and read, by name."""
    state = rx.init_state(rx.init_model(make_model, mesh, key=KEY), OPTIMIZER, key=KEY)
    step = rx.jit_step(partial(rx.train_step, **STEP), donate=False)
    return {"jit_step": step(state, BATCH)}


def everything(mesh: Any, directory: Any) -> dict[str, Any]:
    """Return the result of each function, by name."""
    program: Any = {"loss_fn": loss_fn, "batch": BATCH}
    found: dict[str, Any] = {}

    model = rx.init_model(make_model, mesh, key=KEY, **program)
    shardings = rx.shard_rules(model, mesh, **program)
    found["explain"] = str(rx.explain(model, mesh, **program))
    state = rx.init_state(model, OPTIMIZER, key=KEY)
    found["batches"] = list(rx.batches(EXAMPLES, mesh=mesh, **PIPELINE))
    for name, step in {
        "jit_step": partial(rx.train_step, shardings=shardings, **STEP),
        "eval_step": partial(rx.eval_step, loss_fn=loss_fn),
        "predict_step": partial(rx.predict_step, predict_fn=predict_fn),
    }.items():
        found[name] = rx.jit_step(step, donate=False)(state, BATCH)
    found["loss"] = float(found["eval_step"]["loss"])
    found["evaluate"] = rx.evaluate(state, EXAMPLES, loss_fn=loss_fn, **PIPELINE)
    found["predict"] = rx.predict(state, EXAMPLES, predict_fn=predict_fn, **PIPELINE)
    rx.save(directory, state)
    optimizer: Any = {"optimizer": OPTIMIZER, "bytes_per_device": 2**30, "progress": False}
    found["plan"] = rx.plan(model, **program, **optimizer, estimate=True).mesh
    found["restore"] = rx.restore(directory, state)
    found["fit"], _ = rx.fit(
        state, EXAMPLES, num_epochs=2, evaluation=rx.Evaluation(EXAMPLES), loggers=(), **PIPELINE, **STEP
    )
    return found


def contexts() -> dict[str, tuple[Any, Any]]:
    """The mesh of a state, and the one that is set."""
    explicit = jax.make_mesh((2, 4), ("dp", "tp"))
    return {
        "the same, Explicit": (rx.make_mesh(mesh=explicit, names=("data", "tensor")), explicit),
        "in another order": (rx.make_mesh(mesh=explicit, names=("tensor", "data")), explicit),
        "of more devices": (rx.make_mesh(data=2), rx.make_mesh(tensor=4)),
    }


def test_a_mesh_that_is_set_changes_nothing(tmp_path):
    pytest.importorskip("orbax.checkpoint", exc_type=ImportError)
    for name, (mesh, outer) in contexts().items():
        give = everything if name == "the same, Explicit" else briefly
        expected = give(mesh, tmp_path / f"before {name}")
        with jax.set_mesh(outer):
            found = give(mesh, tmp_path / name)
            assert jax.sharding.get_mesh() == outer
        assert found.keys() == expected.keys()
        for function in found:
            what = f"{function} under {name}"
            for x, y in zip(jax.tree.leaves(found[function]), jax.tree.leaves(expected[function]), strict=True):
                pair = [helpers.host(z) if isinstance(z, jax.Array) else z for z in (x, y)]
                np.testing.assert_array_equal(*pair, err_msg=what)


def under_own_jit(mesh: Any, model: Any) -> Any:
    state = rx.init_state(model, OPTIMIZER, key=KEY)
    step = partial(rx.train_step, **STEP, shardings=rx.shard_rules(model, mesh), num_microbatches=2)

    @jax.jit
    def program(state, batches):
        state, metrics = jax.lax.scan(step, state, batches)
        evaluated = rx.eval_step(state, BATCH, loss_fn=loss_fn)
        return state, metrics, evaluated, rx.predict_step(state, BATCH, predict_fn=predict_fn)

    return program(state, jax.tree.map(lambda x: np.stack([x, x]), BATCH))


def test_steps_under_a_jit_of_ones_own_work_or_say_what_to_do():
    for name, (mesh, outer) in contexts().items():
        model = rx.init_model(make_model, mesh, key=KEY)
        if name == "the same, Explicit":
            expected = under_own_jit(mesh, model)
            with jax.set_mesh(outer):
                helpers.assert_identical(under_own_jit(mesh, model), expected)
            continue
        with jax.set_mesh(outer):
            state = rx.init_state(model, OPTIMIZER, key=KEY)
            with (
                helpers.count_compilations() as compiled,
                pytest.raises(ValueError, match="Call jit_step in place"),
            ):
                jax.jit(partial(rx.eval_step, loss_fn=loss_fn))(state, BATCH)
            assert not compiled


def test_a_loss_may_name_the_axes_of_the_mesh_that_is_set():
    mesh = rx.make_mesh(tensor=4)
    named = partial(loss_fn, spec=P("data", "tensor"))
    state = rx.init_state(rx.init_model(make_model, mesh, key=KEY), OPTIMIZER, key=KEY)
    row = rx.evaluate(state, EXAMPLES, loss_fn=loss_fn, **PIPELINE)
    with jax.set_mesh(mesh):
        found = rx.evaluate(state, EXAMPLES, loss_fn=named, **PIPELINE)
        assert found["loss"] == pytest.approx(row["loss"], rel=1e-5)
        rx.fit(state, EXAMPLES, loss_fn=named, optimizer=OPTIMIZER, num_epochs=1, loggers=(), **PIPELINE)


def test_models_generate_and_their_layers_communicate():
    explicit = jax.make_mesh((2, 4), ("dp", "tp"))
    mesh = rx.make_mesh(mesh=explicit, names=("data", "tensor"))
    config = models.GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=4)
    abstract = eqx.filter_eval_shape(lambda key: models.GPT2LMHeadModel(config, key=key), KEY)
    model, _ = helpers.place(helpers.filled(abstract, jnp.float32, 0), mesh)
    prompts = np.arange(8).reshape(2, 4)
    expected = np.asarray(models.generate(model, prompts, max_new_tokens=3))
    with jax.set_mesh(explicit):
        np.testing.assert_array_equal(models.generate(model, prompts, max_new_tokens=3), expected)


def test_inside_a_shard_map_nothing_changes():
    mesh, model = rx.make_mesh(), make_model(KEY)
    state = jax.device_put(rx.init_state(model, key=KEY), NamedSharding(mesh, P()))

    def each(state: Any, x: Any) -> Any:
        return rx.eval_step(state, {"x": x, "y": x}, loss_fn=loss_fn)["loss"].value[None]

    specs: Any = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(each, mesh=mesh, check_vma=False, **specs))(state, BATCH["x"])
    model = jax.device_get(model)
    expected = [np.mean((np.tanh(x @ model["up"]) @ model["down"] - x) ** 2) for x in BATCH["x"]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
