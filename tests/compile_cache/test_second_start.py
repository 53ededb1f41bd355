"""Options reach the compiler, and a program that starts again compiles nothing of its
step."""

import io
import pathlib
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from fit_helpers import (
    SGD,
    collate,
    compilations,
    fit,
    host,
    linear_state,
    loss_fn,
    make_examples,
    printed,
)

import redco_eqx as rx
from redco_eqx._step import compile_cache
from redco_eqx._training import loop

EXAMPLES = make_examples(8)
# Changes what XLA makes, and is known to it on each platform.
OPTIONS = {"xla_backend_optimization_level": 0}
UNKNOWN = {"xla_no_such_option": True}


@pytest.fixture(autouse=True)
def _nothing_kept_before() -> None:
    compile_cache._programs.clear()


def train(**options: Any) -> Any:
    arguments: Any = {"loss_fn": loss_fn, "optimizer": SGD, "num_steps": 2}
    return fit(linear_state(), EXAMPLES, **arguments, **options)


def assert_equal(tree: Any, other: Any) -> None:
    """Equal up to rounding, because a compiler may fuse otherwise."""
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(host(x), host(y), rtol=1e-6)


def step_of(is_frozen: bool, **options: Any) -> tuple[Any, Any]:
    """A compiled step of one's own, and its state."""
    state = linear_state()
    if is_frozen:
        model = state.model
        trainable = jax.tree.map(lambda x: x is model.weight, model)
        state = rx.init_state(model, SGD, key=jax.random.key(1), trainable=trainable)
    step = partial(
        rx.train_step, loss_fn=loss_fn, optimizer=SGD, shardings=state.shardings
    )
    return rx.jit_step(step, **options), state


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_jit_step_hands_options_to_the_compiler(is_frozen: bool) -> None:
    batch = collate(EXAMPLES[:4])
    step, state = step_of(is_frozen, compiler_options=UNKNOWN)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        step(state, batch)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        step.lower(state, batch).compile()
    step, _ = step_of(is_frozen, compiler_options=OPTIONS)
    plain, same = step_of(is_frozen)
    assert_equal(step(state, batch), plain(same, batch))


def test_fit_hands_options_to_the_compiler() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        train(compiler_options=UNKNOWN)
    expected = train()
    with compilations() as compiled:
        found = train(compiler_options=OPTIONS)
        train(compiler_options=dict(OPTIONS))
    assert compiled.count("jit(body)") == 1  # not that without options, and once
    assert_equal(found, expected)


@pytest.mark.usefixtures("annotations_unchecked")
@pytest.mark.parametrize("options", [[("a", True)], {1: True}, {"a": [True]}])
def test_options_of_another_form_are_refused(options: Any) -> None:
    for call in (train, partial(step_of, False)):
        with pytest.raises(TypeError, match="compiler_options must be a dict"):
            call(compiler_options=options)


@pytest.mark.parametrize(
    ("slow", "directory", "is_said"),
    [(0.0, None, True), (0.0, "cache", False), (1e6, None, False)],
    ids=["slow", "kept", "quick"],
)
def test_a_long_compilation_says_once_how_to_keep_it(
    slow: float,
    directory: str | None,
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setattr(loop, "SLOW_COMPILE_SECONDS", slow)
    before: Any = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update(
        "jax_compilation_cache_dir", directory and str(tmp_path / directory)
    )
    stream = io.StringIO()
    try:
        train(loggers=[rx.ConsoleLogger(stream)])
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert stream.getvalue().count("JAX_COMPILATION_CACHE_DIR") == is_said


PROGRAM = """
import sys
import jax
from fit_helpers import SGD, fit, linear_state, loss_fn, make_examples
from redco_eqx import make_mesh

missed = []
jax.monitoring.register_event_listener(
    lambda event, **_: missed.append(event) if event.endswith("cache_misses") else None
)
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
)
jax.config.update("jax_num_cpu_devices", 8)
state = linear_state(mesh=make_mesh(tensor=2))
fit(state, make_examples(8), loss_fn=loss_fn, optimizer=SGD, num_steps=2)
print(len(missed), len(hits))
"""


def test_a_second_process_compiles_nothing(tmp_path: pathlib.Path) -> None:
    def start() -> list[int]:
        """The numbers of programs that were compiled, and that were read."""
        out = printed(
            PROGRAM,
            JAX_COMPILATION_CACHE_DIR=str(tmp_path / "cache"),
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
            JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        )
        return [int(x) for x in out.split()[-2:]]

    compiled, read = start()
    assert compiled > 0
    assert start() == [0, compiled + read]
