"""States, models and layouts that no step can use are refused by name, before anything
is compiled."""

import dataclasses
import functools
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    EXAMPLES,
    SGD,
    collate,
    fit,
    linear_state,
    loss_fn,
    mlp_state,
    predict_fn,
)
from helpers import KEY, mesh_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import redco_eqx as rx

ROWS = np.ones((8, 8), np.float32)


def squares(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(jax.vmap(model)(batch) ** 2)


# Functions that hold arrays


class Holder(eqx.Module):
    function: Any
    weight: Any

    def __call__(self, x: Any) -> Any:
        return self.function(x) * self.weight


class Still(eqx.Module):
    weight: Any
    function: Any = eqx.field(static=True)


@dataclasses.dataclass(frozen=True)
class Options:
    activation: Any


class Plain:
    """No PyTree."""

    def __init__(self, array: Any):
        self.array = array

    def apply(self, x: Any) -> Any:
        return x * self.array

    def __call__(self, x: Any) -> Any:
        return x * self.array


def scaled(scale: Any, x: Any) -> Any:
    return x * scale


def closure(array: Any) -> Any:
    return lambda x: x * array


def of_default(array: Any) -> Any:
    def function(x: Any, scale: Any = array) -> Any:
        return x * scale

    return function


def of_keyword(array: Any) -> Any:
    def function(x: Any, *, scale: Any = array) -> Any:
        return x * scale

    return function


def wrapped(array: Any) -> Any:
    @functools.wraps(scaled)
    def function(x: Any) -> Any:
        return scaled(array, x)

    return function


def linear(array: Any) -> eqx.nn.Linear:
    layer = eqx.nn.Linear(2, 2, use_bias=False, key=KEY)
    return eqx.tree_at(lambda layer: layer.weight, layer, array)


# Each makes a function that holds an array of shape (2, 2).
HOLDING: dict[str, Any] = {
    "closure": closure,
    "nested closure": lambda array: closure(closure(array)),
    "closure over a list": lambda array: closure([{"a": array}]),
    "default": of_default,
    "keyword default": of_keyword,
    "partial": lambda array: partial(scaled, array),
    "partial by keyword": lambda array: partial(scaled, scale=array),
    "partial of a closure": lambda array: partial(closure(array)),
    "method": lambda array: Plain(array).apply,
    "callable": Plain,
    "wraps": wrapped,
    "vmap": lambda array: jax.vmap(linear(array)),
    "jit": lambda array: jax.jit(closure(array)),
    "vmap of jit": lambda array: jax.vmap(jax.jit(closure(array))),
    "grad": lambda array: jax.grad(lambda x: (x * array).sum()),
    "checkpoint": lambda array: jax.checkpoint(closure(array)),
}
# The array belongs to an object, such as a layer.
OF_OBJECTS = ["method", "callable", "vmap"]
CONSTANTS = [kind for kind in HOLDING if kind not in OF_OBJECTS]
PLACES: dict[str, Any] = {
    "field": lambda function: {"layers": [Holder(function, jnp.ones(2))]},
    "static": lambda function: {"layers": [Still(jnp.ones(2), function)]},
}
WAYS: dict[str, Any] = {
    "init_state": lambda make: rx.init_state(make(KEY), SGD, key=KEY),
    "init_model": lambda make: rx.init_model(make, mesh_of("2x2x2"), key=KEY),
    "shard_rules": lambda make: rx.shard_rules(make(KEY), mesh_of("2x2x2")),
}


WITHIN: dict[str, Any] = {
    "list": lambda function: [1, function],
    "dict": lambda function: {"1": function},
    "tuple": lambda function: (1, function),
    "dataclass": lambda function: Options(function),
    "partial in a list": lambda function: [1, partial(function)],
}


def refused_as(way: str, path: str) -> Any:
    message = f"{way}: {path} is a function that holds the array .*float32\\[2,2\\]"
    return pytest.raises(ValueError, match=message)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("within", WITHIN)
def test_a_function_in_a_value_of_a_static_field_is_refused_by_path(
    within: str, way: str
) -> None:
    def make(key: Any) -> Any:
        function = Plain(jax.random.normal(key, (2, 2))).apply
        return [Still(jnp.ones(2), WITHIN[within](function))]

    with refused_as(way, r"0\.function\.(1|activation)"):
        WAYS[way](make)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", OF_OBJECTS)
def test_a_function_that_holds_a_layer_is_refused_by_path(
    kind: str, place: str, way: str
) -> None:
    def make(key: Any) -> Any:
        return PLACES[place](HOLDING[kind](jax.random.normal(key, (2, 2))))

    with refused_as(way, r"layers\.0\.function"):
        WAYS[way](make)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_function_that_holds_an_array_of_a_trace_is_refused_by_path(
    kind: str, place: str
) -> None:
    def make(key: Any) -> Any:
        return PLACES[place](HOLDING[kind](jax.random.normal(key, (2, 2))))

    with refused_as("init_model", r"layers\.0\.function"):
        rx.init_model(make, mesh_of("2x2x2"), key=KEY)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", CONSTANTS)
def test_a_function_that_holds_an_array_by_itself_is_named(
    kind: str, place: str
) -> None:
    model = PLACES[place](HOLDING[kind](jnp.ones((2, 2))))
    rx.shard_rules(model, mesh_of("2x2x2"))
    with pytest.warns(UserWarning, match=r"init_state: layers\.0\.function is a func"):
        state = rx.init_state(model, SGD, key=KEY)
    assert list(state.params) == ["layers.0.weight"]


@pytest.mark.parametrize("sizes", [{"data": 1}, {"tensor": 4}])
def test_a_constant_of_a_function_is_added_on_any_mesh(sizes: Any) -> None:
    """As in flowjax, where a function adds the initial parameters of a bijection."""
    scale = jnp.linspace(1.0, 2.0, 8)
    model = Holder(closure(scale), jnp.arange(8.0))
    expected = jax.grad(
        lambda weight: squares(Holder(closure(scale), weight), ROWS, KEY)
    )
    model = eqx.filter_shard(model, rx.shard_rules(model, rx.make_mesh(**sizes)))
    with pytest.warns(UserWarning, match="function is a function that holds a JAX"):
        state = rx.init_state(model, SGD, key=KEY)
    begin = np.arange(8.0)
    new, _ = jax.jit(partial(rx.train_step, loss_fn=squares, optimizer=SGD))(
        state, ROWS
    )
    taken = (begin - np.asarray(new.params["weight"])) / 0.05  # the rate of SGD
    np.testing.assert_allclose(taken, expected(begin), rtol=1e-4, atol=1e-5)


TEACHER = jnp.ones((2, 2))


@pytest.mark.parametrize("way", WAYS)
def test_functions_that_hold_constants_are_accepted(way: str) -> None:
    functions = [
        jax.nn.relu,
        jax.nn.gelu,
        jnp.tanh,
        partial(jax.nn.leaky_relu, negative_slope=0.1),
        closure(np.ones(2, np.float32)),  # a constant, as a NumPy array in a field
        lambda x: x @ TEACHER,  # a global variable
        jax.vmap(jax.nn.silu),
        Plain(3.0),
    ]
    WAYS[way](
        lambda key: [
            Holder(function, jax.random.normal(key, (2,))) for function in functions
        ]
    )


def test_arrays_of_functions_that_are_modules_are_parameters() -> None:
    model = Holder(eqx.filter_vmap(eqx.nn.Linear(2, 2, key=KEY)), jnp.ones(2))
    assert len(rx.init_state(model, SGD, key=KEY).params) == 3


# Without compiling


LOSS: Any = {"collate_fn": collate, "loss_fn": loss_fn, "batch_size": 4}
EAGER: dict[str, Any] = {
    "fit": lambda state: fit(state, num_steps=2),
    "evaluate": lambda state: rx.evaluate(state, EXAMPLES, **LOSS),
    "predict": lambda state: rx.predict(
        state, EXAMPLES, collate_fn=collate, predict_fn=predict_fn, batch_size=4
    ),
    "Evaluation": lambda state: rx.Evaluation(EXAMPLES, **LOSS)(state),
}


@pytest.mark.parametrize("name", EAGER)
def test_without_jit_a_compiled_program_is_refused_with_the_remedy(name: str) -> None:
    state = linear_state()
    with (
        jax.disable_jit(),
        pytest.raises(ValueError, match=r"jax.disable_jit is on.*jax.debug.print"),
    ):
        EAGER[name](state)
    EAGER[name](state)  # it is untouched


def test_without_jit_states_and_steps_are_those_with_it() -> None:
    optimizer = optax.adam(1e-2)

    def two_steps() -> Any:
        state = mlp_state(optimizer)
        assert (
            state.opt_state[0].mu["layers.0.weight"].sharding
            == state.params["layers.0.weight"].sharding
        )
        options: Any = {
            "loss_fn": squares,
            "optimizer": optimizer,
            "shardings": state.shardings,
        }
        state, _ = rx.train_step(state, ROWS, **options)
        state, metrics = rx.train_step(state, ROWS, **options)
        explanation = rx.explain(
            state.model, mesh_of("2x2x2"), loss_fn=squares, batch=ROWS
        )
        return state.params, float(metrics["loss"]), str(explanation)

    params, loss, explanation = (
        jax.tree.map(np.asarray, two_steps()[0]),
        *two_steps()[1:],
    )
    with jax.disable_jit():
        eager = two_steps()
    for path, x in params.items():
        np.testing.assert_allclose(
            eager[0][path], x, rtol=1e-5, atol=1e-6, err_msg=path
        )
    assert eager[1] == pytest.approx(loss, rel=1e-5)
    assert eager[2] == explanation


# A layout that is not that of the state


def permuted() -> Mesh:
    mesh = mesh_of("2x2x2")
    return Mesh(mesh.devices[::-1], mesh.axis_names)


MESHES: dict[str, Any] = {
    "one device": lambda: mesh_of("one"),
    "fewer devices": lambda: rx.make_mesh(data=1, tensor=2, devices=jax.devices()[:2]),
    "other devices": lambda: rx.make_mesh(data=1, tensor=2, devices=jax.devices()[2:4]),
    "another order": permuted,
}
STEPS: dict[str, Any] = {
    "train_step": lambda **given: partial(
        rx.train_step, loss_fn=squares, optimizer=SGD, **given
    ),
    "eval_step": lambda **given: partial(rx.eval_step, loss_fn=squares, **given),
    "predict_step": lambda **given: partial(
        rx.predict_step,
        predict_fn=lambda model, batch, key: jax.vmap(model)(batch),
        **given,
    ),
}


HOW: dict[str, Any] = {
    "jit_step": partial(rx.jit_step, donate=False),
    "jit": jax.jit,
    "alone": lambda f: f,
}
# Under a plain `jax.jit`, a state knows the number of its devices alone, and JAX itself
# refuses another order.
PAIRS = [
    (mesh, how)
    for mesh in MESHES
    for how in HOW
    if (mesh, how) != ("another order", "jit")
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("mesh", "how"), PAIRS)
def test_shardings_on_another_mesh_are_refused(mesh: str, how: str, step: str) -> None:
    state = mlp_state()
    function = STEPS[step](shardings=rx.shard_rules(state.model, MESHES[mesh]()))
    with pytest.raises(
        ValueError,
        match=r"shardings is on a mesh of .*, but the state lies on a mesh of data=2",
    ):
        HOW[how](function)(state, ROWS)


def test_a_model_that_was_never_placed_needs_the_layout_first() -> None:
    model = eqx.nn.MLP(8, 8, 16, 1, key=KEY)
    shardings = rx.shard_rules(model, mesh_of("2x2x2"))
    step = rx.jit_step(STEPS["train_step"](shardings=shardings))
    with pytest.raises(ValueError, match=r"devices 0\).*eqx.filter_shard"):
        step(rx.init_state(model, SGD, key=KEY), ROWS)
    step(rx.init_state(eqx.filter_shard(model, shardings), SGD, key=KEY), ROWS)


def test_shardings_on_two_meshes_are_refused_by_path() -> None:
    state = mlp_state()
    other = NamedSharding(mesh_of("data8"), PartitionSpec())
    shardings = {**state.shardings, "layers.1.weight": other}
    with pytest.raises(ValueError, match=r"layers.1.weight is on a mesh of data=8"):
        STEPS["train_step"](shardings=shardings)(state, ROWS)


@pytest.mark.parametrize("width", [6, 2, 32])
def test_the_layout_of_a_model_of_another_width_fits_or_is_refused_by_path(
    width: int,
) -> None:
    """A spec has no sizes: where it divides the arrays of the state, it is a layout
    like any other."""
    mesh = mesh_of("tensor8")
    wide: Any = rx.shard_rules(eqx.nn.MLP(8, 8, 16, 1, key=KEY), mesh)
    model = eqx.nn.MLP(8, 8, width, 1, key=KEY)
    state = rx.init_state(
        eqx.filter_shard(model, rx.shard_rules(model, mesh)), SGD, key=KEY
    )
    step = rx.jit_step(STEPS["eval_step"](shardings=wide), donate=False)
    if width % 8:
        with pytest.raises(
            ValueError, match=rf"does not fit layers.0.weight.*dim 0 of size {width}"
        ):
            step(state, ROWS)
    else:
        np.testing.assert_allclose(
            step(state, ROWS)["loss"].value, squares(model, ROWS, KEY), rtol=1e-5
        )


# What was deleted


def deleted(model: Any) -> Any:
    for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)):
        x.delete()
    return model


