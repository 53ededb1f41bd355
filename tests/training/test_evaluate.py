"""`evaluate` and `predict`: every example once, on every mesh, by a model that stays as it is."""

import json
import pathlib
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import MESHES, assert_same, linear_state, make_examples, no_threads_left
from fit_helpers import collate as collate_all
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
def test_every_example_counts_once_and_in_order(case: Any) -> None:
    mesh, n, batch_size = case
    common: Any = {"collate_fn": collate, "batch_size": batch_size}
    found = rx.evaluate(STATES[mesh], synchronous(n), loss_fn=loss_fn, **common)
    weights = WEIGHTS[:n].astype(np.float64)
    # Exact: both sums are of integers below 2**24.
    assert found["loss"] == (VALUES[:n] * weights).sum() / weights.sum()
    # A scalar weighs its number of examples; the mean of a batch is rounded to float32.
    np.testing.assert_allclose(found["mean"], VALUES[:n].mean(), rtol=1e-6)
    assert set(found) == {"loss", "mean"}
    predicted = rx.predict(STATES[mesh], synchronous(n), predict_fn=predict_fn, **common)
    assert [int(row["id"]) for row in predicted] == list(range(n))
    assert [float(row["pair"][0]) for row in predicted] == VALUES[:n].tolist()
    assert [row["pair"][1].tolist() for row in predicted] == [[w] * 3 for w in WEIGHTS[:n].tolist()]


def test_any_number_of_batches_may_wait() -> None:
    for n in (1, NUM_AHEAD - 1, NUM_AHEAD, NUM_AHEAD + 1, 3 * NUM_AHEAD):
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


def test_a_sharded_model_gives_what_numpy_gives() -> None:
    def real_loss(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    examples = make_examples(13, dim=8)
    model = eqx.nn.Linear(8, 8, key=jax.random.key(0))
    weight, bias = np.float64(model.weight), np.float64(model.bias)
    errors = [np.mean((weight @ e["x"] + bias - e["y"]) ** 2) for e in examples]
    state = linear_state(mesh=rx.make_mesh(**MESHES["mixed"]), dim=8)
    found = rx.evaluate(state, examples, collate_fn=collate_all, loss_fn=real_loss, batch_size=8)
    # float32 against float64.
    np.testing.assert_allclose(found["loss"], np.mean(errors), rtol=1e-5)


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


class Both(eqx.Module):
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        out, state = self.norm(x, state)
        return self.dropout(out, key=key), state


def test_the_model_is_in_inference_mode_and_its_state_stays() -> None:
    norm, dropout = eqx.nn.BatchNorm(2, axis_name="batch", mode="batch"), eqx.nn.Dropout(0.9)
    pair = eqx.nn.make_with_state(Both)(norm, dropout)
    x = jnp.stack([e["x"] for e in make_examples(6)])
    # Running statistics that are not those of `x`.
    _, moved = jax.vmap(pair[0].norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
        3 * x + 1, pair[1]
    )
    state = rx.init_state((pair[0], moved), key=jax.random.key(1))
    before = jax.tree.map(jnp.copy, state)

    def outputs(model: Any, batch: Any, key: Any) -> Any:
        model, model_state = model
        apply = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
        return apply(batch["x"], model_state, key)

    def predict_fn(model: Any, batch: Any, key: Any) -> Any:
        return outputs(model, batch, key)[0]

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        out, model_state = outputs(model, batch, key)
        return jnp.mean(out**2), {"largest": jnp.max(out)}, model_state

    # Each example by itself, in inference mode: what others are in its batch does not matter.
    alone = eqx.nn.inference_mode(pair[0].norm)
    expected = np.stack([np.asarray(alone(row, moved)[0]) for row in x])
    common: Any = {"collate_fn": collate_all, "batch_size": 4}
    predictions = rx.predict(state, make_examples(6), predict_fn=predict_fn, **common)
    np.testing.assert_allclose(np.stack(predictions), expected, rtol=1e-5)
    found = rx.evaluate(state, make_examples(6), loss_fn=loss_fn, **common)
    np.testing.assert_allclose(found["loss"], (expected**2).mean(), rtol=1e-5)
    assert set(found) == {"loss", "largest"}
    assert_same(state, before)


# How it is run


def test_a_state_that_was_never_placed() -> None:
    model = eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
    state = rx.init_state(model, key=jax.random.key(1))
    found = rx.predict(state, range(3), collate_fn=collate, predict_fn=predict_fn, batch_size=2)
    assert [int(row["id"]) for row in found] == [0, 1, 2]


# `output_fn`: a form of the predictions that a person reads


def words(example: int, prediction: Any) -> str:
    """It has the example that belongs to the prediction, and arrays without the batch dim."""
    assert isinstance(prediction["id"], np.ndarray | np.generic)
    assert prediction["id"] == example
    return f"{example}: {'more' if prediction['pair'][0] > 500 else 'less'}"


def test_outputs_are_returned_and_go_to_the_metric_and_the_file(tmp_path: pathlib.Path) -> None:
    expected = [f"{i}: {'more' if VALUES[i] > 500 else 'less'}" for i in range(11)]
    common: Any = {"collate_fn": collate, "batch_size": 8, "predict_fn": predict_fn, "output_fn": words}
    assert rx.predict(STATES["mixed"], range(11), **common) == expected
    seen = []

    def metric_fn(examples: Any, outputs: Any) -> Any:
        seen.append(outputs)
        return {"more": np.mean([output.endswith("more") for output in outputs])}

    evaluation = rx.Evaluation(
        range(11), loss_fn=loss_fn, metric_fn=metric_fn, predictions_directory=tmp_path, **common
    )
    share = evaluation(STATES["mixed"])["eval/more"]
    assert share == np.mean([output.endswith("more") for output in expected])
    assert seen == [expected]
    lines = (tmp_path / "step-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["prediction"] for line in lines] == expected


def test_an_error_of_output_fn_says_for_which_example() -> None:
    with pytest.raises(KeyError) as caught:
        rx.predict(
            STATES["one"], range(11), collate_fn=collate, predict_fn=predict_fn, batch_size=4,
            output_fn=lambda example, prediction: {0: "zero", 1: "one"}[example],
        )  # fmt: skip
    assert "output_fn was given example 2" in "".join(caught.value.__notes__)
