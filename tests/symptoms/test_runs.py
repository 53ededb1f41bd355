"""Runs and checkpoints that went wrong for others, as small programs: each is named by
its thread, and the page `symptoms.md` says what happened there."""

import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_of
from hosts import harness

import redco_eqx as rx

EXAMPLES = list(np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32))
ADAM = optax.adam(1e-3)


def mlp(key: jax.Array) -> eqx.nn.MLP:
    return eqx.nn.MLP(8, 8, 32, depth=2, key=key)


def loss_fn(model: Any, batch: Any, key: Any) -> jax.Array:
    return jnp.mean((jax.vmap(model)(batch) - 1.0) ** 2)


def begun(name: str = "fsdp8", make_model: Any = mlp) -> rx.TrainState:
    model = rx.init_model(make_model, mesh_of(name), key=jax.random.key(0))
    return rx.init_state(model, ADAM, key=jax.random.key(1))


def fit(directory: pathlib.Path, **options: Any) -> Any:
    given: dict[str, Any] = {
        "collate_fn": np.stack,
        "loss_fn": loss_fn,
        "optimizer": ADAM,
        "batch_size": 8,
        "loggers": (),
        "checkpoints": rx.Checkpoints(directory, every_steps=2),
        **options,
    }
    return rx.fit(begun(), rx.Data(EXAMPLES, prefetch=0), **given)


def test_maxdiffusion_484_a_resumed_run_has_one_update_for_each_step(tmp_path):
    def seen(directory: pathlib.Path, end: int) -> tuple[Any, list[list[float]]]:
        firsts: list[list[float]] = []

        def collate_fn(examples: Any) -> np.ndarray:
            batch = np.stack(examples)
            firsts.append(batch[:, 0].tolist())
            return batch

        state, _ = fit(directory, collate_fn=collate_fn, num_steps=end)
        return state, firsts

    whole, every = seen(tmp_path / "whole", 7)
    seen(tmp_path / "resumed", 4)
    state, last = seen(tmp_path / "resumed", 7)
    assert int(state.step) == int(state.opt_state[0].count) == 7
    # A resumed run makes its first batch twice.
    assert last[-3:] == every[-3:]
    for path, x in whole.params.items():
        assert (np.asarray(x) == np.asarray(state.params[path])).all(), path


@pytest.mark.parametrize("name", ["one", "tensor8", "2x2x2", "data2xtensor4"])
def test_flax_5110_what_is_restored_is_laid_out_like_the_state_that_is_given(
    name, tmp_path
):
    rx.save(tmp_path, begun("fsdp8"))
    like = begun(name)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like
    )
    found = rx.restore(tmp_path, shapes)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert x.sharding == y.sharding
        held = {shard.data.shape for shard in x.addressable_shards}
        assert held == {x.sharding.shard_shape(x.shape)}


def sizes_seen(function: Any) -> set[int]:
    """The numbers of elements of the arrays on the first device that appear while it
    runs."""
    seen: set[int] = set()
    is_done = threading.Event()
    first = jax.devices()[0]
    # Other tests may have left some.
    earlier = {id(x): x for x in jax.live_arrays()}

    def watch() -> None:
        while not is_done.is_set():
            for x in jax.live_arrays():
                is_new = id(x) not in earlier
                if is_new and first in x.sharding.device_set and not x.is_deleted():
                    seen.add(int(np.prod(x.sharding.shard_shape(x.shape))))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        function()
    finally:
        is_done.set()
        thread.join()
        sys.setswitchinterval(before)
    return seen


@pytest.mark.parametrize("sizes", [{"fsdp": 4}, {"fsdp": 2}, {"tensor": 4}], ids=str)
def test_maxdiffusion_379_a_restore_makes_no_array_whole_on_a_device(sizes, tmp_path):
    def large(key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(1024, 1024, 1024, depth=2, key=key)

    rx.save(tmp_path, begun("fsdp8", large))
    mesh = rx.make_mesh(data=1, **sizes)
    model = rx.init_model(large, mesh, key=jax.random.key(0))
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        rx.init_state(model, ADAM, key=jax.random.key(1)),
    )
    del model
    seen = sizes_seen(lambda: rx.restore(tmp_path, like))
    assert 1024 * 1024 // mesh.size in seen
    assert max(seen) <= 1024 * 1024 // mesh.size


