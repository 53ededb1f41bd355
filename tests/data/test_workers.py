"""Threads and processes that collate: the same batches in the same order, errors at theirs, nothing left."""

import multiprocessing
import os
import re
import signal
import threading
import time
from typing import Any

import jax
import numpy as np
import pytest
from fit_helpers import no_threads_left

import redco_eqx as rx
from redco_eqx._data.epochs import Epochs
from redco_eqx._data.workers import work_in_hand

OPTIONS: Any = {"batch_size": 8}
NUM = 80


def uneven(examples: Any) -> Any:
    """Takes longer for earlier examples, so that workers overtake each other."""
    time.sleep(0.02 if examples[0] % 3 == 0 else 0.0)
    return {"x": np.asarray(examples), "pid": np.full(len(examples), os.getpid())}


def failing(examples: Any) -> Any:
    if 19 in examples:
        raise LookupError("bad row")
    return np.asarray(examples)


class Unpicklable(Exception):
    def __init__(self, a: Any, b: Any):
        super().__init__(f"{a} {b}")


def failing_oddly(examples: Any) -> Any:
    if 19 in examples:
        raise Unpicklable("odd", "row")
    return np.asarray(examples)


def dying(examples: Any) -> Any:
    if 19 in examples:
        os.kill(os.getpid(), signal.SIGKILL)
    return np.asarray(examples)


def leaving(examples: Any) -> Any:
    if 19 in examples:
        os._exit(7)
    return np.asarray(examples)


def slow(examples: Any) -> Any:
    time.sleep(60 if 8 in examples else 0)
    return np.asarray(examples)


def on_device(examples: Any) -> Any:
    """What a process has of JAX is the CPU."""
    return np.full(len(examples), jax.default_backend() == "cpu")


def batches(collate_fn: Any, *, examples: Any = range(NUM), **options: Any) -> Any:
    return rx.batches(rx.Data(examples, **options), collate_fn, mesh=rx.make_mesh(), **OPTIONS)


def none_left(seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while multiprocessing.active_children() and time.monotonic() < end:
        time.sleep(0.01)
    return not multiprocessing.active_children() and no_threads_left(seconds)


WORKERS = [{"num_workers": 4}, {"num_workers": 2, "processes": True}]
IDS = ["threads", "processes"]


@pytest.mark.parametrize("options", WORKERS, ids=IDS)
def test_order_and_values_are_those_of_one(options):
    made = list(batches(uneven, **options))
    assert [np.asarray(b["x"]).tolist() for b in made] == [list(range(i, i + 8)) for i in range(0, NUM, 8)]
    pids = {int(pid) for b in made for pid in b["pid"]}
    assert (os.getpid() in pids) == ("processes" not in options)
    assert len(pids) == (2 if "processes" in options else 1)
    assert none_left()


def test_so_many_threads_collate_at_the_same_time():
    inside, most, lock = 0, 0, threading.Lock()
    all_in = threading.Barrier(4, timeout=10)

    def counting(examples: Any) -> Any:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        if examples[0] < 32:
            all_in.wait()
        with lock:
            inside -= 1
        return np.asarray(examples)

    assert len(list(batches(counting, num_workers=4, prefetch=1))) == 10
    assert most == 4


@pytest.mark.parametrize("options", WORKERS, ids=IDS)
def test_an_error_arrives_at_its_batch(options):
    made = batches(failing, **options)
    assert [np.asarray(next(made))[0] for _ in range(2)] == [0, 8]
    with pytest.raises(LookupError, match="bad row") as caught:
        next(made)
    notes = "\n".join(caught.value.__notes__)
    assert "This is batch 2 of epoch 0" in notes
    assert ("in failing" in notes) == ("processes" in options)  # the traceback of the other process
    assert list(made) == []
    assert none_left()


def test_an_error_that_cannot_be_sent_arrives_in_words():
    made = batches(failing_oddly, **WORKERS[1])
    with pytest.raises(RuntimeError, match="Unpicklable: odd row"):
        list(made)
    assert none_left()


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (
            dying,
            r"redco_eqx.collate-\d \(pid \d+\) was killed by SIGKILL while it collated. The machine may be out",
        ),
        (leaving, r"redco_eqx.collate-\d \(pid \d+\) ended with exit code 7 while it collated.*__main__"),
    ],
)
def test_a_process_that_dies_is_named(collate_fn, message):
    made = batches(collate_fn, **WORKERS[1])
    assert [np.asarray(next(made))[0] for _ in range(2)] == [0, 8]
    with pytest.raises(RuntimeError, match=message) as caught:
        next(made)
    assert any("This is batch 2" in note for note in caught.value.__notes__)
    assert none_left()


