"""`fit` is the loop that a reader would write: same numbers, compiled once; what fails in it arrives."""

import dataclasses
import itertools
import pathlib
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    BODY,
    COUNTING,
    EXAMPLES,
    Collate,
    Compilations,
    Rows,
    assert_counted,
    assert_same,
    collate,
    errors_of,
    fit,
    linear_state,
    loss_fn,
    make_examples,
    mlp_state,
    predict_fn,
    state_after,
)
from jax._src.array import ArrayImpl
from stream_sources import KINDS, Unlike, generate, order

import redco_eqx as rx
from redco_eqx._training.evaluation import NUM_AHEAD
from redco_eqx._training.run import Training

# The loop is the one that a reader would write


def test_fit_is_the_loop_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh with all axes, over three epochs that drop examples."""
    told = []

    def spying(*arguments: Any, **options: Any) -> Any:
        told.append(options["shardings"])
        return rx.train_step(*arguments, **options)

    optimizer = optax.sgd(1e-2, momentum=0.9)
    examples = make_examples(40, dim=8)
    state = mlp_state(optimizer, rx.make_mesh(tensor=2, fsdp=2))
    layout = {path: x.sharding for path, x in state.params.items()}
    arguments: Any = {"batch_size": 16, "optimizer": optimizer}
    expected = state_after(6, state, examples, **arguments)
    monkeypatch.setattr("redco_eqx._training.run.train_step", spying)
    with Compilations() as compilations:
        found = fit(state, examples, num_epochs=3, **arguments)
    assert_same(found, expected)
    assert compilations.names.count(BODY) == 1
    # The compiler is told the layout (which the numbers do not show), and it is kept.
    assert told
    assert all(shardings == layout for shardings in told)
    assert {path: x.sharding for path, x in found.params.items()} == layout


def test_steps_cut_and_repeat_epochs() -> None:
    for num_steps in (3, 5, 12):
        assert_same(fit(linear_state(), EXAMPLES, num_steps=num_steps), state_after(num_steps))


def test_microbatches_are_those_of_train_step() -> None:
    found = fit(linear_state(), EXAMPLES, num_epochs=1, num_microbatches=2)
    assert_same(found, state_after(5, num_microbatches=2))
    assert not np.array_equal(found.params["weight"], state_after(5).params["weight"])  # other noise


def test_a_second_fit_starts_epochs_of_its_own() -> None:
    examples = make_examples(20)
    first, second = Collate(), Collate()
    middle = fit(linear_state(), examples, num_epochs=2, collate_fn=first, donate=False)
    expected = state_after(10, middle, examples)
    assert_same(fit(middle, examples, num_epochs=2, collate_fn=second, prefetch=0), expected)
    epochs = [tuple(spy.ids[i : i + 20]) for spy in (first, second) for i in (0, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 4
    assert len(set(epochs)) == 4


def test_not_shuffled_keeps_the_order() -> None:
    spy, data = Collate(), rx.Data(EXAMPLES, shuffle=False, prefetch=0)
    fit(linear_state(), data, collate_fn=spy, optimizer=COUNTING, num_epochs=2)
    assert spy.ids == [*range(20)] * 2


@pytest.mark.parametrize("stop", [{"num_epochs": 3}, {"num_steps": 6}], ids=str)
def test_examples_by_epoch(stop: Any) -> None:
    of_epoch = [EXAMPLES[:8], EXAMPLES[8:21], EXAMPLES[21:] + EXAMPLES[:3]]  # 2, 3 and 1 batches
    asked = []

    def examples(epoch: int) -> Any:
        asked.append(epoch)
        return of_epoch[epoch]

    rows = Rows()
    found = fit(linear_state(), examples, log_every=1, loggers=[rows], **stop)
    assert_same(found, state_after(6, examples=of_epoch.__getitem__))
    assert asked == [0, 1, 2]
    epochs = [row["train/epoch"] for _, row in rows.rows]
    np.testing.assert_allclose(epochs, [0.5, 1, 4 / 3, 5 / 3, 2, 3], rtol=1e-12)


def test_donation() -> None:
    kept, given = linear_state(), linear_state()
    arguments: Any = {"num_steps": 2, "optimizer": COUNTING}
    assert_counted(fit(kept, EXAMPLES, donate=False, **arguments), 2, kept)
    assert_same(kept, linear_state())
    assert_counted(fit(given, EXAMPLES, **arguments), 2, kept)
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    for use in (
        lambda: fit(given, EXAMPLES, **arguments),
        lambda: rx.evaluate(given, EXAMPLES, collate_fn=collate, loss_fn=loss_fn, batch_size=4),
        lambda: rx.predict(given, EXAMPLES, collate_fn=collate, predict_fn=predict_fn, batch_size=4),
    ):
        with pytest.raises(ValueError, match=r"array \w+ has been deleted.*donated.*a copy"):
            use()


# Compiled once, and no waiting


def test_a_new_shape_compiles_once_more_and_is_told_once() -> None:
    lengths = itertools.cycle([3, 5, 4])

    def ragged(examples: Any) -> Any:
        length = next(lengths)
        return {"pad": np.zeros((len(examples), length), np.float32), **collate(examples)}

    with Compilations() as compilations, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(linear_state(), EXAMPLES, num_steps=6, collate_fn=ragged, optimizer=COUNTING, prefetch=0)
    assert compilations.names.count(BODY) == 3
    messages = [str(w.message) for w in caught]
    assert len(messages) == 1
    assert "pad is float32[4,5], but was float32[4,3] in the first batch" in messages[0]


def test_numbers_are_fetched_only_with_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    get, step, value = jax.device_get, Training._step, ArrayImpl.__dict__["_value"]
    fetching = False

    def noted_get(tree: Any) -> Any:
        nonlocal fetching
        is_flag = isinstance(tree, jax.Array)
        assert not is_flag or tree.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        events.append("flag" if is_flag else "get")
        fetching = True
        try:
            return get(tree)
        finally:
            fetching = False

    def noted_step(self: Any, batch: Any, place: Any) -> None:
        events.append("batch")
        step(self, batch, place)

    def noted_value(self: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and not fetching:
            events.append("value")
        return value.fget(self)

    state, rows = linear_state(), Rows()
    monkeypatch.setattr(jax, "device_get", noted_get)
    monkeypatch.setattr(Training, "_step", noted_step)
    monkeypatch.setattr(ArrayImpl, "_value", property(noted_value))
    assert float(jnp.ones(())) == 1  # the ears work
    assert events == ["value"]
    events.clear()
    fit(state, make_examples(48), num_epochs=1, log_every=5, loggers=[rows], optimizer=COUNTING)
    # The window of steps 1-5 is fetched when step 9 is on its way, and the others at the end.
    loop = events[events.index("batch") :]
    assert [event for event in loop if event != "flag"] == ["batch"] * 9 + ["get"] + ["batch"] * 3 + ["get"] * 2
    # And of the step four before, which is over, whether it was finite: while its batch is at hand.
    assert loop.count("flag") == 12
    assert loop[: NUM_AHEAD + 2] == ["batch"] * (NUM_AHEAD + 1) + ["flag"]
    assert [step for step, _ in rows.rows] == [5, 10, 12]


# What fails, and what is warned of


def test_unused_parameters_are_told_once_by_path() -> None:
    def without_bias(model: Any, batch: Any, key: Any) -> Any:
        return jnp.mean((batch["x"] @ model.weight.T - batch["y"]) ** 2)

    # No thread: beartype, at work in it, now and then catches what another thread warns of.
    with pytest.warns(UserWarning, match=r"does not depend on 1 trainable array.*: bias\.") as caught:
        fit(linear_state(), EXAMPLES, loss_fn=without_bias, num_epochs=2, prefetch=0)
    assert len(caught) == 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_of_collate_fn_in_the_second_epoch_arrives(prefetch: int) -> None:
    own = LookupError("mine")

    def fail() -> None:
        raise own

    with pytest.raises(LookupError) as caught:
        fit(
            linear_state(),
            EXAMPLES,
            collate_fn=Collate(7, fail),
            num_epochs=3,
            optimizer=COUNTING,
            prefetch=prefetch,
        )
    assert caught.value is own
    assert any("batch 1 of epoch 1" in note for note in own.__notes__)


def test_errors_of_loss_fn_and_of_a_logger_arrive_unchanged() -> None:
    own = LookupError("mine")

    def failing(*_: Any) -> Any:
        raise own

    state = linear_state()
    with Compilations() as compilations, pytest.raises(LookupError) as caught:
        fit(state, EXAMPLES, loss_fn=lambda model, batch, key: failing(), num_epochs=3)
    assert caught.value is own
    assert BODY not in compilations.names
    assert_same(state, linear_state())
    with pytest.raises(LookupError) as caught:
        fit(state, EXAMPLES, num_epochs=3, loggers=[lambda step, row: failing()], optimizer=COUNTING)
    assert caught.value is own


def test_num_train_steps_is_what_fit_takes() -> None:
    for n, num_epochs in ((22, 3), (4, 1)):
        found = fit(linear_state(), EXAMPLES[:n], optimizer=COUNTING, num_epochs=num_epochs)
        assert int(found.step) == rx.num_train_steps(n, batch_size=4, num_epochs=num_epochs)
    with pytest.raises(ValueError, match=r"3 examples do not fill a batch of 4"):
        rx.num_train_steps(3, batch_size=4, num_epochs=1)
    with pytest.raises(ValueError, match="batch_size=0"):
        rx.num_train_steps(3, batch_size=0, num_epochs=1)


# Streams


def errors_fn(model: Any, batch: Any, key: Any) -> Any:
    return errors_of(model, batch)


def metric_fn(examples: Any, predictions: Any) -> Any:
    return {"sum": sum(float(p) * float(e["weight"]) for e, p in zip(examples, predictions, strict=True))}


def test_a_stream_trains_as_its_examples_do() -> None:
    def of_epoch(epoch: int) -> Any:
        return [EXAMPLES[i] for i in order(22, epoch)]

    expected = fit(linear_state(), rx.Data(of_epoch, shuffle=False), num_steps=13)
    rows = Rows()
    found = fit(linear_state(), KINDS["iterable"](EXAMPLES), num_steps=13, log_every=3, loggers=[rows])
    assert_same(found, expected)
    assert [(step, row["train/epoch"]) for step, row in rows.rows] == [(3, 0), (6, 1), (9, 1), (12, 2), (13, 2)]


def test_other_items_are_refused(tmp_path: pathlib.Path, capsys: Any) -> None:
    def run(num_steps: int, **options: Any) -> Any:
        checkpoints = rx.Checkpoints(tmp_path, **options)
        stream, loggers = rx.Stream(Unlike(EXAMPLES)), [rx.ConsoleLogger(progress=False)]
        return fit(linear_state(), stream, num_steps=num_steps, checkpoints=checkpoints, loggers=loggers)

    run(3)
    with pytest.raises(ValueError, match=r"first 12 items of epoch 0 differ from those when the run was saved"):
        run(5)
    assert int(run(5, allow_changes=True).step) == 5
    assert "from those when the run was saved: continuing anyway" in capsys.readouterr().err


def test_the_end_of_an_iterator_ends_the_run(tmp_path: pathlib.Path) -> None:
    rows = Rows()
    expected = fit(linear_state(), rx.Data([EXAMPLES[i] for i in order(22, 0)], shuffle=False), num_epochs=1)

    def run(examples: Any) -> Any:
        return fit(
            linear_state(),
            rx.Stream(examples),
            num_steps=100,
            loggers=[rows],
            evaluation=rx.Evaluation(EXAMPLES),
            checkpoints=tmp_path,
        )

    assert_same(run(generate(EXAMPLES, 0)), expected)
    assert [step for step, row in rows.rows if "eval/loss" in row] == [5]
    (info,) = rx.list_checkpoints(tmp_path)
    assert info.run is not None
    assert (info.step, info.run.finished) == (5, True)
    assert_same(run(generate(EXAMPLES, 0)), expected)  # which has come to its end already


def test_a_stream_is_evaluated_as_its_examples_are(tmp_path: pathlib.Path) -> None:
    state = linear_state(mesh=rx.make_mesh(data=4))
    common: Any = {"collate_fn": collate, "batch_size": 8}
    stream = rx.Stream(lambda epoch: iter({0: EXAMPLES}[epoch]))  # read from the first epoch each time
    expected = rx.evaluate(state, EXAMPLES, loss_fn=loss_fn, **common)
    assert rx.evaluate(state, stream, loss_fn=loss_fn, **common) == expected
    predicted = rx.predict(state, stream, predict_fn=errors_fn, **common)
    np.testing.assert_array_equal(predicted, rx.predict(state, EXAMPLES, predict_fn=errors_fn, **common))
    evaluation = rx.Evaluation(
        stream,
        loss_fn=loss_fn,
        predict_fn=errors_fn,
        metric_fn=metric_fn,
        predictions_directory=tmp_path,
        **common,
    )
    assert evaluation(state) == dataclasses.replace(evaluation, examples=EXAMPLES)(state)
    assert evaluation.rehearse(state).keys() == evaluation(state).keys()
    assert len((tmp_path / "step-0.jsonl").read_text().splitlines()) == 22
