"""Batches: every example once and in order, placed on the mesh, made ahead by threads
that end."""

import fractions
import functools
import gc
import inspect
import math
import os
import signal
import sys
import threading
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fit_helpers import MESHES, no_threads_left, raised
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import redco_eqx as rx
from redco_eqx._data import workers
from redco_eqx._data.order import Permutation, epoch_order
from redco_eqx._data.placement import batch_sizes
from redco_eqx._sharding.mesh import (
    batch_sharding,
    make_mesh,
    num_batch_shards,
    replicated,
)

KEY = jax.random.key(0)


class Counting:
    """A sequence of the numbers below `n` that remembers what was read."""

    def __init__(self, n):
        self.n = n
        self.read = []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        assert 0 <= i < self.n
        self.read.append(i)
        return i


def collate(examples):
    wide = np.stack([np.full((2, 3), x, np.float32) for x in examples])
    return {"x": np.asarray(examples, np.int32), "nested": [wide]}


def batches(
    examples,
    collate_fn,
    *,
    prefetch=2,
    num_workers=0,
    batch_size=8,
    mesh=None,
    **arguments,
):
    data = rx.Data(examples, prefetch=prefetch, num_workers=num_workers)
    return rx.batches(
        data, collate_fn, batch_size=batch_size, mesh=mesh or make_mesh(), **arguments
    )


def values(made):
    return [np.asarray(batch["x"]).tolist() for batch in made]


# Which rows


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(MESHES)),
    num_examples=st.integers(1, 50),
    multiple=st.integers(1, 3),
    remainder=st.sampled_from(["split", "pad", "drop"]),
    shuffle=st.booleans(),
    prefetch=st.integers(0, 3),
    data=st.data(),
)
def test_no_example_lost_or_counted_twice(
    name, num_examples, multiple, remainder, shuffle, prefetch, data
):
    mesh = make_mesh(**MESHES[name])
    batch_size = multiple * num_batch_shards(mesh)
    if remainder == "drop" and num_examples < batch_size:
        num_examples += batch_size
    key, order = (
        (KEY, epoch_order(num_examples, KEY, 1)) if shuffle else (None, lambda x: x)
    )
    order = order(np.arange(num_examples)).tolist()
    arguments = {"batch_size": batch_size, "mesh": mesh, "key": key, "epoch": 1}
    arguments |= {"remainder": remainder, "prefetch": prefetch}
    examples = Counting(num_examples)
    made = list(batches(examples, collate, **arguments))

    flat = [x for batch in values(made) for x in batch]
    dropped = num_examples % batch_size if remainder == "drop" else 0
    assert flat[:num_examples] == order[: num_examples - dropped]
    if remainder != "split":
        assert set(flat[num_examples:]) <= {order[-1]}
        assert len(flat) % batch_size == 0
    assert examples.read == flat[:num_examples]  # each row once, no other row, in order

    num_whole, tail = batch_sizes(examples, batch_size, remainder, mesh)
    assert [len(x) for x in values(made)] == [batch_size] * num_whole + tail

    start = data.draw(st.integers(0, len(made)))
    rest = batches(examples, collate, start=start, **arguments)
    assert len(examples.read) == len(flat[:num_examples])  # none before it is asked for
    assert values(rest) == values(made)[start:]
    before = sum(map(len, values(made)[:start]))  # the last batches may be smaller
    assert examples.read[len(flat[:num_examples]) :] == flat[before:num_examples]


@pytest.mark.parametrize("name", MESHES)
def test_placed_batch_is_the_collated_one(name):
    mesh = make_mesh(**MESHES[name])
    collated = []

    def remember(examples):
        assert threading.current_thread() is threading.main_thread()  # without prefetch
        collated.append(collate(examples))
        return collated[-1]

    made = list(
        batches(range(27), remember, mesh=mesh, key=KEY, remainder="split", prefetch=0)
    )
    assert len(made) == len(collated)
    for batch, host in zip(made, collated):
        expected = (
            batch_sharding(mesh)
            if len(host["x"]) % num_batch_shards(mesh) == 0
            else replicated(mesh)
        )
        for x, y in zip(jax.tree.leaves(batch), jax.tree.leaves(host), strict=True):
            assert (x.sharding, x.dtype, x.committed) == (expected, y.dtype, True)
            np.testing.assert_array_equal(x, y)


# Threads


def test_prefetch_runs_ahead_and_no_further(monkeypatch):
    monkeypatch.setattr(workers, "CHEAP_SECONDS", 0)
    examples = Counting(80)
    made = batches(examples, collate, prefetch=3)
    time.sleep(0.05)
    assert examples.read == []
    for num_taken in range(1, 4):
        next(made)
        end = time.monotonic() + 5
        while len(examples.read) < 8 * (num_taken + 3) and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.02)
        assert len(examples.read) == 8 * (num_taken + 3)
    made.close()
    assert no_threads_left()


