"""A loop of one's own: steps, `batches` that say their place, and `Checkpoints.open`."""

import functools
import itertools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import assert_same, collate, fit, loss_fn, make_examples, mlp_state

import redco_eqx as rx
from redco_eqx._step.state import order_key

EXAMPLES = make_examples(44, dim=8)
OPTIMIZER = optax.adam(1e-2)
SOURCES: dict[str, Any] = {
    "list": lambda: EXAMPLES,
    "stream": lambda: rx.Stream(lambda epoch: iter(EXAMPLES)),
    "stream of batches": lambda: rx.Stream(
        lambda epoch: (EXAMPLES[i : i + 8] for i in range(0, 40, 8)), batched=True
    ),
}


def my_loop(state: Any, step: Any, directory: Any, *, num_epochs: int, stop_at: int | None = None) -> Any:
    """Saves every third step, and goes on from what is saved there."""
    mesh, key = state.step.sharding.mesh, order_key(state, 0)
    place: dict[str, Any] = {"epoch": 0, "start": 0}
    if saved := rx.list_checkpoints(directory) if directory.exists() else []:
        state, place = rx.restore(directory, state), saved[-1].extras["place"]
    with rx.Checkpoints(directory).open() as writer:
        while place["epoch"] < num_epochs:
            batches = rx.batches(EXAMPLES, collate, batch_size=8, mesh=mesh, key=key, **place)
            for batch in batches:
                if int(state.step) == stop_at:
                    return state
                state, _ = step(state, batch)
                if int(state.step) % 3 == 0:
                    writer.save(state, extras={"place": batches.place})
            place = batches.place
    return state


def test_it_takes_the_same_steps_as_fit_also_when_it_is_resumed(tmp_path: pathlib.Path) -> None:
    """From a place in the middle of an epoch of five batches, and in the next one."""
    state = mlp_state(OPTIMIZER, rx.make_mesh(tensor=2, fsdp=2))
    layout = {path: x.sharding for path, x in state.params.items()}
    step = rx.jit_step(functools.partial(rx.train_step, loss_fn=loss_fn, optimizer=OPTIMIZER, shardings=layout))
    arguments: Any = {"optimizer": OPTIMIZER, "batch_size": 8, "num_epochs": 2, "donate": False}
    expected = fit(state, EXAMPLES, **arguments)
    assert int(expected.step) == 10
    for stop_at in (5, 8):
        run = functools.partial(my_loop, step=step, directory=tmp_path / str(stop_at), num_epochs=2)
        assert int(run(jax.tree.map(jnp.copy, state), stop_at=stop_at).step) == stop_at
        assert_same(run(jax.tree.map(jnp.copy, state)), expected)


@pytest.mark.parametrize("kind", SOURCES)
def test_the_place_goes_on_after_each_batch(kind: str) -> None:
    def batches(**place: Any) -> Any:
        mesh, key = rx.make_mesh(data=1), jax.random.key(0)
        return rx.batches(SOURCES[kind](), collate, batch_size=8, mesh=mesh, key=key, **place)

    expected = [batch["id"].tolist() for batch in batches(epoch=1)]
    assert len(expected) == 5
    iterator = batches(epoch=1)
    for num_done in range(5):
        place = json.loads(json.dumps(iterator.place))
        assert (place["epoch"], place["start"]) == (1, num_done)
        assert [batch["id"].tolist() for batch in batches(**place)] == expected[num_done:]
        next(iterator, None)
    assert (iterator.place["epoch"], iterator.place["start"]) == (2, 0)
    assert next(iterator, None) is None
    assert iterator.place == {"epoch": 2, "start": 0}
    at_the_end = batches(epoch=1, start=5)  # as an earlier version said it
    assert next(at_the_end, None) is None
    assert at_the_end.place == {"epoch": 2, "start": 0}


def test_the_place_in_a_stream_refuses_other_items() -> None:
    """It has a checksum of the items before it. A sequence has no such place."""

    def batches(source: Any, **place: Any) -> Any:
        return rx.batches(rx.Stream(source), np.asarray, batch_size=4, mesh=rx.make_mesh(data=1), **place)

    iterator = batches(lambda epoch: iter(range(40)))
    for _ in itertools.islice(iterator, 3):
        pass
    place = iterator.place
    iterator.close()
    rest = batches(lambda epoch: iter(range(40)), **place)
    assert [batch.tolist()[0] for batch in rest] == list(range(12, 40, 4))
    with pytest.raises(ValueError, match="differ"):
        next(batches(lambda epoch: iter(range(1, 41)), **place))
    with pytest.raises(ValueError, match="positions are those of a Stream"):
        rx.batches(EXAMPLES, collate, batch_size=8, mesh=rx.make_mesh(data=1), positions=[[0, 1]])
