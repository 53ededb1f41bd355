"""Compiled steps are kept while what they were traced from stays the same, and then let go."""

import array
import collections
import functools
import gc
import itertools
import sys
import types
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import assert_same, collate, compilations, errors_of, fit, linear_state, make_examples

import redco_eqx as rx
from redco_eqx._step import kept as programs

EXAMPLES = make_examples(14)


@pytest.fixture(autouse=True)
def _nothing_kept_before(monkeypatch: pytest.MonkeyPatch):
    programs._entries.clear()
    monkeypatch.setitem(sys.modules, "settings_of_a_test", MODULE)


# In `fit` and `evaluate`.


def train(loss_fn: Any, optimizer: Any = None, **arguments: Any) -> Any:
    optimizer = optimizer or optax.sgd(0.05)
    state = linear_state(optimizer)
    return fit(state, EXAMPLES, loss_fn=loss_fn, optimizer=optimizer, num_steps=3, **arguments)


def evaluate(state: Any, loss_fn: Any) -> Any:
    return rx.evaluate(state, EXAMPLES[:4], collate_fn=collate, loss_fn=loss_fn, batch_size=4)["loss"]


def make_loss(target: Any = 0.0) -> Any:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - target) ** 2)

    return loss_fn


def test_a_second_run_compiles_and_traces_nothing() -> None:
    traces = itertools.count()  # which is compared by identity

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        next(traces)
        return jnp.mean(errors_of(model, batch))

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        next(traces)
        return jax.vmap(model)(batch["x"])

    def run() -> Any:
        evaluation = rx.Evaluation(EXAMPLES, predict_fn=predict_fn, every_steps=2)
        state = train(loss_fn, evaluation=evaluation, num_microbatches=2, donate=False)
        return state, evaluate(state, loss_fn)

    first = run()
    num_traces = next(traces)
    assert num_traces > 0
    with compilations() as compiled:
        second = run()  # its optimizer and its evaluation are new objects, made alike
    assert (next(traces), compiled) == (num_traces + 1, [])
    assert_same(first[0], second[0])
    assert first[1] == second[1]


def test_another_run_is_another_program() -> None:
    """The reference is the same run with nothing kept; it ends elsewhere than the first one."""
    arguments: Any = {"loss_fn": make_loss(), "optimizer": optax.sgd(0.05)}
    first = train(**arguments)
    new: Any = {"optimizer": optax.sgd(0.06), "num_microbatches": 2, "batch_size": 2, "loss_fn": make_loss(1.0)}
    for changed in ({name: x} for name, x in new.items()):
        with compilations() as compiled:
            found = train(**{**arguments, **changed})
        assert compiled.count("jit(body)") == 1, changed
        if "loss_fn" in changed:
            assert not np.array_equal(found.params["weight"], first.params["weight"])
            programs._entries.clear()
            assert_same(found, train(**{**arguments, **changed}))


def test_nothing_is_kept_alive() -> None:
    """Neither the functions nor what they capture; nor the program once that is gone."""

    def run() -> list[weakref.ref]:
        target = jnp.ones(())
        loss_fn = make_loss(target)
        optimizer = optax.sgd(optax.constant_schedule(0.01))
        state = train(loss_fn, optimizer, evaluation=rx.Evaluation(EXAMPLES))
        evaluate(state, loss_fn)
        return [weakref.ref(x) for x in (target, loss_fn, optimizer.update, state.params["weight"])]

    refs = run()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    assert len(programs._entries) == 1  # of the optimizer's initialisation, which captured nothing of ours


# By `kept` alone: a program stands for the number that its function gave when it was traced.

NUMBERS = itertools.count()


def kept(*functions: Any) -> int:
    """A number that is new for each program that is made."""
    return programs.kept(functions, "a test", lambda: next(NUMBERS))


class Named:
    target: Any = 0

    @staticmethod
    def static() -> Any:
        return helper()

    def read(self) -> Any:
        return self.target


class Slots:
    __slots__ = "target"  # pyright: ignore[reportGeneralTypeIssues] (a string is one name)


class OfSlots(Slots):
    __slots__ = ("other",)


TARGET, SETTINGS, MODULE = 0, {"target": 0}, types.ModuleType("settings_of_a_test")
MODULE.target = 0  # pyright: ignore[reportAttributeAccessIssue]


def helper() -> Any:
    return TARGET


def from_module() -> Any:
    from settings_of_a_test import target  # pyright: ignore[reportMissingImports]

    return target


class Outer:
    @property
    def target(self) -> Any:
        return (lambda: helper())()


class Inherited(Outer):
    def __call__(self) -> Any:
        return self.target


def set_target(x: Any, value: Any) -> Any:
    x.target = value
    return x


def next_target(x: Any) -> None:
    x.target += 1


def next_item(x: dict[str, int]) -> None:
    x["target" if "target" in x else "TARGET"] += 1


# Each way has some content, how a function is made of it, and a change, after which that gives another number.
def by_closure(content: Any, read: Any, change: Any) -> Any:
    return content, lambda content: lambda: read(content), change


def looked_up(view: Any) -> Any:
    return lambda: view["target"]


