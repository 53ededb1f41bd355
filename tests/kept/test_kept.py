"""Compiled steps are kept from call to call, and let go."""

import collections
import functools
import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    STEP,
    Compilations,
    assert_same,
    collate,
    errors_of,
    fit,
    linear_state,
    make_examples,
    to_numpy,
)

import redco_eqx as rx
from redco_eqx._step import kept as programs

EXAMPLES = make_examples(14)


@pytest.fixture(autouse=True)
def _nothing_kept_before(monkeypatch: pytest.MonkeyPatch):
    programs._entries.clear()
    monkeypatch.setitem(sys.modules, "settings_of_a_test", MODULE)


def train(loss_fn: Any, optimizer: Any = None, **arguments: Any) -> Any:
    optimizer = optimizer or optax.sgd(0.05)
    return fit(
        linear_state(optimizer), EXAMPLES, loss_fn=loss_fn, optimizer=optimizer, num_steps=3, **arguments
    )


def make_loss(target: Any = 0.0) -> Callable[..., Any]:
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
        loss = rx.evaluate(state, EXAMPLES, collate_fn=collate, loss_fn=loss_fn, batch_size=4)
        return state, loss

    first = run()
    num_traces = next(traces)
    assert num_traces > 0
    with Compilations() as compilations:
        second = run()  # its optimizer and its evaluation are new objects, made alike
    assert next(traces) == num_traces + 1
    assert compilations.names == []
    assert_same(first[0], second[0])
    assert first[1] == second[1]


TARGET, SETTINGS, MODULE = jnp.zeros(()), {"target": 0.0}, types.ModuleType("settings")
MODULE.target = jnp.zeros(())  # pyright: ignore[reportAttributeAccessIssue]


def helper() -> Any:
    return TARGET


class Loss:
    def __init__(self, target: Any):
        self.target = target

    def __call__(self, model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - self.target) ** 2)

    def method(self, model: Any, batch: Any, key: Any) -> Any:
        return self(model, batch, key)


def by_cell() -> tuple[Any, Callable[[], None]]:
    target = jnp.zeros(())

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - target) ** 2)

    def change() -> None:
        nonlocal target
        target = jnp.ones(())

    return loss_fn, change


def by_global() -> tuple[Any, Callable[[], None]]:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - helper()) ** 2)  # two functions away

    def change() -> None:
        globals()["TARGET"] = TARGET + 1

    return loss_fn, change


def by_dict() -> tuple[Any, Callable[[], None]]:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - SETTINGS["target"]) ** 2)

    return loss_fn, lambda: SETTINGS.update(target=SETTINGS["target"] + 1)


def by_module() -> tuple[Any, Callable[[], None]]:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - MODULE.target) ** 2)

    return loss_fn, lambda: setattr(MODULE, "target", MODULE.target + 1)


def by_object() -> tuple[Any, Callable[[], None]]:
    loss = Loss(jnp.zeros(()))
    return loss, lambda: setattr(loss, "target", jnp.ones(()))


def by_method() -> tuple[Any, Callable[[], None]]:
    loss = Loss(0.0)
    return loss.method, lambda: setattr(loss, "target", 1.0)


def by_numpy() -> tuple[Any, Callable[[], None]]:
    target = np.zeros(4, np.float32)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - target) ** 2)

    return loss_fn, lambda: target.fill(1.0)


def by_default() -> tuple[Any, Callable[[], None]]:
    def loss_fn(model: Any, batch: Any, key: Any, target: Any = 0.0) -> Any:
        return jnp.mean((errors_of(model, batch) - target) ** 2)

    return loss_fn, lambda: setattr(loss_fn, "__defaults__", (1.0,))


def by_jit() -> tuple[Any, Callable[[], None]]:
    losses = {"inner": jax.jit(lambda x: jnp.mean(x**2))}

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return losses["inner"](errors_of(model, batch))

    return loss_fn, lambda: losses.update(inner=jax.jit(lambda x: jnp.mean((x - 1) ** 2)))


