"""Input that is refused before anything is compiled, and messages that name the argument to change."""

import dataclasses
import inspect
import pathlib
from collections.abc import Callable
from typing import Any

import equinox as eqx
import fit_helpers as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import BODY, SGD, STEP, assert_same, collate, compilations, fit, linear_state, make_examples

import redco_eqx as rx

EXAMPLES = make_examples(12)
ADAM = optax.adam(1e-2)


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return jax.vmap(model)(batch["x"])


def run(state: Any = None, examples: Any = EXAMPLES, **arguments: Any) -> Any:
    """`fit` with one thing wrong, which must leave the given state as it was."""
    given = linear_state() if state is None else state
    before = jax.tree.map(jnp.copy, given)
    try:
        fit(given, examples, **{"num_epochs": 1, **arguments})
    finally:
        assert_same(given, before)


def on_eight(batch_size: int = 8, **arguments: Any) -> Any:
    run(linear_state(mesh=rx.make_mesh()), make_examples(48), batch_size=batch_size, **arguments)


def evaluating(examples: Any = EXAMPLES, **fields: Any) -> Any:
    run(evaluation=rx.Evaluation(examples, **{"predict_fn": predict_fn, **fields}))


def metrics(value: Any) -> Any:
    evaluating(metric_fn=lambda examples, predictions: value)


def collating(**changed: Any) -> Any:
    run(collate_fn=lambda examples: {**collate(examples), **changed})


def guarding(step: Any) -> Any:
    rx.skip_nonfinite(step)(linear_state(), collate(EXAMPLES[:4]))


def stepping(**changed: Any) -> Any:
    """A custom step that changes the shape of the state."""

    def step(state: Any, batch: Any) -> Any:
        state, metrics = tiny.counting_step(state, batch)
        return dataclasses.replace(state, **changed), metrics

    guarding(step)


def half_trained() -> Any:
    """Adam's state over the weight alone, in a state that trains the bias too."""
    state = linear_state(ADAM)
    spec = eqx.tree_at(lambda m: m.weight, jax.tree.map(lambda _: False, state.model), True)
    half = rx.init_state(linear_state().model, ADAM, key=jax.random.key(1), trainable=spec)
    return dataclasses.replace(state, opt_state=half.opt_state)


