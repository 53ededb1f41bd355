import threading
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import MESHES, STEP, Compilations, assert_same, linear_state, make_examples, no_threads_left
from hypothesis import given, settings
from hypothesis import strategies as st

import redco_eqx as rx
from redco_eqx._sharding.mesh import num_batch_shards
from redco_eqx._step.state import TRAIN, stream
from redco_eqx._training.evaluation import NUM_AHEAD

# Sums of small integers are exact in float32: one example lost, or counted twice, shows.
RNG = np.random.default_rng(0)
VALUES, WEIGHTS = RNG.integers(1, 1000, 200), RNG.integers(1, 9, 200)


def make_state(mesh: Any) -> Any:
    return rx.init_state(eqx.filter_shard(*_one_and_layout(mesh)), key=jax.random.key(1))


def _one_and_layout(mesh: Any) -> Any:
    model = eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.weight, model, jnp.ones((1, 1)))
    return model, rx.shard_rules(model, mesh)


STATES = {name: make_state(rx.make_mesh(**sizes)) for name, sizes in MESHES.items()}
SHARDS = {name: num_batch_shards(rx.make_mesh(**sizes)) for name, sizes in MESHES.items()}


def collate(examples: Any) -> dict[str, np.ndarray]:
    ids = np.asarray(examples, np.int32)
    return {"id": ids, "value": VALUES[ids].astype(np.float32), "weight": WEIGHTS[ids].astype(np.float32)}


def values_of(model: Any, batch: Any) -> jax.Array:
    return jax.vmap(model)(batch["value"][:, None])[:, 0]


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    values, weight = values_of(model, batch), batch["weight"]
    return rx.Mean(jnp.sum(values * weight), jnp.sum(weight)), {"mean": jnp.mean(values)}


def sums_fn(model: Any, batch: Any, key: Any) -> Any:
    """`loss` is the exact sum over the number of batches, and `weight` the same of the number of examples."""
    values = values_of(model, batch)
    return rx.Mean(jnp.sum(values), 1.0), {"count": rx.Mean(len(values), 1.0)}


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return {"id": batch["id"], "pair": (values_of(model, batch), jnp.stack([batch["weight"]] * 3, 1))}


def synchronous(n: int) -> rx.Data:
    return rx.Data(range(n), prefetch=0)