def by_options_of_jit() -> tuple[Any, Callable[[], None]]:
    def inner(x: Any, number: Any) -> Any:
        return jnp.mean(x**2) * (2.0 if isinstance(number, int) else 3.0)

    losses = {"inner": jax.jit(inner, static_argnums=1)}

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return losses["inner"](errors_of(model, batch), 1)

    return loss_fn, lambda: losses.update(inner=jax.jit(inner))


def by_array_of_objects() -> tuple[Any, Callable[[], None]]:
    targets = np.array([0.0, "one"], object)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - targets[0]) ** 2)

    return loss_fn, lambda: targets.__setitem__(0, 1.0)


def by_read_only_view() -> tuple[Any, Callable[[], None]]:
    settings = {"target": 0.0}
    view = types.MappingProxyType(settings)

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - view["target"]) ** 2)

    return loss_fn, lambda: settings.update(target=1.0)


class Settings:
    target: Any = 0.0


def by_class() -> tuple[Any, Callable[[], None]]:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - Settings.target) ** 2)

    return loss_fn, lambda: setattr(Settings, "target", Settings.target + 1)


class Outer:
    @property
    def target(self) -> Any:
        return self.inner()

    def inner(self) -> Any:
        return (lambda: helper())()


class Inherited(Outer):
    def __call__(self, model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - self.target) ** 2)


def by_inherited_method() -> tuple[Any, Callable[[], None]]:
    return Inherited(), lambda: globals().update(TARGET=TARGET + 1)


class Slots:
    __slots__ = ("target",)

    def __init__(self) -> None:
        self.target = 0.0


def by_slot() -> tuple[Any, Callable[[], None]]:
    slots = Slots()

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - slots.target) ** 2)

    return loss_fn, lambda: setattr(slots, "target", 1.0)


def by_partial() -> tuple[Any, Callable[[], None]]:
    settings = {"target": 0.0}

    def loss_fn(model: Any, batch: Any, key: Any, settings: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - settings["target"]) ** 2)

    return functools.partial(loss_fn, settings=settings), lambda: settings.update(target=1.0)


def by_attribute() -> tuple[Any, Callable[[], None]]:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - loss_fn.target) ** 2)  # pyright: ignore

    loss_fn.target = 0.0  # pyright: ignore[reportFunctionMemberAccess]
    return loss_fn, lambda: setattr(loss_fn, "target", 1.0)


def by_import() -> tuple[Any, Callable[[], None]]:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        from settings_of_a_test import target  # pyright: ignore[reportMissingImports]

        return jnp.mean((errors_of(model, batch) - target) ** 2)

    return loss_fn, lambda: setattr(MODULE, "target", MODULE.target + 1)


def by_deque() -> tuple[Any, Callable[[], None]]:
    queue = collections.deque([0.0])

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - queue[-1]) ** 2)

    return loss_fn, lambda: queue.append(1.0)