def test_a_deleted_model_or_key_is_named_and_its_layout_is_known() -> None:
    make: Any = lambda key: {"mlp": eqx.nn.MLP(8, 8, 16, 1, key=key), "key": key}  # noqa: E731
    mesh = mesh_of("2x2x2")
    expected = str(rx.explain(make(jax.random.key(3)), mesh))
    model = deleted(make(jax.random.key(3)))
    assert str(rx.explain(model, mesh)) == expected  # shapes are enough
    rx.shard_rules(model["mlp"], mesh, loss_fn=squares, batch=ROWS)
    rx.parameter_kinds(model)
    for call in (
        lambda: rx.init_state(model, SGD, key=KEY),
        lambda: rx.init_state(eqx.nn.MLP(8, 8, 16, 1, key=KEY), SGD, key=model["key"]),
        lambda: rx.init_model(make, mesh, key=model["key"]),
    ):
        with pytest.raises(ValueError, match=r"has been deleted\. It was donated"):
            call()


# The last step


def test_the_number_of_a_step_never_becomes_negative() -> None:
    state = linear_state()
    last = 2**31 - 1
    late = dataclasses.replace(
        state, step=jax.device_put(jnp.int32(last - 1), state.step.sharding)
    )
    step = jax.jit(partial(rx.train_step, loss_fn=loss_fn, optimizer=SGD))
    batch = collate(EXAMPLES[:4])
    steps = []
    for _ in range(3):
        late, _ = step(late, batch)
        steps.append(int(late.step))
    assert steps == [last] * 3
    late = dataclasses.replace(late, step=jnp.int32(last - 2))
    assert int(fit(jax.tree.map(jnp.copy, late), num_steps=2).step) == last
    with pytest.raises(
        ValueError,
        match=rf"the state is at step {last - 2}, and 3 more would pass {last}",
    ):
        fit(late, num_steps=3)
