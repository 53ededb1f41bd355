"""Input that is refused before anything is compiled, and messages that name the argument to change."""

import dataclasses
import inspect
import pathlib
from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    BODY,
    SGD,
    STEP,
    Compilations,
    assert_same,
    collate,
    counting_step,
    fit,
    linear_state,
    make_examples,
    no_threads_left,
)

import redco_eqx as rx

EXAMPLES = make_examples(12)
ADAM = optax.adam(1e-2)


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return jax.vmap(model)(batch["x"])


def run(state: Any = None, examples: Any = EXAMPLES, **arguments: Any) -> Any:
    """`fit` with one thing wrong, which must leave the given state as it was."""
    given = linear_state() if state is None else state
    before = None if given.step.is_deleted() else jax.tree.map(jnp.copy, given)
    arguments = {"num_epochs": 1, **arguments}
    try:
        # The annotations would refuse some of it first, but only under the tests' type checker.
        fit(given, examples, call=inspect.unwrap(rx.fit), **arguments)
    finally:
        if before is not None:
            assert_same(given, before)


def on_eight(**arguments: Any) -> Any:
    run(linear_state(mesh=rx.make_mesh()), make_examples(48), batch_size=8, **arguments)


def evaluating(examples: Any = EXAMPLES, **fields: Any) -> Any:
    run(evaluation=rx.Evaluation(examples, **{"predict_fn": predict_fn, **fields}))


def metric(value: Any) -> Callable[[], Any]:
    return lambda: evaluating(metric_fn=lambda examples, predictions: {"score": value})


def collating(**changed: Any) -> Callable[[], Any]:
    return lambda: run(collate_fn=lambda examples: {**collate(examples), **changed})


def losing(loss: Callable[[Any], Any]) -> Callable[[], Any]:
    return lambda: run(loss_fn=lambda model, batch, key: loss(jnp.mean(jax.vmap(model)(batch["x"]), -1)))


def predicting(outputs: Callable[[Any], Any]) -> Callable[[], Any]:
    def outputs_fn(model: Any, batch: Any, key: Any) -> Any:
        return outputs(jax.vmap(model)(batch["x"]))

    return lambda: evaluating(predict_fn=outputs_fn)


def stepping(**changed: Any) -> Callable[[], Any]:
    def step(state: Any, batch: Any) -> Any:
        state, metrics = counting_step(state, batch)
        return dataclasses.replace(state, **changed), metrics

    return lambda: rx.skip_nonfinite(step)(linear_state(), collate(EXAMPLES[:4]))


def reporting(metrics: Any) -> Callable[[], Any]:
    step = rx.skip_nonfinite(lambda state, batch: (state, metrics))
    return lambda: step(linear_state(), collate(EXAMPLES[:4]))


def deleted_state() -> Any:
    state = linear_state()
    for x in jax.tree.leaves(state):
        x.delete()
    return state


def other_params() -> Any:
    state = linear_state(ADAM)
    return dataclasses.replace(state, opt_state=linear_state(ADAM, dim=3).opt_state)


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