@st.composite
def cases(draw: Any) -> tuple[str, int, int]:
    mesh = draw(st.sampled_from(sorted(MESHES)))
    batch_size = SHARDS[mesh] * draw(st.integers(1, 40 // SHARDS[mesh]))
    return mesh, draw(st.integers(1, 40)), batch_size


@settings(max_examples=20, deadline=None)
@given(cases())
def test_evaluation_counts_every_example_once(case: Any) -> None:
    mesh, n, batch_size = case
    found = rx.evaluate(
        STATES[mesh], synchronous(n), collate_fn=collate, loss_fn=loss_fn, batch_size=batch_size
    )
    weights = WEIGHTS[:n].astype(np.float64)
    # Exact: both sums are of integers below 2**24.
    assert found["loss"] == (VALUES[:n] * weights).sum() / weights.sum()
    # A scalar weighs its number of examples; the mean of a batch is rounded to float32.
    np.testing.assert_allclose(found["mean"], VALUES[:n].mean(), rtol=1e-6)
    assert set(found) == {"loss", "mean"}


@settings(max_examples=20, deadline=None)
@given(cases())
def test_prediction_keeps_every_example_in_order(case: Any) -> None:
    mesh, n, batch_size = case
    found = rx.predict(
        STATES[mesh], synchronous(n), collate_fn=collate, predict_fn=predict_fn, batch_size=batch_size
    )
    assert [int(row["id"]) for row in found] == list(range(n))
    assert [float(row["pair"][0]) for row in found] == VALUES[:n].tolist()
    assert [row["pair"][1].tolist() for row in found] == [[w] * 3 for w in WEIGHTS[:n].tolist()]


@pytest.mark.parametrize("n", [1, NUM_AHEAD - 1, NUM_AHEAD, NUM_AHEAD + 1, 3 * NUM_AHEAD])
def test_any_number_of_batches_may_wait(n: int) -> None:
    found = rx.evaluate(STATES["one"], range(n), collate_fn=collate, loss_fn=sums_fn, batch_size=1)
    assert found == {"loss": VALUES[:n].sum() / n, "count": 1.0}
    assert no_threads_left()


def test_an_error_leaves_no_thread() -> None:
    def broken(model: Any, batch: Any, key: Any) -> Any:
        raise LookupError("mine")

    # `errors` holds the frames, as an interactive session does with the last error.
    errors = []
    for run in (partial(rx.evaluate, loss_fn=broken), partial(rx.predict, predict_fn=broken)):
        with pytest.raises(LookupError, match="mine") as caught:
            run(STATES["one"], range(40), collate_fn=collate, batch_size=1)
        errors.append(caught)
    assert no_threads_left()


def test_a_mean_of_nothing_is_zero() -> None:
    def nothing(model: Any, batch: Any, key: Any) -> Any:
        return rx.Mean(jnp.sum(batch["value"]) * 0, 0.0)

    assert rx.evaluate(STATES["one"], range(5), collate_fn=collate, loss_fn=nothing, batch_size=2) == {
        "loss": 0.0
    }


def test_a_sharded_model_gives_the_same_on_every_mesh() -> None:
    def real_loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    examples = make_examples(13, dim=8)
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    weight, bias = np.float64(model.weight), np.float64(model.bias)
    errors = [np.mean((weight @ e["x"] + bias - e["y"]) ** 2) for e in examples]
    for name in ("tensor", "mixed", "data"):
        state = linear_state(mesh=rx.make_mesh(**MESHES[name]), dim=8)
        found = rx.evaluate(state, examples, collate_fn=_collate_xy, loss_fn=real_loss, batch_size=8)
        # float32 against float64.
        np.testing.assert_allclose(found["loss"], np.mean(errors), rtol=1e-5)


def _collate_xy(examples: Any) -> dict[str, np.ndarray]:
    return {name: np.stack([e[name] for e in examples]) for name in ("x", "y")}


# Noise


def noise_fn(model: Any, batch: Any, key: Any) -> jax.Array:
    return jnp.full(batch["id"].shape, jax.random.normal(key))


def noisy_loss(model: Any, batch: Any, key: Any) -> Any:
    """The noise of the first two batches, apart."""
    noise, first = jax.random.normal(key), batch["id"][0]
    of = {f"batch{i}": rx.Mean(jnp.where(first == 4 * i, noise, 0), first == 4 * i) for i in range(2)}
    return jnp.zeros(()), of


def test_noise_differs_between_batches_and_not_between_calls() -> None:
    state = STATES["one"]

    def losses() -> list[float]:
        found = rx.evaluate(state, range(8), collate_fn=collate, loss_fn=noisy_loss, batch_size=4)
        return [found["batch0"], found["batch1"]]

    def rows() -> list[float]:
        found = rx.predict(state, range(8), collate_fn=collate, predict_fn=noise_fn, batch_size=4)
        return [float(found[0]), float(found[4])]

    assert losses() == losses()
    assert rows() == rows()
    training = float(jax.random.normal(stream(state, TRAIN)))
    # Two batches, and evaluation, prediction and training: all have their own.
    assert len({*losses(), *rows(), training}) == 5


# The model


class WithDropout(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, x: Any, key: Any) -> Any:
        return self.dropout(self.linear(x), key=key)


def test_the_model_is_in_inference_mode() -> None:
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    state = rx.init_state(WithDropout(linear, eqx.nn.Dropout(0.9)), key=jax.random.key(1))
    examples = make_examples(6)

    def outputs(model: Any, batch: Any, key: Any) -> Any:
        return jax.vmap(model)(batch["x"], jax.random.split(key, len(batch["x"])))

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(outputs(model, batch, key))

    expected = np.stack([np.asarray(linear.weight) @ e["x"] + np.asarray(linear.bias) for e in examples])
    common: Any = {"collate_fn": _collate_xy, "batch_size": 4}
    predictions = rx.predict(state, examples, predict_fn=outputs, **common)
    np.testing.assert_allclose(np.stack(predictions), expected, rtol=1e-5)
    found = rx.evaluate(state, examples, loss_fn=loss, **common)
    np.testing.assert_allclose(found["loss"], expected.mean(), rtol=1e-5)


class WithNorm(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __call__(self, x: Any, state: Any) -> Any:
        return self.norm(x, state)


def test_a_model_with_a_state_uses_it_and_leaves_it() -> None:
    pair = eqx.nn.make_with_state(WithNorm)(eqx.nn.BatchNorm(2, axis_name="batch", mode="batch"))
    apply = jax.vmap(pair[0], axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    x = np.stack([e["x"] for e in make_examples(6)])
    _, moved = apply(3 * x + 1, pair[1])  # running statistics that are not those of `x`
    state = rx.init_state((pair[0], moved), key=jax.random.key(1))
    before = jax.tree.map(jnp.copy, state)

    def outputs(model: Any, batch: Any, key: Any) -> Any:
        model, model_state = model
        apply = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return apply(batch["x"], model_state)

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        return outputs(model, batch, key)[0]

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        out, model_state = outputs(model, batch, key)
        return jnp.mean(out**2), {"largest": jnp.max(out)}, model_state

    # Each example by itself, in inference mode: what others are in its batch does not matter.
    alone = eqx.nn.inference_mode(pair[0])
    expected = np.stack([np.asarray(alone(row, moved)[0]) for row in x])
    common: Any = {"collate_fn": _collate_xy, "batch_size": 4}
    predictions = rx.predict(state, make_examples(6), predict_fn=predict_fn, **common)
    np.testing.assert_allclose(np.stack(predictions), expected, rtol=1e-5)
    found = rx.evaluate(state, make_examples(6), loss_fn=loss_fn, **common)
    np.testing.assert_allclose(found["loss"], (expected**2).mean(), rtol=1e-5)
    assert set(found) == {"loss", "largest"}
    assert_same(state, before)


# How it is run


def test_the_same_function_is_compiled_once() -> None:
    def loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(values_of(model, batch))

    def outputs(model: Any, batch: Any, key: Any) -> Any:
        return values_of(model, batch)

    def run() -> Compilations:
        with Compilations() as compilations:
            for _ in range(2):
                rx.evaluate(STATES["one"], range(8), collate_fn=collate, loss_fn=loss, batch_size=4)
                rx.predict(STATES["one"], range(8), collate_fn=collate, predict_fn=outputs, batch_size=4)
        return compilations

    assert run().names.count(STEP) == 2
    assert run().names == []


@pytest.mark.parametrize("prefetch", [0, 2])
def test_collation_in_a_thread_only_if_wanted(prefetch: int) -> None:
    threads = set()

    def spying(examples: Any) -> Any:
        threads.add(threading.current_thread() is threading.main_thread())
        return collate(examples)

    examples = rx.Data(range(8), prefetch=prefetch)
    common: Any = {"collate_fn": spying, "batch_size": 4}
    rx.evaluate(STATES["one"], examples, loss_fn=loss_fn, **common)
    rx.predict(STATES["one"], examples, predict_fn=predict_fn, **common)
    assert threads == {prefetch == 0}
    assert no_threads_left()


def test_a_state_that_was_never_placed() -> None:
    model = eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
    state = rx.init_state(model, key=jax.random.key(1))
    found = rx.predict(state, range(3), collate_fn=collate, predict_fn=predict_fn, batch_size=2)
    assert [int(row["id"]) for row in found] == [0, 1, 2]
