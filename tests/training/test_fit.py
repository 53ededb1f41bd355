"""`fit` is the loop that a reader would write, compiled once; what fails arrives, what
is wrong is refused."""

import dataclasses
import functools
import inspect
import itertools
import json
import pathlib
import threading
from typing import Any

import fit_helpers as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    EXAMPLES,
    assert_same,
    compilations,
    counted,
    fit,
    linear_state,
    raised,
    scalar_loss,
)
from helpers import assert_close
from jax._src.array import ArrayImpl
from stream_sources import KINDS, Unlike, order

import redco_eqx as rx
from redco_eqx._data.batches import Batches
from redco_eqx._training.in_flight import NUM_AHEAD
from redco_eqx._training.loop import Training

# The loop is the one that a reader would write


def test_fit_is_the_loop_by_hand() -> None:
    """On a mesh with all axes, over three epochs that drop examples."""
    told = []

    def spying(*arguments: Any, **options: Any) -> Any:
        told.append(options["shardings"])
        return rx.train_step(*arguments, **options)

    arguments: Any = {"batch_size": 16, "optimizer": optax.sgd(1e-2, momentum=0.9)}
    examples = tiny.make_examples(40, dim=8)
    state = tiny.mlp_state(arguments["optimizer"])
    layout = {path: x.sharding for path, x in state.params.items()}
    expected = tiny.state_after(6, state, examples, **arguments)
    with compilations() as compiled:
        found = fit(state, examples, num_epochs=3, step_fn=spying, **arguments)
    assert_same(found, expected)
    assert compiled.count(tiny.BODY) == 1
    # The compiler is told the layout (which the numbers do not show), and it is kept.
    assert told
    assert all(shardings == layout for shardings in told)
    assert {path: x.sharding for path, x in found.params.items()} == layout


def own_step(state: Any, batch: Any, **keywords: Any) -> Any:
    return rx.train_step(state, batch, **keywords)


def smoothed(gradient: jax.Array) -> jax.Array:
    """Laplacian smoothing (Osher et al. 2018), by a Fourier transform."""
    length = gradient.shape[-1]
    factor = 3 - 2 * jnp.cos(2 * jnp.pi * jnp.arange(length) / length)
    return jnp.real(jnp.fft.ifft(jnp.fft.fft(gradient) / factor)).astype(jnp.float32)


@pytest.mark.parametrize("step_fn", [rx.train_step, own_step], ids=["default", "own"])
def test_an_optimizer_with_a_fourier_transform_is_corrected(step_fn: Any) -> None:
    """XLA does not transform an array along a dim that is split."""
    optimizer = optax.chain(
        optax.stateless(lambda tree, _: jax.tree.map(smoothed, tree)), optax.sgd(0.1)
    )
    examples = tiny.make_examples(32, dim=8)
    arguments: Any = {
        "batch_size": 16,
        "optimizer": optimizer,
        "num_epochs": 1,
        "step_fn": step_fn,
    }
    one, several = (
        fit(tiny.mlp_state(optimizer, mesh), examples, **arguments)
        for mesh in (rx.make_mesh(data=1), rx.make_mesh(tensor=4))
    )
    assert any("tensor" in str(x.sharding.spec) for x in several.params.values())
    # Rounding of float32: sums over devices have another order.
    assert_close(one.params, several.params, rtol=1e-5, atol=1e-6)


def test_steps_cut_and_repeat_epochs_and_microbatches_are_those_of_train_step() -> None:
    for num_steps in (3, 5, 12):
        assert_same(fit(num_steps=num_steps), tiny.state_after(num_steps))
    found = fit(num_epochs=1, num_microbatches=2)
    assert_same(found, tiny.state_after(5, num_microbatches=2))
    # Other noise.
    assert not np.array_equal(
        found.params["weight"], tiny.state_after(5).params["weight"]
    )


