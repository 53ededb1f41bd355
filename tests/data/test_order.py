"""The order of an epoch: a permutation, uniform as far as can be told, the same for ever, in no memory."""

import fractions
import functools
import inspect
import math
import sys

import jax
import numpy as np
import pytest
from scipy import stats

import redco_eqx as rx
from redco_eqx._data.order import Permutation, epoch_order
from redco_eqx._sharding.mesh import make_mesh, replicated

KEY = jax.random.key(0)


def order_of(n, key, epoch):
    return epoch_order(n, key, epoch)(np.arange(n))


def test_it_is_a_permutation():
    for n in range(1, 40):
        for epoch in range(4):
            assert sorted(order_of(n, KEY, epoch).tolist()) == list(range(n)), (n, epoch)
    n = 10**6 + 3
    assert np.array_equal(np.sort(order_of(n, KEY, 0)), np.arange(n))


def test_it_differs_by_epoch_and_key_and_stays_the_same_between_versions():
    keys = [jax.random.key(seed) for seed in range(4)]
    orders = [tuple(order_of(100, key, epoch).tolist()) for key in keys for epoch in range(4)]
    assert len(set(orders)) == len(orders)
    # A run that is resumed under another version of NumPy or of this library goes on in this order. Another one
    # needs another name for `RunRecord.order`.
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
        assert order(positions).tolist() == [by_hand(n, order.keys, i) for i in positions.tolist()]


def test_every_kind_of_key():
    expected = order_of(20, jax.random.key(3), 1)
    np.testing.assert_array_equal(order_of(20, jax.random.PRNGKey(3), 1), expected)
    on_mesh = jax.device_put(jax.random.key(3), replicated(make_mesh()))
    np.testing.assert_array_equal(order_of(20, on_mesh, 1), expected)
    assert sorted(order_of(20, jax.random.key(3, impl="rbg"), 1).tolist()) == list(range(20))
    # Past the annotations, which are checked in tests only.
    order = inspect.unwrap(epoch_order)
    for key in (jax.random.split(KEY), 0, None):
        with pytest.raises(ValueError, match="key must be one PRNG key"):
            order(10, key, 0)


# Uniform, by Pearson's test. By chance a p-value is below this once in a million; here every draw is fixed.

LOWEST = 1e-6


def p_values(n, num_rounds=20, num_draws=4000):
    """Those of the pairs of neighbours, at three places, and of all orders, if they are few. 200,000 draws were
    tried too."""
    keys = np.random.default_rng(1).integers(0, 2**64, (num_draws, num_rounds), dtype=np.uint64)
    orders = np.array([Permutation(n, key)(np.arange(n)) for key in keys])
    pairs = [orders[:, i] * n + orders[:, j] for i, j in ((0, 1), (0, n - 1), (n // 2 - 1, n // 2))]
    counts = [np.bincount(x, minlength=n * n).reshape(n, n)[~np.eye(n, dtype=bool)] for x in pairs]
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
    """In a long epoch, check the origin of the first examples, and the distance between neighbours."""
    n, num = 10**9 + 7, 200_000
    numbers = epoch_order(n, KEY, 0)(np.arange(num))
    for x in (numbers, np.diff(numbers) % n):
        assert stats.chisquare(np.histogram(x, bins=1000, range=(0, n))[0]).pvalue > LOWEST
    assert stats.chisquare(np.bincount(numbers % 2 * 2 + np.arange(num) % 2, minlength=4)).pvalue > LOWEST


def test_however_many_examples_in_constant_memory():
    """Those of a Grain dataset that repeats itself are `sys.maxsize`."""
    as_floats = functools.partial(np.asarray, dtype=np.float32)
    for n in (10**9, sys.maxsize):
        made = rx.batches(range(n), as_floats, batch_size=8, mesh=make_mesh(), key=KEY, start=n // 8 - 3)
        assert [batch.shape for batch in made] == [(8,)] * 3
