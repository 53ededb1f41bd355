"""Compiled programs are kept by their text: nothing is compiled twice, and nothing that
is read is stale."""

import contextvars
import functools
import gc
import os
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    assert_same,
    collate,
    compilations,
    errors_of,
    fit,
    linear_state,
    make_examples,
)

import redco_eqx as rx
from redco_eqx._step import compile_cache

EXAMPLES = make_examples(14)
KEY = jax.random.key(1)


@pytest.fixture(autouse=True)
def _nothing_kept_before() -> None:
    compile_cache._programs.clear()


def train(loss_fn: Any, optimizer: Any = None, **arguments: Any) -> Any:
    optimizer = optimizer or optax.sgd(0.05)
    state = linear_state(optimizer)
    return fit(
        state, EXAMPLES, loss_fn=loss_fn, optimizer=optimizer, num_steps=3, **arguments
    )


def evaluate(state: Any, loss_fn: Any) -> Any:
    return rx.evaluate(
        state, EXAMPLES[:4], collate_fn=collate, loss_fn=loss_fn, batch_size=4
    )["loss"]


def make_loss(target: Any = 0.0) -> Any:
    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((errors_of(model, batch) - target) ** 2)

    return loss_fn


def test_a_second_run_compiles_nothing() -> None:
    """Its functions, its optimizer and its evaluation are new objects, made alike."""

    def run() -> Any:
        loss_fn = make_loss(jnp.ones(()))
        evaluation = rx.Evaluation(
            EXAMPLES, predict_fn=lambda model, batch, key: batch["x"], every_steps=2
        )
        state = train(loss_fn, evaluation=evaluation, num_microbatches=2, donate=False)
        return state, evaluate(state, loss_fn)

    first = run()
    with compilations() as compiled:
        second = run()
    assert compiled == []
    assert_same(first[0], second[0])
    assert first[1] == second[1]


def test_another_run_is_another_program() -> None:
    """The reference is the same run with nothing kept; it ends elsewhere than the first
    one."""
    arguments: Any = {"loss_fn": make_loss(), "optimizer": optax.sgd(0.05)}
    first = train(**arguments)
    new: Any = {
        "optimizer": optax.sgd(0.06),
        "num_microbatches": 2,
        "batch_size": 2,
        "loss_fn": make_loss(1.0),
    }
    for changed in ({name: x} for name, x in new.items()):
        with compilations() as compiled:
            found = train(**{**arguments, **changed})
        assert compiled.count("jit(body)") == 1, changed
        if "loss_fn" in changed:
            assert not np.array_equal(found.params["weight"], first.params["weight"])
            compile_cache._programs.clear()
            assert_same(found, train(**{**arguments, **changed}))


def test_a_run_traces_its_functions_once() -> None:
    """But for the identity of the run, and for the rehearsal of the evaluation."""
    traced: dict[str, int] = {"loss": 0, "evaluation": 0}

    def counted(name: str, *arguments: Any) -> Any:
        traced[name] += 1
        return make_loss()(*arguments)

    evaluation = rx.Evaluation(
        EXAMPLES[:8], every_steps=1, loss_fn=functools.partial(counted, "evaluation")
    )
    train(functools.partial(counted, "loss"), evaluation=evaluation)
    assert traced == {"loss": 1, "evaluation": 2}


def test_functions_are_not_kept_alive() -> None:
    def run() -> list[weakref.ref]:
        target = jnp.ones(())
        loss_fn = make_loss(target)
        optimizer = optax.sgd(optax.constant_schedule(0.01))
        state = train(loss_fn, optimizer, evaluation=rx.Evaluation(EXAMPLES))
        evaluate(state, loss_fn)
        return [
            weakref.ref(x)
            for x in (target, loss_fn, optimizer.update, state.params["weight"])
        ]

    refs = run()
    jax.clear_caches()  # JAX 0.11 and 0.12 keep arrays that a nested `jit` captured
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)


# Values that a loss reads.

SETTING: contextvars.ContextVar[float] = contextvars.ContextVar("SETTING", default=0.0)
TARGET = 0.0


class Reading(eqx.Module):
    """Calls three functions: of its class, of a field and of a static field."""

    weight: Any
    field: Any
    static: Any = eqx.field(static=True)

    def __call__(self, x: Any) -> Any:
        return self.method(self.field(self.static(x @ self.weight)))

    def method(self, x: Any) -> Any:
        return x


def by_method(patch: pytest.MonkeyPatch, value: float) -> None:
    patch.setattr(Reading, "method", lambda self, x: x + value)