def test_a_second_fit_starts_epochs_of_its_own() -> None:
    examples = tiny.make_examples(20)
    first, second = tiny.Collate(), tiny.Collate()
    middle = fit(None, examples, num_epochs=2, collate_fn=first)
    expected = tiny.state_after(10, middle, examples)
    assert_same(
        fit(middle, examples, num_epochs=2, collate_fn=second, prefetch=0), expected
    )
    epochs = [tuple(spy.ids[i : i + 20]) for spy in (first, second) for i in (0, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(20))] * 4
    assert len(set(epochs)) == 4


@pytest.mark.parametrize("stop", [{"num_epochs": 3}, {"num_steps": 6}], ids=str)
def test_examples_by_epoch(stop: Any) -> None:
    # 2, 3 and 1 batches.
    of_epoch = [EXAMPLES[:8], EXAMPLES[8:21], EXAMPLES[21:] + EXAMPLES[:3]]
    asked = []
    rows = tiny.Rows()

    def examples(epoch: int) -> Any:
        asked.append(epoch)
        return of_epoch[epoch]

    found = fit(None, examples, log_every=1, loggers=[rows], **stop)
    assert_same(found, tiny.state_after(6, examples=of_epoch.__getitem__))
    assert asked == [0, 1, 2]
    epochs = [row["train/epoch"] for _, row in rows.rows]
    np.testing.assert_allclose(epochs, [0.5, 1, 4 / 3, 5 / 3, 2, 3], rtol=1e-12)


def test_donation() -> None:
    kept, given = linear_state(), linear_state()
    tiny.assert_counted(counted(kept, num_steps=2, donate=False), 2)
    assert_same(kept, linear_state())
    tiny.assert_counted(counted(given, num_steps=2), 2)
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    common: Any = {"collate_fn": tiny.collate, "batch_size": 4}
    refused = functools.partial(
        raised, ValueError, match=r"array \w+ has been deleted.*donated.*a copy"
    )
    refused(counted, given)
    refused(rx.evaluate, given, EXAMPLES, loss_fn=tiny.loss_fn, **common)
    refused(rx.predict, given, EXAMPLES, predict_fn=tiny.predict_fn, **common)


def test_num_train_steps_is_what_fit_takes() -> None:
    for n, num_epochs in ((22, 3), (4, 1)):
        found = counted(examples=EXAMPLES[:n], num_epochs=num_epochs)
        assert int(found.step) == rx.num_train_steps(
            n, batch_size=4, num_epochs=num_epochs
        )
    for size, message in (
        (4, r"3 examples do not fill a batch of 4"),
        (0, "batch_size=0"),
    ):
        raised(
            ValueError,
            rx.num_train_steps,
            3,
            batch_size=size,
            num_epochs=1,
            match=message,
        )


# Compiled once, and no waiting


def ragged(*lengths: int) -> Any:
    """A `collate_fn` of batches of such widths, and so on."""
    widths = itertools.cycle(lengths)
    return lambda rows: {
        "pad": np.zeros((len(rows), next(widths)), np.float32),
        **tiny.collate(rows),
    }


def test_a_new_shape_compiles_once_more_and_is_told_once(
    recwarn: pytest.WarningsRecorder,
) -> None:
    with compilations() as compiled:
        counted(num_steps=6, collate_fn=ragged(3, 5, 4))
    assert compiled.count(tiny.BODY) == 3
    (message,) = [str(w.message) for w in recwarn]
    assert "pad is float32[4,5], but was float32[4,3] in the first batch" in message