def noting(is_here):
    """`collate`, which notes whether the main thread calls it."""

    def collate_here(examples):
        is_here.append(threading.current_thread() is threading.main_thread())
        return collate(examples)

    return collate_here


def test_cheap_batches_are_made_without_the_thread_in_the_same_order(monkeypatch):
    monkeypatch.setattr(workers, "CHEAP_SECONDS", math.inf)
    is_here = []
    made = values(batches(range(80), noting(is_here), prefetch=2, key=KEY))
    assert made == values(batches(range(80), collate, prefetch=0, key=KEY))
    assert is_here == [True] * 10
    assert no_threads_left()


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


@pytest.mark.parametrize(
    ("short", "pause", "in_thread"),
    [(math.inf, 0.05, True), (math.inf, 0, False), (0, 0, True)],
    ids=["slow-consumer", "fast-consumer", "long-batches"],
)
def test_the_thread_makes_batches_if_that_saves_time(
    short, pause, in_thread, monkeypatch
):
    clock = Clock()
    monkeypatch.setattr(workers, "time", clock)
    monkeypatch.setattr(workers, "CHEAP_SECONDS", 0.01)
    monkeypatch.setattr(workers, "SHORT_SECONDS", short)
    threads = []

    def slow(examples):
        threads.append(threading.current_thread())
        clock.now += 0.02
        return collate(examples)

    for _ in batches(range(80), slow, prefetch=1):
        clock.now += pause
    others = [thread is not threading.main_thread() for thread in threads]
    assert no_threads_left()
    # The first batch, whose time is not known yet, and the second, which no consumer
    # has waited for.
    assert others[2:] == [in_thread] * 8


def test_a_thread_that_makes_short_batches_pauses_now_and_then(monkeypatch):
    monkeypatch.setattr(workers, "CHEAP_SECONDS", 0)
    monkeypatch.setattr(workers, "SHORT_SECONDS", math.inf)
    monkeypatch.setattr(workers, "_NUM_SHORT", 3)
    is_here = []
    made = values(batches(range(80), noting(is_here), prefetch=1, key=KEY))
    assert made == values(batches(range(80), collate, prefetch=0, key=KEY))
    # Three batches of the thread, and one that it had begun.
    assert is_here == [True, False, False, False, False] * 2
    assert no_threads_left()


def close_early(made):
    next(made)
    made.close()
    assert next(made, None) is None