WAYS: dict[str, Any] = {
    "global": (
        lambda x: x + TARGET,
        lambda patch, value: patch.setitem(globals(), "TARGET", value),
    ),
    "context variable": (
        lambda x: x + SETTING.get(),
        lambda patch, value: SETTING.set(value),
    ),
    "environment": (
        lambda x: x + float(os.environ.get("A_TARGET", 0)),
        lambda patch, value: patch.setenv("A_TARGET", str(value)),
    ),
    "method": (lambda x: x, by_method),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["loss", "field", "static"])
def test_nothing_that_is_read_is_stale(
    way: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, change = WAYS[way]
    reads = {
        name: read if name == place else lambda x: x
        for name in ("loss", "field", "static")
    }
    state = rx.init_state(
        Reading(jnp.ones(2), reads["field"], reads["static"]), key=jax.random.key(0)
    )
    values = []
    for target in (0, 0, 5):
        change(monkeypatch, target)
        with compilations() as compiled:
            values.append(
                rx.evaluate(
                    state,
                    np.ones((2, 2), np.float32),
                    collate_fn=np.stack,
                    loss_fn=lambda model, batch, key: reads["loss"](
                        jax.vmap(model)(batch)
                    ).mean(),
                    batch_size=2,
                )["loss"]
            )
    assert (values, compiled.count("jit(inference)")) == ([2, 2, 7], 1)


def test_functions_of_python_in_a_program_are_never_stale() -> None:
    """The text of a program has only the number of such a function."""

    def loss_by(scale: float) -> Any:
        def loss_fn(model: Any, batch: Any, key: Any) -> Any:
            return jax.pure_callback(
                lambda: np.float32(scale), jax.ShapeDtypeStruct((), jnp.float32)
            )

        return loss_fn

    state = linear_state()
    assert [evaluate(state, loss_by(scale)) for scale in (1.0, 2.0, 1.0)] == [
        1.0,
        2.0,
        1.0,
    ]


def test_programs_of_other_arguments_are_told_apart() -> None:
    """Their texts are equal if they leave out the arguments that they do not use."""
    for name, expected in (("x", 1.0), ("y", 289.0), ("x", 1.0)):
        batch = lambda _: {"x": np.ones(2, np.float32), "y": np.full(2, 17, np.float32)}  # noqa: E731
        loss_fn = lambda model, batch, key, name=name: (batch[name] ** 2).mean()  # noqa: E731
        arguments: Any = {"collate_fn": batch, "loss_fn": loss_fn, "batch_size": 2}
        assert rx.evaluate(linear_state(), [0, 1], **arguments)["loss"] == expected

    model = {"bias": jnp.full(2, 3.0), "weight": jnp.full(2, 2.0)}
    for name, values in model.items():
        init: Any = lambda params, name=name: params[name] * 2  # noqa: E731
        state = rx.init_state(
            model, optax.GradientTransformation(init, optax.sgd(1.0).update), key=KEY
        )
        np.testing.assert_array_equal(state.opt_state, 2 * values)


def test_arrays_that_a_program_changes_are_never_stale() -> None:
    state = linear_state()
    for begin in (1.0, 100.0):
        ref = jax.new_ref(jnp.float32(begin))

        def loss_fn(model: Any, batch: Any, key: Any, ref: Any = ref) -> Any:
            ref[...] += 1
            return ref[...]

        assert evaluate(state, loss_fn) == begin + 1


def test_results_with_other_static_values_are_told_apart() -> None:
    class Tagged(eqx.Module):
        x: Any
        tag: Any = eqx.field(static=True)

    def tag_of(tag: Any) -> Any:
        predict_fn = lambda model, batch, key: Tagged(batch["x"], tag)  # noqa: E731
        return rx.predict(
            state, EXAMPLES[:1], collate_fn=collate, predict_fn=predict_fn, batch_size=1
        )[0].tag

    state = linear_state()
    assert [repr(tag_of(tag)) for tag in (1, True, 1.0)] == ["1", "True", "1.0"]


def test_options_of_jax_count() -> None:
    state = linear_state()
    loss_fn = make_loss()
    for precision, number in (("float32", 1), ("bfloat16", 1), ("float32", 0)):
        with jax.default_matmul_precision(precision), compilations() as compiled:
            evaluate(state, loss_fn)
        assert compiled.count("jit(inference)") == number, precision


def test_only_those_that_were_used_last_are_kept() -> None:
    state = linear_state()
    compile_cache._programs.clear()

    def num_compiled(target: int) -> int:
        with compilations() as compiled:
            evaluate(state, make_loss(float(target)))
        return compiled.count("jit(inference)")

    assert [num_compiled(i) for i in range(compile_cache._MOST)] == [
        1
    ] * compile_cache._MOST
    assert [num_compiled(i) for i in (0, compile_cache._MOST, 0, 1)] == [0, 1, 0, 1]
    assert len(compile_cache._programs) == compile_cache._MOST