def by_attribute() -> Any:
    def function() -> Any:
        return function.target  # pyright: ignore[reportFunctionMemberAccess]

    return set_target(function, 0), lambda function: function, next_target


def double(number: Any) -> Any:
    return number * (2 if isinstance(number, int) else 3)


WAYS: dict[str, Any] = {
    "default": lambda: (lambda target=0: target, lambda f: f, lambda f: setattr(f, "__defaults__", (1,))),
    "attribute": by_attribute,
    "object": lambda: (set_target(Named(), jnp.zeros(())), lambda x: x.read, next_target),
    "partial": lambda: ({"target": 0}, lambda x: functools.partial(lambda x: x["target"], x), next_item),
    "read-only view": lambda: ({"target": 0}, lambda x: looked_up(types.MappingProxyType(x)), next_item),
    "global": lambda: (globals(), lambda _: lambda: helper() + 1, next_item),  # two functions away
    "inherited method": lambda: (globals(), lambda _: Inherited(), next_item),
    "global dict": lambda: (SETTINGS, lambda _: lambda: SETTINGS["target"], next_item),
    "module": lambda: (MODULE, lambda _: lambda: MODULE.target, next_target),
    "import": lambda: (MODULE, lambda _: from_module, next_target),
    "class": lambda: (Named, lambda _: lambda: Named.target, next_target),
    "static method": lambda: (globals(), lambda _: lambda: Named.static(), next_item),
    "array": lambda: by_closure(array.array("d", [0.0]), lambda x: x[0], lambda x: x.__setitem__(0, 1.0)),
    "slot": lambda: by_closure(set_target(OfSlots(), 0), lambda x: x.target, next_target),
    "deque": lambda: by_closure(collections.deque([0]), lambda x: x[-1], lambda x: x.append(1)),
    "numpy": lambda: by_closure(np.zeros(4), lambda x: x.sum(), lambda x: x.fill(1)),
    "objects": lambda: by_closure(np.array([0, "one"], object), lambda x: x[0], lambda x: x.put(0, 1)),
    "options of jit": lambda: by_closure(
        {"f": jax.jit(double, static_argnums=0)}, lambda x: x["f"](1), lambda x: x.update(f=jax.jit(double))
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_function_captures_is_never_stale(way: str) -> None:
    content, make, change = WAYS[way]()
    function = make(content)
    before, program = float(function()), kept(function)
    assert kept(function) == program
    change(content)
    assert float(function()) != before
    assert kept(function) != program
    assert kept(function) == kept(function)


class Reading(eqx.Module):
    """A linear map that also calls three functions: of its class, of a field and of a static field."""

    weight: Any
    field: Any
    static: Any = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.method(self.field(self.static(x @ self.weight)))

    def method(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("place", ["method", "field", "static"])
def test_the_code_of_a_model_is_never_stale(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, pass_on = lambda x: x + helper(), lambda x: x
    if place == "method":
        monkeypatch.setattr(Reading, "method", lambda self, x: read(x))
    functions = (read if name == place else pass_on for name in ("field", "static"))
    state = rx.init_state(Reading(jnp.ones(2), *functions), key=jax.random.key(0))
    loss_fn = lambda model, batch, key: jax.vmap(model)(batch).mean()  # noqa: E731
    arguments: Any = {"collate_fn": np.stack, "loss_fn": loss_fn, "batch_size": 2}
    values = []
    for target in (0, 0, 5):
        monkeypatch.setitem(globals(), "TARGET", target)
        with compilations() as compiled:
            values.append(rx.evaluate(state, np.ones((2, 2), np.float32), **arguments)["loss"])
    assert (values, compiled.count("jit(inference)")) == ([2, 2, 7], 1)


def test_what_captures_an_object_without_a_hash_is_kept() -> None:
    function = functools.singledispatch(helper)
    assert kept(function) == kept(function)


def test_what_changes_while_it_is_traced_is_compiled_anew() -> None:
    calls: list[int] = []

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        calls.append(0)
        return jnp.mean(errors_of(model, batch)) * len(calls)

    losses = [evaluate(linear_state(), loss_fn) for _ in range(2)]
    np.testing.assert_allclose(losses[1], 2 * losses[0], rtol=1e-6)


def test_functions_side_by_side_are_told_apart() -> None:
    """The parts of a chain have equal code, of optax's own: each counts, the first as well as the last."""
    chains = ([1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0])
    first, *others, last = (kept(optax.chain(*map(optax.scale, scales))) for scales in chains)
    assert first == last
    assert len({first, *others}) == 4


def test_options_of_jax_count() -> None:
    program = kept(helper)
    with jax.default_matmul_precision("bfloat16"):
        assert kept(helper) != program
    assert kept(helper) == program


def test_only_those_that_were_used_last_are_kept() -> None:
    losses = [make_loss(float(i)) for i in range(programs._MOST)]
    first, second, *_ = map(kept, losses)
    assert kept(losses[0]) == first
    kept(helper)
    assert len(programs._entries) == programs._MOST
    assert kept(losses[0]) == first
    assert kept(losses[1]) != second


def test_what_captures_too_much_is_compiled_anew() -> None:
    table = dict(zip(itertools.count(), range(50_000)))

    def function(x: Any) -> Any:
        return x * table[1]

    assert kept(function) != kept(function)