def raise_in_consumer(made):
    with pytest.raises(ZeroDivisionError):
        [1 // 0 for _ in made]


def lose_in_a_cycle(made):
    next(made)
    cycle = [made]
    cycle.append(cycle)
    del made, cycle
    gc.collect()


@pytest.mark.parametrize(
    "consume", [list, close_early, raise_in_consumer, lose_in_a_cycle]
)
def test_thread_ends(consume):
    for prefetch in (0, 1, 50):
        made = batches(range(80), collate, prefetch=prefetch)
        assert no_threads_left(0.01)  # none before the first batch
        consume(made)
        del made
        assert no_threads_left()


@pytest.mark.parametrize(("num_workers", "at_most"), [(0, 16), (2, 40)])
def test_closing_does_not_wait_for_a_slow_batch(num_workers, at_most):
    release = threading.Event()

    def slow(examples):
        if 0 not in examples:
            release.wait(60)
        return collate(examples)

    calls = Counting(800)
    made = batches(calls, slow, num_workers=num_workers)
    next(made)
    begin = time.monotonic()
    made.close()
    assert time.monotonic() - begin < 10
    release.set()
    assert no_threads_left()
    assert len(calls.read) <= at_most  # the batches in hand are finished, none is begun


def test_interrupt_while_waiting():
    release = threading.Event()

    def stuck(examples):
        release.wait(10)
        return collate(examples)

    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    made = batches(range(80), stuck)
    try:
        timer.start()
        begin = time.monotonic()
        raised(KeyboardInterrupt, next, made)
        assert time.monotonic() - begin < 5
    finally:
        timer.join()
        release.set()
    assert no_threads_left()


@pytest.mark.parametrize("error", [KeyError, StopIteration])
def test_exception_arrives_at_its_batch(error):
    class Broken(Counting):
        def __getitem__(self, i):
            if i == 19:
                raise error("bad row")
            return super().__getitem__(i)

    for prefetch, num_workers in ((0, 0), (1, 0), (4, 4)):
        made = batches(Broken(80), collate, prefetch=prefetch, num_workers=num_workers)
        assert [np.asarray(next(made)["x"])[0] for _ in range(2)] == [0, 8]
        # StopIteration becomes a RuntimeError, so that it is not taken for the end.
        with pytest.raises((KeyError, RuntimeError)) as caught:
            next(made)
        cause: Any = caught.value if error is KeyError else caught.value.__context__
        assert (type(cause), cause.args) == (error, ("bad row",))
        assert "__getitem__" in [
            frame.name for frame in traceback.extract_tb(cause.__traceback__)
        ]
        told = " ".join([str(caught.value), *getattr(cause, "__notes__", [])])
        assert all(part in told for part in ("This is batch 2 of epoch 0", "start=2"))
        assert list(made) == []
        assert no_threads_left()


def test_workers_collate_at_the_same_time_and_keep_the_order():
    threads = set()
    all_in = threading.Barrier(4, timeout=10)

    def uneven(examples):
        """Takes longer for earlier examples, so that workers overtake each other."""
        threads.add(threading.current_thread())
        if examples[0] < 32:
            all_in.wait()
        time.sleep(0.02 if examples[0] % 3 == 0 else 0.0)
        return collate(examples)

    made = values(batches(range(80), uneven, num_workers=4, prefetch=1))
    assert made == [list(range(i, i + 8)) for i in range(0, 80, 8)]
    assert len(threads) == 4


# What collate_fn may return


ACCEPTED: dict[str, Any] = {
    "bool": lambda x: np.asarray(x, bool),
    "complex64": lambda x: np.asarray(x, np.complex64),
    "bfloat16": lambda x: np.asarray(x).astype(jnp.bfloat16),
    "float16_of_jax": lambda x: jnp.asarray(x, jnp.float16),
    "no_elements": lambda x: np.zeros((len(x), 0), np.float32),
    "tree": lambda x: (np.asarray(x), {"a": jnp.asarray(x)}, None),
    "mean": lambda x: rx.Mean(jnp.asarray(x), jnp.ones(8)),
    "reversed": lambda x: np.stack([x, x], axis=1)[:, ::-1],
}


@pytest.mark.parametrize("convert", ACCEPTED.values(), ids=list(ACCEPTED))
def test_arrays_that_are_accepted(convert):
    (batch,) = batches(range(8), convert, mesh=make_mesh(tensor=2, fsdp=2))
    expected = convert(list(range(8)))
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(batch), jax.tree.leaves(expected)):
        assert x.dtype == jnp.asarray(y).dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


NOT_RETURNED = [
    pytest.param(
        lambda x: None,
        ValueError,
        r"returned None, which holds no array.*leading dim 8",
        id="none",
    ),
    pytest.param(
        lambda x: {"a": np.float32(1)},
        ValueError,
        r"leaf 'a' is float32\[\].*must be 8",
        id="scalar",
    ),
    pytest.param(
        lambda x: {"a": list(x)}, TypeError, r"leaf 'a.0' is a int", id="list"
    ),
    pytest.param(
        lambda x: (np.zeros((8, 2)), np.zeros((4, 2))),
        ValueError,
        r"leaf '1' is float64\[4,2\]",
        id="of_unequal_rows",
    ),
    pytest.param(
        lambda x: np.zeros((9,), np.int32),
        ValueError,
        r"the batch is int32\[9\].*must be 8",
        id="one_row_more",
    ),
    pytest.param(
        lambda x: {"t": np.asarray(["a"] * 8)},
        TypeError,
        r"leaf 't' is <U1\[8\].*numbers and boo",
        id="text",
    ),
    pytest.param(
        lambda x: {"t": np.zeros(8, "datetime64[s]")},
        TypeError,
        r"datetime64\[s\]\[8\]",
        id="dates",
    ),
    pytest.param(
        lambda x: {"k": jax.random.split(KEY, 8)},
        TypeError,
        r"leaf 'k' is key<fry>\[8\].*loss func",
        id="keys",
    ),
]


@pytest.mark.parametrize(("bad", "error", "message"), NOT_RETURNED)
def test_what_collate_fn_may_not_return(bad, error, message):
    raised(error, next, batches(range(16), bad), match=message)
    assert no_threads_left()


def in_a_batch(x):
    """The array of a batch that holds a number."""
    made = batches([0] * 8, lambda rows: {"x": np.array([0, x] * 4, x.dtype)})
    return next(made)["x"]


