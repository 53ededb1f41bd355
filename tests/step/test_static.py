"""Static fields with lists, dicts and other values that could change: a state keeps
them by value."""

import collections
import copy
import dataclasses
import pickle
import types
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import (
    EXAMPLES,
    SGD,
    assert_identical,
    collate,
    fit,
    loss_fn,
    predict_fn,
    scalar_loss,
)
from helpers import KEY

import redco_eqx as rx
from redco_eqx._step.state import Structure
from redco_eqx._step.static import check_static

BATCH = collate(EXAMPLES[:4])
STATIC = {"depths": [2, 2], "kinds": {"a"}}


class Inner(eqx.Module):
    """Its static field stands deep in the model, and changes nothing."""

    linear: eqx.nn.Linear
    static: Any = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.linear(x)


class Widths(eqx.Module):
    """A model in the style of published ones: the lists say how it is built."""

    layers: list[Inner]
    head: eqx.nn.Linear
    widths: list[int] = eqx.field(static=True)
    options: dict[str, Any] = eqx.field(static=True)

    def __init__(self, key: Any, static: Any, widths: list[int], num_in: int = 2):
        self.widths = widths
        self.options = {"scales": [0.5, 2.0], "activations": [jnp.tanh, jax.nn.relu]}
        keys = jax.random.split(key, len(widths) + 1)
        sizes = [num_in, *widths]
        self.layers = [
            Inner(eqx.nn.Linear(before, after, key=own), static)
            for own, before, after in zip(keys, sizes, widths)
        ]
        self.head = eqx.nn.Linear(sizes[-1], 1, key=keys[-1])

    def __call__(self, x: Any) -> Any:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            x = self.options["activations"][i % 2](x) * self.options["scales"][i % 2]
        return self.head(x)


def make(static: Any = None, widths: Any = (8, 8), key: Any = KEY) -> Widths:
    return Widths(key, static, list(widths))


def state_of(static: Any) -> rx.TrainState:
    return rx.init_state(make(static), SGD, key=KEY)


def static_of(state: rx.TrainState) -> Any:
    return state.model.layers[1].static


@dataclasses.dataclass
class Options:
    depths: Any
    name: str = "tiny"


@dataclasses.dataclass(frozen=True)
class Frozen:
    depths: Any


class Sizes(NamedTuple):
    depths: Any


class Listed(list[Any]):
    """A list with a method of its own."""


