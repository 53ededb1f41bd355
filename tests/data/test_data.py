import gc
import inspect
import json
import os
import pathlib
import signal
import socket
import threading
import time
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_two_processes
from hypothesis import given, settings
from hypothesis import strategies as st

import redco_eqx as rx
from redco_eqx._data.order import epoch_order
from redco_eqx._data.placement import batch_sizes, needed_rows
from redco_eqx._sharding.mesh import batch_sharding, make_mesh, num_batch_shards, replicated

MESHES = {
    "one": {"data": 1},
    "data": {},
    "fsdp": {"fsdp": 8},
    "tensor": {"tensor": 8},
    "mixed": {"tensor": 2, "fsdp": 2},
}
KEY = jax.random.key(0)


@pytest.fixture(params=MESHES)
def mesh(request):
    return make_mesh(**MESHES[request.param])


class Counting:
    """A sequence of the numbers below `n` that remembers what was read."""

    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert type(i) is int
        assert 0 <= i < self.n
        self.read.append(i)
        return i


def collate(examples):
    return {
        "x": np.asarray(examples, np.int32),
        "nested": [np.stack([np.full((2, 3), x, np.float32) for x in examples])],
    }


def batches(examples, collate_fn, *, prefetch=2, **arguments):
    return rx.batches(rx.Data(examples, prefetch=prefetch), collate_fn, **arguments)


def order_of(num_examples, key, epoch):
    return epoch_order(num_examples, key, epoch)(np.arange(num_examples))


def values(made):
    return [np.asarray(batch["x"]).tolist() for batch in made]


def threads():
    return [t for t in threading.enumerate() if t.name.startswith("redco_eqx")]


def threads_end(seconds=5.0):
    end = time.monotonic() + seconds
    while threads() and time.monotonic() < end:
        time.sleep(0.005)
    return not threads()


# Invariants


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(MESHES)),
    num_examples=st.integers(1, 50),
    multiple=st.integers(1, 3),
    remainder=st.sampled_from(["split", "pad", "drop"]),
    shuffle=st.booleans(),
    prefetch=st.integers(0, 3),
    data=st.data(),
)
def test_no_example_lost_or_counted_twice(name, num_examples, multiple, remainder, shuffle, prefetch, data):
    mesh = make_mesh(**MESHES[name])
    batch_size = multiple * num_batch_shards(mesh)
    if remainder == "drop" and num_examples < batch_size:
        num_examples += batch_size
    key = KEY if shuffle else None
    order = order_of(num_examples, KEY, 1).tolist() if shuffle else list(range(num_examples))
    arguments = {"batch_size": batch_size, "mesh": mesh, "key": key, "epoch": 1}
    arguments |= {"remainder": remainder, "prefetch": prefetch}
    examples = Counting(num_examples)
    made = list(batches(examples, collate, **arguments))

    flat = [x for batch in values(made) for x in batch]
    whole = num_examples - num_examples % batch_size
    if remainder == "split":
        assert flat == order
    elif remainder == "drop":
        assert flat == order[:whole]
    else:
        assert flat[:num_examples] == order
        assert set(flat[num_examples:]) <= {order[-1]}
        assert len(flat) % batch_size == 0
    assert examples.read == flat[:num_examples]  # each row once, no other row, in order

    num_whole, tail = batch_sizes(examples, batch_size, remainder, mesh)
    assert [len(x) for x in values(made)] == [batch_size] * num_whole + tail

    start = data.draw(st.integers(0, len(made)))
    assert values(batches(examples, collate, start=start, **arguments)) == values(made)[start:]


def test_placed_batch_is_the_collated_one(mesh):
    collated = []

    def remember(examples):
        collated.append(collate(examples))
        return collated[-1]

    made = list(batches(range(27), remember, batch_size=8, mesh=mesh, key=KEY, remainder="split", prefetch=0))
    assert len(made) == len(collated)
    for batch, host in zip(made, collated):
        split = len(host["x"]) % num_batch_shards(mesh) == 0
        expected = batch_sharding(mesh) if split else replicated(mesh)
        for x, y in zip(jax.tree.leaves(batch), jax.tree.leaves(host), strict=True):
            assert x.sharding == expected
            assert x.dtype == y.dtype
            assert x.committed
            np.testing.assert_array_equal(x, y)


def test_one_batch_shape_except_for_the_tail():
    shapes = [
        batch["x"].shape[0]
        for batch in batches(range(29), collate, batch_size=16, mesh=make_mesh(), remainder="split")
    ]
    assert shapes == [16, 8, 5]