TOO_LARGE = [
    pytest.param(
        np.int64(2**31),
        r"leaf 'x' is int64\[8\] and has 2147483648, but JAX stores it as int32",
        id="int64",
    ),
    pytest.param(np.int64(-(2**40)), r"has -1099511627776, but", id="negative_int64"),
    pytest.param(
        np.uint64(2**32), r"has 4294967296, but JAX stores it as uint32", id="uint64"
    ),
    pytest.param(
        np.float64(-1e39),
        r"leaf 'x' is float64\[8\] and has -1e\+39, but JAX stores it as float32",
        id="float64",
    ),
]


@pytest.mark.parametrize(("value", "message"), TOO_LARGE)
def test_numbers_that_32_bits_do_not_hold_are_refused(value, message):
    raised(ValueError, in_a_batch, value, match=rf"^collate_fn: .*{message}")
    with jax.enable_x64(True):
        assert in_a_batch(value)[1] == value


@pytest.mark.parametrize(
    "value",
    [
        np.int64(-(2**31)),
        np.int64(2**31 - 1),
        np.uint64(2**32 - 1),
        np.float64(0.1),
        np.float64(-np.inf),
    ],
    ids=repr,
)
def test_numbers_that_32_bits_hold_are_taken(value):
    assert in_a_batch(value).dtype.itemsize == 4


# Errors at the call

BAD_ARGUMENTS = [
    pytest.param(
        {"batch_size": 0},
        ValueError,
        r"batch_size=0 must be a positive multiple of 4.*Use 4",
        id="batch_size-zero",
    ),
    pytest.param(
        {"batch_size": 10},
        ValueError,
        r"batch_size=10.*of 4.*\(data=2, fsdp=2\).*Use 8",
        id="batch_size-indivisible",
    ),
    pytest.param(
        {"batch_size": 64},
        ValueError,
        r"batch_size=64, but there are only 40 examples.*split",
        id="batch_size-too_large",
    ),
    pytest.param(
        {"examples": []}, ValueError, r"examples is empty", id="examples-empty"
    ),
    pytest.param(
        {"examples": iter([1])},
        TypeError,
        r"examples is a list_iterator.*list\(\.\.\.\)",
        id="examples-iterator",
    ),
    pytest.param(
        {"examples": {"a": 1}}, TypeError, r"examples is a dict", id="examples-dict"
    ),
    pytest.param(
        {"remainder": "keep"},
        ValueError,
        r"remainder='keep', but it must be \"drop\"",
        id="remainder-unknown",
    ),
    pytest.param(
        {"start": 6},
        ValueError,
        r"start=6, but the epoch has 5 batches.*0\.\.5",
        id="start-too_large",
    ),
    pytest.param({"start": -1}, ValueError, r"start=-1", id="start-negative"),
    pytest.param({"prefetch": -1}, ValueError, r"prefetch=-1", id="prefetch-negative"),
    pytest.param(
        {"num_workers": -1},
        ValueError,
        r"Data: .* num_workers=-1",
        id="num_workers-negative",
    ),
    pytest.param(
        {"num_workers": 2, "prefetch": 0},
        ValueError,
        r"num_workers=2.* work ahead",
        id="num_workers-without_prefetch",
    ),
    pytest.param(
        {"key": KEY, "epoch": -1}, ValueError, r"epoch=-1", id="epoch-negative"
    ),
]


@pytest.mark.parametrize(("wrong", "error", "message"), BAD_ARGUMENTS)
def test_errors_at_the_call(wrong, error, message):
    arguments = {"examples": range(40), "mesh": make_mesh(tensor=2, fsdp=2), **wrong}
    with pytest.raises(error, match=message):
        batches(arguments.pop("examples"), collate, **arguments)


def test_a_mesh_of_other_axes_is_refused_at_the_call():
    mesh = jax.make_mesh((8,), ("x",))
    with pytest.raises(ValueError, match=r"mesh has axes \('x',\)"):
        batches(range(40), collate, mesh=mesh)


# The order of an epoch: a permutation, uniform as far as can be told, the same for
# ever, in no memory.


def order_of(n, key, epoch):
    return epoch_order(n, key, epoch)(np.arange(n))


def test_it_is_a_permutation():
    for n in range(1, 40):
        for epoch in range(4):
            assert sorted(order_of(n, KEY, epoch).tolist()) == list(range(n)), (
                n,
                epoch,
            )
    n = 10**6 + 3
    assert np.array_equal(np.sort(order_of(n, KEY, 0)), np.arange(n))