def test_other_metrics_for_another_shape_begin_a_row() -> None:
    """Each step is in exactly one row."""

    def loss_fn(model: Any, batch: Any, key: Any) -> Any:
        return scalar_loss(model, batch, key), {
            f"by_{batch['pad'].shape[1]}": rx.Mean(1.0, 1.0)
        }

    options: Any = {"loss_fn": loss_fn, "optimizer": tiny.COUNTING, "num_steps": 6}
    options["collate_fn"] = ragged(3, 3, 4, 4, 4, 3)
    with pytest.warns(UserWarning, match="collate_fn: pad"):
        _, history = tiny.fit_with_history(
            examples=rx.Data(EXAMPLES, prefetch=0), **options
        )
    rows = [
        (row["step"], [name for name in row if "by_" in name]) for row in history.rows
    ]
    assert rows == [(2, ["train/by_3"]), (5, ["train/by_4"]), (6, ["train/by_3"])]
    last = history.rows[-1]
    for row in history.rows:
        # Of the steps of the row, without the batch that ended it.
        expected = last["train/epoch"] * row["step"] / last["step"]
        assert row["train/epoch"] == pytest.approx(expected)


def test_numbers_are_fetched_only_with_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    get = jax.device_get
    step = Training._step
    value = ArrayImpl.__dict__["_value"]
    fetching = False

    def noted_get(tree: Any) -> Any:
        nonlocal fetching
        is_flag = getattr(tree, "dtype", None) == np.dtype(bool)
        assert not is_flag or tree.is_ready()
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
            is_flag = self.dtype == bool
            assert not is_flag or self.is_ready()
            events.append("flag" if is_flag else "value")
        return value.fget(self)

    state = linear_state()
    rows = tiny.Rows()
    monkeypatch.setattr(jax, "device_get", noted_get)
    monkeypatch.setattr(Training, "_step", noted_step)
    monkeypatch.setattr(ArrayImpl, "_value", property(noted_value))
    assert float(jnp.ones(())) == 1  # the ears work
    assert events == ["value"]
    events.clear()
    fit(
        state,
        tiny.make_examples(48),
        num_epochs=1,
        log_every=5,
        loggers=[rows],
        optimizer=tiny.COUNTING,
    )
    # The window of steps 1-5 is fetched when step 9 is on its way, and the others at
    # the end.
    loop = events[events.index("batch") :]
    assert [event for event in loop if event != "flag"] == ["batch"] * 9 + ["get"] + [
        "batch"
    ] * 3 + ["get"] * 2
    # And of the step four before, which is over, whether it was finite: while its batch
    # is at hand.
    assert loop.count("flag") == 12
    assert loop[: NUM_AHEAD + 2] == ["batch"] * (NUM_AHEAD + 1) + ["flag"]
    assert [step for step, _ in rows.rows] == [5, 10, 12]


# What fails, and what is warned of


def test_errors_of_collate_fn_loss_fn_and_of_a_logger_arrive() -> None:
    """With the rows of all steps before it, also of those that were handed to the
    devices and not looked at."""
    for prefetch in (0, 2):
        arguments: Any = {
            "collate_fn": tiny.Collate(7, tiny.fail),
            "prefetch": prefetch,
            "log_every": 1,
        }
        rows = tiny.Rows()
        error = raised(LookupError, counted, loggers=[rows], match="mine", **arguments)
        assert any("batch 1 of epoch 1" in note for note in error.__notes__)
        assert int(error.state.step) == len(error.history.rows) == len(rows.rows) == 6
    state = linear_state()
    with compilations() as compiled, pytest.raises(LookupError, match="mine"):
        fit(state, loss_fn=lambda model, batch, key: tiny.fail(), num_epochs=3)
    assert tiny.BODY not in compiled
    assert_same(state, linear_state())
    raised(LookupError, counted, loggers=[lambda step, row: tiny.fail()], match="mine")


# Streams


def test_a_stream_trains_as_its_examples_do() -> None:
    def of_epoch(epoch: int) -> Any:
        return [EXAMPLES[i] for i in order(22, epoch)]

    rows = tiny.Rows()
    found = fit(
        None, KINDS["iterable"](EXAMPLES), num_steps=13, log_every=3, loggers=[rows]
    )
    assert_same(found, fit(None, rx.Data(of_epoch, shuffle=False), num_steps=13))
    assert [(step, row["train/epoch"]) for step, row in rows.rows] == [
        (3, 0),
        (6, 1),
        (9, 1),
        (12, 2),
        (13, 2),
    ]


