"""Runs that end early: by Ctrl-C at the next step, by a step that is not finite at the
last good state."""

import functools
import itertools
import math
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import fit_helpers as tiny
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fit_helpers import (
    EXAMPLES,
    MESHES,
    SGD,
    Collate,
    Rows,
    assert_counted,
    assert_same,
    counted,
    fit,
    raised,
)

import redco_eqx as rx
from redco_eqx._checkpoint.run_record import RunRecord
from redco_eqx._training import course
from redco_eqx._training.course import Course, Due, due

TESTS = pathlib.Path(__file__).parents[1]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_at_the_next_step_with_the_state() -> None:
    rows = Rows()

    def logger(step: int, row: Any) -> None:
        rows(step, row)
        if step == 2:
            interrupt()

    evaluation = rx.Evaluation(EXAMPLES[:4], every_steps=6)  # which is not made
    arguments: Any = {
        "num_epochs": 9,
        "log_every": 1,
        "loggers": [logger],
        "evaluation": evaluation,
    }
    error = raised(rx.errors.TrainingInterrupted, fit, **arguments)
    # The row of step 2 is there when step 6 is on its way, whose boundary is the next
    # one.
    assert issubclass(type(error), KeyboardInterrupt)
    assert int(error.state.step) == error.step == 6
    assert [step for step, _ in rows.rows] == list(range(1, 7))  # no row is lost
    expected = tiny.state_after(6)
    assert_same(error.state, expected)
    copy = pickle.loads(pickle.dumps(error))  # as it goes from one process to another
    assert (type(copy), str(copy), copy.signal) == (
        type(error),
        str(error),
        signal.SIGINT,
    )
    assert copy.history == error.history
    assert_same(copy.state, expected)
    # It can be used.
    assert_same(fit(error.state, num_steps=3), tiny.state_after(3, expected))


def test_a_signal_saves_and_does_not_evaluate() -> None:
    """With several processes, an evaluation could not stop either, so it must not
    begin."""
    run = RunRecord(
        begin=0, num_steps=6, epoch=0, batch=6, batch_size=4, num_examples=40
    )
    nine_steps = Course(num_steps=9, evaluate=6, save=6)
    assert due(nine_steps, run) == Due(log=True, evaluate=True, save=True, finish=False)
    assert due(nine_steps, run, stop=True) == Due(
        log=False, evaluate=False, save=True, finish=True
    )


def test_an_interrupt_at_the_last_evaluation_is_not_lost() -> None:
    calls = itertools.count()

    def metric_fn(examples: Any, predictions: Any) -> Any:
        if next(calls) == 1:
            interrupt()
        return {}

    evaluation = rx.Evaluation(
        EXAMPLES, predict_fn=tiny.predict_fn, metric_fn=metric_fn
    )
    error = raised(
        rx.errors.TrainingInterrupted, counted, num_steps=2, evaluation=evaluation
    )
    assert_counted(error.state, 2)


NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number.name)
def test_the_same_signal_twice_is_one_request(
    number: Any, tmp_path: pathlib.Path
) -> None:
    """As srun and the batch script send it, or docker to a group."""

    def twice() -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    error = raised(
        rx.errors.TrainingInterrupted,
        counted,
        None,
        tmp_path,
        collate_fn=Collate(3, twice),
    )
    assert error.signal == number
    assert_counted(error.state, 3)
    assert tiny.steps_in(tmp_path)[-1] == 3


def test_a_later_interrupt_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "REPEAT_SECONDS", 0.1)

    def twice() -> None:
        interrupt()
        time.sleep(0.5)
        interrupt()

    error = raised(KeyboardInterrupt, counted, collate_fn=Collate(3, twice))
    assert type(error) is KeyboardInterrupt


TWO_SIGNALS = """
import os, signal, sys, time
from fit_helpers import counted, Collate
first, second, seconds = sys.argv[1:]

def both():
    os.kill(os.getpid(), int(first))
    time.sleep(float(seconds))
    os.kill(os.getpid(), int(second))
    time.sleep(5)

counted(collate_fn=Collate(3, both))
"""


