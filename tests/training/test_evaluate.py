"""`evaluate`, `predict`, the evaluations of `fit`, and a hook within it."""

import dataclasses
import functools
import itertools
import json
import pathlib
import types
from typing import Any

import equinox as eqx
import fit_helpers as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import EXAMPLES, Rows, assert_same, compilations, counted, fit, raised
from hypothesis import given, settings
from hypothesis import strategies as st

import redco_eqx as rx
from redco_eqx._sharding.mesh import num_batch_shards
from redco_eqx._step import compile_cache
from redco_eqx._step.state import TRAIN, stream
from redco_eqx._training.in_flight import NUM_AHEAD

# Sums of small integers are exact in float32: one example lost, or counted twice,
# shows.
RNG = np.random.default_rng(0)
VALUES, WEIGHTS = RNG.integers(1, 1000, 200), RNG.integers(1, 9, 200)


def make_state(mesh: Any) -> Any:
    model = jax.tree.map(
        jnp.ones_like, eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0))
    )
    return rx.init_state(
        eqx.filter_shard(model, rx.shard_rules(model, mesh)), key=jax.random.key(1)
    )


STATES = {
    name: make_state(rx.make_mesh(**sizes)) for name, sizes in tiny.MESHES.items()
}
SHARDS = {
    name: num_batch_shards(rx.make_mesh(**sizes)) for name, sizes in tiny.MESHES.items()
}


def collate(examples: Any) -> dict[str, np.ndarray]:
    ids = np.asarray(examples, np.int32)
    return {
        "id": ids,
        "value": VALUES[ids].astype(np.float32),
        "weight": WEIGHTS[ids].astype(np.float32),
    }


def evaluated(
    examples: Any, loss_fn: Any, batch_size: int, state: Any = STATES["one"]
) -> Any:
    return rx.evaluate(
        state, examples, collate_fn=collate, loss_fn=loss_fn, batch_size=batch_size
    )


def predicted(
    examples: Any,
    predict_fn: Any,
    batch_size: int,
    state: Any = STATES["one"],
    **more: Any,
) -> Any:
    arguments: Any = {
        "collate_fn": collate,
        "predict_fn": predict_fn,
        "batch_size": batch_size,
        **more,
    }
    return rx.predict(state, examples, **arguments)


def values_of(model: Any, batch: Any) -> jax.Array:
    return jax.vmap(model)(batch["value"][:, None])[:, 0]


def loss_fn(model: Any, batch: Any, key: Any) -> Any:
    values = values_of(model, batch)
    weight = batch["weight"]
    return rx.Mean(jnp.sum(values * weight), jnp.sum(weight)), {
        "mean": jnp.mean(values)
    }


def predict_fn(model: Any, batch: Any, key: Any) -> Any:
    return {
        "id": batch["id"],
        "pair": (values_of(model, batch), jnp.stack([batch["weight"]] * 3, 1)),
    }


OF_VALUES: Any = {
    "collate_fn": collate,
    "loss_fn": loss_fn,
    "predict_fn": predict_fn,
    "batch_size": 8,
}


