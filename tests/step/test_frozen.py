"""Frozen arrays stay the user's: no step donates, copies or returns them."""

import dataclasses
import pathlib
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import assert_same, collate, fit, loss_fn, make_examples
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]

import redco_eqx as rx
from redco_eqx._step.passed_through import sources

KEY = jax.random.key(0)
ADAM = optax.adam(1e-2)
EXAMPLES = make_examples(40, dim=8)
BATCH = collate(EXAMPLES[:8])


class Adapted(eqx.Module):
    """A large frozen matrix with a small trained branch beside it."""

    base: eqx.nn.Linear
    down: eqx.nn.Linear
    up: eqx.nn.Linear

    def __init__(self, key: Any):
        keys = jax.random.split(key, 3)
        self.base = eqx.nn.Linear(8, 8, key=keys[0])
        self.down = eqx.nn.Linear(8, 2, use_bias=False, key=keys[1])
        self.up = eqx.nn.Linear(2, 8, use_bias=False, key=keys[2])

    def __call__(self, x: Any) -> Any:
        return self.base(x) + self.up(self.down(x))


def frozen_base(model: Any) -> Any:
    every = jax.tree.map(lambda _: True, model)
    return eqx.tree_at(
        lambda m: m.base, every, jax.tree.map(lambda _: False, model.base)
    )


def adapted_state(mesh: Any = None) -> Any:
    mesh = rx.make_mesh(tensor=2, fsdp=2) if mesh is None else mesh
    model = rx.init_model(Adapted, mesh, key=KEY)
    return rx.init_state(model, ADAM, key=KEY, trainable=frozen_base(model))


def train_step_of(state: Any) -> Any:
    arguments: Any = {"optimizer": ADAM, "shardings": state.shardings}
    return partial(rx.train_step, loss_fn=loss_fn, **arguments)


def changing(state: Any, batch: Any, *, step: Any) -> Any:
    new, metrics = step(state, batch)
    frozen = {path: 0.9 * x for path, x in new.frozen.items()}
    return dataclasses.replace(new, frozen=frozen), metrics


def in_scan(state: Any, batch: Any, *, step: Any) -> Any:
    state, metrics = jax.lax.scan(
        lambda state, _: step(state, batch), state, None, length=2
    )
    return state, jax.tree.map(lambda x: x[-1], metrics)


AROUND: dict[str, Any] = {
    "alone": lambda step: step,
    "guarded": rx.skip_nonfinite,
    "jitted": lambda step: jax.jit(step),
    "guarded and jitted": lambda step: rx.skip_nonfinite(jax.jit(step)),
    "in a scan": lambda step: partial(in_scan, step=step),
    "in a branch": lambda step: (
        lambda state, batch: jax.lax.cond(state.step >= 0, step, step, state, batch)
    ),
}


@pytest.mark.parametrize("kind", AROUND)
def test_the_state_that_comes_back_has_the_very_arrays(kind: str, recwarn: Any) -> None:
    state = adapted_state()
    step = rx.jit_step(AROUND[kind](train_step_of(state)))
    new, _ = step(state, BATCH)
    assert all(new.frozen[path] is x for path, x in state.frozen.items())
    assert all(x.is_deleted() for x in state.params.values())
    again, _ = step(new, BATCH)
    assert all(again.frozen[path] is x for path, x in state.frozen.items())
    assert not [w for w in recwarn if "frozen" in str(w.message)]


def test_the_numbers_are_those_of_a_step_that_donates_nothing() -> None:
    state = adapted_state()
    step = train_step_of(state)
    plain, metrics = jax.jit(step)(state, BATCH)
    new, own_metrics = rx.jit_step(step)(state, BATCH)
    assert_same((new, own_metrics), (plain, metrics))


def test_two_heads_share_a_trunk() -> None:
    state = adapted_state()
    model = state.model
    other = eqx.tree_at(
        lambda m: (m.down.weight, m.up.weight),
        model,
        replace_fn=jnp.copy,
    )
    second = rx.init_state(other, ADAM, key=KEY, trainable=frozen_base(model))
    step = rx.jit_step(train_step_of(state))
    state, _ = step(state, BATCH)
    second, _ = step(second, BATCH)
    assert_same(state, second)


def test_arrays_that_a_step_changes_are_taken_over_with_a_word() -> None:
    state = adapted_state()
    step = partial(changing, step=train_step_of(state))
    expected, _ = jax.jit(step)(state, BATCH)
    jitted = rx.jit_step(step)
    with pytest.warns(UserWarning, match=r"base\.bias, base\.weight as they were"):
        new, _ = jitted(state, BATCH)
    assert_same(new, expected)
    assert all(x.is_deleted() for x in state.frozen.values())
    again, _ = jitted(new, BATCH)  # once
    assert all(x.is_deleted() for x in new.frozen.values())
    assert int(again.step) == 2