def test_it_differs_by_epoch_and_key_and_stays_the_same_between_versions():
    keys = [jax.random.key(seed) for seed in range(4)]
    orders = [
        tuple(order_of(100, key, epoch).tolist()) for key in keys for epoch in range(4)
    ]
    assert len(set(orders)) == len(orders)
    # A run that is resumed under another version of NumPy or of this library goes on in
    # this order. Another one needs another name for `RunRecord.order`.
    assert order_of(10, jax.random.key(7), 3).tolist() == [2, 6, 8, 1, 3, 0, 5, 4, 7, 9]


def by_hand(n, keys, position):
    """The network with Python's numbers."""

    def mixed(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    height = next(h for h in range(math.isqrt(n), n + 1) if h * h >= n)
    width = math.ceil(fractions.Fraction(n, height))
    while True:
        x, y = divmod(position, width)
        for i, key in enumerate(keys.tolist()):
            if i % 2 == 0:
                x = (x + mixed(y ^ key)) % height
            else:
                y = (y + mixed(x ^ key)) % width
        position = x * width + y
        if position < n:
            return position


def test_it_is_the_network_by_hand():
    for n in (1, 2, 3, 10, 1000, 2**32 + 1, 2**40 - 1, 2**62 + 3, sys.maxsize):
        order = epoch_order(n, KEY, 5)
        positions = np.array(sorted({(n - 1) * i // 9 for i in range(10)}))
        assert order(positions).tolist() == [
            by_hand(n, order.keys, i) for i in positions.tolist()
        ]


def test_every_kind_of_key():
    expected = order_of(20, jax.random.key(3), 1)
    np.testing.assert_array_equal(order_of(20, jax.random.PRNGKey(3), 1), expected)
    on_mesh = jax.device_put(jax.random.key(3), replicated(make_mesh()))
    np.testing.assert_array_equal(order_of(20, on_mesh, 1), expected)
    assert sorted(order_of(20, jax.random.key(3, impl="rbg"), 1).tolist()) == list(
        range(20)
    )


@pytest.mark.parametrize("kind", ["two", "int", "none"])
def test_what_is_not_one_key_gives_no_order(kind):
    # Past the annotations, which are checked in tests only.
    order = inspect.unwrap(epoch_order)
    make: Any = {"two": lambda: jax.random.split(KEY), "int": int, "none": lambda: None}
    key = make[kind]()
    raised(ValueError, order, 10, key, 0, match="key must be one PRNG key")


# Uniform, by Pearson's test. By chance a p-value is below this once in a million; here
# every draw is fixed.

LOWEST = 1e-6


def p_values(n, num_rounds=20, num_draws=4000):
    """Those of the pairs of neighbours, at three places, and of all orders, if they are
    few. 200,000 draws were tried too."""
    keys = np.random.default_rng(1).integers(
        0, 2**64, (num_draws, num_rounds), dtype=np.uint64
    )
    orders = np.array([Permutation(n, key)(np.arange(n)) for key in keys])
    pairs = [
        orders[:, i] * n + orders[:, j]
        for i, j in ((0, 1), (0, n - 1), (n // 2 - 1, n // 2))
    ]
    counts = [
        np.bincount(x, minlength=n * n).reshape(n, n)[~np.eye(n, dtype=bool)]
        for x in pairs
    ]
    if n <= 5:
        seen = np.unique(orders, axis=0, return_counts=True)[1]
        counts.append(np.pad(seen, (0, math.factorial(n) - len(seen))))
    return [stats.chisquare(x).pvalue for x in counts]


def test_it_is_uniform():
    """And the test can fail: six rounds do not pass it."""
    for n in (5, 16):
        assert min(p_values(n)) > LOWEST, n
    assert min(p_values(5, num_rounds=6)) < LOWEST


def test_the_walk_through_a_long_epoch_is_uniform():
    """In a long epoch, check the origin of the first examples, and the distance between
    neighbours."""
    n = 10**9 + 7
    num = 200_000
    numbers = epoch_order(n, KEY, 0)(np.arange(num))
    for x in (numbers, np.diff(numbers) % n):
        assert (
            stats.chisquare(np.histogram(x, bins=1000, range=(0, n))[0]).pvalue > LOWEST
        )
    assert (
        stats.chisquare(
            np.bincount(numbers % 2 * 2 + np.arange(num) % 2, minlength=4)
        ).pvalue
        > LOWEST
    )


def test_however_many_examples_in_constant_memory():
    """Those of a Grain dataset that repeats itself are `sys.maxsize`."""
    as_floats = functools.partial(np.asarray, dtype=np.float32)
    for n in (10**9, sys.maxsize):
        made = rx.batches(
            range(n),
            as_floats,
            batch_size=8,
            mesh=make_mesh(),
            key=KEY,
            start=n // 8 - 3,
        )
        assert [batch.shape for batch in made] == [(8,)] * 3