def test_other_items_are_refused(tmp_path: pathlib.Path, capsys: Any) -> None:
    def run(num_steps: int, **options: Any) -> Any:
        checkpoints = rx.Checkpoints(tmp_path, **options)
        stream = rx.Stream(Unlike(EXAMPLES))
        loggers = [rx.ConsoleLogger(progress=False)]
        return fit(
            None, stream, num_steps=num_steps, checkpoints=checkpoints, loggers=loggers
        )

    run(3)
    raised(
        ValueError,
        run,
        5,
        match=r"first 12 items of epoch 0 differ from those read before the save",
    )
    assert int(run(5, allow_changes=True).step) == 5
    assert (
        "from those read before the save: continuing anyway" in capsys.readouterr().err
    )


# Places of `batches`, from which your own loop continues

WIDE = tiny.make_examples(44, dim=8)


def test_the_place_goes_on_after_each_batch() -> None:
    in_batches = rx.Stream(
        lambda epoch: (WIDE[i : i + 8] for i in range(0, 40, 8)), batched=True
    )
    for source in (WIDE, rx.Stream(lambda epoch: iter(WIDE)), in_batches):
        options: Any = {
            "batch_size": 8,
            "mesh": rx.make_mesh(data=1),
            "key": jax.random.key(0),
        }
        batches = functools.partial(rx.batches, source, tiny.collate, **options)
        expected = [batch["id"].tolist() for batch in batches(epoch=1)]
        assert len(expected) == 5
        iterator = batches(epoch=1)
        for num_done in range(5):
            place = json.loads(json.dumps(iterator.place))
            assert (place["epoch"], place["start"]) == (1, num_done)
            assert [batch["id"].tolist() for batch in batches(**place)] == expected[
                num_done:
            ]
            next(iterator, None)
        assert (iterator.place["epoch"], iterator.place["start"]) == (2, 0)
        # The latter as an earlier version said it.
        for ended in (iterator, batches(epoch=1, start=5)):
            assert next(ended, None) is None
            assert ended.place == {"epoch": 2, "start": 0}


def test_the_place_stays_after_an_error_and_after_close() -> None:
    """Also if you ask for more, which ends the iterator and not the epoch."""

    def failing(rows: Any) -> Any:
        if 8 in rows:
            raise KeyError("bad row")
        return np.asarray(rows)

    def fail(iterator: Any) -> None:
        raised(KeyError, next, iterator)

    for collate, end in ((failing, fail), (np.asarray, Batches.close)):
        iterator = rx.batches(
            range(16), collate, batch_size=4, mesh=rx.make_mesh(data=1)
        )
        assert [next(iterator).tolist()[0] for _ in range(2)] == [0, 4]
        end(iterator)
        assert next(iterator, None) is None
        assert iterator.place == {"epoch": 0, "start": 2}


def test_the_place_goes_on_inside_a_tail() -> None:
    """25 examples are 16, 8 and 1, because 9 do not divide over 8 data shards."""
    options: Any = {"batch_size": 16, "mesh": rx.make_mesh(), "remainder": "split"}
    iterator = rx.batches(range(25), np.asarray, **options)
    assert [len(next(iterator)) for _ in range(2)] == [16, 8]
    assert [
        x.tolist()
        for x in rx.batches(range(25), np.asarray, **options, **iterator.place)
    ] == [[24]]


def test_the_place_in_a_stream_refuses_other_items() -> None:
    """It has a checksum of the items before it. A sequence has no such place."""

    def batches(source: Any, **place: Any) -> Any:
        return rx.batches(
            source, np.asarray, batch_size=4, mesh=rx.make_mesh(data=1), **place
        )

    iterator = batches(rx.Stream(range(40)))
    for _ in itertools.islice(iterator, 3):
        pass
    place = iterator.place
    iterator.close()
    assert [
        batch.tolist()[0] for batch in batches(rx.Stream(range(40)), **place)
    ] == list(range(12, 40, 4))
    raised(ValueError, next, batches(rx.Stream(range(1, 41)), **place), match="differ")
    raised(
        ValueError,
        batches,
        range(40),
        positions=[[0, 1]],
        match="positions are those of a Stream",
    )


