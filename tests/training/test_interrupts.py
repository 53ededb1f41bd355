"""Ctrl-C: a run ends at the next step, with its state."""

import itertools
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fit_helpers import (
    COUNTING,
    EXAMPLES,
    Collate,
    Rows,
    assert_counted,
    assert_same,
    fit,
    linear_state,
    predict_fn,
    spoiled,
    state_after,
)

import redco_eqx as rx


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_ends_at_the_next_step_with_the_state() -> None:
    rows = Rows()

    def logger(step: int, row: Any) -> None:
        rows(step, row)
        if step == 2:
            interrupt()

    with pytest.raises(rx.errors.TrainingInterrupted) as caught:
        fit(linear_state(), EXAMPLES, num_epochs=9, log_every=1, loggers=[logger])
    # The row of step 2 is there when step 6 is on its way, whose boundary is the next one.
    stopped = caught.value.step
    assert stopped == 6
    assert isinstance(caught.value, KeyboardInterrupt)
    assert int(caught.value.state.step) == stopped
    assert [step for step, _ in rows.rows] == list(range(1, stopped + 1))  # no row is lost
    expected = state_after(stopped)
    assert_same(caught.value.state, expected)
    copy = pickle.loads(pickle.dumps(caught.value))  # as it goes from one process to another
    assert (type(copy), str(copy), copy.signal) == (type(caught.value), str(caught.value), signal.SIGINT)
    assert_same(copy.state, expected)
    assert_same(fit(caught.value.state, EXAMPLES, num_steps=3), state_after(3, expected))  # and it can be used


def test_an_interrupt_at_the_last_evaluation_is_not_lost() -> None:
    calls = itertools.count()

    def metric_fn(examples: Any, predictions: Any) -> Any:
        if next(calls) == 1:
            interrupt()
        return {}

    with pytest.raises(rx.errors.TrainingInterrupted) as caught:
        fit(
            linear_state(),
            EXAMPLES,
            num_steps=2,
            optimizer=COUNTING,
            evaluation=rx.Evaluation(EXAMPLES, predict_fn=predict_fn, metric_fn=metric_fn),
        )
    assert_counted(caught.value.state, 2, linear_state())


def test_a_second_interrupt_leaves_at_once() -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    arguments: Any = {"num_steps": 9, "optimizer": COUNTING, "prefetch": 0}
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(linear_state(), EXAMPLES, collate_fn=Collate(3, twice), **arguments)
    assert type(caught.value) is KeyboardInterrupt


def test_an_interrupt_while_the_last_good_state_waits() -> None:
    examples, step = spoiled(np.nan)
    arguments: Any = {"num_steps": 99, "prefetch": 0, "log_every": 100}
    with pytest.raises(rx.errors.NonFiniteError) as caught:
        fit(linear_state(), examples, collate_fn=Collate(step + 2, interrupt), **arguments)
    assert caught.value.step == step


def test_the_programs_own_handler_stays() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    arguments: Any = {"num_steps": 3, "optimizer": COUNTING, "prefetch": 0}
    try:
        found = fit(linear_state(), EXAMPLES, collate_fn=Collate(2, interrupt), **arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [True]
    assert_counted(found, 3, linear_state())


def test_outside_the_main_thread_no_handler_is_needed() -> None:
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(fit, linear_state(), EXAMPLES, num_steps=3, optimizer=COUNTING).result()
    assert_counted(found, 3, linear_state())


SCRIPT = """
import os, sys
os.open(sys.argv[1], os.O_RDWR)  # now the terminal that Ctrl-C is typed on is this program's
sys.path.insert(0, sys.argv[2])
from fit_helpers import COUNTING, fit, linear_state, make_examples
import redco_eqx as rx

examples, options = make_examples(20), dict(optimizer=COUNTING, log_every=500)
console = rx.ConsoleLogger(open(os.devnull, "w"), progress=True)
try:
    say = lambda step, row: print("step", step, flush=True)
    fit(linear_state(), examples, num_epochs=10**6, loggers=[say, console], **options)
except rx.errors.TrainingInterrupted as error:
    state = fit(error.state, examples, num_steps=5, **options)
    print("went on", int(state.step) - error.step)
"""


def test_a_real_ctrl_c(tmp_path: pathlib.Path) -> None:
    ours, theirs = os.openpty()
    with (tmp_path / "errors").open("w") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, os.ttyname(theirs), str(pathlib.Path(__file__).parents[1])],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            text=True,
        )
    deadline = threading.Timer(120, child.kill)
    deadline.start()
    try:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("step 500")
        os.write(ours, b"\x03")
        out, _ = child.communicate(timeout=60)
    finally:
        deadline.cancel()
        child.kill()
        child.wait()
        os.close(theirs)
        os.close(ours)
    assert out.splitlines()[-1] == "went on 5"
    assert child.returncode == 0