def test_marin_8441_a_state_in_host_memory_keeps_its_place(tmp_path):
    state = begun("fsdp8")
    pinned = jax.tree.map(
        lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")),
        state.params,
    )
    moved = eqx.tree_at(lambda s: s.params, state, pinned)
    rx.save(tmp_path, moved)
    found = rx.restore(tmp_path, moved)
    for path, x in found.params.items():
        assert x.sharding.memory_kind == "pinned_host", path
        assert (np.asarray(x) == np.asarray(state.params[path])).all(), path


def test_pytorch_187138_no_array_changes_its_dtype_in_silence(tmp_path):
    rx.save(tmp_path, begun("fsdp8"))
    narrow = begun("fsdp8", lambda key: rx.cast(mlp(key), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"layers\.0\.weight[^\n]*float32"):
        rx.restore(tmp_path, narrow)


def test_spd_677_a_sigterm_in_an_evaluation_is_not_missed(tmp_path):
    def metric_fn(examples: Any, outputs: Any) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"score": 1.0}

    def evaluation(metric_fn: Any) -> rx.Evaluation:
        return rx.Evaluation(
            EXAMPLES[:8],
            every_steps=3,
            predict_fn=lambda model, batch, key: jax.vmap(model)(batch),
            metric_fn=metric_fn,
        )

    def quiet(examples: Any, outputs: Any) -> dict[str, float]:
        return {"score": 1.0}

    calls = 0

    def at_the_second(examples: Any, outputs: Any) -> dict[str, float]:
        """The first is a trial before the run."""
        nonlocal calls
        calls += 1
        return (quiet if calls < 2 else metric_fn)(examples, outputs)

    with pytest.raises(rx.errors.TrainingInterrupted):
        fit(tmp_path, num_steps=9, evaluation=evaluation(at_the_second))
    assert rx.list_checkpoints(tmp_path)[-1].step < 6
    state, history = fit(tmp_path, num_steps=9, evaluation=evaluation(quiet))
    assert int(state.step) == 9
    assert history["eval/score"] == [1.0, 1.0, 1.0]


@pytest.mark.long
def test_marin_6774_the_memory_of_the_host_does_not_grow_by_saves(tmp_path):
    def large(key: jax.Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(8, 8, 1024, depth=3, key=key)

    state = begun("fsdp8", large)
    size = sum(x.nbytes for x in jax.tree.leaves(state) if hasattr(x, "nbytes"))
    assert size > 20e6
    peaks = []
    for save in range(24):
        rx.save(tmp_path / str(save % 2), state)
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    assert peaks[-1] - peaks[7] < size


RESUMES = """
import resource, sys
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import redco_eqx as rx
import orbax.checkpoint
adam = optax.adam(1e-3)
def make_model(key):
    return eqx.nn.MLP(8, 8, 1536, depth=5, key=key)
mesh = rx.make_mesh(fsdp=8)
model = rx.init_model(make_model, mesh, key=jax.random.key(0))
given = [rx.init_state(model, adam, key=jax.random.key(1))]
del model
size = sum(x.nbytes for x in jax.tree.leaves(given) if hasattr(x, "nbytes"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def loss_fn(model, batch, key):
    return jnp.mean(jax.vmap(model)(batch) ** 2)
rx.fit(
    given.pop(), [np.ones(8, np.float32)] * 8, collate_fn=np.stack, loss_fn=loss_fn,
    optimizer=adam, batch_size=8, num_steps=1, loggers=(),
    checkpoints=rx.Checkpoints(sys.argv[1], every_steps=1),
)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("grown by", (after - before) * 1024 / size)
"""


def grown_by_a_run(directory: pathlib.Path) -> float:
    """The memory by which the host's peak grows in a run, as a multiple of the
    state."""
    done = subprocess.run(
        [sys.executable, "-c", RESUMES, str(directory)],
        # Memory that is freed goes back to the system at once.
        env=harness.environment(num_devices=8, JAX_ENABLE_X64=0)
        | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"grown by ([\d.]+)", done.stdout)
    assert found, done.stdout
    return float(found[1])


@pytest.mark.long
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory as Linux counts it"
)
def test_marin_8480_a_resumed_run_does_not_hold_two_states(tmp_path):
    """The second run reads the state of the first, and has no step left to take."""
    grown_by_a_run(tmp_path)
    # Two states at once would take 1, and the buffers of the reader.
    assert grown_by_a_run(tmp_path) < 1.0