# Input that is refused before anything is compiled, and messages that name the argument
# to change

TWELVE = tiny.make_examples(12)
ADAM = optax.adam(1e-2)


def run(state: Any = None, examples: Any = TWELVE, **arguments: Any) -> Any:
    """`fit` with one thing wrong, which must leave the given state as it was."""
    given = linear_state() if state is None else state
    before = jax.tree.map(jnp.copy, given)
    try:
        fit(given, examples, **{"num_epochs": 1, **arguments})
    finally:
        assert_same(given, before)


def on_eight(batch_size: int = 8, **arguments: Any) -> Any:
    run(
        linear_state(mesh=rx.make_mesh()),
        tiny.make_examples(48),
        batch_size=batch_size,
        **arguments,
    )


def evaluating(examples: Any = TWELVE, **fields: Any) -> Any:
    run(evaluation=rx.Evaluation(examples, **{"predict_fn": tiny.predict_fn, **fields}))


def metrics(value: Any) -> Any:
    evaluating(metric_fn=lambda examples, predictions: value)


def collating(**changed: Any) -> Any:
    run(collate_fn=lambda examples: {**tiny.collate(examples), **changed})


def guarding(step: Any) -> Any:
    rx.skip_nonfinite(step)(linear_state(), tiny.collate(TWELVE[:4]))


def stepping(**changed: Any) -> Any:
    """A custom step that changes the shape of the state."""

    def step(state: Any, batch: Any) -> Any:
        state, metrics = tiny.counting_step(state, batch)
        return dataclasses.replace(state, **changed), metrics

    guarding(step)


def alone(call: Any, examples: Any, batch_size: int) -> Any:
    functions = {
        "loss_fn" if call is rx.evaluate else "predict_fn": lambda model, batch, key: (
            batch["x"][:3]
        )
    }
    common: Any = {"collate_fn": tiny.collate, "batch_size": batch_size, **functions}
    return call(linear_state(mesh=rx.make_mesh()), examples, **common)


def half_trained() -> Any:
    """Adam's state over the weight alone, in a state that trains the bias too."""
    state = linear_state(ADAM)
    half = rx.init_state(
        state.model, ADAM, key=jax.random.key(1), trainable=lambda x: x.ndim == 2
    )
    return dataclasses.replace(state, opt_state=half.opt_state)


def explicit_axes() -> Any:
    whole = jax.NamedSharding(jax.make_mesh((8,), ("data",)), jax.P())
    return rx.init_state(
        jax.device_put(linear_state().model, whole), tiny.SGD, key=jax.random.key(1)
    )


def nothing_trainable() -> Any:
    return rx.init_state(
        linear_state().model, key=jax.random.key(1), trainable=lambda x: False
    )


def generator() -> Any:
    yield from TWELVE


WEIGHT, BIAS = jnp.ones((2, 2)), jnp.ones(2)
OTHERS = rx.Evaluation(tiny.make_examples(48), batch_size=12)

OTHER_STATE = r"at opt_state\.\S+ it keeps .*, but the state holds"
UNFIT = (
    optax.sgd(0.1, momentum=0.9),
    optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    optax.chain(ADAM, ADAM),
)

