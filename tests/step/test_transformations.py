"""Steps under plain `jit`, `scan`, `vmap` and `grad`, under a set mesh, and of a batch
from anywhere."""

import dataclasses
import warnings
from functools import cache, partial
from typing import Any

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import compilations, host, raised
from helpers import KEY, mlp_batch, squared_error
from jax.sharding import Mesh

import redco_eqx as rx
from redco_eqx.errors import ShardingWarning


def quadratic_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.sum(jnp.tanh(batch @ model["w"]) ** 2) + 0.1 * jnp.sum(model["w"] ** 4)


def test_gradient_through_steps_by_a_learning_rate_in_the_optimizer_state():
    with jax.enable_x64(True):
        batch = np.random.default_rng(0).normal(size=(4, 3))
        w = {"w": jnp.array([0.3, -0.7, 1.1])}
        # eps_root: without it the derivative of a square root at 0 is infinite.
        optimizer = optax.inject_hyperparams(partial(optax.adam, eps_root=1e-8))(0.1)
        step = partial(
            rx.train_step,
            loss_fn=quadratic_loss,
            optimizer=optimizer,
            num_microbatches=2,
        )

        def after(rate):
            state = rx.init_state(w, optimizer, key=KEY)
            hyperparams = {
                **state.opt_state.hyperparams,
                "learning_rate": jnp.asarray(rate),
            }
            state = dataclasses.replace(
                state, opt_state=state.opt_state._replace(hyperparams=hyperparams)
            )
            for _ in range(2):
                state, _ = step(state, batch)
            return rx.eval_step(state, batch, loss_fn=quadratic_loss)["loss"].value

        f = jax.jit(after)
        slope = jax.jit(jax.grad(after))(0.05)
        assert abs(slope) > 1e-3
        # Central differences in float64 have an error of the step's square.
        np.testing.assert_allclose(
            slope, float(f(0.05 + 1e-5) - f(0.05 - 1e-5)) / 2e-5, rtol=1e-6
        )


# Every public function gives the same under each mesh that `jax.set_mesh` may have set.

MOMENTUM = optax.sgd(0.1, momentum=0.9)
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


PIPELINE: Any = {
    "collate_fn": lambda rows: jax.tree.map(lambda *xs: np.stack(xs), *rows),
    "batch_size": 8,
}
COMPUTED: Any = {"loss_fn": loss_fn, "optimizer": MOMENTUM}


def begin(mesh: Any) -> Any:
    return rx.init_state(rx.init_model(make_model, mesh, key=KEY), MOMENTUM, key=KEY)


def briefly(mesh: Any, directory: Any) -> dict[str, Any]:
    """Return the results of the functions that place, compile and read, by name."""
    return {
        "jit_step": rx.jit_step(partial(rx.train_step, **COMPUTED), donate=False)(
            begin(mesh), BATCH
        )
    }


def everything(mesh: Any, directory: Any) -> dict[str, Any]:
    """Return the result of each function, by name."""
    program: Any = {"loss_fn": loss_fn, "batch": BATCH}
    found: dict[str, Any] = {}

    model = rx.init_model(make_model, mesh, key=KEY, **program)
    shardings = rx.shard_rules(model, mesh, **program)
    found["explain"] = str(rx.explain(model, mesh, **program))
    state = rx.init_state(model, MOMENTUM, key=KEY)
    found["batches"] = list(rx.batches(EXAMPLES, mesh=mesh, **PIPELINE))
    for name, step in {
        "jit_step": partial(rx.train_step, shardings=shardings, **COMPUTED),
        "eval_step": partial(rx.eval_step, loss_fn=loss_fn),
        "predict_step": partial(rx.predict_step, predict_fn=predict_fn),
    }.items():
        found[name] = rx.jit_step(step, donate=False)(state, BATCH)
    found["loss"] = float(found["eval_step"]["loss"])
    found["evaluate"] = rx.evaluate(state, EXAMPLES, loss_fn=loss_fn, **PIPELINE)
    found["predict"] = rx.predict(state, EXAMPLES, predict_fn=predict_fn, **PIPELINE)
    rx.save(directory, state)
    optimizer: Any = {
        "optimizer": MOMENTUM,
        "bytes_per_device": 2**30,
        "progress": False,
    }
    found["plan"] = rx.plan(model, **program, **optimizer).mesh
    found["restore"] = rx.restore(directory, state)
    run: Any = {"num_epochs": 2, "evaluation": rx.Evaluation(EXAMPLES), "loggers": ()}
    found["fit"], _ = rx.fit(state, EXAMPLES, **run, **PIPELINE, **COMPUTED)
    return found


