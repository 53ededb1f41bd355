"""A tiny problem, the hand-written loop that `fit` must equal, and ears for what JAX
compiles."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import redco_eqx as rx
from redco_eqx._step.state import ORDER

MESHES: dict[str, dict[str, Any]] = {
    "one": {"data": 1},
    "data8": {},
    "tensor8": {"tensor": 8},
    "fsdp8": {"fsdp": 8},
    "2x2x2": {"tensor": 2, "fsdp": 2},
    "data2xtensor4": {"tensor": 4},
}
# As XLA names them: the loop's body, and the steps of `evaluate` and `predict`.
BODY, STEP = "jit(body)", "jit(inference)"
SGD = optax.sgd(0.05)


def make_examples(n: int, dim: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "id": i,
            "x": rng.normal(size=dim).astype(np.float32),
            "y": rng.normal(size=dim).astype(np.float32),
            "weight": np.float32(rng.integers(1, 9)),
            "flag": np.float32(1.0),
        }
        for i in range(n)
    ]


EXAMPLES = make_examples(22)  # five batches of 4, and 2 dropped


def collate(examples: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {
        name: np.stack([example[name] for example in examples]) for name in examples[0]
    }


def fail(*_: Any) -> Any:
    raise LookupError("mine")


def raised(
    exception: Any, call: Any, *arguments: Any, match: str | None = None, **options: Any
) -> Any:
    """The error that a call must raise."""
    with pytest.raises(exception, match=match) as caught:
        call(*arguments, **options)
    return caught.value


class Collate:
    """`collate`, which notes ids, and at its n-th call (from 1, evaluations too) acts,
    or sends a signal.

    A run with checkpoints makes its first batch twice. The second call does not count.
    """

    def __init__(self, at: int | None = None, act: Any = signal.SIGTERM):
        self.ids: list[int] = []
        self.num_calls = 0
        self._at, self._act = at, act
        self._first: Any = None

    def __call__(self, examples: Any) -> Any:
        if self._first is examples:
            return collate(examples)
        self._first = examples
        self.num_calls += 1
        if self.num_calls == self._at:
            os.kill(os.getpid(), self._act) if isinstance(
                self._act, int
            ) else self._act()
        self.ids += [example["id"] for example in examples]
        return collate(examples)


class Normed(eqx.Module):
    """A model with a state. Large enough that `tensor` and `fsdp` split it."""

    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key: Any):
        self.linear = eqx.nn.Linear(64, 128, key=key)
        self.norm = eqx.nn.BatchNorm(128, "batch", mode="ema", momentum=0.9)

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(self.linear(x), state)


def errors_of(model: Any, batch: Any) -> jax.Array:
    """The squared error of each example."""
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2, axis=-1)


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    """Unequal weights, noise from the key, a second metric, and a `flag` by which one
    example spoils all.

    The noise is the key's own bits, which compiles in half the time of a draw.
    """
    noise = (jax.random.key_data(key)[-1] % 1024).astype(jnp.float32) / 1024
    errors = errors_of(model, {**batch, "x": batch["x"] + noise}) * batch["flag"]
    weight = batch["weight"]
    return rx.Mean(jnp.sum(weight * errors), jnp.sum(weight)), {
        "plain": jnp.mean(errors)
    }


def dropout_loss(model: Any, batch: Any, key: Any) -> Any:
    keep = jax.random.bernoulli(key, 0.7, batch["x"].shape)
    errors = errors_of(model, {**batch, "x": batch["x"] * keep})
    return rx.Mean(jnp.sum(batch["weight"] * errors), jnp.sum(batch["weight"])), {
        "plain": jnp.mean(errors)
    }


def linear_state(
    optimizer: optax.GradientTransformation = SGD, mesh: Any = None, dim: int = 2
) -> Any:
    return _state(
        eqx.nn.Linear(dim, dim, key=jax.random.key(0)),
        optimizer,
        mesh or rx.make_mesh(data=1),
    )


def mlp_state(optimizer: optax.GradientTransformation = SGD, mesh: Any = None) -> Any:
    mesh = mesh or rx.make_mesh(**MESHES["2x2x2"])
    return _state(eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0)), optimizer, mesh)


def _state(model: Any, optimizer: Any, mesh: Any) -> Any:
    model = eqx.filter_shard(model, rx.shard_rules(model, mesh))
    return rx.init_state(model, optimizer, key=jax.random.key(1))


def fit_with_history(
    state: Any = None,
    examples: Any = EXAMPLES,
    *,
    prefetch: Any = None,
    donate: bool = True,
    **options: Any,
) -> Any:
    """The state (or a copy of it, to be kept) and the history of `rx.fit`, silent, with
    the tiny problem as its default; `prefetch` for all examples, or as they say."""
    state = linear_state() if state is None else state
    if prefetch is not None:
        examples = rx.Data(examples, prefetch=prefetch)
        if options.get("evaluation") is not None:
            held_out = rx.Data(options["evaluation"].examples, prefetch=prefetch)
            options["evaluation"] = dataclasses.replace(
                options["evaluation"], examples=held_out
            )
    defaults = {
        "collate_fn": collate,
        "loss_fn": loss_fn,
        "optimizer": SGD,
        "batch_size": 4,
        "loggers": (),
    }
    return rx.fit(
        state if donate else jax.tree.map(jnp.copy, state),
        examples,
        **{**defaults, **options},
    )


def fit(*arguments: Any, **options: Any) -> Any:
    """The same, and the state alone."""
    return fit_with_history(*arguments, **options)[0]


def steps_in(directory: pathlib.Path) -> list[int]:
    """Those of the checkpoints in a directory."""
    return [info.step for info in rx.list_checkpoints(directory)]


def counted(
    state: Any = None, checkpoints: Any = None, examples: Any = EXAMPLES, **options: Any
) -> Any:
    """`fit` that compiles in no time, makes batches when they are asked for, and saves
    every second step."""
    if isinstance(checkpoints, pathlib.Path):
        checkpoints = rx.Checkpoints(checkpoints, every_steps=2)
    defaults: Any = {"optimizer": COUNTING, "prefetch": 0, "checkpoints": checkpoints}
    defaults |= {} if "num_epochs" in options else {"num_steps": 12}
    return fit(state, examples, **{**defaults, **options})


@functools.lru_cache
def _jitted(layout: Any, **options: Any) -> Any:
    return jax.jit(functools.partial(rx.train_step, shardings=dict(layout), **options))


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return {"id": batch["id"], "out": jax.vmap(model)(batch["x"])}


def scalar_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(errors_of(model, batch))


def spoiled(value: float) -> tuple[list[Any], int]:
    """Examples of which one is spoiled, and the step of the first epoch that meets
    it."""
    examples = make_examples(20)
    examples[7]["flag"] = np.float32(value)
    batches = [
        batch
        for _, _, batch in itertools.islice(
            hand_loop(linear_state(), make_examples(20)), 5
        )
    ]
    return examples, next(
        i for i, batch in enumerate(batches) if 7 in np.asarray(batch["id"])
    )


def hand_loop(
    state: Any,
    examples: Any,
    *,
    batch_size: int = 4,
    skip: int | None = None,
    **options: Any,
) -> Iterator[tuple[Any, Any, Any]]:
    """`(state, metrics, batch)` after each step, for ever: the loop of DESIGN.md,
    nothing donated.

    The step numbered `skip` (from 0) changes nothing but the number of steps.
    """
    mesh = state.step.sharding.mesh
    layout = tuple((path, x.sharding) for path, x in state.params.items())
    step = _jitted(layout, **{"loss_fn": loss_fn, "optimizer": SGD, **options})
    key = jax.random.fold_in(jax.random.fold_in(state.key, ORDER), int(state.step))
    epoch = 0
    while True:
        data = rx.Data(examples(epoch) if callable(examples) else examples, prefetch=0)
        for batch in rx.batches(
            data, collate, batch_size=batch_size, mesh=mesh, key=key, epoch=epoch
        ):
            new_state, metrics = step(state, batch)
            is_skipped = int(state.step) == skip
            state = (
                dataclasses.replace(state, step=new_state.step)
                if is_skipped
                else new_state
            )
            yield state, metrics, batch
        epoch += 1


def state_after(
    num_steps: int, state: Any = None, examples: Any = EXAMPLES, **arguments: Any
) -> Any:
    """The hand-written loop's state after so many steps."""
    state = linear_state() if state is None else state
    steps = hand_loop(state, examples, **arguments)
    return next(itertools.islice(steps, num_steps - 1, None))[0] if num_steps else state


