"""Operations that XLA's partitioner gets wrong are replaced wherever they stand, so
that steps are right.

`nox -s gradients` asks this of generated programs on every mesh.
"""

import itertools
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gradients.golden import GOLDEN
from gradients.steps import check
from helpers import abstract, assert_close, filled, mesh_of, stepped

import redco_eqx as rx
from redco_eqx._base.jaxprs import trace
from redco_eqx._base.rewriting import replace_operations
from redco_eqx._compiled.communication import communication
from redco_eqx._step.workarounds import for_partitioner

UNIT_SGD = optax.sgd(1.0)
ACROSS = mesh_of("data2xtensor4")
# Rounding of sums of some thousand float32 products, of numbers around 1.
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}


def partitioned(function: Any, kernels: Any = ()) -> Any:
    """The function by way of `for_partitioner`."""
    return lambda *arguments: for_partitioner(
        trace(function, *arguments), ACROSS, kernels
    )(*arguments)


# Programs of which gradients, or the compilation, were wrong once: first and second
# derivatives, inside of the step or of the step itself, under loops and `vmap`.
FEW = (
    "depthwise, two tasks",
    "depthwise, ensemble of states",
    "depthwise, accumulated",
    "depthwise, derivative of a step",
    "depthwise in a scan",
    "adapted grouped convolution",
    "grouped pointwise by example",
    "fft over the batch",
    "fft over split channels",
    "complex parameters",
)


@pytest.mark.parametrize("name", FEW)
def test_gradients_of_a_step_are_those_of_one_device(name):
    check(GOLDEN[name] | {"layouts": GOLDEN[name]["layouts"][:1]})


# Grouped convolutions.


def stem(model: Any, x: Any) -> Any:
    """A depthwise convolution as a bare array, of which no name and no type tells, and
    a pointwise one."""
    x = jnp.sin(
        jax.lax.conv_general_dilated(
            x, model["kernel"], (1, 1), "SAME", feature_group_count=16
        )
    )
    return jax.lax.conv_general_dilated(x, model["mix"], (1, 1), "SAME")


def make_stem() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {"kernel": (16, 1, 3, 3), "mix": (8, 16, 1, 1)}
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


IMAGES = np.random.default_rng(0).normal(size=(16, 16, 4, 4)).astype(np.float32)


def placed() -> tuple[Any, Any]:
    model = jax.tree.map(
        lambda x: jax.device_put(x, jax.NamedSharding(ACROSS, jax.P())), make_stem()
    )
    return model, jax.device_put(IMAGES, rx.batch_sharding(ACROSS))


def loss(model: Any, batch: Any) -> Any:
    return jnp.mean(stem(model, batch) ** 2)


def test_a_derivative_forward_is_that_of_one_device():
    def along_itself(f: Any) -> Any:
        return jax.jit(
            lambda model, x: jax.jvp(lambda model: f(model, x), (model,), (model,))[1]
        )

    assert_close(
        along_itself(partitioned(loss))(*placed()),
        along_itself(loss)(make_stem(), IMAGES),
        **CLOSE,
    )


def test_a_weight_gradient_is_summed_over_the_axes_of_the_batch_once():
    compiled = jax.jit(partitioned(jax.grad(loss))).lower(*placed()).compile()
    assert set(communication(compiled, ACROSS).counts) == {("all-reduce", ("data",))}


def test_channels_that_are_split_stay_so():
    """Between a column and a row split a depthwise convolution sends nothing of its own
    over `tensor`."""
    spec = {
        "up": jax.P("tensor"),
        "each": jax.P("tensor"),
        "down": jax.P(None, "tensor"),
    }
    shapes = {"up": (32, 8, 1, 1), "each": (32, 1, 3, 3), "down": (8, 32, 1, 1)}
    struct = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    weights = {
        name: struct(x, sharding=jax.NamedSharding(ACROSS, spec[name]))
        for name, x in shapes.items()
    }
    x = struct((16, 8, 4, 4), sharding=rx.batch_sharding(ACROSS))

    def loss(weights: Any, x: Any) -> Any:
        convolve = partial(
            jax.lax.conv_general_dilated, window_strides=(1, 1), padding="SAME"
        )
        hidden = jnp.sin(convolve(x, weights["up"]))
        hidden = jnp.sin(convolve(hidden, weights["each"], feature_group_count=32))
        return jnp.mean(convolve(hidden, weights["down"]) ** 2)

    compiled = (
        jax.jit(partitioned(jax.grad(loss), [32 * 3 * 3])).lower(weights, x).compile()
    )
    counts = communication(compiled, ACROSS).counts
    assert counts == {("all-reduce", ("tensor",)): 1, ("all-reduce", ("data",)): 1}


def test_a_shard_map_that_leaves_the_batch_to_the_compiler_is_refused_by_its_line():
    def f(model: Any, x: Any) -> Any:
        specs: Any = {"in_specs": (jax.P(), jax.P()), "out_specs": jax.P()}
        inside = jax.shard_map(stem, mesh=ACROSS, axis_names={"tensor"}, **specs)
        return jnp.mean(inside(model, x) ** 2)

    with pytest.raises(
        ValueError, match=r"test_workarounds\.py:\d+ \(.*stem\): a grouped convolution"
    ):
        partitioned(jax.grad(f))(*placed())