@pytest.mark.parametrize("remainder", ["drop", "split", "pad"])
def test_batches_do_not_depend_on_the_mesh(remainder):
    made = {
        name: np.concatenate(
            values(
                batches(
                    range(40),
                    collate,
                    batch_size=16,
                    mesh=make_mesh(**kwargs),
                    key=KEY,
                    remainder=remainder,
                )
            )
        ).tolist()
        for name, kwargs in MESHES.items()
    }
    assert all(x == made["one"] for x in made.values())


# Rows of a process


def rows_of(indices, size):
    return needed_rows(dict(enumerate(indices)), size).tolist()


def test_needed_rows():
    assert rows_of([(slice(0, 2),), (slice(2, 4),)], 8) == [0, 1, 2, 3]
    assert rows_of([(slice(4, 6),), (slice(6, 8),)], 8) == [4, 5, 6, 7]
    # Replicated, or a tensor axis over all of the process's devices.
    assert rows_of([(slice(None),)] * 4, 8) == list(range(8))
    # Devices of processes that alternate along the axis, and pieces that several devices hold.
    assert rows_of([(slice(4, 5),), (slice(0, 1),), (slice(0, 1),), (slice(6, 7),)], 8) == [0, 4, 6]
    assert rows_of([], 8) == []


def test_needed_rows_of_a_sharding(mesh):
    indices = batch_sharding(mesh).addressable_devices_indices_map((24,))
    assert needed_rows(indices, 24).tolist() == list(range(24))
    # As many processes as devices: together they need every row.
    alone = [needed_rows({device: index}, 24).tolist() for device, index in indices.items()]
    assert sorted({row for rows in alone for row in rows}) == list(range(24))
    assert all(len(rows) == 24 // num_batch_shards(mesh) for rows in alone)


def test_only_needed_rows_are_read():
    examples = Counting(1_000_000)
    made = batches(examples, collate, batch_size=8, mesh=make_mesh(), key=KEY, start=70_000, prefetch=0)
    assert examples.read == []
    next(made)
    assert examples.read == order_of(1_000_000, KEY, 0)[560_000:560_008].tolist()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes(tmp_path):
    run_two_processes(pathlib.Path(__file__).with_name("_two_process_data.py"), tmp_path, str(tmp_path))
    results = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]

    order = order_of(29, jax.random.key(5), 2).tolist()
    whole = [order[:8], order[8:16], order[16:24]]
    tail = {"data": [order[24:]], "interleaved": [order[24:]], "tensor": [order[24:]]}
    tail["mixed"] = [order[24:28], order[28:]]
    for name, last in tail.items():
        for process, result in enumerate(results):
            assert [batch["x"] for batch in result[name]["batches"]] == whole + last
            assert [batch["wide"] for batch in result[name]["batches"]] == [
                [[x] * 3 for x in batch] for batch in whole + last
            ]
            if name in ("data", "mixed"):
                mine = [batch[4 * process :][:4] for batch in whole]
            elif name == "interleaved":
                mine = [batch[process::2] for batch in whole]
            else:
                mine = whole
            # The first tail of "mixed" is split four ways, so each process holds half of it.
            my_last = [last[0][2 * process :][:2], last[1]] if name == "mixed" else last
            assert result[name]["seen"] == mine + my_last, (name, process)
    assert results[0]["refused"] is None
    assert "len(examples) is 29 on process 0, but 28 on process 1" in results[1]["refused"]


# Prefetch


def test_prefetch_runs_ahead_and_no_further():
    examples = Counting(80)
    made = batches(examples, collate, batch_size=8, mesh=make_mesh(), prefetch=3)
    time.sleep(0.05)
    assert examples.read == []
    assert not threads()
    for num_taken in range(1, 4):
        next(made)
        end = time.monotonic() + 5
        while len(examples.read) < 8 * (num_taken + 3) and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.02)
        assert len(examples.read) == 8 * (num_taken + 3)
    made.close()
    assert threads_end()


def test_no_thread_without_prefetch():
    made = batches(range(80), collate, batch_size=8, mesh=make_mesh(), prefetch=0)
    next(made)
    assert not threads()


def consume_all(made):
    list(made)


def close_early(made):
    next(made)
    made.close()
    with pytest.raises(StopIteration):
        next(made)


def break_out(made):
    for _ in made:
        break
    del made


def raise_in_consumer(made):
    def loop(made):
        for _ in made:
            raise RuntimeError("consumer")

    with pytest.raises(RuntimeError, match="consumer"):
        loop(made)


def lose_in_a_cycle(made):
    next(made)
    cycle = [made]
    cycle.append(cycle)