def test_closing_waits_for_no_batch():
    made = batches(slow, **WORKERS[1])
    next(made)
    begin = time.monotonic()
    made.close()
    assert time.monotonic() - begin < 10
    assert none_left()


# What hangs is named


def hanging_process(examples: Any) -> Any:
    time.sleep(600 if 19 in examples else 0)
    return np.asarray(examples)


@pytest.mark.parametrize("kind", ["collate_fn", "examples[i]", "stream"])
def test_a_worker_that_hangs_is_named(kind):
    end = threading.Event()

    def hanging(examples: Any) -> Any:
        if kind == "collate_fn" and 19 in examples:
            end.wait(60)
        return np.asarray(examples)

    class Rows:
        def __len__(self) -> int:
            return NUM

        def __getitem__(self, i: int) -> int:
            if kind == "examples[i]" and i == 19:
                end.wait(60)
            return i

    def rows(epoch: int) -> Any:
        yield from range(19)
        end.wait(60)

    options: Any = {"num_workers": 2, "timeout_seconds": 2.0}
    if kind == "stream":
        made = rx.batches(rx.Stream(rows, **options), hanging, mesh=rx.make_mesh(), **OPTIONS)
    else:
        made = batches(hanging, examples=Rows(), **options)
    message = {
        "collate_fn": r"(?m)^batch 2 of epoch 0, collate_fn: not back for \d+ s, in the thread redco_eqx",
        "examples[i]": r"(?m)^batch 2 of epoch 0, examples\[i\]: not back for \d+ s",
        "stream": r"(?m)^batch 2 of epoch 0 of the stream, reading its examples: not back for \d+ s",
    }[kind]
    try:
        with pytest.raises(TimeoutError, match=r"has not come for \d+ s \(timeout_seconds\)") as caught:
            list(made)
        assert re.search(message, str(caught.value)), caught.value
    finally:
        end.set()
    assert none_left()


def test_a_process_that_hangs_is_named():
    made, end = batches(hanging_process, **WORKERS[1]), time.monotonic() + 60
    next(made)
    message = r"(?m)^batch 2 of epoch 0, collate_fn, in the process redco_eqx.collate-\d \(pid \d+\): not back "
    while not re.search(message, work_in_hand()) and time.monotonic() < end:
        time.sleep(0.01)
    assert re.search(message, work_in_hand())
    made.close()
    assert none_left()
    assert work_in_hand() == ""


def test_processes_see_the_cpu_only_and_ignore_ctrl_c():
    made = batches(on_device, **WORKERS[1])
    assert bool(np.asarray(next(made)).all())
    for child in multiprocessing.active_children():
        os.kill(child.pid or 0, signal.SIGINT)
    assert all(bool(np.asarray(x).all()) for x in made)
    assert none_left()


def test_processes_live_through_all_epochs():
    data = rx.Data(range(16), num_workers=2, processes=True)
    epochs = Epochs(data, uneven, batch_size=8, mesh=rx.make_mesh())
    pids = set()
    made = epochs.after(0, 0, key=jax.random.key(0))
    for batch, place in made:
        pids |= set(np.asarray(batch["pid"]).tolist())
        if place.epoch == 4:
            break
    made.close()
    assert len(pids) <= 2
    assert none_left()


def test_what_cannot_be_sent_is_refused_at_once():
    with pytest.raises(TypeError, match=r"collate_fn cannot be sent to a process.*num_workers= alone"):
        batches(lambda examples: np.asarray(examples), **WORKERS[1])
    made = batches(uneven, examples=[threading.Lock()] * 8, **WORKERS[1])
    with pytest.raises(TypeError, match="lock"):
        next(made)
    assert none_left()