def test_a_whole_array_is_padded_into_a_split_one():
    mesh = mesh_of("data2xtensor4")
    x = jnp.arange(128.0).reshape(32, 4)
    simple = [(-2, 2, 0), (1, -1, 0), (-8, 40, 0), (-33, 37, 0)]
    spread = [(0, 1, 1), (2, 4, 2), (-2, -3, 3)]
    for config, axis in itertools.product(simple + spread, ("tensor", "data")):

        def pad(x: Any, config: Any = config, axis: str = axis) -> Any:
            x = jax.lax.pad(2 * x, 1.0, [config, (0, 0, 0)])
            return x, jax.lax.with_sharding_constraint(
                x, jax.NamedSharding(mesh, jax.P(axis))
            )

        corrected = jax.jit(for_partitioner(trace(pad, x), mesh))(x)
        np.testing.assert_array_equal(corrected[1], pad(x)[0], str(config))


def test_other_programs_are_left_as_they_are():
    def f(mix: Any, x: Any) -> Any:
        return jnp.mean(jax.lax.conv_general_dilated(x, mix, (1, 1), "SAME") ** 2)

    program = trace(jax.grad(f), make_stem()["mix"], IMAGES)
    # As text: JAX 0.12 makes a new object of an equal program.
    assert str(for_partitioner(program, ACROSS).closed.jaxpr) == str(
        program.closed.jaxpr
    )


# In the steps. At a rate of 1 the parameters lose their gradient.


def lost(old: rx.TrainState, new: rx.TrainState) -> dict[str, np.ndarray]:
    return {
        path: np.asarray(x) - np.asarray(new.params[path])
        for path, x in old.params.items()
    }


def test_steps_and_a_users_own_step_are_corrected_and_refuse_a_state_given_away():
    shardings = rx.shard_rules(make_stem(), ACROSS)
    state = rx.init_state(
        eqx.filter_shard(make_stem(), shardings), UNIT_SGD, key=jax.random.key(1)
    )
    batch = placed()[1]

    def own_step(state: Any, batch: Any) -> Any:
        grads = jax.grad(lambda params: loss(state.build(params, {}), batch))(
            state.params
        )
        params = jax.tree.map(lambda p, g: p - g, state.params, grads)
        return eqx.tree_at(
            lambda s: (s.params, s.step), state, (params, state.step + 1)
        ), {"loss": 0.0}

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return loss(model, batch)

    train = partial(
        rx.train_step,
        loss_fn=loss_fn,
        optimizer=UNIT_SGD,
        shardings=shardings,
        num_microbatches=2,
    )
    evaluate = rx.jit_step(partial(rx.eval_step, loss_fn=loss_fn), donate=False)
    step = rx.jit_step(train)
    value, expected = jax.jit(jax.value_and_grad(loss))(make_stem(), IMAGES)
    assert_close(
        lost(state, rx.jit_step(own_step, donate=False)(state, batch)[0]),
        expected,
        **CLOSE,
    )
    before = jax.tree.map(jnp.copy, state)
    assert float(evaluate(state, batch)["loss"]) == pytest.approx(
        float(value), rel=1e-5
    )
    new, _ = step(state, batch)  # what eval_step was given is still there
    assert_close(lost(before, new), expected, **CLOSE)
    for refuses in (step, evaluate):
        with pytest.raises(ValueError, match="its array kernel has been deleted"):
            refuses(state, batch)
    assert "all-reduce" in (step.lower(new, batch).compile().as_text() or "")
    assert int(step(new, batch)[0].step) == 2


def test_rows_that_are_looked_up_in_bfloat16_have_the_gradient_of_one_device():
    """To the bit: it is of integers that bfloat16 holds. openxla/xla#42481 adds up rows
    of several shards."""
    mesh = mesh_of("2x2x2")
    rng = np.random.default_rng(0)
    # Many of each, and none of most rows.
    ids = rng.integers(0, 5, (16, 8)).astype(np.int32)
    signs = rng.choice([-1.0, 1.0], (16, 8, 8)).astype(np.float32)
    specs = (
        jax.P("tensor"),
        jax.P(None, "tensor"),
        jax.P(("fsdp", "tensor")),
        jax.P("tensor", "fsdp"),
    )

    def loss(model: Any, batch: Any, key: Any) -> Any:
        def one(total: Any, part: Any) -> Any:
            ids = part[0]
            signs = part[1].astype(jnp.bfloat16)
            each = jnp.broadcast_to(ids[..., None], signs.shape)
            for table in model.values():
                found = jnp.take(table["take"], ids, axis=0) + 2 * table["index"][ids]
                found += jnp.take_along_axis(table["along"][None], each, axis=1)
                total += jnp.sum(found * signs, dtype=jnp.float32)
            return total, None

        halves = jax.tree.map(
            lambda x: x.reshape(8, 2, *x.shape[1:]).swapaxes(0, 1), batch
        )
        return jax.lax.scan(jax.checkpoint(one), 0.0, halves)[0]

    expected = np.zeros((16, 8), np.float32)
    np.add.at(expected, ids, signs)
    ways = ("take", "index", "along")
    shardings = {
        str(i): dict.fromkeys(ways, jax.NamedSharding(mesh, spec))
        for i, spec in enumerate(specs)
    }
    zeros = jax.tree.map(lambda _: np.zeros((16, 8), jnp.bfloat16), shardings)
    new = stepped(
        jax.device_put(zeros, shardings),
        (ids, signs),
        mesh,
        loss,
        UNIT_SGD,
        shardings=shardings,
    )
    for path, x in new.state.params.items():
        times = 2 if "index" in path else 1
        np.testing.assert_array_equal(
            -np.asarray(x).astype(np.float32), times * expected, err_msg=path
        )