# (call, what its message says): a `ValueError`
REFUSED = [
    # How long, how often
    pytest.param(
        lambda: run(num_steps=2),
        r"num_epochs=1, num_steps=2, but exactly one",
        id="fit-num_epochs_and_num_steps",
    ),
    pytest.param(
        lambda: run(num_epochs=None),
        r"num_epochs=None, num_steps=None, but exactly one",
        id="fit-neither_num_epochs_nor_num_steps",
    ),
    pytest.param(
        lambda: run(num_epochs=0),
        r"num_epochs=0, but it must be positive",
        id="fit-num_epochs-zero",
    ),
    pytest.param(
        lambda: run(num_epochs=None, num_steps=0),
        r"num_steps=0, but it must be positive",
        id="fit-num_steps-zero",
    ),
    pytest.param(
        lambda: run(log_every=0),
        r"log_every=0, but it must be positive",
        id="fit-log_every-zero",
    ),
    pytest.param(
        lambda: run(examples=rx.Stream(TWELVE)),
        r"num_epochs=1, but train_examples is a Stream.*num_steps=",
        id="fit-num_epochs-of_a_stream",
    ),
    pytest.param(
        lambda: run(step_timeout_seconds=0.0),
        r"step_timeout_seconds=0",
        id="fit-step_timeout_seconds-zero",
    ),
    # Batch sizes
    pytest.param(
        lambda: on_eight(12),
        r"fit: batch_size=12 must be a positive multiple of 8, "
        r"the number of data shards",
        id="fit-batch_size-indivisible",
    ),
    pytest.param(
        lambda: on_eight(num_microbatches=2),
        r"num_microbatches=2 times 8, the number of data shards",
        id="fit-num_microbatches-too_many",
    ),
    pytest.param(
        lambda: run(num_microbatches=0),
        r"num_microbatches=0, but it must be",
        id="fit-num_microbatches-zero",
    ),
    pytest.param(
        lambda: on_eight(evaluation=OTHERS),
        r"batches: batch_size=12 must be a positive multiple of 8, the",
        id="fit-evaluation-indivisible",
    ),
    pytest.param(
        lambda: evaluating(batch_size=0),
        r"Evaluation: batch_size=0, but",
        id="Evaluation-batch_size-zero",
    ),
    # Examples
    pytest.param(
        lambda: run(examples=lambda epoch: []),
        r"examples is empty",
        id="fit-examples-empty",
    ),
    pytest.param(
        lambda: evaluating([]),
        r"(?s)is empty.*the evaluation",
        id="Evaluation-examples-empty",
    ),
    # Evaluation
    pytest.param(
        lambda: evaluating(rx.Stream(TWELVE), predict_fn=None, num_batches=0),
        r"Evaluation: num_batches=0, but it must be positive",
        id="Evaluation-num_batches-zero",
    ),
    pytest.param(
        lambda: evaluating(num_batches=2),
        r"num_batches=2 is for a Stream, but examples is a list\..*examples\[:1000\]",
        id="Evaluation-num_batches-of_a_list",
    ),
    pytest.param(
        lambda: evaluating(rx.Stream(TWELVE), num_batches=2),
        r"Evaluation: predict_fn needs a sequence of examples, but .* a Stream\. Pass",
        id="Evaluation-predict_fn-of_a_stream",
    ),
    pytest.param(
        lambda: evaluating(every_steps=0),
        r"Evaluation: every_steps=0, but it",
        id="Evaluation-every_steps-zero",
    ),
    pytest.param(
        lambda: evaluating(predict_fn=None, metric_fn=lambda x, y: {}),
        r"metric_fn needs predict_fn",
        id="Evaluation-metric_fn-without_predict_fn",
    ),
    pytest.param(
        lambda: evaluating(predict_fn=None, predictions_directory="no"),
        r"predictions_directory needs predict",
        id="Evaluation-predictions_directory-without_predict_fn",
    ),
    pytest.param(
        lambda: evaluating(predict_fn=None, output_fn=lambda x, y: 0),
        r"output_fn needs predict_fn",
        id="Evaluation-output_fn-without_predict_fn",
    ),
    pytest.param(
        lambda: alone(rx.evaluate, [], 8),
        r"examples is empty",
        id="evaluate-examples-empty",
    ),
    pytest.param(
        lambda: alone(rx.predict, [], 8),
        r"examples is empty",
        id="predict-examples-empty",
    ),
    pytest.param(
        lambda: alone(rx.evaluate, WIDE, 12),
        r"batch_size=12 must be a positive multiple of 8",
        id="evaluate-batch_size-indivisible",
    ),
    pytest.param(
        lambda: alone(rx.predict, WIDE, 12),
        r"batch_size=12 must be a positive multiple of 8",
        id="predict-batch_size-indivisible",
    ),
    pytest.param(
        lambda: alone(rx.evaluate, tiny.make_examples(16), 8),
        r"the loss must be a scalar.*\(3, 2\)",
        id="evaluate-loss-no_scalar",
    ),
    pytest.param(
        lambda: alone(rx.predict, tiny.make_examples(16), 8),
        r"output array has shape \(3, 2\), .* 8",
        id="predict-predict_fn-without_rows",
    ),
    # Functions
    pytest.param(
        lambda: collating(y=np.zeros((3, 2))),
        r"leaf 'y' is float64\[3,2\], .*must be 4",
        id="fit-collate_fn-of_unequal_rows",
    ),
    pytest.param(
        lambda: run(loss_fn=lambda m, b, k: b["x"]),
        r"the loss must be a scalar.*\(4, 2\)\. Sum it",
        id="fit-loss-no_scalar",
    ),
    # The state
    pytest.param(
        lambda: run(explicit_axes()),
        r"\('data',\) are not of AxisType\.Auto.*make_mesh",
        id="fit-state-explicit_axes",
    ),
    pytest.param(
        lambda: run(nothing_trainable()),
        r"no trainable leaf.*`trainable`",
        id="fit-state-nothing_trainable",
    ),
    pytest.param(
        lambda: run(optimizer=ADAM),
        r"opt_state\.0 it keeps ScaleByAdamState, but the state holds EmptyState",
        id="fit-optimizer-without_its_state",
    ),
    pytest.param(
        lambda: run(half_trained(), optimizer=ADAM),
        r"mu\.bias it keeps float32\[2\], .* holds nothing.*given",
        id="fit-optimizer-of_half_the_state",
    ),
    *(
        pytest.param(
            functools.partial(run, linear_state(ADAM), optimizer=x),
            OTHER_STATE,
            id=f"fit-optimizer-unfit_{UNFIT.index(x)}",
        )
        for x in UNFIT
    ),
    # A custom step
    pytest.param(
        lambda: guarding(lambda state, batch: (state, {"error": 1.0})),
        r"a dict that has a 'loss'.*\['error'\]",
        id="step-metrics-without_loss",
    ),
    pytest.param(
        lambda: guarding(lambda state, batch: (state, None)),
        r"must return \(state, metrics\).*NoneType",
        id="step-metrics-none",
    ),
    pytest.param(
        lambda: guarding(lambda state, batch: (state, {"loss": BIAS})),
        r"the metric 'loss' must be a scalar",
        id="step-loss-no_scalar",
    ),
    pytest.param(
        lambda: guarding(lambda state, batch: (state.params, {"loss": 1.0})),
        r"but the state is a dict",
        id="step-state-dict",
    ),
    pytest.param(
        lambda: stepping(params={"bias": jnp.ones(3), "weight": WEIGHT}),
        r"params\.bias .* became float32\[3\]",
        id="step-params-of_another_shape",
    ),
    pytest.param(
        lambda: stepping(model_state={"mean": BIAS}),
        r"model_state\.mean was missing and became float32\[2\]",
        id="step-model_state-new",
    ),
]

