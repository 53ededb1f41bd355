"""Runs and checkpoints that went wrong for others, as small programs: each is named by
its thread, and the page `symptoms.md` says what happened there."""

import os
import pathlib
import resource
import signal
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_of

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