COUNTING = optax.chain(
    optax.identity(),
    optax.stateless(lambda grads, _: jax.tree.map(jnp.ones_like, grads)),
)
"""Adds one to every parameter. Its state is that of `SGD`."""


def counting_step(state: Any, batch: Any) -> Any:
    """The same as a step that compiles in no time."""
    params = jax.tree.map(lambda p: p + 1, state.params)
    return dataclasses.replace(state, params=params, step=state.step + 1), {
        "loss": jnp.mean(batch["weight"])
    }


def assert_counted(state: Any, num_steps: int) -> None:
    """That `state` is the first one after so many counting steps."""
    begin = linear_state()
    for _ in range(num_steps):
        begin = counting_step(begin, {"weight": jnp.zeros(1)})[0]
    assert_same(state, begin)


def host(x: Any) -> np.ndarray:
    """An array in NumPy; of keys their bits."""
    return np.asarray(
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )


def bits(tree: Any) -> list[bytes]:
    """Those of each leaf."""
    return [host(x).tobytes() for x in jax.tree.leaves(tree)]


def paired(tree: Any, other: Any) -> list[tuple[Any, Any, Any]]:
    """`(path, leaf, leaf of the other)`, as many of each."""
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(other), strict=True
    )
    return [(path, x, y) for (path, x), y in pairs]