OF_ANOTHER_TYPE = [
    pytest.param(
        lambda: run(examples=generator()),
        r"examples is a generator.*list.*rx.Stream",
        id="fit-examples-generator",
    ),
    pytest.param(
        lambda: evaluating(rx.Stream(TWELVE)),
        r"Evaluation: examples is a Stream, .*num_batches=, or list\(stream\)",
        id="Evaluation-examples-stream",
    ),
    pytest.param(
        lambda: alone(rx.evaluate, rx.Stream(WIDE), 8),
        r"evaluate: examples is a Stream, .*list\(stream\)",
        id="evaluate-examples-stream",
    ),
    pytest.param(
        lambda: alone(rx.predict, rx.Stream(WIDE), 8),
        r"predict: examples is a Stream, .*list\(stream\)",
        id="predict-examples-stream",
    ),
    pytest.param(
        lambda: evaluating(generator()),
        r"Evaluation: examples is a generator.*list\(\.\.\.\)",
        id="Evaluation-examples-generator",
    ),
    pytest.param(
        lambda: collating(n=4),
        r"leaf 'n' is a int, but must be a NumPy array",
        id="fit-collate_fn-int",
    ),
    pytest.param(
        lambda: evaluating(state_fn=lambda state: state.params),
        r"state_fn returns must be a TrainState",
        id="Evaluation-state_fn-dict",
    ),
]