WAYS = [
    by_cell, by_global, by_dict, by_module, by_object, by_method, by_numpy, by_default, by_jit,
    by_class, by_inherited_method, by_slot, by_partial, by_attribute, by_import, by_deque,
    by_options_of_jit, by_array_of_objects, by_read_only_view,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_a_function_captures_is_never_stale(way: Callable[[], Any]) -> None:
    loss_fn, change = way()
    before = train(loss_fn)
    again = train(loss_fn)
    with Compilations() as compilations:
        assert_same(before, train(loss_fn))
    assert compilations.names == []
    change()
    after = train(loss_fn)
    assert_same(before, again)
    assert any(np.any(x != y) for x, y in zip(to_numpy(before), to_numpy(after)))
    # The reference: the same with nothing kept.
    programs._entries.clear()
    assert_same(after, train(loss_fn))


def test_what_changes_while_it_is_traced_is_compiled_anew() -> None:
    calls: list[int] = []

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        calls.append(0)
        return jnp.mean(errors_of(model, batch)) * len(calls)

    losses = []
    for _ in range(2):
        state = linear_state()
        losses.append(
            rx.evaluate(state, EXAMPLES[:4], collate_fn=collate, loss_fn=loss_fn, batch_size=4)["loss"]
        )
    np.testing.assert_allclose(losses[1], 2 * losses[0], rtol=1e-6)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_functions_side_by_side_are_told_apart(place: int) -> None:
    """The parts of a chain have equal code, of optax's own: each counts, the first as well as the last."""

    def chain(changed: float) -> Any:
        scales = [1.0, 1.0, 1.0]
        scales[place] = changed
        return optax.chain(*(optax.scale(x) for x in scales), optax.scale(-0.05))

    loss_fn = make_loss()
    states = [train(loss_fn, chain(changed)) for changed in (1.0, 0.0, 1.0)]
    assert_same(states[0], states[2])
    assert_same(states[1].params, linear_state().params)
    assert not np.array_equal(states[0].params["weight"], states[1].params["weight"])


def test_evaluation_is_never_stale() -> None:
    loss_fn, change = by_cell()
    state = linear_state()
    arguments: Any = {"collate_fn": collate, "loss_fn": loss_fn, "batch_size": 4}
    before = rx.evaluate(state, EXAMPLES, **arguments)
    assert before == rx.evaluate(state, EXAMPLES, **arguments)
    change()
    assert rx.evaluate(state, EXAMPLES, **arguments) != before


@pytest.mark.parametrize(
    "changed",
    [
        {"optimizer": optax.sgd(0.06)},
        {"num_microbatches": 2},
        {"batch_size": 2},
        {"loss_fn": make_loss(1.0)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_run_is_another_program(changed: Any) -> None:
    arguments: Any = {"loss_fn": make_loss(), "optimizer": optax.sgd(0.05)}
    train(**arguments)
    with Compilations() as compilations:
        found = train(**{**arguments, **changed})
    assert compilations.names.count("jit(body)") == 1
    programs._entries.clear()
    assert_same(found, train(**{**arguments, **changed}))


def test_options_of_jax_count() -> None:
    loss_fn = make_loss()
    train(loss_fn)
    with Compilations() as compilations, jax.default_matmul_precision("bfloat16"):
        train(loss_fn)
    assert "jit(body)" in compilations.names


def test_nothing_is_kept_alive() -> None:
    """Neither the functions nor what they capture; nor the program once that is gone."""

    def run() -> list[weakref.ref]:
        target = jnp.ones(())
        loss_fn = make_loss(target)
        optimizer = optax.sgd(optax.constant_schedule(0.01))
        evaluation = rx.Evaluation(EXAMPLES)
        state = train(loss_fn, optimizer, evaluation=evaluation)
        rx.evaluate(state, EXAMPLES, collate_fn=collate, loss_fn=loss_fn, batch_size=4)
        return [weakref.ref(x) for x in (target, loss_fn, optimizer.update, state.params["weight"])]

    refs = run()
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    assert len(programs._entries) == 1  # of the optimizer's initialisation, which captured nothing of ours


def test_only_a_few_are_kept() -> None:
    losses = [make_loss(float(i)) for i in range(programs._MOST + 3)]
    state = linear_state()
    for loss_fn in losses:
        rx.evaluate(state, EXAMPLES[:4], collate_fn=collate, loss_fn=loss_fn, batch_size=4)
    assert len(programs._entries) == programs._MOST


def test_what_captures_too_much_is_compiled_anew() -> None:
    table = dict(zip(itertools.count(), range(50_000)))

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(errors_of(model, batch)) * table[1]

    state = linear_state()
    with Compilations() as compilations:
        for _ in range(2):
            rx.evaluate(state, EXAMPLES[:4], collate_fn=collate, loss_fn=loss_fn, batch_size=4)
    assert compilations.names.count(STEP) == 2