SAVES = """
import sys
import equinox as eqx, jax, optax
import redco_eqx as rx
rx.initialize_distributed()
def make_model(key):
    return eqx.nn.MLP(8, 8, 256, depth=4, key=key)
model = rx.init_model(make_model, rx.make_mesh(), key=jax.random.key(0))
state = rx.init_state(model, optax.adam(1e-3), key=jax.random.key(1))
rx.save(f"{sys.argv[1]}/run", state)
"""


def test_marin_8120_processes_share_the_writing_of_whole_arrays(tmp_path):
    program = tmp_path / "saves.py"
    program.write_text(SAVES)
    processes = harness.start_loopback(
        tmp_path, program=program, num_devices=1, JAX_ENABLE_X64=0
    )
    assert processes.leave(120)[0] == [0, 0], processes.text()
    [arrays] = (tmp_path / "run").glob("*/arrays")
    written = [
        sum(x.stat().st_size for x in arrays.glob(f"ocdbt.process_{i}/**/*"))
        for i in range(2)
    ]
    assert min(written) > 1e5
    assert max(written) < 1.3 * min(written)


NAMES = ["a/b", "~", ".", "..", "a.b", "%2F", "a%b", "", "größe", "*", "[0]", "a\\b"]


@pytest.mark.parametrize("name", NAMES)
def test_orbax_2972_any_name_of_an_array_comes_back(name, tmp_path):
    def state_with(number: float) -> rx.TrainState:
        arrays = {name: jnp.full((4, 8), number), "other": jnp.zeros(3)}
        return rx.init_state(arrays, ADAM, key=jax.random.key(1))

    rx.save(tmp_path, state_with(2.0))
    found = rx.restore(tmp_path, state_with(1.0))
    assert (np.asarray(found.model[name]) == 2.0).all()
    assert (np.asarray(found.model["other"]) == 0.0).all()


TRAINS = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
import redco_eqx as rx
def loss_fn(model, batch, key):
    loss = jnp.mean((jax.vmap(model)(batch) - 1.0) ** 2)
    return loss, {"\\u2588": loss}
def make_model(key):
    return eqx.nn.Linear(8, 8, key=key)
model = rx.init_model(make_model, rx.make_mesh(), key=jax.random.key(0))
state = rx.init_state(model, optax.sgd(0.1), key=jax.random.key(1))
state, history = rx.fit(
    state, [np.ones(8, np.float32)] * 64, collate_fn=np.stack, loss_fn=loss_fn,
    optimizer=optax.sgd(0.1), batch_size=8, num_epochs=2, log_every=4,
)
print("trained", int(state.step), history["train/loss"][-1] < 0.1)
"""

STARTS = {
    "ascii": ([], {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"}),
    "code page": ([], {"PYTHONIOENCODING": "cp1252"}),
    "no asserts": (["-OO"], {}),
}


@pytest.mark.parametrize("name", STARTS)
def test_edward_790_it_trains_on_any_console_and_without_asserts(name):
    """The log has a metric whose name the consoles cannot print."""
    flags, variables = STARTS[name]
    done = subprocess.run(
        [sys.executable, *flags, "-c", TRAINS],
        env=harness.environment(num_devices=8, JAX_ENABLE_X64=0) | variables,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"trained 16 True" in done.stdout