@pytest.mark.parametrize("consume", [consume_all, close_early, break_out, raise_in_consumer, lose_in_a_cycle])
@pytest.mark.parametrize("prefetch", [1, 2, 50])
def test_thread_ends(consume, prefetch):
    consume(batches(range(80), collate, batch_size=8, mesh=make_mesh(), prefetch=prefetch))
    gc.collect()
    assert threads_end()


def test_closing_does_not_wait_for_a_slow_batch():
    release = threading.Event()

    def slow(examples):
        if 0 not in examples:
            release.wait(10)
        return collate(examples)

    calls = Counting(800)
    made = batches(calls, slow, batch_size=8, mesh=make_mesh(), prefetch=2)
    next(made)
    begin = time.monotonic()
    made.close()
    assert time.monotonic() - begin < 1
    release.set()
    assert threads_end()
    assert len(calls.read) <= 16  # the batch in hand is finished, none is begun


def test_interrupt_while_waiting():
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals reach the main thread only")
    release = threading.Event()

    def stuck(examples):
        release.wait(10)
        return collate(examples)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    made = batches(range(80), stuck, batch_size=8, mesh=make_mesh())
    try:
        timer.start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(made)
        assert time.monotonic() - begin < 5
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
        release.set()
    assert threads_end()


@pytest.mark.parametrize("prefetch", [0, 1, 4])
@pytest.mark.parametrize("error", [KeyError("bad row"), StopIteration()])
def test_exception_arrives_at_its_batch(prefetch, error):
    class Broken(Counting):
        def __getitem__(self, i):
            if i == 19:
                raise error
            return super().__getitem__(i)

    made = batches(Broken(80), collate, batch_size=8, mesh=make_mesh(), prefetch=prefetch)
    assert [np.asarray(next(made)["x"])[0] for _ in range(2)] == [0, 8]
    # A generator turns StopIteration into RuntimeError, so that it is not taken for the end.
    with pytest.raises((KeyError, RuntimeError)) as caught:
        next(made)
    cause = caught.value if isinstance(error, KeyError) else caught.value.__cause__
    assert cause is error
    assert "__getitem__" in [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert any("start=2" in note for note in error.__notes__)
    assert list(made) == []
    assert threads_end()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_enable_x64_reaches_the_thread(prefetch):
    def wide(examples):
        return np.asarray(examples, np.float64) + 1e-12

    with jax.enable_x64(True):
        made = batches(range(8), wide, batch_size=8, mesh=make_mesh(), prefetch=prefetch)
        assert [x.dtype for x in made] == [np.float64]
    made = batches(range(8), wide, batch_size=8, mesh=make_mesh(), prefetch=prefetch)
    assert [x.dtype for x in made] == [np.float32]


# What collate_fn may return


class Pair(eqx.Module):
    x: jax.Array
    none: None


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: np.asarray(x, bool),
        lambda x: np.asarray(x, np.uint8),
        lambda x: np.asarray(x, np.complex64),
        lambda x: np.asarray(x).astype(jnp.bfloat16),
        lambda x: jnp.asarray(x, jnp.float16),
        lambda x: np.zeros((len(x), 0), np.float32),
        lambda x: (np.asarray(x), {"a": jnp.asarray(x)}, None),
        lambda x: Pair(jnp.asarray(x), None),
        lambda x: np.stack([x, x], axis=1)[:, ::-1],
    ],
)
def test_arrays_that_are_accepted(convert, mesh):
    (batch,) = batches(range(8), convert, batch_size=8, mesh=mesh)
    expected = convert(list(range(8)))
    assert jax.tree.structure(batch) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(batch), jax.tree.leaves(expected)):
        assert x.dtype == jnp.asarray(y).dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_examples_of_every_kind():
    rows = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    for examples in (rows, list(rows), tuple(rows), jnp.asarray(rows)):
        (batch,) = batches(examples, np.stack, batch_size=8, mesh=make_mesh())
        np.testing.assert_array_equal(batch, rows)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (lambda x: None, ValueError, r"returned None, which holds no array.*leading dim 8"),
        (lambda x: {"a": []}, ValueError, r"holds no array"),
        (lambda x: {"a": np.float32(1)}, ValueError, r"leaf 'a' is float32\[\].*must be 8"),
        (lambda x: {"a": 1.0}, TypeError, r"leaf 'a' is a float, but must be a NumPy array"),
        (lambda x: {"a": list(x)}, TypeError, r"leaf 'a.0' is a int"),
        (lambda x: "text", TypeError, r"the batch is a str"),
        (lambda x: (np.zeros((8, 2)), np.zeros((4, 2))), ValueError, r"leaf '1' is float64\[4,2\]"),
        (lambda x: np.zeros((9,), np.int32), ValueError, r"the batch is int32\[9\].*must be 8"),
        (lambda x: {"t": np.asarray(["a"] * 8)}, TypeError, r"leaf 't' is <U1\[8\].*numbers and boo"),
        (lambda x: {"t": np.asarray([{}] * 8)}, TypeError, r"leaf 't' is object\[8\]"),
        (lambda x: {"t": np.zeros(8, "datetime64[s]")}, TypeError, r"datetime64\[s\]\[8\]"),
        (lambda x: {"k": jax.random.split(KEY, 8)}, TypeError, r"leaf 'k' is key<fry>\[8\].*loss func"),
    ],
)
def test_what_collate_fn_may_not_return(bad, error, message):
    made = batches(range(16), bad, batch_size=8, mesh=make_mesh())
    with pytest.raises(error, match=message):
        next(made)
    assert threads_end()