def assert_identical(tree: Any, other: Any) -> None:
    """Equal arrays, bit for bit, of the same shape and dtype."""
    for path, x, y in paired(tree, other):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), path
        assert host(x).tobytes() == host(y).tobytes(), path


def assert_same(a: Any, b: Any) -> None:
    """The same structure, too."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert_identical(a, b)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the name of each program that the backend compiles inside."""
    names: list[str] = []

    def hear(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(kwargs["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


class Rows:
    """A logger that remembers."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def __call__(self, step: int, row: Any, /) -> None:
        self.rows.append((step, dict(row)))

    def with_prefix(self, prefix: str) -> list[tuple[int, dict[str, float]]]:
        return [
            (step, row)
            for step, row in self.rows
            if any(name.startswith(prefix) for name in row)
        ]


def read_log(path: pathlib.Path) -> list[tuple[int, dict[str, Any]]]:
    """The rows in the file of a `JSONLLogger`, without what depends on the clock."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return without_times(
        [
            (line["step"], {k: x for k, x in line.items() if k != "step"})
            for line in lines
        ]
    )


def without_times(rows: list[Any]) -> list[tuple[int, dict[str, Any]]]:
    clocked = (
        "time|run|train/(mfu|data_wait_seconds|slowest_(process|by_seconds)|"
        "(examples|tokens)_per_second)"
    )
    return [
        (step, {k: x for k, x in row.items() if not re.fullmatch(clocked, k)})
        for step, row in rows
    ]


@contextlib.contextmanager
def full_disk(num_bytes: int = 16) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def python(
    script: str, *arguments: object, without: Any = (), **options: Any
) -> "subprocess.Popen[str]":
    """Starts a program that can import the modules of the tests, and has no variables
    `without`."""
    path = os.pathsep.join(
        [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in without
    }
    environment |= {"PYTHONPATH": path, **options.pop("env", {})}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        env=environment,
        text=True,
        **{"stdout": pipe, "stderr": pipe, **options},
    )


def printed(
    script: str, *arguments: object, without: tuple[str, ...] = (), **environment: str
) -> str:
    """The output of a program; fails with its errors."""
    child = python(
        script, *arguments, without=without, env={"JAX_PLATFORMS": "cpu", **environment}
    )
    out, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors[-2000:]
    return out


def no_threads_left(seconds: float = 5.0) -> bool:
    """Return true if all threads of `batches` end by themselves."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(
            thread.name.startswith("redco_eqx") for thread in threading.enumerate()
        ):
            return True
        time.sleep(0.005)
    return False
