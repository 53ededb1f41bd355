"""Ctrl-C: a run ends at the next step, with its state."""

import fcntl
import itertools
import os
import pathlib
import pickle
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
from typing import Any

import numpy as np
import pytest
from fit_helpers import (
    COUNTING,
    EXAMPLES,
    Rows,
    assert_counted,
    assert_same,
    collate,
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


def interrupting_collate(at: int, times: int = 1) -> Any:
    calls = itertools.count(1)

    def collate_and_interrupt(examples: Any) -> Any:
        if next(calls) == at:
            for _ in range(times):
                interrupt()
        return collate(examples)

    return collate_and_interrupt


@pytest.mark.parametrize("at", [1, 3, 5, 6])
def test_an_interrupt_while_a_batch_is_made(at: int) -> None:
    rows = Rows()
    with pytest.raises(rx.errors.TrainingInterrupted, match=f"after step {at};") as caught:
        fit(
            linear_state(),
            EXAMPLES,
            collate_fn=interrupting_collate(at),
            num_steps=9,
            optimizer=COUNTING,
            prefetch=0,
            log_every=4,
            loggers=[rows],
        )
    assert_counted(caught.value.state, at, linear_state())
    assert [step for step, _ in rows.rows] == [*range(4, at, 4), at]


def test_an_interrupt_from_the_thread_that_makes_batches() -> None:
    with pytest.raises(rx.errors.TrainingInterrupted) as caught:
        fit(
            linear_state(),
            EXAMPLES,
            collate_fn=interrupting_collate(3),
            num_steps=10_000,
            optimizer=COUNTING,
        )
    assert_counted(caught.value.state, caught.value.step, linear_state())


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
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(
            linear_state(),
            EXAMPLES,
            collate_fn=interrupting_collate(3, times=2),
            num_steps=9,
            optimizer=COUNTING,
            prefetch=0,
        )
    assert type(caught.value) is KeyboardInterrupt


def test_an_interrupt_while_the_last_good_state_waits() -> None:
    examples, step = spoiled(np.nan)
    with pytest.raises(rx.errors.NonFiniteError) as caught:
        fit(
            linear_state(),
            examples,
            collate_fn=interrupting_collate(step + 2),
            num_steps=99,
            prefetch=0,
            log_every=100,
        )
    assert caught.value.step == step


def test_the_programs_own_handler_stays() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    try:
        found = fit(
            linear_state(),
            EXAMPLES,
            collate_fn=interrupting_collate(2),
            num_steps=3,
            optimizer=COUNTING,
            prefetch=0,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [True]
    assert_counted(found, 3, linear_state())


def test_outside_the_main_thread_no_handler_is_needed() -> None:
    found: list[Any] = []

    def run() -> None:
        found.append(fit(linear_state(), EXAMPLES, num_steps=3, optimizer=COUNTING))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert_counted(found[0], 3, linear_state())


def test_a_real_ctrl_c(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    tests = pathlib.Path(__file__).parent.parent
    script.write_text(
        textwrap.dedent(
            f"""
            import os, sys
            os.open(sys.argv[1], os.O_RDWR)  # now the terminal that Ctrl-C is typed on is this program's
            sys.path.insert(0, {str(tests)!r})
            import jax
            from fit_helpers import COUNTING, fit, linear_state, make_examples
            import redco_eqx as rx

            examples, options = make_examples(20), dict(optimizer=COUNTING, log_every=500)
            try:
                say = lambda step, row: print("step", step, file=sys.stdout, flush=True)
                console = rx.ConsoleLogger(open(os.devnull, "w"), progress=True)
                fit(linear_state(), examples, num_epochs=10**6, loggers=[say, console], **options)
            except rx.errors.TrainingInterrupted as error:
                state = fit(error.state, examples, num_steps=5, **options)
                print("went on", int(state.step) - error.step, flush=True)
            """
        )
    )
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    child = subprocess.Popen(
        [sys.executable, str(script), os.ttyname(theirs)],
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        start_new_session=True,
        text=True,
    )
    drawn: list[bytes] = []

    def drain() -> None:
        try:
            while data := os.read(ours, 4096):
                drawn.append(data)
        except OSError:  # the other end is closed
            pass

    drainer = threading.Thread(target=drain, daemon=True)
    drainer.start()
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
        drainer.join(5)
        os.close(ours)
    assert out.splitlines()[-1] == "went on 5"
    assert child.returncode == 0
    assert b"train:" in b"".join(drawn)  # on a terminal there is a bar