# (name, call, exception, what its message says)
REFUSED: list[tuple[str, Callable[[], Any], type[Exception], str]] = [
    # How long, how often
    ("both lengths", lambda: run(num_steps=2), ValueError, r"num_epochs=1, num_steps=2, but exactly one"),
    ("no length", lambda: run(num_epochs=None), ValueError, r"num_epochs=None, num_steps=None, but exactly"),
    ("no epochs", lambda: run(num_epochs=0), ValueError, r"num_epochs=0, but it must be positive"),
    ("no steps", lambda: run(num_epochs=None, num_steps=0), ValueError, r"num_steps=0, but it must be pos"),
    ("log_every", lambda: run(log_every=0), ValueError, r"log_every=0, but it must be positive"),
    (
        "epochs of a stream",
        lambda: run(examples=rx.Stream(EXAMPLES)),
        ValueError,
        r"num_epochs=1, but train_examples is a Stream.*num_steps=",
    ),
    (
        "a stream without a length",
        lambda: run(examples=rx.Stream(EXAMPLES), num_epochs=None),
        ValueError,
        r"num_epochs=None, num_steps=None",
    ),
    (
        "an iterator to evaluate again and again",
        lambda: evaluating(rx.Stream(generator())),
        ValueError,
        r"Stream of an iterator, which can be read only once.*a function",
    ),
    (
        "batches to evaluate",
        lambda: evaluating(rx.Stream([EXAMPLES], batched=True)),
        ValueError,
        r"Stream\(batched=True\) is for training",
    ),
    # Batch sizes
    ("batch of 0", lambda: run(batch_size=0), ValueError, r"batch_size=0 must be a positive multiple of 1"),
    ("negative batch", lambda: run(batch_size=-4), ValueError, r"batch_size=-4 must be a positive multiple"),
    (
        "batch over shards",
        lambda: run(linear_state(mesh=rx.make_mesh()), make_examples(48), batch_size=12),
        ValueError,
        r"fit: batch_size=12 must be a positive multiple of 8, the number of data shards",
    ),
    (
        "fsdp shards count too",
        lambda: run(linear_state(mesh=rx.make_mesh(tensor=2, fsdp=2)), make_examples(48), batch_size=6),
        ValueError,
        r"batch_size=6 must be a positive multiple of 4, the number of data shards",
    ),
    (
        "batch over microbatches",
        lambda: on_eight(num_microbatches=2),
        ValueError,
        r"batch_size=8 must be a positive multiple of num_microbatches=2 times 8, the number of data shards",
    ),
    ("no microbatches", lambda: run(num_microbatches=0), ValueError, r"num_microbatches=0, but it must be"),
    (
        "evaluation's batch over shards",
        lambda: on_eight(evaluation=rx.Evaluation(make_examples(48), batch_size=12)),
        ValueError,
        r"batches: batch_size=12 must be a positive multiple of 8, the number of data",
    ),
    ("evaluation's batch of 0", lambda: evaluating(batch_size=0), ValueError, r"Evaluation: batch_size=0, but"),
    # Examples
    ("no examples", lambda: run(examples=[]), ValueError, r"examples is empty"),
    ("too few", lambda: run(examples=EXAMPLES[:3]), ValueError, r"batch_size=4, but there are only 3 examples"),
    ("an iterator", lambda: run(examples=generator()), TypeError, r"examples is a generator.*list.*rx.Stream"),
    ("a dict", lambda: run(examples={0: EXAMPLES[0]}), TypeError, r"examples is a dict.*sequence"),
    ("by epoch, none", lambda: run(examples=lambda epoch: []), ValueError, r"examples is empty"),
    ("nothing to evaluate", lambda: evaluating([]), ValueError, r"(?s)is empty.*the evaluation"),
    (
        "an iterator to evaluate",
        lambda: evaluating(generator()),
        TypeError,
        r"Evaluation: examples is a generator.*list\(\.\.\.\)",
    ),
    # Evaluation
    ("every 0 steps", lambda: evaluating(every_steps=0), ValueError, r"Evaluation: every_steps=0, but it"),
    (
        "metric_fn without predict_fn",
        lambda: evaluating(predict_fn=None, metric_fn=lambda examples, predictions: {}),
        ValueError,
        r"metric_fn needs predict_fn",
    ),
    (
        "a directory without predict_fn",
        lambda: evaluating(predict_fn=None, predictions_directory="nowhere"),
        ValueError,
        r"predictions_directory needs predict_fn",
    ),
    # collate_fn
    ("other rows", collating(y=np.zeros((3, 2))), ValueError, r"leaf 'y' is float64\[3,2\], .*must be 4"),
    ("a scalar leaf", collating(n=np.float32(4)), ValueError, r"leaf 'n' is float32\[\], .*must be 4"),
    ("a number", collating(n=4), TypeError, r"leaf 'n' is a int, but must be a NumPy array"),
    ("text", collating(t=np.array(["a"] * 4)), TypeError, r"leaf 't' is <U1\[4\], .*numbers and booleans"),
    ("nothing", lambda: run(collate_fn=lambda examples: None), ValueError, r"returned None, .*holds no array"),
    ("an empty dict", lambda: run(collate_fn=lambda examples: {}), ValueError, r"returned {}, .*no array"),
    # loss_fn
    ("loss per example", losing(lambda x: x), ValueError, r"the loss must be a scalar.*\(4,\)\. Sum it"),
    (
        "weight per example",
        losing(lambda x: rx.Mean(x.sum(), x)),
        ValueError,
        r"the loss must be a scalar or a Mean of scalars, but its weight has shape \(4,\)",
    ),
    ("complex loss", losing(lambda x: x.sum() * 1j), ValueError, r"the loss must be a real number.*complex64"),
    ("metric per example", losing(lambda x: (x.sum(), {"m": x})), ValueError, r"the metric 'm' must be a sca"),
    ("metrics in a list", losing(lambda x: (x.sum(), [x])), ValueError, r"metrics a dict of names, not list"),
    ("three of them", losing(lambda x: (x.sum(), {}, x)), ValueError, r"a loss, or \(loss, metrics\).*of 3"),
    ("a reserved name", losing(lambda x: (x.sum(), {"loss": x.sum()})), ValueError, r"'loss' is reserved"),
    # predict_fn
    (
        "prediction: one number",
        predicting(jnp.sum),
        ValueError,
        r"predict_fn's output array has shape \(\), .*batch's, 4",
    ),
    (
        "prediction: lost rows",
        predicting(lambda x: {"a": x, "b": [x[1:]]}),
        ValueError,
        r"output b\.0 has shape \(3, 2\)",
    ),
    ("prediction: no prediction", predicting(lambda x: {}), ValueError, r"predict_fn returned no array"),
    # metric_fn
    (
        "metric: text",
        metric("0.5"),
        ValueError,
        r"metric_fn: 'score' is '0.5' \(str\), but a metric is one num",
    ),
    ("metric: array", metric(np.ones(2)), ValueError, r"'score' is array\(\[1., 1.\]\) \(ndarray\)"),
    ("metric: of one", metric(np.ones(1)), ValueError, r"'score' is array\(\[1.\]\) \(ndarray\)"),
    ("metric: on a device", metric(jnp.ones(2)), ValueError, r"'score' is Array\(.*but a metric is one number"),
    ("metric: none", metric(None), ValueError, r"'score' is None \(NoneType\)"),
    ("metric: list", metric([1.0, 2.0]), ValueError, r"'score' is \[1.0, 2.0\] \(list\)"),
    (
        "metric ragged",
        metric([[1.0], [1.0, 2.0]]),
        ValueError,
        r"'score' is \[\[1.0\], .* \(list\)",
    ),
    ("metric: dict", metric({"a": 1.0}), ValueError, r"'score' is {'a': 1.0} \(dict\)"),
    ("metric: complex", metric(1j), ValueError, r"'score' is 1j \(complex\)"),
    (
        "metric: metrics without names",
        lambda: evaluating(metric_fn=lambda examples, predictions: 0.5),
        ValueError,
        r"metric_fn must return a dict of numbers by name, but returned a float",
    ),
    (
        "metric: metrics of nothing",
        lambda: evaluating(metric_fn=lambda examples, predictions: None),
        ValueError,
        r"metric_fn must return a dict of numbers by name, but returned a NoneType",
    ),
    (
        "metric: a metric's name twice",
        lambda: evaluating(metric_fn=lambda examples, predictions: {"plain": 1.0}),
        ValueError,
        r"loss_fn already reports a metric 'plain'",
    ),
    # The state
    ("a deleted state", lambda: run(deleted_state()), ValueError, r"its array \w+ has been deleted.*donated"),
    (
        "explicit axes",
        lambda: run(explicit_axes()),
        ValueError,
        r"\('data',\) are not of AxisType\.Auto.*make_mesh",
    ),
    ("nothing trainable", lambda: run(nothing_trainable()), ValueError, r"no trainable leaf.*`trainable`"),
    (
        "adam for sgd",
        lambda: run(optimizer=ADAM),
        ValueError,
        r"opt_state\.0 it keeps ScaleByAdamState, but the state holds EmptyState",
    ),
    (
        "sgd for adam",
        lambda: run(linear_state(ADAM)),
        ValueError,
        r"opt_state\.0 it keeps EmptyState, but the state holds ScaleByAdamState",
    ),
    (
        "adam of another model",
        lambda: run(other_params(), optimizer=ADAM),
        ValueError,
        r"opt_state\.0\.mu\.bias it keeps float32\[2\], but the state holds float32\[3\]",
    ),
    (
        "adam of half the model",
        lambda: run(half_trained(), optimizer=ADAM),
        ValueError,
        r"opt_state\.0\.mu\.bias it keeps float32\[2\], but the state holds nothing.*given to init_state",
    ),
    # A step of one's own
    ("no loss", reporting({"error": 1.0}), ValueError, r"metrics a dict that has a 'loss'.*\['error'\]"),
    ("no metrics", reporting(None), ValueError, r"step_fn must return \(state, metrics\).*NoneType"),
    ("a row of losses", reporting({"loss": np.ones(2)}), ValueError, r"the metric 'loss' must be a scalar"),
    (
        "no state",
        lambda: rx.skip_nonfinite(cast(Any, lambda state, batch: (state.params, {"loss": 1.0})))(
            linear_state(), collate(EXAMPLES[:4])
        ),
        ValueError,
        r"step_fn must return \(state, metrics\), but the state is a dict",
    ),
    (
        "another shape",
        stepping(params={"bias": jnp.ones(3), "weight": jnp.ones((2, 2))}),
        ValueError,
        r"params\.bias was float32\[2\] and became float32\[3\]",
    ),
    (
        "another dtype",
        stepping(params={"bias": jnp.ones(2), "weight": jnp.ones((2, 2), jnp.bfloat16)}),
        ValueError,
        r"params\.weight was float32\[2,2\] and became bfloat16\[2,2\]",
    ),
    (
        "a lost leaf",
        stepping(params={"bias": jnp.ones(2)}),
        ValueError,
        r"params\.weight was float32\[2,2\] and became missing",
    ),
    (
        "a new leaf",
        stepping(model_state={"mean": jnp.ones(2)}),
        ValueError,
        r"model_state\.mean was missing and became float32\[2\]",
    ),
]