@pytest.mark.parametrize(
    ("first", "second", "seconds", "code"),
    [
        (signal.SIGTERM, signal.SIGTERM, 0.2, 143),  # `fit` ends, after its step
        (signal.SIGTERM, signal.SIGTERM, 2.5, -signal.SIGTERM),
        (signal.SIGINT, signal.SIGTERM, 0.2, -signal.SIGTERM),
    ],
    ids=["again", "later", "another"],
)
def test_the_second_signal_of_a_program(
    first: int, second: int, seconds: float, code: int
) -> None:
    arguments = map(str, (int(first), int(second), seconds))
    program = [sys.executable, "-c", TWO_SIGNALS, *arguments]
    done = subprocess.run(
        program, cwd=TESTS, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == code, done.stderr


@pytest.mark.parametrize(
    "options", [{"num_workers": 2}, {"prefetch": 2}, {"prefetch": 0}], ids=str
)
def test_a_signal_while_the_reader_hangs_saves(
    options: dict[str, Any], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "PATIENCE_SECONDS", 0.5)
    is_over = threading.Event()

    def hang() -> None:
        time.sleep(0.5)  # the steps before this batch are taken meanwhile
        os.kill(os.getpid(), signal.SIGTERM)
        is_over.wait(60)

    examples = rx.Data(EXAMPLES, **options)
    collate_fn = Collate(6, hang)
    arguments: Any = {
        "collate_fn": collate_fn,
        "checkpoints": tmp_path,
        "num_epochs": 3,
    }
    began = time.monotonic()
    error = raised(rx.errors.TrainingInterrupted, fit, None, examples, **arguments)
    seconds = time.monotonic() - began
    is_over.set()
    assert seconds < 30
    assert tiny.steps_in(tmp_path)[-1] == error.step
    assert error.step >= 4
    resumed = fit(None, EXAMPLES, checkpoints=tmp_path, num_epochs=3)
    assert_same(resumed, fit(None, EXAMPLES, num_epochs=3))


def test_a_signal_before_the_reader_hangs_saves(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes between two batches, while a row is logged."""
    monkeypatch.setattr(course, "PATIENCE_SECONDS", 0.5)
    # A slow machine may save for longer than the two seconds that are usual.
    monkeypatch.setattr(course, "REPEAT_SECONDS", 600.0)
    usual = signal.getsignal(signal.SIGTERM)
    is_over = threading.Event()

    def hook(run: Any, row: Any, state: Any) -> None:
        if run.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    examples = rx.Data(EXAMPLES, prefetch=0)
    arguments: Any = {
        "collate_fn": Collate(5, lambda: is_over.wait(60)),
        "checkpoints": tmp_path,
        "num_epochs": 3,
        "hook": hook,
        "log_every": 1,
    }
    began = time.monotonic()
    try:
        error = raised(rx.errors.TrainingInterrupted, fit, None, examples, **arguments)
        seconds = time.monotonic() - began
        # A repeated signal is still ignored here, but not by a program that starts now.
        ask = "import signal; print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
        os.kill(os.getpid(), signal.SIGTERM)
        answer = subprocess.check_output([sys.executable, "-c", ask], text=True)
    finally:
        signal.signal(signal.SIGTERM, usual)
        is_over.set()
    assert answer == "True\n"
    assert seconds < 30
    assert tiny.steps_in(tmp_path)[-1] == error.step == 4


def test_an_earlier_timer_does_not_end_the_time_of_a_later_signal() -> None:
    usual = signal.getsignal(signal.SIGTERM)
    try:
        course._ignore_for(signal.SIGTERM, 0.5)
        signal.signal(signal.SIGTERM, usual)  # as another call of `fit` does
        course._ignore_for(signal.SIGTERM, 600.0)
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)  # would end this process
    finally:
        signal.signal(signal.SIGTERM, usual)


FORKING = """
import os, signal, time
from fit_helpers import Collate, counted

def fork():
    begun, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(begins, b".")  # Python drops a signal that comes while it forks
        time.sleep(60)
        os._exit(0)
    os.read(begun, 1)
    os.kill(child, signal.SIGTERM)  # as a pool ends its workers
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

counted(collate_fn=Collate(3, fork))
"""


def test_a_child_forked_during_a_run_ends_by_its_first_signal() -> None:
    program = [sys.executable, "-c", FORKING]
    done = subprocess.run(
        program, cwd=TESTS, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == [str(-signal.SIGTERM)], done.stderr


HANGING = """
import sys, time
from fit_helpers import EXAMPLES, Collate, fit
import redco_eqx as rx

def hang():
    print("hangs", flush=True)
    time.sleep(3600)

fit(None, rx.Data(EXAMPLES, num_workers=2), collate_fn=Collate(6, hang), num_epochs=9)
"""


def test_ctrl_c_ends_a_program_whose_worker_hangs() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", HANGING],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "hangs\n"
        program.send_signal(signal.SIGINT)
        time.sleep(course.REPEAT_SECONDS + 0.5)
        program.send_signal(signal.SIGINT)
        try:
            # The second Ctrl-C, or the first if the wait for the batch was over before.
            assert program.wait(15) in (130, -signal.SIGINT)
        finally:
            program.kill()


def test_an_interrupt_while_the_last_good_state_waits() -> None:
    examples, step = tiny.spoiled(np.nan)
    arguments: Any = {
        "collate_fn": Collate(step + 2, signal.SIGINT),
        "num_steps": 99,
        "prefetch": 0,
    }
    assert (
        raised(rx.errors.NonFiniteError, fit, None, examples, **arguments).step == step
    )


def test_the_programs_own_handler_stays() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        found = counted(num_steps=3, collate_fn=Collate(2, signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [True]
    assert_counted(found, 3)


def test_outside_the_main_thread_no_handler_is_needed() -> None:
    with ThreadPoolExecutor(1) as thread:
        assert_counted(thread.submit(counted, num_steps=3).result(), 3)


SCRIPT = """
import os, sys
# Now the terminal that Ctrl-C is typed on is this program's.
os.open(sys.argv[1], os.O_RDWR)
from fit_helpers import counted, make_examples
import redco_eqx as rx

console = rx.ConsoleLogger(open(os.devnull, "w"), progress=True)
say = lambda step, row: print("step", step, flush=True)
try:
    options = {"log_every": 500, "loggers": [say, console], "prefetch": 2}
    counted(examples=make_examples(20), num_epochs=10**6, **options)
except rx.errors.TrainingInterrupted as error:
    print("went on", int(counted(error.state, num_steps=5).step) - error.step)
"""


def test_a_real_ctrl_c(tmp_path: pathlib.Path) -> None:
    ours, theirs = os.openpty()
    with (tmp_path / "errors").open("w") as errors:
        options: Any = {"stdin": theirs, "stderr": errors, "start_new_session": True}
        child: Any = tiny.python(SCRIPT, os.ttyname(theirs), **options)
    deadline = threading.Timer(120, child.kill)
    deadline.start()
    try:
        assert child.stdout.readline().startswith("step 500")
        os.write(ours, b"\x03")
        out, _ = child.communicate(timeout=60)
    finally:
        deadline.cancel()
        child.kill()
        child.wait()
        os.close(theirs)
        os.close(ours)
    assert (out.splitlines()[-1], child.returncode) == ("went on 5", 0)


# Steps that are not finite


def infinite_gradient(model: Any, batch: Any, key: Any) -> Any:
    """The value of the loss is always finite, but at a flag of 0 the gradient is
    infinite."""
    some = jnp.sum(jax.tree.leaves(eqx.filter(model, eqx.is_array))[0])
    zero = some - jax.lax.stop_gradient(some)
    return jnp.mean(tiny.errors_of(model, batch)) + jnp.mean(
        jnp.sqrt(batch["flag"] + zero)
    )


CASES = [
    (tiny.loss_fn, np.nan, 1),
    (tiny.loss_fn, np.inf, 100),
    (infinite_gradient, 0, 100),
]


@pytest.mark.parametrize(("loss", "value", "log_every"), CASES)
def test_a_nonfinite_step_ends_the_run_with_the_state_before_it(
    loss: Any, value: Any, log_every: int
) -> None:
    """And is found before an evaluation after it."""
    examples, step = tiny.spoiled(value)
    assert step > 0
    for evaluation in (None, rx.Evaluation(EXAMPLES[:4], every_steps=step + 1)):
        rows = Rows()
        arguments: Any = {
            "num_epochs": 2,
            "loss_fn": loss,
            "evaluation": evaluation,
            "loggers": [rows],
        }
        arguments |= {"log_every": log_every, "match": f"not finite at step {step} "}
        error = raised(rx.errors.NonFiniteError, fit, None, examples, **arguments)
        assert error.step == step
        assert_same(
            error.state, tiny.state_after(step, examples=examples, loss_fn=loss)
        )
        assert all(math.isfinite(x) for _, row in rows.rows for x in row.values())
        steps = list(range(1, step + 1)) if log_every == 1 else []
        assert (
            [at for at, _ in rows.rows]
            == [row["step"] for row in error.history.rows]
            == steps
        )
        # As it goes from one process to another.
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.step, again.history) == (
            str(error),
            step,
            error.history,
        )
        assert_same(again.state, error.state)


@pytest.mark.parametrize(
    ("loss", "value"), [(tiny.loss_fn, np.nan), (infinite_gradient, 0)]
)
def test_skipping_leaves_out_exactly_the_step(loss: Any, value: Any) -> None:
    examples, step = tiny.spoiled(value)
    hand: Any = {"loss_fn": loss, "optimizer": optax.adam(1e-2)}
    state = tiny.linear_state(hand["optimizer"])
    steps = list(
        itertools.islice(tiny.hand_loop(state, examples, skip=step, **hand), 5)
    )
    guarded = rx.jit_step(rx.skip_nonfinite(functools.partial(rx.train_step, **hand)))
    for i, (_, metrics, batch) in enumerate(steps):
        state, reported = guarded(state, batch)
        assert float(reported["skipped"]) == (i == step)
        if i != step:
            assert float(reported["loss"]) == float(metrics["loss"])
    # Parameters, moments and counts are kept at that step, only its number counts; and
    # training goes on.
    assert_same(state, steps[-1][0])
    assert int(state.step) == 5


# Where: under `jax_debug_nans` the line

WIDE = tiny.make_examples(16, dim=8)


def risky_part(flag: Any) -> Any:
    return jnp.log(flag)


def poisoned_loss(model: Any, batch: Any, key: Any) -> Any:
    return jnp.mean(tiny.errors_of(model, batch) + risky_part(batch["flag"]))


def test_a_nan_raises_from_its_line_with_the_last_good_state() -> None:
    poisoned = [
        {**example, "flag": np.float32(-1.0 if i == 3 else 1.0)}
        for i, example in enumerate(WIDE)
    ]
    run = functools.partial(
        fit,
        tiny.mlp_state(),
        poisoned,
        loss_fn=poisoned_loss,
        num_epochs=1,
        donate=False,
    )
    plain = raised(rx.errors.NonFiniteError, run, match=r"jax_debug_nans")
    with jax.debug_nans(True):
        error = raised(rx.errors.NonFiniteError, run, match=r"nan.* encountered")
    assert isinstance(error.__cause__, FloatingPointError)
    assert "risky_part" in [
        frame.name for frame in traceback.extract_tb(error.__cause__.__traceback__)
    ]
    assert_same(error.state, plain.state)


# Found at the row of the log, and in the next step.
@pytest.mark.parametrize("num_steps", [1, 3])
def test_an_update_that_is_not_finite_names_the_parameters(num_steps: int) -> None:
    spoiling = optax.sgd(lambda step: jnp.where(step == 0, jnp.nan, 0.05))
    run = functools.partial(
        fit, tiny.mlp_state(spoiling), WIDE, optimizer=spoiling, num_steps=num_steps
    )
    error = raised(
        rx.errors.NonFiniteError,
        run,
        match=r"before step 1 .*layers\.0\.bias.*checkpoint",
    )
    assert int(error.state.step) == error.step == 1


def test_a_nan_in_the_batch_is_named() -> None:
    examples = [dict(example) for example in WIDE]
    examples[3]["x"] = np.full_like(examples[3]["x"], np.nan)
    with pytest.raises(
        rx.errors.NonFiniteError, match=r"step 0 .*the batch's x has NaN in row 3"
    ):
        fit(
            tiny.mlp_state(),
            rx.Data(examples, shuffle=False),
            loss_fn=tiny.loss_fn,
            num_steps=1,
        )


def test_without_a_place_a_parameter_is_named_and_a_finite_run_is_as_without() -> None:
    state = tiny.mlp_state(SGD, rx.make_mesh(data=1))
    flagged = [{**example, "flag": np.float32(0)} for example in WIDE]
    kinds = (FloatingPointError, rx.errors.NonFiniteError)
    run = functools.partial(fit, state, donate=False)
    with jax.debug_infs(True):
        said = str(raised(kinds, run, flagged, loss_fn=infinite_gradient, num_steps=2))
    assert "inf" in said or "layers.0.bias" in said
    with jax.debug_nans(True):
        found = run(WIDE, num_steps=3)
    assert_same(found, fit(state, WIDE, num_steps=3))


def by_layers(model: Any, batch: Any, key: Any) -> Any:
    table = model["table"]
    hidden = rx.layers.embed(table, batch["ids"])
    return rx.layers.cross_entropy(hidden, table, batch["labels"], num_chunks=2)


def by_optax(model: Any, batch: Any, key: Any) -> Any:
    table = model["table"]
    look_up = jax.checkpoint(lambda table, ids: jnp.take(table, ids, axis=0))
    hidden = look_up(table, batch["ids"])
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return cross_entropy(hidden @ table.T, batch["labels"]).mean()


OUTSIDE = [
    (by_layers, "ids", 99),
    (by_layers, "labels", -7),
    (by_optax, "ids", -17),
    (by_optax, "labels", 16),
]


@pytest.mark.parametrize(("loss", "name", "value"), OUTSIDE)
def test_an_index_outside_is_named(loss: Any, name: str, value: int) -> None:
    """However late the metrics are read, in a stream too, and under `jax_debug_nans`
    from the lookup's line."""
    rng = np.random.default_rng(0)
    examples = [
        {x: rng.integers(0, 16, 4).astype(np.int32) for x in ("ids", "labels")}
        for _ in range(80)
    ]
    examples[18][name][2] = value  # row 2 of step 2
    mesh = rx.make_mesh(**MESHES["one" if loss is by_optax else "2x2x2"])
    model = rx.init_model(
        lambda key: {"table": jax.random.normal(key, (16, 8))},
        mesh,
        key=jax.random.key(0),
    )
    state = rx.init_state(model, SGD, key=jax.random.key(1))
    run = functools.partial(
        fit, state, loss_fn=loss, num_steps=10, batch_size=8, donate=False
    )
    # The first line that is not JAX's or this library's: else Optax's, or of what
    # checks annotations here.
    line = r"test_ended_early.py:\d+ \(" if loss is by_optax and name == "ids" else ""
    where = rf"{name} has {value} in row 2, an index outside a dim of 16 at .*{line}"
    match = f"at step 2 .*: the batch's {where}"
    for given in (rx.Data(examples, shuffle=False), rx.Stream(examples)):
        error = raised(rx.errors.NonFiniteError, run, given, match=match)
        assert int(error.state.step) == error.step == 2
    with jax.debug_nans(True):
        error = raised(
            rx.errors.NonFiniteError,
            run,
            rx.Data(examples, shuffle=False),
            match="at step 2 ",
        )
    lines = [
        x.line
        for x in traceback.extract_tb(error.__cause__.__traceback__)
        if x.name == loss.__name__
    ]
    assert [f'batch["{name}"]' in str(line) for line in lines] == [True]