def test_complex_products_train():
    linear = partial(eqx.nn.Linear, dtype=jnp.complex64, key=jax.random.key(0))
    shape = abstract(lambda _: [linear(64, 128), linear(128, 64)])
    phases = np.exp(1j * np.arange(64 * 128)).astype(np.complex64)
    model = jax.tree.map(
        lambda x: x * phases[: x.size].reshape(x.shape), filled(shape, jnp.complex64, 0)
    )

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        def layers(model: Any, x: Any) -> Any:
            return rx.layers.row(jnp.tanh(rx.layers.column(x, model[0])[0]), model[1])

        x = rx.layers.scan_layers(layers, [model], batch, remat="row_out")
        x = rx.layers.scan_layers(layers, [model], x)
        return jnp.mean(jnp.abs(jax.vmap(model[1])(jax.vmap(model[0])(x))) ** 2)

    def gradient(name: str) -> dict[str, np.ndarray]:
        found = stepped(
            model, np.ones((16, 64), np.complex64), mesh_of(name), loss_fn, UNIT_SGD
        )
        return lost(found.before, found.state)

    assert_close(gradient("fsdp8"), gradient("one"), **CLOSE)


# An operation is replaced wherever it stands: in calls, loops, branches, solvers, with
# what those capture.

CAPTURED = np.arange(1.0, 4.0, dtype=np.float32)  # a constant of the traced program
XS = jnp.asarray([0.3, 0.5, 0.7])


def scan(f: Any, x: Any, **options: Any) -> Any:
    return jax.lax.scan(
        lambda c, y: (f(c) + y * CAPTURED, f(y)), x, jnp.stack([x, x]), **options
    )


def solve(f: Any, x: Any) -> Any:
    def inverse(_: Any, b: Any) -> Any:
        return b / f(CAPTURED)

    return jax.lax.custom_linear_solve(
        lambda v: v * f(CAPTURED), x, inverse, symmetric=True
    )


def custom_jvp(f: Any, x: Any) -> Any:
    of = jax.custom_jvp(lambda x: f(x) * CAPTURED)
    of.defjvps(lambda x_dot, y, x: x_dot)
    return of(x)


def custom_vjp(f: Any, x: Any) -> Any:
    of = jax.custom_vjp(lambda x: f(x) * CAPTURED)
    of.defvjp(lambda x: (x, None), lambda _, y_bar: (y_bar,))
    return of(x)


FORMS: dict[str, Any] = {
    "jit": lambda f, x: jax.jit(lambda x: f(x) * CAPTURED)(x),
    "scan": scan,
    "reversed": lambda f, x: scan(f, x, reverse=True),
    "while": lambda f, x: jax.lax.while_loop(
        lambda c: f(c[0]) + c[1] < 3, lambda c: (f(c[0]) + 1, c[1] + 1), (x[0], 0)
    ),
    "cond": lambda f, x: jax.lax.cond(
        x[0] > 0, lambda x: f(x) * CAPTURED, lambda x: x, x
    ),
    "checkpoint": lambda f, x: jax.checkpoint(lambda x: f(x) * CAPTURED)(x),
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "linear solve": solve,
    "shard_map": lambda f, x: jax.shard_map(
        f, mesh=mesh_of("data8"), in_specs=jax.P(), out_specs=jax.P()
    )(x),
    "nested": lambda f, x: jax.jit(
        lambda x: jax.lax.map(lambda x: scan(f, x)[0], x[None])
    )(x),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_operation_is_replaced_wherever_it_stands(form):
    program = trace(lambda x: FORMS[form](jnp.sin, x), XS)
    jaxpr = replace_operations(
        program.closed.jaxpr, lambda e: jnp.cos if e.primitive.name == "sin" else None
    )
    expected = FORMS[form](jnp.cos, XS)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
        program.replace(jaxpr)(XS),
        expected,
    )
    assert (
        replace_operations(program.closed.jaxpr, lambda e: None) is program.closed.jaxpr
    )