@pytest.mark.parametrize(
    ("name", "call", "exception", "message"),
    [pytest.param(*case, id=case[0]) for case in REFUSED],
)
def test_refused_before_compilation(
    name: str, call: Any, exception: Any, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with Compilations() as compilations, pytest.raises(exception, match=message) as caught:
        call()
    assert BODY not in compilations.names
    if not name.startswith(("prediction", "metric")):  # these come after the loss of one batch
        assert STEP not in compilations.names
    assert list(tmp_path.iterdir()) == []
    assert no_threads_left()
    del caught


def test_the_names_are_unique() -> None:
    assert len({case[0] for case in REFUSED}) == len(REFUSED)


def test_what_is_right_is_compiled() -> None:
    """That the ears of this file hear."""

    def loss(model: Any, batch: Any, key: Any) -> Any:
        return plain(model, batch, key)

    with Compilations() as compilations:
        fit(
            linear_state(),
            EXAMPLES,
            num_epochs=1,
            evaluation=rx.Evaluation(EXAMPLES),
            loss_fn=loss,  # of this test alone: programs are kept
        )
    assert compilations.names.count(BODY) == 1
    assert compilations.names.count(STEP) == 1


def plain(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(jax.vmap(model)(batch["x"]))


@pytest.mark.parametrize("number", [1, 2.5, True, np.float32(2), np.int64(3), np.array(1.0)], ids=repr)
def test_a_metric_may_be_any_number(number: Any) -> None:
    """And one on a device: see the schedule of evaluations in test_fit."""
    from redco_eqx._training.evaluation import _number

    assert _number("score", number) == float(number)
    assert type(_number("score", jnp.asarray(number))) is float


def test_a_sharded_state_is_refused_and_kept() -> None:
    state = linear_state(ADAM, mesh=rx.make_mesh(tensor=2, fsdp=2), dim=8)
    with pytest.raises(ValueError, match="the optimizer does not fit the state"):
        run(state, make_examples(8, dim=8))
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


# `evaluate` and `predict` by themselves

ALONE: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("no examples", {"examples": []}, ValueError, r"examples is empty"),
    ("batch over shards", {"batch_size": 12}, ValueError, r"batch_size=12 must be a positive multiple of 8"),
    ("batch of 0", {"batch_size": 0}, ValueError, r"batch_size=0 must be a positive multiple of 8"),
    ("nothing collated", {"collate_fn": lambda examples: None}, ValueError, r"holds no array"),
    (
        "other rows",
        {"collate_fn": lambda examples: {"x": np.zeros((len(examples) + 1, 2))}},
        ValueError,
        r"leaf 'x' is float64\[9,2\], but its leading dim must be 8",
    ),
    (
        "function",
        {"function": lambda model, batch, key: batch["x"][:3]},
        ValueError,
        r"the loss must be a scalar.*\(3, 2\)|output array has shape \(3, 2\), .* 8",
    ),
]


@pytest.mark.parametrize("what", ["evaluate", "predict"])
@pytest.mark.parametrize(
    ("wrong", "exception", "message"), [case[1:] for case in ALONE], ids=[case[0] for case in ALONE]
)
def test_evaluate_and_predict_refuse(what: str, wrong: Any, exception: Any, message: str) -> None:
    state = linear_state(mesh=rx.make_mesh())
    right = {"function": plain if what == "evaluate" else predict_fn, "examples": make_examples(16)}
    arguments: Any = {**right, "collate_fn": collate, "batch_size": 8, **wrong}
    function, examples = arguments.pop("function"), arguments.pop("examples")
    kind = {"evaluate": "loss_fn", "predict": "predict_fn"}[what]
    with Compilations() as compilations, pytest.raises(exception, match=message):
        getattr(rx, what)(state, examples, **{kind: function}, **arguments)
    assert STEP not in compilations.names
    assert no_threads_left()