def contexts() -> dict[str, tuple[Any, Any]]:
    """The mesh of a state, and the one that is set."""
    explicit = jax.make_mesh((2, 4), ("dp", "tp"))
    return {
        "the same, Explicit": (Mesh(explicit.devices, ("data", "tensor")), explicit),
        "in another order": (Mesh(explicit.devices, ("tensor", "data")), explicit),
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
            for x, y in zip(
                jax.tree.leaves(found[function]),
                jax.tree.leaves(expected[function]),
                strict=True,
            ):
                pair = [host(z) if isinstance(z, jax.Array) else z for z in (x, y)]
                np.testing.assert_array_equal(*pair, err_msg=f"{function} under {name}")


def test_steps_under_a_jit_of_ones_own_say_what_to_do():
    for mesh, outer in contexts().values():
        state = begin(mesh)
        step = jax.jit(partial(rx.eval_step, loss_fn=loss_fn))
        with jax.set_mesh(outer), compilations() as compiled:
            raised(ValueError, step, state, BATCH, match="Call jit_step in place")
        assert not compiled


def test_a_loss_may_name_the_axes_of_the_mesh_that_is_set():
    mesh = rx.make_mesh(tensor=4)
    named = partial(loss_fn, spec=jax.P("data", "tensor"))
    state = begin(mesh)
    row = rx.evaluate(state, EXAMPLES, loss_fn=loss_fn, **PIPELINE)
    with jax.set_mesh(mesh):
        found = rx.evaluate(state, EXAMPLES, loss_fn=named, **PIPELINE)
        assert found["loss"] == pytest.approx(row["loss"], rel=1e-5)
        rx.fit(
            state,
            EXAMPLES,
            loss_fn=named,
            optimizer=MOMENTUM,
            num_epochs=1,
            loggers=(),
            **PIPELINE,
        )


def test_inside_a_shard_map_nothing_changes():
    mesh = rx.make_mesh()
    model = make_model(KEY)
    state = jax.device_put(
        rx.init_state(model, key=KEY), jax.NamedSharding(mesh, jax.P())
    )

    def each(state: Any, x: Any) -> Any:
        return rx.eval_step(state, {"x": x, "y": x}, loss_fn=loss_fn)["loss"].value[
            None
        ]

    specs: Any = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P("data")}
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(each, mesh=mesh, check_vma=False, **specs))(
            state, BATCH["x"]
        )
    model = jax.device_get(model)
    expected = [
        np.mean((np.tanh(x @ model["up"]) @ model["down"] - x) ** 2) for x in BATCH["x"]
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# A batch is computed in parts, wherever it comes from: at the operations and bytes of
# one that is placed.

OPTIMIZER = optax.sgd(0.1)


@cache
def subject(name: str) -> Any:
    """A mesh, a state on it, and steps, with a layout or without."""
    mesh = helpers.mesh_of(name)
    model, shardings = helpers.place(helpers.make_mlp(), mesh)
    train = partial(rx.train_step, optimizer=OPTIMIZER, loss_fn=squared_error)
    predict = partial(
        rx.predict_step,
        predict_fn=lambda model, batch, key: jax.vmap(model)(batch["x"]),
    )
    steps = {
        "train_step": partial(train, shardings=shardings),
        "of microbatches": partial(train, num_microbatches=2),
        "eval_step": partial(rx.eval_step, loss_fn=squared_error),
        "predict_step": partial(predict, shardings=shardings),
    }
    return mesh, rx.init_state(model, OPTIMIZER, key=KEY), steps


def cost(
    function: Any, *arguments: Any, mesh: Any
) -> tuple[float, dict[Any, int], Any]:
    """Operations of a device, bytes that are sent over which axes, and the program,
    under plain `jit`."""
    compiled = jax.jit(function).lower(*arguments).compile()
    analysis: Any = compiled.cost_analysis()
    sent = {
        axes: x.sent_bytes
        for axes, x in rx.communication(compiled, mesh).by_axes.items()
    }
    return analysis["flops"], sent, compiled


@cache
def alone(name: str) -> tuple[float, dict[Any, int], Any]:
    """The cost of one rx.train_step of a batch that is placed."""
    mesh, state, steps = subject(name)
    return cost(
        steps["train_step"],
        state,
        jax.device_put(mlp_batch(0), rx.batch_sharding(mesh)),
        mesh=mesh,
    )


def test_a_batch_that_is_not_placed_costs_what_one_does_that_is():
    mesh, state, steps = subject("2x2x2")
    batch = mlp_batch(0)
    placed = jax.device_put(batch, rx.batch_sharding(mesh))
    for what, step in steps.items():
        flops, sent, _ = cost(step, state, batch, mesh=mesh)
        wanted = (
            alone("2x2x2")
            if what == "train_step"
            else cost(step, state, placed, mesh=mesh)
        )
        assert flops == pytest.approx(wanted[0], rel=0.01), what
        assert sent == wanted[1], what


def test_rows_that_are_taken_inside_of_a_scan_are_split_too():
    mesh, state, steps = subject("2x2x2")
    data = jax.tree.map(jnp.asarray, mlp_batch(0, 48))
    step = steps["train_step"]
    one = alone("2x2x2")

    def epoch(state: Any, rows: Any) -> Any:
        return jax.lax.scan(
            lambda state, rows: step(state, jax.tree.map(lambda x: x[rows], data)),
            state,
            rows,
        )

    rows = np.random.default_rng(0).permutation(48).reshape(3, 16)
    flops, sent, compiled = cost(epoch, state, rows, mesh=mesh)
    # A body of a scan is counted once; the rest takes the rows.
    assert flops < 1.2 * one[0]
    assert any("data" in axes for axes in sent)
    found, _ = compiled(state, rows)
    helpers.assert_same_layout(found.params, state.params)
    for taken in rows:
        batch = jax.tree.map(lambda x, taken=taken: np.asarray(x)[taken], data)
        state, _ = one[2](state, jax.device_put(batch, rx.batch_sharding(mesh)))
    helpers.assert_close(found.params, state.params, rtol=1e-5, atol=1e-6)


def test_members_under_vmap_are_each_computed_in_parts_and_stay_split():
    mesh, state, steps = subject("2x2x2")
    states = [
        state,
        dataclasses.replace(
            state, params={path: 2 * x for path, x in state.params.items()}
        ),
    ]
    members = jax.tree.map(lambda *xs: jnp.stack(xs), *states)
    batches = [mlp_batch(seed) for seed in range(2)]
    data = jax.tree.map(lambda *xs: np.stack(xs), *batches)
    flops, sent, compiled = cost(
        jax.vmap(steps["train_step"]), members, data, mesh=mesh
    )
    one = alone("2x2x2")
    assert flops < 2.2 * one[0]
    assert any("data" in axes for axes in sent)
    together, _ = compiled(members, data)
    assert not together.params["layers.0.weight"].is_fully_replicated
    for i in range(2):
        expected, _ = one[2](
            states[i], jax.device_put(batches[i], rx.batch_sharding(mesh))
        )
        found = {path: x[i] for path, x in together.params.items()}
        helpers.assert_close(found, expected.params, rtol=1e-5, atol=1e-6)


def test_what_spmd_axis_name_says_of_an_axis_comes_first():
    """Clients that are laid over `data` train without a word to each other."""
    mesh, state, steps = subject("data8")

    def train(key: Any, batches: Any) -> Any:
        return jax.lax.scan(
            steps["train_step"], dataclasses.replace(state, key=key), batches
        )[0].params

    batches = jax.tree.map(
        lambda x: x.reshape(8, 2, 8, *x.shape[1:]), mlp_batch(0, 128)
    )
    flops, sent, _ = cost(
        jax.vmap(train, spmd_axis_name="data"),
        jax.random.split(KEY, 8),
        batches,
        mesh=mesh,
    )
    one, _, _ = cost(train, KEY, jax.tree.map(lambda x: x[0], batches), mesh=mesh)
    assert flops < 8 * one  # `one` is split over eight
    assert ("data",) not in sent


def test_other_dims_stay_as_they_were_placed():
    mesh = rx.make_mesh(tensor=4)
    state = rx.init_state(
        {"w": jax.device_put(jnp.ones((8, 8)), jax.NamedSharding(mesh, jax.P()))},
        key=KEY,
    )
    tokens = jax.device_put(
        np.ones((4, 16, 8), np.float32),
        jax.NamedSharding(mesh, jax.P("data", "tensor")),
    )
    step = partial(
        rx.predict_step,
        predict_fn=lambda model, batch, key: jnp.tanh(batch @ model["w"]),
    )
    _, sent, compiled = cost(step, state, tokens, mesh=mesh)
    assert not sent
    assert compiled.output_shardings.is_equivalent_to(tokens.sharding, tokens.ndim)


def test_gradients_and_keys_pass_through():
    _, state, steps = subject("data8")
    batch = mlp_batch(0)

    def loss(x: Any) -> Any:
        return steps["eval_step"](state, {**batch, "x": x})["loss"].value

    def plain(x: Any) -> Any:
        return squared_error(helpers.make_mlp(), {**batch, "x": x}, None)[0].value

    def derivatives(f: Any) -> Any:
        return jax.jit(
            lambda x: (jax.grad(f)(x), jax.jvp(f, (x,), (jnp.ones_like(x),))[1])
        )(batch["x"])

    helpers.assert_close(derivatives(loss), derivatives(plain), rtol=1e-4, atol=1e-6)

    def normals(model: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(jax.random.normal)(batch["keys"]) * batch["scale"]

    keys = {"keys": jax.random.split(KEY, 16), "scale": jnp.float32(2)}
    drawn = jax.jit(partial(rx.predict_step, predict_fn=normals))(state, keys)
    np.testing.assert_array_equal(drawn, 2 * jax.vmap(jax.random.normal)(keys["keys"]))


def test_rows_that_do_not_divide_are_warned_of_and_a_tail_is_not():
    _, state, steps = subject("data8")
    for step in (steps["train_step"], steps["eval_step"]):
        message = "weight has 12 rows, which do not divide evenly over 8"
        with pytest.warns(ShardingWarning, match=message) as seen:
            jax.jit(step).lower(state, mlp_batch(0, 12))
        assert len(seen) == 1
        for size in (16, 3):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                jax.jit(step).lower(state, mlp_batch(0, size))
    # 8 rows, in 2 microbatches of 4.
    with pytest.warns(ShardingWarning, match="8 data shards"):
        jax.jit(steps["of microbatches"]).lower(state, mlp_batch(0, 24))