# These come after the loss of one batch.
REFUSED_IN_EVALUATION = [
    pytest.param(
        lambda: evaluating(predict_fn=scalar_loss),
        r"predict_fn's output array has shape \(\), .*batch's, 4",
        id="predict_fn-without_rows",
    ),
    pytest.param(
        lambda: metrics({"score": "0.5"}),
        r"metric_fn: 'score' is '0.5' \(str\), but a metric is one num",
        id="metric-str",
    ),
    pytest.param(
        lambda: metrics({"score": np.ones(1)}),
        r"'score' is array\(\[1.\]\) \(ndarray\)",
        id="metric-array_of_one",
    ),
    pytest.param(
        lambda: metrics({"score": jnp.ones(2)}),
        r"'score' is Array\(.*but a metric is one number",
        id="metric-array_of_jax",
    ),
    pytest.param(
        lambda: metrics({"score": None}),
        r"'score' is None \(NoneType\)",
        id="metric-none",
    ),
    pytest.param(
        lambda: metrics({"score": [[1.0], [1.0, 2.0]]}),
        r"'score' is \[\[1.0\], .* \(list\)",
        id="metric-lists",
    ),
    pytest.param(
        lambda: metrics({"score": 1j}),
        r"'score' is 1j \(complex\)",
        id="metric-complex",
    ),
    pytest.param(
        lambda: metrics(0.5),
        r"metric_fn must return a dict of numbers by name, but returned a float",
        id="metric_fn-float",
    ),
    pytest.param(
        lambda: metrics({"plain": 1.0}),
        r"loss_fn already reports a metric 'plain'",
        id="metric-of_loss_fn_too",
    ),
]


@pytest.fixture
def assert_refused(tmp_path: pathlib.Path, monkeypatch: Any) -> Any:
    """Asserts that a call is refused before any of these programs is compiled, writes
    nothing and leaves no thread."""
    # The annotations would refuse some of it first, but only under the tests' type
    # checker.
    monkeypatch.setattr(rx, "fit", inspect.unwrap(rx.fit))
    monkeypatch.chdir(tmp_path)

    def check(
        exception: type[Exception], call: Any, message: str, unheard: set[str]
    ) -> None:
        with compilations() as compiled:
            raised(exception, call, match=message)
        assert not unheard & set(compiled)
        assert tiny.no_threads_left()
        assert list(tmp_path.iterdir()) == []

    return check


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused_before_compilation(
    call: Any, message: str, assert_refused: Any
) -> None:
    assert_refused(ValueError, call, message, {tiny.BODY, tiny.STEP})


@pytest.mark.parametrize(("call", "message"), OF_ANOTHER_TYPE)
def test_another_type_is_refused_before_compilation(
    call: Any, message: str, assert_refused: Any
) -> None:
    assert_refused(TypeError, call, message, {tiny.BODY, tiny.STEP})


@pytest.mark.parametrize(("call", "message"), REFUSED_IN_EVALUATION)
def test_refused_in_an_evaluation_before_the_body_is_compiled(
    call: Any, message: str, assert_refused: Any
) -> None:
    assert_refused(ValueError, call, message, {tiny.BODY})