@st.composite
def cases(draw: Any) -> tuple[str, int, int]:
    mesh = draw(st.sampled_from(sorted(tiny.MESHES)))
    return (
        mesh,
        draw(st.integers(1, 40)),
        SHARDS[mesh] * draw(st.integers(1, 40 // SHARDS[mesh])),
    )


@settings(max_examples=20, deadline=None)
@given(cases())
def test_every_example_counts_once_and_in_order(case: Any) -> None:
    mesh, n, batch_size = case
    synchronous = rx.Data(range(n), prefetch=0)
    found = evaluated(synchronous, loss_fn, batch_size, STATES[mesh])
    weights = WEIGHTS[:n].astype(np.float64)
    # Exact: both sums are of integers below 2**24.
    assert found["loss"] == (VALUES[:n] * weights).sum() / weights.sum()
    # A scalar weighs its number of examples, as a metric and as the loss. The mean of a
    # batch is rounded to float32.
    alone = evaluated(
        synchronous, lambda *given: loss_fn(*given)[1]["mean"], batch_size, STATES[mesh]
    )
    np.testing.assert_allclose(
        [found["mean"], alone["loss"]], VALUES[:n].mean(), rtol=1e-6
    )
    assert set(found) == {"loss", "mean"}
    rows = predicted(synchronous, predict_fn, batch_size, STATES[mesh])
    assert [int(row["id"]) for row in rows] == list(range(n))
    assert [float(row["pair"][0]) for row in rows] == VALUES[:n].tolist()
    assert [row["pair"][1].tolist() for row in rows] == [
        [w] * 3 for w in WEIGHTS[:n].tolist()
    ]


def test_any_number_of_batches_may_wait_and_a_mean_of_nothing_is_nan() -> None:
    def sums_fn(model: Any, batch: Any, key: Any) -> Any:
        """The exact sum over the number of batches, the same of the number of examples,
        and nothing."""
        values = values_of(model, batch)
        total = jnp.sum(values)
        return rx.Mean(total, 1.0), {
            "count": rx.Mean(len(values), 1.0),
            "nothing": rx.Mean(total * 0, 0.0),
        }

    for n in (1, NUM_AHEAD - 1, NUM_AHEAD, NUM_AHEAD + 1, 3 * NUM_AHEAD):
        found = evaluated(range(n), sums_fn, 1)
        assert np.isnan(found.pop("nothing"))  # each metric by itself
        assert found == {"loss": VALUES[:n].sum() / n, "count": 1.0}
        assert tiny.no_threads_left()


def test_programs_are_kept_by_function_and_shape() -> None:
    """`programs` saves the tracing of a function, and is none of another's."""
    programs: dict[Any, Any] = {}
    traced = []

    def make_loss(factor: float) -> Any:
        def scaled(model: Any, batch: Any, key: Any) -> Any:
            traced.append(factor)
            return factor * jnp.mean(batch["weight"])

        return scaled

    def weigh(loss_fn: Any, examples: range) -> float:
        return rx.evaluate(
            STATES["one"],
            examples,
            collate_fn=collate,
            loss_fn=loss_fn,
            batch_size=4,
            programs=programs,
        )["loss"]

    one = make_loss(1.0)
    expected = np.mean(WEIGHTS[:8])
    assert [weigh(one, range(8)), weigh(one, range(8))] == [expected, expected]
    assert weigh(one, range(4, 12)) == np.mean(WEIGHTS[4:12])
    assert traced == [1.0]
    assert weigh(make_loss(2.0), range(8)) == 2 * expected
    assert weigh(one, range(5)) == pytest.approx(np.mean(WEIGHTS[:5]))
    # The batch of the last example has another shape.
    assert traced == [1.0, 2.0, 1.0]
    for factor in (1, 2):
        rows = rx.predict(
            STATES["one"],
            range(8),
            collate_fn=collate,
            predict_fn=functools.partial(scaled_values, factor),
            batch_size=4,
            programs=programs,
        )
        np.testing.assert_array_equal(rows, factor * VALUES[:8])


def scaled_values(factor: float, model: Any, batch: Any, key: Any) -> Any:
    return factor * batch["value"]


def test_noise_differs_between_batches_and_not_between_calls() -> None:
    def noisy_loss(model: Any, batch: Any, key: Any) -> Any:
        """The noise of the first two batches, apart."""
        noise = jax.random.normal(key)
        first = batch["id"][0]
        of = {
            f"batch{i}": rx.Mean(jnp.where(first == 4 * i, noise, 0), first == 4 * i)
            for i in range(2)
        }
        return jnp.zeros(()), of

    def drawn() -> list[float]:
        found = evaluated(range(8), noisy_loss, 4)
        rows = predicted(
            range(8),
            lambda m, b, key: jnp.full(b["id"].shape, jax.random.normal(key)),
            4,
        )
        return [found["batch0"], found["batch1"], float(rows[0]), float(rows[4])]

    assert drawn() == drawn()
    training = float(jax.random.normal(stream(STATES["one"], TRAIN)))
    # Two batches, and evaluation, prediction and training: all have their own.
    assert len({*drawn(), training}) == 5


# `output_fn`: a form of the predictions that a person reads


def words(example: int, prediction: Any) -> str:
    """It has the example that belongs to the prediction, and arrays without the batch
    dim."""
    assert isinstance(prediction["id"], np.ndarray | np.generic)
    assert prediction["id"] == example
    return f"{example}: {'more' if prediction['pair'][0] > 500 else 'less'}"


def test_outputs_are_returned_and_go_to_the_metric_and_the_file(
    tmp_path: pathlib.Path,
) -> None:
    expected = [f"{i}: {'more' if VALUES[i] > 500 else 'less'}" for i in range(11)]
    assert (
        predicted(range(11), predict_fn, 8, STATES["2x2x2"], output_fn=words)
        == expected
    )
    seen = []

    def metric_fn(examples: Any, outputs: Any) -> Any:
        seen.append(outputs)
        return {"more": np.mean([output.endswith("more") for output in outputs])}

    more: Any = {
        "metric_fn": metric_fn,
        "output_fn": words,
        "predictions_directory": tmp_path,
    }
    share = rx.Evaluation(range(11), **OF_VALUES, **more)(STATES["2x2x2"])["eval/more"]
    assert share == np.mean([output.endswith("more") for output in expected])
    assert seen == [expected]
    lines = (tmp_path / "step-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["prediction"] for line in lines] == expected


def test_an_error_of_output_fn_says_for_which_example() -> None:
    names = {0: "zero", 1: "one"}
    error = raised(
        KeyError,
        predicted,
        range(11),
        predict_fn,
        4,
        output_fn=lambda i, prediction: names[i],
    )
    assert "output_fn was given example 2" in "".join(error.__notes__)


# Streams


class Counted:
    """Examples that can be read many times, and where each reading was in the end."""

    def __init__(self, examples: Any):
        self.examples = examples
        self.epochs: list[int] = []
        self.num_read: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        self.num_read.append(0)
        for example in self.examples:
            self.num_read[-1] += 1
            yield example


OF_STREAM: Any = {"collate_fn": collate, "loss_fn": loss_fn, "batch_size": 8}
STREAMS: dict[str, Any] = {
    "iterable": lambda: rx.Stream(range(100)),
    "function": lambda: rx.Stream(lambda epoch: iter(range(100 * epoch, 100))),
    "endless": lambda: rx.Stream(lambda epoch: itertools.count()),
    "exactly": lambda: rx.Stream(range(24)),
    "no thread": lambda: rx.Stream(range(100), prefetch=0),
    "workers": lambda: rx.Stream(range(100), num_workers=2),
    "batches": lambda: rx.Stream(np.arange(96).reshape(12, 8), batched=True),
    "one shard": lambda: rx.Stream(lambda *epoch_and_shard: range(100), sharded=True),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mesh", tiny.MESHES)
@pytest.mark.parametrize("kind", STREAMS)
def test_an_evaluation_of_a_stream_is_that_of_its_first_examples(
    kind: str, mesh: str
) -> None:
    of_stream = rx.Evaluation(STREAMS[kind](), num_batches=3, **OF_STREAM)
    of_list = rx.Evaluation(range(24), **OF_STREAM)
    state = STATES[mesh]
    assert of_stream(state) == of_stream(state) == of_list(state)
    assert tiny.no_threads_left()


def test_a_stream_draws_the_noise_of_its_first_examples() -> None:
    def noisy(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean(values_of(model, batch)) * jax.random.normal(key)

    functions: Any = {**OF_STREAM, "loss_fn": noisy}
    of_stream = rx.Evaluation(rx.Stream(range(100)), num_batches=3, **functions)
    of_list = rx.Evaluation(range(24), **functions)
    assert of_stream(STATES["one"]) == of_list(STATES["one"])


def test_an_evaluation_reads_no_more_than_it_prefetches() -> None:
    source = Counted(range(1000))
    rx.Evaluation(rx.Stream(source, prefetch=1), num_batches=2, **OF_STREAM)(
        STATES["one"]
    )
    (num_read,) = source.num_read
    assert 16 <= num_read <= 16 + 3 * 8


def test_an_item_after_the_last_batch_may_fail() -> None:
    def failing(epoch: int) -> Any:
        yield from range(16)
        raise KeyError("no more")

    of_stream = rx.Evaluation(rx.Stream(failing), num_batches=2, **OF_STREAM)
    assert of_stream(STATES["one"]) == rx.Evaluation(range(16), **OF_STREAM)(
        STATES["one"]
    )
    too_long = dataclasses.replace(of_stream, num_batches=3)
    raised(KeyError, too_long, STATES["one"], match="no more")


def test_a_stream_that_ends_early_is_evaluated_with_a_warning() -> None:
    short = rx.Evaluation(rx.Stream(range(21)), num_batches=3, **OF_STREAM)
    with pytest.warns(UserWarning, match=r"after 2 whole batches of 8, .*=3"):
        row = short(STATES["one"])
    assert row == rx.Evaluation(range(16), **OF_STREAM)(STATES["one"])


@pytest.mark.parametrize("num", [0, 7])
def test_a_stream_without_a_batch_is_refused(num: int) -> None:
    short = rx.Evaluation(rx.Stream(range(num)), num_batches=3, **OF_STREAM)
    raised(
        ValueError, short, STATES["one"], match="ends before its first batch is full"
    )


def test_each_evaluation_of_a_run_reads_the_same_examples() -> None:
    """A state that stands still has the same numbers each time."""
    source = Counted(EXAMPLES)
    rows = Rows()
    evaluation = rx.Evaluation(rx.Stream(source), num_batches=2, every_steps=2)
    fit(
        optimizer=tiny.SGD,
        num_steps=6,
        loggers=[rows],
        evaluation=dataclasses.replace(
            evaluation, state_fn=lambda state: tiny.linear_state()
        ),
    )
    found = rows.with_prefix("eval")
    assert [step for step, _ in found] == [2, 4, 6]
    assert len({row["eval/loss"] for _, row in found}) == 1
    of_list = rx.Evaluation(
        EXAMPLES[:8], collate_fn=tiny.collate, loss_fn=tiny.loss_fn, batch_size=4
    )
    assert found[0][1]["eval/loss"] == of_list(tiny.linear_state())["eval/loss"]
    assert set(source.epochs) == {0}
    assert len(source.num_read) == 4  # the first one tries a batch


def test_a_stream_that_fails_does_so_before_the_run() -> None:
    def failing(epoch: int) -> Any:
        raise KeyError("no file")
        yield

    rows = Rows()
    evaluation = rx.Evaluation(rx.Stream(failing), num_batches=2)
    error = raised(KeyError, fit, num_steps=2, evaluation=evaluation, loggers=[rows])
    assert "first batch of its examples" in "".join(error.__notes__)
    assert not rows.rows


# In `fit`


def test_rows_of_evaluations_and_when_they_are_made() -> None:
    """Every fourth step, and at the end, of epochs that have examples of their own."""
    rows = Rows()
    calls = []
    examples = EXAMPLES[:11]

    def metric_fn(examples: Any, predictions: Any) -> Any:
        ids = [examples[i]["id"] for i in range(len(examples))]
        calls.append((ids, [int(p["id"]) for p in predictions]))
        return {
            "size": len(examples),
            "jax": jnp.ones(()),
            "numpy": np.float32(2),
            "array": np.array(3),
        }

    evaluation = rx.Evaluation(
        examples, every_steps=4, predict_fn=tiny.predict_fn, metric_fn=metric_fn
    )
    by_epoch: Any = rx.Data(lambda epoch: EXAMPLES)
    found = counted(
        examples=by_epoch,
        prefetch=None,
        num_epochs=2,
        evaluation=evaluation,
        loggers=[rows],
    )
    evaluations = rows.with_prefix("eval/")
    assert ([step for step, _ in evaluations], int(found.step)) == ([4, 8, 10], 10)
    # First the rehearsal, on one batch, and then always everything, in order.
    assert calls == [(list(range(n)), list(range(n))) for n in (4, 11, 11, 11)]
    for _, row in evaluations:
        assert row.keys() == {
            f"eval/{n}" for n in ("loss", "plain", "size", "jax", "numpy", "array")
        }
        assert (
            row["eval/size"],
            row["eval/jax"],
            row["eval/numpy"],
            row["eval/array"],
        ) == (11, 1, 2, 3)
        assert all(type(x) is float for x in row.values())
    # Train rows come before the evaluation at their step.
    assert [step for step, _ in rows.rows] == sorted(step for step, _ in rows.rows)
    assert rows.rows[-1] == evaluations[-1]
    own = rx.evaluate(
        found, examples, collate_fn=tiny.collate, loss_fn=tiny.loss_fn, batch_size=4
    )
    assert {
        f"eval/{name}": value for name, value in own.items()
    }.items() <= evaluations[-1][1].items()


def test_evaluation_changes_nothing_in_training_and_steps_are_compiled_once() -> None:
    evaluation = rx.Evaluation(EXAMPLES[:8], every_steps=2, predict_fn=tiny.predict_fn)
    compile_cache._programs.clear()
    with compilations() as compiled:
        found = tiny.fit(loss_fn=tiny.scalar_loss, num_epochs=3, evaluation=evaluation)
    assert (compiled.count(tiny.STEP), compiled.count(tiny.BODY)) == (2, 1)
    assert_same(found, tiny.state_after(15, loss_fn=tiny.scalar_loss))


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def written(extras: list[Any], directory: pathlib.Path) -> tuple[list[Any], list[Any]]:
    """Trains, and writes predictions for examples that have something besides; these,
    and what is predicted."""
    examples = [{**example, "extra": extra} for example, extra in zip(EXAMPLES, extras)]

    def without_extra(given: Any) -> Any:
        return tiny.collate(
            [{k: v for k, v in e.items() if k != "extra"} for e in given]
        )

    functions: Any = {"collate_fn": without_extra, "predict_fn": tiny.predict_fn}
    evaluation = rx.Evaluation(examples, **functions, predictions_directory=directory)
    state = counted(num_epochs=2, evaluation=evaluation)
    return examples, rx.predict(state, examples, **functions, batch_size=4)


def test_the_file_of_predictions(tmp_path: pathlib.Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    odd = types.SimpleNamespace(odd=1)
    deep = {np.int64(3): b"x"}
    extras: list[Any] = [odd, "Grüße", {("a", 1): 2}, deep, "half \ud800 pair", loop]
    directory = tmp_path / "deep" / "predictions"
    examples, predictions = written(extras, directory)
    assert sorted(path.name for path in directory.iterdir()) == [
        "step-10.jsonl",
        "step-5.jsonl",
    ]
    text = (directory / "step-10.jsonl").read_bytes().decode("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert "Grüße" in text
    expected = [{"id": int(p["id"]), "out": p["out"].tolist()} for p in predictions]
    assert [line["prediction"] for line in lines] == expected
    for i, extra in ((0, "namespace(odd=1)"), (1, "Grüße"), (4, "half \ud800 pair")):
        found = lines[i]["example"]
        assert (found["id"], found["x"], found["extra"]) == (
            i,
            EXAMPLES[i]["x"].tolist(),
            extra,
        )
    for i in (2, 3, 5):  # what JSON cannot hold at all is there by its repr
        assert lines[i]["example"] == repr(examples[i])


def test_a_file_of_predictions_that_fails_leaves_nothing(
    tmp_path: pathlib.Path,
) -> None:
    raised(RuntimeError, written, [Broken(), Broken()], tmp_path, match="no repr")
    assert list(tmp_path.iterdir()) == []


def test_what_is_broken_fails_before_training() -> None:
    state = tiny.linear_state()
    for name in ("predict_fn", "metric_fn", "loss_fn"):
        right = {
            "predict_fn": tiny.predict_fn,
            "metric_fn": lambda *_: {},
            "loss_fn": tiny.loss_fn,
        }
        evaluation: Any = rx.Evaluation(
            EXAMPLES, **{**right, name: lambda *_: tiny.fail()}
        )
        with (
            compilations() as compiled,
            pytest.raises(LookupError, match="mine") as caught,
        ):
            tiny.fit(state, num_epochs=1, evaluation=evaluation)
        assert tiny.BODY not in compiled
        assert any("the evaluation" in note for note in caught.value.__notes__)
    assert_same(state, tiny.linear_state())  # and the state is still there


# A hook within `fit`: when it is called, and that it can only end the run

by_fives = functools.partial(tiny.counted, log_every=5)


class Calls:
    """A hook that notes how it was called."""

    def __init__(self, *results: Any):
        self.calls: list[tuple[int, dict[str, float]]] = []
        self._results = list(results)

    def __call__(self, run: Any, row: Any, state: Any) -> Any:
        assert int(jnp.copy(state.step)) == run.step
        self.calls.append((run.step, dict(row)))
        return self._results.pop(0) if self._results else None


def test_it_is_called_after_each_row_and_each_evaluation_with_what_was_logged() -> None:
    rows = Rows()
    hook = Calls()
    by_fives(
        hook=hook, loggers=[rows], evaluation=rx.Evaluation(EXAMPLES, every_steps=4)
    )
    logged = tiny.without_times(rows.rows)
    assert hook.calls == [
        (step, {k: x for k, x in row.items() if k != "train/epoch"})
        for step, row in logged
    ]
    found = " ".join(
        f"{step} {next(iter(row)).partition('/')[0]}" for step, row in hook.calls
    )
    assert found == "4 train 4 eval 5 train 8 train 8 eval 10 train 12 train 12 eval"


def test_a_hook_changes_nothing() -> None:
    for hook in (
        Calls(None, False, np.False_),
        lambda run, row, state: state.params.clear(),
    ):
        assert_same(fit(num_steps=7, log_every=2, hook=hook), fit(num_steps=7))


def test_a_run_that_a_hook_ends_is_a_whole_run() -> None:
    """With a last evaluation, and the state as its result."""
    rows = Rows()
    hook = Calls(None, True)
    state = by_fives(
        hook=hook, loggers=[rows], evaluation=rx.Evaluation(EXAMPLES, every_steps=100)
    )
    tiny.assert_counted(state, 10)
    assert (
        [step for step, _ in rows.rows]
        == [step for step, _ in hook.calls]
        == [5, 10, 10]
    )


def test_what_a_hook_cannot_return() -> None:
    for value, name in (
        (tiny.linear_state(), "TrainState"),
        (1, "int"),
        (jnp.array(True), "ArrayImpl"),
    ):
        raised(
            TypeError,
            by_fives,
            hook=Calls(value),
            match=f"None, or True .*, but returned a {name}",
        )


def test_without_its_hook_an_ended_run_goes_on(tmp_path: pathlib.Path) -> None:
    stop = Calls(True)
    for hook, num_steps in ((stop, 5), (stop, 5), (None, 12)):
        tiny.assert_counted(
            by_fives(None, rx.Checkpoints(tmp_path), hook=hook), num_steps
        )


# A state of its own for evaluations


def test_another_state_is_evaluated_and_kept_best(tmp_path: pathlib.Path) -> None:
    """As with an average of the parameters that the optimizer keeps."""
    examples = tiny.make_examples(16, dim=8)
    state = tiny.mlp_state()
    logged = Rows()

    def state_fn(state: Any) -> Any:
        return dataclasses.replace(
            state, params=jax.tree.map(lambda x: x / 2, state.params)
        )

    by_hand = [
        state_fn(new)
        for new, *_ in itertools.islice(tiny.hand_loop(state, examples), 1, 6, 2)
    ]
    common: Any = {"collate_fn": tiny.collate, "loss_fn": tiny.loss_fn, "batch_size": 4}
    losses = [rx.evaluate(new, examples, **common)["loss"] for new in by_hand]
    evaluation = rx.Evaluation(examples, every_steps=2, state_fn=state_fn)
    checkpoints = rx.Checkpoints(
        tmp_path, every_steps=2, keep_last=1, keep_best={"eval/loss": "max"}
    )
    fit(
        state,
        examples,
        num_steps=6,
        loggers=[logged],
        evaluation=evaluation,
        checkpoints=checkpoints,
    )
    found = [row["eval/loss"] for _, row in logged.with_prefix("eval/")]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert tiny.steps_in(tmp_path) == [2 * (1 + int(np.argmax(found))), 6]


def test_an_evaluation_of_no_weight_is_nan_and_never_the_best(
    tmp_path: pathlib.Path,
) -> None:
    """In the log, the history and the checkpoints; a resumed run reads the same."""

    def weightless(model: Any, batch: Any, key: Any) -> Any:
        """The weight is 0 in the first of the evaluations, and in the last."""
        weight = jnp.where((model.bias[0] > 2.5) & (model.bias[0] < 5), 4.0, 0.0)
        return rx.Mean(weight * model.bias[0], weight)

    state = tiny.linear_state(tiny.COUNTING)
    begin = float(state.model.bias[0])
    state = dataclasses.replace(
        state, params={**state.params, "bias": state.params["bias"] - begin}
    )
    evaluation = rx.Evaluation(EXAMPLES[:8], every_steps=2, loss_fn=weightless)
    logged = Rows()
    file = tmp_path / "log.jsonl"
    checkpoints = rx.Checkpoints(
        tmp_path / "run", every_steps=2, keep_last=1, keep_best={"eval/loss": "min"}
    )

    def run(state: Any) -> Any:
        return tiny.fit_with_history(
            state,
            optimizer=tiny.COUNTING,
            num_steps=6,
            evaluation=evaluation,
            checkpoints=checkpoints,
            loggers=[logged, rx.JSONLLogger(file)],
        )[1]

    history = run(jax.tree.map(jnp.copy, state))
    losses = [row["eval/loss"] for _, row in logged.with_prefix("eval/")]
    np.testing.assert_array_equal(losses, [np.nan, 4.0, np.nan])
    np.testing.assert_array_equal(history["eval/loss"], losses)
    assert tiny.steps_in(tmp_path / "run") == [4, 6]
    assert [
        line.get("eval/loss") for line in map(json.loads, file.read_text().splitlines())
    ][-1] == "NaN"
    np.testing.assert_array_equal(run(state)["eval/loss"], losses)
    assert tiny.steps_in(tmp_path / "run") == [4, 6]