def explicit_axes() -> Any:
    mesh = jax.make_mesh((8,), ("data",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    model = jax.device_put(eqx.nn.Linear(2, 2, key=jax.random.key(0)), whole)
    return rx.init_state(model, SGD, key=jax.random.key(1))


def nothing_trainable() -> Any:
    model = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    return rx.init_state(model, key=jax.random.key(1), trainable=jax.tree.map(lambda _: False, model))


def generator() -> Any:
    yield from EXAMPLES


WEIGHT, BIAS = jnp.ones((2, 2)), jnp.ones(2)
OTHERS = rx.Evaluation(make_examples(48), batch_size=12)

# (call, what its message says): a `ValueError`
REFUSED: list[tuple[Callable[[], Any], str]] = [
    # How long, how often
    (lambda: run(num_steps=2), r"num_epochs=1, num_steps=2, but exactly one"),
    (lambda: run(num_epochs=None), r"num_epochs=None, num_steps=None, but exactly one"),
    (lambda: run(num_epochs=0), r"num_epochs=0, but it must be positive"),
    (lambda: run(num_epochs=None, num_steps=0), r"num_steps=0, but it must be positive"),
    (lambda: run(log_every=0), r"log_every=0, but it must be positive"),
    (lambda: run(examples=rx.Stream(EXAMPLES)), r"num_epochs=1, but train_examples is a Stream.*num_steps="),
    (lambda: run(step_timeout_seconds=0.0), r"step_timeout_seconds=0"),
    # Batch sizes
    (lambda: on_eight(12), r"fit: batch_size=12 must be a positive multiple of 8, the number of data shards"),
    (lambda: on_eight(num_microbatches=2), r"num_microbatches=2 times 8, the number of data shards"),
    (lambda: run(num_microbatches=0), r"num_microbatches=0, but it must be"),
    (lambda: on_eight(evaluation=OTHERS), r"batches: batch_size=12 must be a positive multiple of 8, the"),
    (lambda: evaluating(batch_size=0), r"Evaluation: batch_size=0, but"),
    # Examples
    (lambda: run(examples=lambda epoch: []), r"examples is empty"),
    (lambda: evaluating([]), r"(?s)is empty.*the evaluation"),
    (lambda: evaluating(rx.Stream(generator())), r"Stream of an iterator, which can be read only once"),
    (lambda: evaluating(rx.Stream([EXAMPLES], batched=True)), r"Stream\(batched=True\) is for training"),
    # Evaluation
    (lambda: evaluating(every_steps=0), r"Evaluation: every_steps=0, but it"),
    (lambda: evaluating(predict_fn=None, metric_fn=lambda x, y: {}), r"metric_fn needs predict_fn"),
    (lambda: evaluating(predict_fn=None, predictions_directory="no"), r"predictions_directory needs predict"),
    (lambda: evaluating(predict_fn=None, output_fn=lambda x, y: 0), r"output_fn needs predict_fn"),
    # Functions
    (lambda: collating(y=np.zeros((3, 2))), r"leaf 'y' is float64\[3,2\], .*must be 4"),
    (lambda: run(loss_fn=predict_fn), r"the loss must be a scalar.*\(4, 2\)\. Sum it"),
    # The state
    (lambda: run(explicit_axes()), r"\('data',\) are not of AxisType\.Auto.*make_mesh"),
    (lambda: run(nothing_trainable()), r"no trainable leaf.*`trainable`"),
    (lambda: run(optimizer=ADAM), r"opt_state\.0 it keeps ScaleByAdamState, but the state holds EmptyState"),
    (lambda: run(half_trained(), optimizer=ADAM), r"mu\.bias it keeps float32\[2\], .* holds nothing.*given"),
    # A custom step
    (lambda: guarding(lambda state, batch: (state, {"error": 1.0})), r"a dict that has a 'loss'.*\['error'\]"),
    (lambda: guarding(lambda state, batch: (state, None)), r"must return \(state, metrics\).*NoneType"),
    (lambda: guarding(lambda state, batch: (state, {"loss": BIAS})), r"the metric 'loss' must be a scalar"),
    (lambda: guarding(lambda state, batch: (state.params, {"loss": 1.0})), r"but the state is a dict"),
    (lambda: stepping(params={"bias": jnp.ones(3), "weight": WEIGHT}), r"params\.bias .* became float32\[3\]"),
    (lambda: stepping(model_state={"mean": BIAS}), r"model_state\.mean was missing and became float32\[2\]"),
]

OF_ANOTHER_TYPE: list[tuple[Callable[[], Any], str]] = [
    (lambda: run(examples=generator()), r"examples is a generator.*list.*rx.Stream"),
    (lambda: evaluating(generator()), r"Evaluation: examples is a generator.*list\(\.\.\.\)"),
    (lambda: collating(n=4), r"leaf 'n' is a int, but must be a NumPy array"),
    (lambda: evaluating(state_fn=lambda state: state.params), r"state_fn returns must be a TrainState"),
]

# These come after the loss of one batch.
REFUSED_IN_EVALUATION: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: evaluating(predict_fn=tiny.scalar_loss),
        r"predict_fn's output array has shape \(\), .*batch's, 4",
    ),
    (lambda: metrics({"score": "0.5"}), r"metric_fn: 'score' is '0.5' \(str\), but a metric is one num"),
    (lambda: metrics({"score": np.ones(1)}), r"'score' is array\(\[1.\]\) \(ndarray\)"),
    (lambda: metrics({"score": jnp.ones(2)}), r"'score' is Array\(.*but a metric is one number"),
    (lambda: metrics({"score": None}), r"'score' is None \(NoneType\)"),
    (lambda: metrics({"score": [[1.0], [1.0, 2.0]]}), r"'score' is \[\[1.0\], .* \(list\)"),
    (lambda: metrics({"score": 1j}), r"'score' is 1j \(complex\)"),
    (lambda: metrics(0.5), r"metric_fn must return a dict of numbers by name, but returned a float"),
    (lambda: metrics({"plain": 1.0}), r"loss_fn already reports a metric 'plain'"),
]


@pytest.mark.parametrize(
    ("cases", "exception", "unheard"),
    [
        (REFUSED, ValueError, [BODY, STEP]),
        (OF_ANOTHER_TYPE, TypeError, [BODY, STEP]),
        (REFUSED_IN_EVALUATION, ValueError, [BODY]),
    ],
    ids=["values", "types", "in evaluation"],
)
def test_refused_before_compilation(
    cases: Any, exception: Any, unheard: list[str], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The annotations would refuse some of it first, but only under the tests' type checker.
    monkeypatch.setattr(rx, "fit", inspect.unwrap(rx.fit))
    monkeypatch.chdir(tmp_path)
    for call, message in cases:
        with compilations() as compiled, pytest.raises(exception, match=message) as caught:
            call()
        assert not set(unheard) & set(compiled), message
        assert tiny.no_threads_left(), message
        del caught
    assert list(tmp_path.iterdir()) == []


def test_evaluate_and_predict_refuse() -> None:
    state = linear_state(mesh=rx.make_mesh())
    for call, function, message in (
        (rx.evaluate, "loss_fn", r"the loss must be a scalar.*\(3, 2\)"),
        (rx.predict, "predict_fn", r"output array has shape \(3, 2\), .* 8"),
    ):
        for examples, size, words in (
            ([], 8, r"examples is empty"),
            (make_examples(16), 12, r"batch_size=12 must be a positive multiple of 8"),
            (make_examples(16), 8, message),
        ):
            arguments: Any = {
                "collate_fn": collate,
                "batch_size": size,
                function: lambda model, batch, key: batch["x"][:3],
            }
            with compilations() as compiled, pytest.raises(ValueError, match=words) as caught:
                call(state, examples, **arguments)
            assert STEP not in compiled, words
            assert tiny.no_threads_left(), words  # though the error holds the frames
            del caught
