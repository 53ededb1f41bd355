"""Threads that collate: the same batches in the same order, errors at theirs, nothing left."""

import threading
import time
from typing import Any

import numpy as np
import pytest
from fit_helpers import no_threads_left

import redco_eqx as rx

OPTIONS: Any = {"batch_size": 8}
NUM = 80


def uneven(examples: Any) -> Any:
    """Takes longer for earlier examples, so that workers overtake each other."""
    time.sleep(0.02 if examples[0] % 3 == 0 else 0.0)
    return np.asarray(examples)


def failing(examples: Any) -> Any:
    if 19 in examples:
        raise LookupError("bad row")
    return np.asarray(examples)


def batches(collate_fn: Any, *, examples: Any = range(NUM), **options: Any) -> Any:
    return rx.batches(rx.Data(examples, **options), collate_fn, mesh=rx.make_mesh(), **OPTIONS)


def test_order_and_values_are_those_of_one():
    made = list(batches(uneven, num_workers=4))
    assert [np.asarray(x).tolist() for x in made] == [list(range(i, i + 8)) for i in range(0, NUM, 8)]
    assert no_threads_left()


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


def test_an_error_arrives_at_its_batch():
    made = batches(failing, num_workers=4)
    assert [np.asarray(next(made))[0] for _ in range(2)] == [0, 8]
    with pytest.raises(LookupError, match="bad row") as caught:
        next(made)
    assert "This is batch 2 of epoch 0" in "\n".join(caught.value.__notes__)
    assert list(made) == []
    assert no_threads_left()


def test_closing_waits_for_no_batch():
    end = threading.Event()

    def slow(examples: Any) -> Any:
        if 8 in examples:
            end.wait(60)
        return np.asarray(examples)

    made = batches(slow, num_workers=2)
    next(made)
    begin = time.monotonic()
    made.close()
    assert time.monotonic() - begin < 10
    end.set()
    assert no_threads_left()