@pytest.mark.parametrize("mesh", [{"data": 1}, {"fsdp": 8}, {"tensor": 2, "fsdp": 2}])
def test_a_step_takes_no_byte_more_than_one_that_donates_all(mesh: Any) -> None:
    state = adapted_state(rx.make_mesh(**mesh))
    step = train_step_of(state)
    ours: Any = rx.jit_step(step).lower(state, BATCH).compile().memory_analysis()
    all_donated = jax.jit(step, donate_argnums=0).lower(state, BATCH).compile()
    theirs: Any = all_donated.memory_analysis()

    def peak(stats: Any) -> int:
        kept = stats.argument_size_in_bytes + stats.output_size_in_bytes
        return kept - stats.alias_size_in_bytes + stats.temp_size_in_bytes

    assert peak(ours) <= peak(theirs)
    num_bytes = sum(x.addressable_shards[0].data.nbytes for x in state.frozen.values())
    assert ours.output_size_in_bytes <= theirs.output_size_in_bytes - num_bytes


def test_fit_leaves_frozen_arrays_to_the_caller(tmp_path: pathlib.Path) -> None:
    state = adapted_state()
    frozen = state.frozen
    options: Any = {
        "optimizer": ADAM,
        "batch_size": 8,
        "checkpoints": tmp_path,
    }
    new = fit(state, EXAMPLES, num_steps=3, **options)
    assert all(new.frozen[path] is x for path, x in frozen.items())
    # A resumed run does not read them again.
    fresh = adapted_state()
    fresh = dataclasses.replace(fresh, frozen=frozen)
    resumed = fit(fresh, EXAMPLES, num_steps=5, **options)
    assert all(resumed.frozen[path] is x for path, x in frozen.items())
    options["checkpoints"] = None
    assert_same(resumed, fit(adapted_state(), EXAMPLES, num_steps=5, **options))


def test_a_resumed_run_reads_frozen_arrays_that_are_others(
    tmp_path: pathlib.Path,
) -> None:
    options: Any = {"optimizer": ADAM, "batch_size": 8, "checkpoints": tmp_path}
    first = fit(adapted_state(), EXAMPLES, num_steps=3, **options)
    state = adapted_state()
    doubled = {path: 2 * x for path, x in state.frozen.items()}
    state = dataclasses.replace(state, frozen=doubled)
    allowed = rx.Checkpoints(tmp_path, allow_changes=True)
    resumed = fit(state, EXAMPLES, num_steps=4, **{**options, "checkpoints": allowed})
    for path, x in first.frozen.items():
        np.testing.assert_array_equal(resumed.frozen[path], x)
        assert not doubled[path].is_deleted()


def program(function: Any, *arguments: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(*arguments)


X = jnp.arange(4.0)
SOURCES: dict[str, tuple[Any, list[int | None]]] = {
    "itself": (lambda x, y: (y, x), [1, 0]),
    "where": (lambda x, y: (jnp.where(y[0] > 0, x, x), y), [0, 1]),
    "where of two": (lambda x, y: (jnp.where(y[0] > 0, x, y), y), [None, 1]),
    "jit": (lambda x, y: jax.jit(lambda x, y: (y, x + y))(x, y), [1, None]),
    "jit in jit": (
        lambda x, y: jax.jit(lambda x, y: jax.jit(lambda x: (x, y))(x))(x, y),
        [0, 1],
    ),
    "checkpoint": (lambda x, y: jax.checkpoint(lambda x: (x, x * 2))(x), [0, None]),
    "scan": (
        lambda x, y: jax.lax.scan(lambda c, _: ((c[0], c[1] + c[0]), None), (x, y), X)[
            0
        ],
        [0, None],
    ),
    "a scan that swaps": (
        lambda x, y: jax.lax.scan(lambda c, _: ((c[1], c[0]), None), (x, y), X)[0],
        [None, None],
    ),
    "while": (
        lambda x, y: jax.lax.while_loop(
            lambda c: c[1][0] < 3, lambda c: (c[0], c[1] + 1), (x, y)
        ),
        [0, None],
    ),
    "cond": (
        lambda x, y: jax.lax.cond(
            y[0] > 0, lambda x, y: (x, y), lambda x, y: (x, y * 2), x, y
        ),
        [0, None],
    ),
    "cond that swaps": (
        lambda x, y: jax.lax.cond(
            y[0] > 0, lambda x, y: (x, y), lambda x, y: (y, y), x, y
        ),
        [None, 1],
    ),
    "barrier": (lambda x, y: jax.lax.optimization_barrier((y, x)), [1, 0]),
    "a number": (lambda x, y: (x + 0, 3.0), [None, None]),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_what_a_program_passes_through_is_found(kind: str) -> None:
    function, expected = SOURCES[kind]
    assert sources(program(function, X, X + 1).jaxpr) == expected
