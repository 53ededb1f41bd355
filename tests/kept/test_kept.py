"""Compiled steps are kept from call to call, and let go."""

import gc
import itertools
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
def _nothing_kept_before():
    programs._entries.clear()


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
    traces: list[str] = []

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        traces.append("loss")
        return jnp.mean(errors_of(model, batch))

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        traces.append("predict")
        return jax.vmap(model)(batch["x"])

    def run() -> Any:
        evaluation = rx.Evaluation(EXAMPLES, predict_fn=predict_fn, every_steps=2)
        state = train(loss_fn, evaluation=evaluation, num_microbatches=2, donate=False)
        loss = rx.evaluate(state, EXAMPLES, collate_fn=collate, loss_fn=loss_fn, batch_size=4)
        return state, loss

    first = run()
    assert traces
    traces.clear()
    with Compilations() as compilations:
        second = run()  # its optimizer and its evaluation are new objects, made alike
    assert traces == []
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


WAYS = [
    by_cell, by_global, by_dict, by_module, by_object, by_method, by_numpy, by_default, by_jit,
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
