"""`fit` is made of public pieces: put together by hand they give the same state and the same rows."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from fit_helpers import MESHES, Rows, assert_same, collate, fit, loss_fn, make_examples, mlp_state

import redco_eqx as rx

EXAMPLES = make_examples(44, dim=8)
OPTIMIZER = optax.adam(1e-2)


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return jax.vmap(model)(batch["x"])


def metric_fn(examples: Any, predictions: Any) -> dict[str, float]:
    return {"mean": float(sum(p.sum() for p in predictions)) / len(examples)}


def my_fit(state: Any, examples: Any, held_out: Any, checkpoints: Any, logger: Any) -> Any:
    mesh = state.step.sharding.mesh
    layout = {path: x.sharding for path, x in state.params.items()}
    step_fn = functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER, shardings=layout)
    step = rx.jit_step(rx.loop.guarded(step_fn))
    evaluation = rx.Evaluation(
        held_out, collate_fn=collate, loss_fn=loss_fn, batch_size=16, predict_fn=predict_fn, metric_fn=metric_fn
    )
    plan = rx.loop.Plan(
        num_epochs=3, log_every=2, evaluate=rx.loop.Every(epochs=1), save=rx.loop.Every(steps=2)
    )
    epochs = rx.loop.Epochs(examples, collate, batch_size=16, mesh=mesh)
    run = rx.types.RunRecord.begin_at(int(state.step), batch_size=16, num_examples=len(examples))
    window = empty = None
    with rx.Checkpoints(checkpoints, keep_last=None).open() as writer:
        for batch, place in epochs.after(0, 0, key=rx.loop.order_key(state, run.begin)):
            if empty is None:
                window = empty = rx.loop.empty_window(step_fn, state, batch)
            state, window = step(state, window, batch)
            run = run.advanced(place.epoch, place.batch)
            due = rx.loop.due(plan, run)
            if due.log:
                row = rx.loop.window_row(jax.device_get(window))
                logger(run.step, {**row, "train/epoch": place.epochs_done})
                window = rx.loop.next_window(empty, window)
            if due.evaluate:
                row = evaluation(state)
                logger(run.step, row)
                run = run.evaluated(row)
            if due.save:
                writer.save(state, run=dataclasses.replace(run, finished=due.finish))
            if due.finish:
                break
    return state


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_fit_from_its_pieces(sizes: Any, tmp_path: pathlib.Path) -> None:
    state = mlp_state(OPTIMIZER, rx.make_mesh(**sizes))
    rows, my_rows = Rows(), Rows()
    mine = my_fit(jax.tree.map(jnp.copy, state), EXAMPLES, EXAMPLES[:11], tmp_path / "mine", my_rows)
    evaluation = rx.Evaluation(EXAMPLES[:11], predict_fn=predict_fn, metric_fn=metric_fn)
    theirs = fit(
        state, EXAMPLES, optimizer=OPTIMIZER, batch_size=16, num_epochs=3, log_every=2, loggers=[rows],
        evaluation=evaluation, checkpoints=rx.Checkpoints(tmp_path / "fit", every_steps=2, keep_last=None),
    )  # fmt: skip
    assert_same(mine, theirs)
    timed = ("train/examples_per_second", "train/tokens_per_second")
    assert my_rows.rows == [
        (step, {name: x for name, x in row.items() if name not in timed}) for step, row in rows.rows
    ]
    saved, my_saved = (rx.list_checkpoints(tmp_path / name) for name in ("fit", "mine"))
    assert [info.step for info in saved] == [info.step for info in my_saved] == [2, 4, 6]
    for info, my_info in zip(saved, my_saved):
        assert {name: x.checksum for name, x in info.arrays.items()} == {
            name: x.checksum for name, x in my_info.arrays.items()
        }