# By kind: make a value, change it in place, and make another value of this kind.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[], Any]]] = {
    "list": (lambda: [2, 2, 6], lambda x: x.append(2), lambda: [2, 2, 18]),
    "types in a list": (lambda: [1], lambda x: x.append(2), lambda: [True]),
    "list of lists": (lambda: [[1], [2]], lambda x: x[0].append(2), lambda: [[1], [3]]),
    "empty list": (lambda: [], lambda x: x.append(2), lambda: [0]),
    "dict": (lambda: {"a": 1}, lambda x: x.update(b=2), lambda: {"a": 2}),
    "dict by number": (lambda: {1: "a"}, lambda x: x.clear(), lambda: {True: "a"}),
    "dict of lists": (
        lambda: {"a": {"b": [1, None]}},
        lambda x: x["a"]["b"].append(2),
        lambda: {"a": {"b": [1, 0]}},
    ),
    "set": (lambda: {8, 0, "a"}, lambda x: x.add(2), lambda: {8, 0, "b"}),
    "functions": (
        lambda: [jax.nn.relu, jnp.sin, np.tanh, len],
        lambda x: x.pop(),
        lambda: [jax.nn.gelu, jnp.sin, np.tanh, len],
    ),
    "classes and dtypes": (
        lambda: [eqx.nn.LayerNorm, jnp.float32, np.dtype("int8")],
        lambda x: x.pop(),
        lambda: [eqx.nn.LayerNorm, jnp.float32, np.dtype("int4")],
    ),
    "list in a tuple": (
        lambda: (1, [2]),
        lambda x: x[1].append(2),
        lambda: (1, [3]),
    ),
    "named tuple": (
        lambda: Sizes([1]),
        lambda x: x.depths.append(2),
        lambda: Sizes([2]),
    ),
    "dataclass": (
        lambda: Options([1]),
        lambda x: setattr(x, "name", "base"),
        lambda: Options([1], "large"),
    ),
    "list in a dataclass": (
        lambda: Options([jax.nn.relu]),
        lambda x: x.depths.append(2),
        lambda: Options([jax.nn.gelu]),
    ),
    "frozen dataclass": (
        lambda: Frozen([1]),
        lambda x: x.depths.append(2),
        lambda: Frozen([2]),
    ),
    "namespace": (
        lambda: types.SimpleNamespace(depths=[1]),
        lambda x: x.depths.append(2),
        lambda: types.SimpleNamespace(depths=[2]),
    ),
    "ordered dict": (
        lambda: collections.OrderedDict(a=[jax.nn.relu]),
        lambda x: x["a"].append(2),
        lambda: collections.OrderedDict(a=[jax.nn.gelu]),
    ),
    "default dict": (
        lambda: collections.defaultdict(list, a=[1]),
        lambda x: x["b"],  # reading it adds an entry
        lambda: collections.defaultdict(list, a=[2]),
    ),
    "counter": (
        lambda: collections.Counter("aab"),
        lambda x: x.update("b"),
        lambda: collections.Counter("ab"),
    ),
    "subclass of list": (
        lambda: Listed([1]),
        lambda x: x.append(2),
        lambda: Listed([2]),
    ),
    "bytearray": (lambda: bytearray(b"a"), lambda x: x.append(2), lambda: bytearray()),
    "deque": (
        lambda: collections.deque([1]),
        lambda x: x.append(2),
        lambda: collections.deque([2]),
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
def test_the_model_of_a_state_has_the_value_and_its_type(kind: str) -> None:
    new, _, _ = KINDS[kind]
    value = new()
    kept = static_of(state_of(value))
    assert kept == value == new()
    assert type(kept) is type(value)


@every_kind
def test_a_later_change_has_no_effect_on_the_state(kind: str) -> None:
    new, change, _ = KINDS[kind]
    value = new()
    state = state_of(value)
    change(value)
    assert value != new()
    assert static_of(state) == new()
    change(static_of(state))
    assert static_of(state) == new()


@every_kind
def test_a_loss_that_changes_it_changes_nothing(kind: str) -> None:
    new, change, _ = KINDS[kind]
    seen = []

    def changing(model: Any, batch: Any, key: Any) -> Any:
        seen.append(copy.copy(model.layers[1].static) == new())
        change(model.layers[1].static)
        return loss_fn(model, batch, key)

    state = state_of(new())
    step = jax.jit(partial(rx.train_step, loss_fn=changing, optimizer=SGD))
    after, _ = step(state, BATCH)
    again, _ = step(after, BATCH)
    assert all(seen)
    assert static_of(again) == static_of(state) == new()


def assert_traced_for_each_value(jit: Any, kind: str) -> None:
    new, _, other = KINDS[kind]
    traced = []

    def step(state: rx.TrainState, batch: Any) -> Any:
        traced.append(static_of(state))
        return rx.train_step(state, batch, loss_fn=scalar_loss, optimizer=SGD)

    compiled = jit(step)
    for static in (new(), new(), other(), new(), other()):
        state, _ = compiled(state_of(static), BATCH)
        state, _ = compiled(state, BATCH)
        assert static_of(state) == static
    assert traced == [new(), other()]


@every_kind
def test_a_step_is_traced_again_for_another_value_alone(kind: str) -> None:
    assert_traced_for_each_value(jax.jit, kind)


@pytest.mark.parametrize("jit", [rx.jit_step, eqx.filter_jit], ids=["step", "filter"])
def test_other_compiled_steps_are_traced_again_for_another_value_alone(
    jit: Any,
) -> None:
    assert_traced_for_each_value(jit, "list")


@every_kind
def test_structures_are_equal_by_value(kind: str) -> None:
    new, _, other = KINDS[kind]
    first, again, different = (Structure(make(x())) for x in (new, new, other))
    assert first == again
    assert hash(first) == hash(again)
    assert first != different


@every_kind
def test_an_edited_model_must_have_the_same_value(kind: str) -> None:
    new, _, other = KINDS[kind]
    state = state_of(new())
    model = eqx.tree_at(lambda m: m.head.bias, make(new()), replace_fn=jnp.ones_like)
    np.testing.assert_array_equal(state.with_model(model).params["head.bias"], 1)
    assert state.with_model(state.model).structure == state.structure
    with pytest.raises(ValueError, match=r"layers\.0\.static was .*, and is "):
        state.with_model(make(other()))


def test_a_change_is_noticed_where_the_model_is_compared() -> None:
    model = make([1])
    state = rx.init_state(model, SGD, key=KEY)
    model.widths.append(4)
    with pytest.raises(ValueError, match=r"widths was \[8, 8\], and is \[8, 8, 4\]"):
        state.with_model(model)


def test_equal_sets_in_another_order_are_one_value() -> None:
    one, other = {8, 0}, {0, 8}
    assert list(one) != list(other)
    assert Structure(make(one)) == Structure(make(other))
    state_of(one).with_model(make(other))


def test_the_order_of_a_dict_belongs_to_its_value() -> None:
    # A loss can iterate over it, so the order may change the program.
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert Structure(make(one)) != Structure(make(other))
    with pytest.raises(ValueError, match=r"static was .*'a': 1.*, and is .*'b': 2"):
        state_of(one).with_model(make(other))


def test_it_is_pickled_by_value() -> None:
    structure = Structure(Inner(eqx.nn.Linear(2, 2, key=KEY), STATIC))
    assert pickle.loads(pickle.dumps(structure)) == structure


# What cannot be compared


class Nameless:
    """Compares by value, and is written by its address."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nameless)


class Unequal:
    """Equals nothing."""

    __hash__: Any = None

    def __repr__(self) -> str:
        return "Unequal()"


class Raising(Unequal):
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")


class Unanswered(Unequal):
    """Compares element by element, as arrays do."""

    def __eq__(self, other: object) -> Any:
        return np.array([True, False])


class Locked(Unequal):
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle '_thread.lock' object")


ARRAY = "layers.1.static is a static field that holds an array"
COPY = (
    r"layers.1.static is a static field of type {}, which is not hashable, and no copy"
)
INCOMPARABLE: dict[str, tuple[Callable[[], Any], str]] = {
    "array": (lambda: np.ones(2), f"{ARRAY}\\. Arrays belong"),
    "array of one number": (lambda: np.ones(1), ARRAY),
    "array in a list": (lambda: [1, np.ones(1)], f"{ARRAY} at 1"),
    "array in a tuple": (lambda: (1, jnp.ones(1)), f"{ARRAY} at 1"),
    "abstract array": (lambda: (1, jax.ShapeDtypeStruct((), "int8")), f"{ARRAY} at 1"),
    "array in a dict": (lambda: {"a": {1: np.ones(2)}}, f"{ARRAY} at a.1"),
    "array in a dataclass": (lambda: Options([np.ones(2)]), f"{ARRAY} at depths.0"),
    "module": (lambda: make(), f"{ARRAY} at layers"),
    "module in a list": (lambda: [eqx.nn.Identity(), make()], f"{ARRAY} at 1.layers"),
    "without a text": (lambda: Nameless(), COPY.format("Nameless")),
    "in a list": (lambda: [Nameless()], COPY.format("list")),
    "equals nothing": (lambda: [Unequal()], COPY.format("list")),
    "comparison fails": (lambda: [Raising()], COPY.format("list")),
    "comparison gives an array": (lambda: [Unanswered()], COPY.format("list")),
    "cannot be copied": (lambda: [Locked()], COPY.format("list")),
}


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
@pytest.mark.parametrize("kind", INCOMPARABLE)
def test_what_cannot_be_compared_is_refused_by_path(kind: str) -> None:
    new, match = INCOMPARABLE[kind]
    model = make()
    inner = Inner(model.layers[1].linear, new())
    model = eqx.tree_at(lambda m: m.layers[1], model, inner)
    with pytest.raises(ValueError, match=match):
        rx.init_state(model, SGD, key=KEY)
    with pytest.raises(ValueError, match=match):
        state_of([1]).with_model(model)


@pytest.mark.parametrize("new", [list, lambda: Options([])], ids=["list", "dataclass"])
def test_a_list_that_holds_itself_is_refused_by_path(new: Any) -> None:
    value = new()
    model = make(value)  # Equinox would not take it with the loop in it
    depths = getattr(value, "depths", value)
    depths.append({"again": value})
    match = rf"layers\.0\.static .*{type(value).__name__} that holds itself at .*again"
    with pytest.raises(ValueError, match=match):
        rx.init_state(model, SGD, key=KEY)


def test_what_can_be_hashed_stays_the_same_object() -> None:
    class Other:
        """Equals only itself."""

    for value in (Other(), jnp.sin, "a", (1, (2,)), Sizes(1), frozenset({1, 2})):
        check_static(make(value))
        assert static_of(state_of(value)) is value
        assert static_of(state_of([value]))[0] is value


# All functions that take a model or a state

OTHERS: Any = {"collate_fn": collate, "batch_size": 4}


@pytest.fixture
def state() -> rx.TrainState:
    return state_of(STATIC)


def step_of(state: rx.TrainState, batch: Any) -> Any:
    return rx.train_step(state, batch, loss_fn=loss_fn, optimizer=SGD)


@pytest.fixture
def expected() -> rx.TrainState:
    """Two steps with a model without such fields, which has the same numbers."""

    class Plain(eqx.Module):
        layers: list[eqx.nn.Linear]
        head: eqx.nn.Linear

        def __call__(self, x: Any) -> Any:
            x = jnp.tanh(self.layers[0](x)) * 0.5
            return self.head(jax.nn.relu(self.layers[1](x)) * 2.0)

    model = make(STATIC)
    plain = Plain([layer.linear for layer in model.layers], model.head)
    state = rx.init_state(plain, SGD, key=KEY)
    for _ in range(2):
        state, _ = jax.jit(step_of)(state, BATCH)
    return state


def assert_like(state: rx.TrainState, expected: rx.TrainState) -> None:
    ours = {path.replace(".linear", ""): x for path, x in state.params.items()}
    assert ours.keys() == expected.params.keys()
    for path, x in expected.params.items():
        np.testing.assert_allclose(ours[path], x, rtol=2e-6, atol=1e-7)
    assert static_of(state) == STATIC


def by_jit(state: rx.TrainState) -> rx.TrainState:
    for _ in range(2):
        state, _ = jax.jit(step_of)(state, BATCH)
    return state


def by_filter_jit(state: rx.TrainState) -> rx.TrainState:
    for _ in range(2):
        state, _ = eqx.filter_jit(step_of)(state, BATCH)
    return state


def by_jit_step(state: rx.TrainState) -> rx.TrainState:
    step = rx.jit_step(step_of)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return state


def by_scan(state: rx.TrainState) -> rx.TrainState:
    twice = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
    return jax.lax.scan(step_of, state, twice)[0]


def by_vmap(state: rx.TrainState) -> rx.TrainState:
    two = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    for _ in range(2):
        two, _ = jax.vmap(step_of, in_axes=(0, None))(two, BATCH)
    return jax.tree.map(lambda x: x[1], two)


def by_fit(state: rx.TrainState) -> rx.TrainState:
    return fit(state, EXAMPLES[:4], num_steps=2)  # each epoch is one batch


def on_a_mesh(state: rx.TrainState) -> rx.TrainState:
    mesh = rx.make_mesh(data=2, tensor=4)
    model = make(STATIC)
    model = eqx.filter_shard(model, rx.shard_rules(model, mesh))
    return by_jit(rx.init_state(model, SGD, key=KEY))


def made_on_a_mesh(state: rx.TrainState) -> rx.TrainState:
    mesh = rx.make_mesh(data=2, tensor=4)
    model = rx.init_model(lambda key: make(STATIC, key=key), mesh, key=KEY)
    return by_jit(rx.init_state(model, SGD, key=KEY))


def made_under_jit(state: rx.TrainState) -> rx.TrainState:
    made = jax.jit(lambda key: rx.init_state(make(STATIC, key=key), SGD, key=KEY))
    return by_jit(made(KEY))


def of_arrays(state: rx.TrainState) -> rx.TrainState:
    arrays = rx.to_arrays(state.model)
    return by_jit(rx.init_state(rx.from_arrays(state.model, arrays), SGD, key=KEY))


WAYS: dict[str, Callable[[rx.TrainState], rx.TrainState]] = {
    way.__name__: way
    for way in (
        by_jit,
        by_filter_jit,
        by_jit_step,
        by_scan,
        by_vmap,
        by_fit,
        on_a_mesh,
        made_on_a_mesh,
        made_under_jit,
        of_arrays,
    )
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_train_takes_it(
    way: str, state: rx.TrainState, expected: rx.TrainState
) -> None:
    assert_like(WAYS[way](state), expected)


def test_evaluation_and_prediction_take_it(state: rx.TrainState) -> None:
    row = rx.evaluate(state, EXAMPLES[:4], loss_fn=scalar_loss, **OTHERS)
    loss = float(scalar_loss(make(STATIC), BATCH, KEY))
    assert row["loss"] == pytest.approx(loss, rel=1e-6)
    outputs = rx.predict(state, EXAMPLES[:4], predict_fn=predict_fn, **OTHERS)
    np.testing.assert_allclose(
        [x["out"] for x in outputs], jax.vmap(make(STATIC))(BATCH["x"]), rtol=1e-6
    )


@pytest.mark.parametrize("by", ["paths", "program"])
def test_layouts_and_plans_take_it(by: str) -> None:
    mesh = rx.make_mesh(data=2, tensor=4)
    decided: Any = {}
    if by == "program":
        decided = {"loss_fn": loss_fn, "batch": BATCH}
    table = str(rx.explain(make(STATIC), mesh, **decided))
    assert "layers.1.linear.weight" in table
    abstract = eqx.filter_eval_shape(lambda key: make(STATIC, key=key), KEY)
    assert str(rx.explain(abstract, mesh, **decided)) == table


def test_a_plan_takes_it() -> None:
    found = rx.plan(
        lambda key: make(STATIC, key=key),
        loss_fn=loss_fn,
        optimizer=SGD,
        batch=BATCH,
        mesh={"data": 2, "tensor": 4},
        bytes_per_device=2**20,
        progress=False,
    )
    assert found.fits


def test_a_pair_with_such_fields_keeps_them() -> None:
    class Normed(eqx.Module):
        linear: Inner
        norm: eqx.nn.BatchNorm

        def __init__(self, key: Any):
            self.linear = Inner(eqx.nn.Linear(2, 4, key=key), [1, 2])
            self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")

        def __call__(self, x: Any, model_state: Any) -> Any:
            return self.norm(self.linear(x), model_state)

    def loss(pair: Any, batch: Any, key: Any) -> Any:
        model, model_state = pair
        y, model_state = jax.vmap(
            model, in_axes=(0, None), out_axes=(0, None), axis_name="batch"
        )(batch["x"], model_state)
        return jnp.mean(y**2), {}, model_state

    state = rx.init_state(eqx.nn.make_with_state(Normed)(KEY), SGD, key=KEY)
    step = jax.jit(partial(rx.train_step, loss_fn=loss, optimizer=SGD))
    state, _ = step(state, BATCH)
    model, _ = state.model
    assert model.linear.static == [1, 2]
    other = Inner(model.linear.linear, [3])
    model = eqx.tree_at(lambda m: m.linear, model, other)
    with pytest.raises(ValueError, match=r"linear\.static was \[1, 2\], and is \[3\]"):
        state.with_model((model, state.model[1]))


def test_fit_goes_on_from_a_checkpoint(tmp_path: Any) -> None:
    options: Any = {"checkpoints": rx.Checkpoints(tmp_path, every_steps=2)}
    fit(state_of(STATIC), num_steps=2, **options)
    resumed = fit(state_of(copy.deepcopy(STATIC)), num_steps=4, **options)
    assert_identical(resumed, fit(state_of(STATIC), num_steps=4))


def test_a_resumed_run_is_told_of_another_list_that_changes_its_program(
    tmp_path: Any,
) -> None:
    def scaled(scales: list[float]) -> rx.TrainState:
        model = make(STATIC)
        model.options["scales"][:] = scales
        return rx.init_state(model, SGD, key=KEY)

    options: Any = {"checkpoints": rx.Checkpoints(tmp_path, every_steps=2)}
    fit(scaled([0.5, 2.0]), num_steps=2, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(scaled([0.5, 2.0]), num_steps=2, **options)
    with pytest.warns(UserWarning, match="loss_fn .* something different"):
        fit(scaled([0.5, 4.0]), num_steps=4, **options)