# Errors at the call


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"batch_size": 0}, ValueError, r"batch_size=0 must be a positive multiple of 4.*Use 4"),
        ({"batch_size": -4}, ValueError, r"batch_size=-4 must be"),
        ({"batch_size": 10}, ValueError, r"batch_size=10.*of 4.*\(data=2, fsdp=2\).*Use 8"),
        ({"batch_size": 64}, ValueError, r"batch_size=64, but there are only 40 examples.*split"),
        ({"examples": []}, ValueError, r"examples is empty"),
        ({"examples": iter([1])}, TypeError, r"examples is a list_iterator.*list\(\.\.\.\)"),
        ({"examples": {"a": 1}}, TypeError, r"examples is a dict"),
        ({"remainder": "keep"}, ValueError, r"remainder='keep', but it must be \"drop\""),
        ({"start": 6}, ValueError, r"start=6, but the epoch has 5 batches.*0\.\.5"),
        ({"start": -1}, ValueError, r"start=-1"),
        ({"prefetch": -1}, ValueError, r"prefetch=-1"),
        ({"key": KEY, "epoch": -1}, ValueError, r"epoch=-1"),
        ({"mesh": jax.make_mesh((8,), ("data",))}, ValueError, r"not of AxisType.Auto"),
        ({"mesh": jax.make_mesh((8,), ("x",))}, ValueError, r"mesh has axes \('x',\)"),
    ],
)
def test_errors_at_the_call(arguments, error, message):
    defaults = {"examples": range(40), "batch_size": 8, "mesh": make_mesh(tensor=2, fsdp=2)}
    arguments = defaults | arguments
    with pytest.raises(error, match=message):
        batches(arguments.pop("examples"), collate, **arguments)


def test_key_that_is_not_one_key():
    # Past the annotations, which are checked in tests only.
    order = inspect.unwrap(epoch_order)
    for key in (jax.random.split(KEY), 0, None):
        with pytest.raises(ValueError, match="key must be one PRNG key"):
            order(10, key, 0)


def test_start_at_the_end_yields_nothing():
    assert list(batches(range(16), collate, batch_size=8, mesh=make_mesh(), start=2)) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.int64(2**31), r"leaf 'x' is int64\[8\] and has 2147483648, but JAX stores it as int32"),
        (np.int64(-(2**40)), r"has -1099511627776, but"),
        (np.uint64(2**32), r"has 4294967296, but JAX stores it as uint32"),
        (np.float64(-1e39), r"leaf 'x' is float64\[8\] and has -1e\+39, but JAX stores it as float32"),
    ],
)
def test_what_32_bits_do_not_hold_is_refused(value, message):
    def made(x):
        return next(
            rx.batches(
                [0] * 8, lambda rows: {"x": np.array([0, x] * 4, x.dtype)}, batch_size=8, mesh=make_mesh()
            )
        )["x"]

    with pytest.raises(ValueError, match=rf"^collate_fn: .*{message}"):
        made(value)
    with jax.enable_x64(True):
        assert made(value)[1] == value


@pytest.mark.parametrize(
    "x", [np.int64(-(2**31)), np.int64(2**31 - 1), np.uint64(2**32 - 1), np.float64(0.1), np.float64(-np.inf)]
)
def test_what_32_bits_hold_is_taken(x):
    made = next(rx.batches([0] * 8, lambda rows: np.full(8, x), batch_size=8, mesh=make_mesh()))
    assert made.dtype.itemsize == 4
    np.testing.assert_allclose(made, np.full(8, x), rtol=1e-7)  # a float64 is rounded to float32
