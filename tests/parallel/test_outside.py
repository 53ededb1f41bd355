"""Ids and labels outside of the vocabulary, and tokens that do not count, are the same on every mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MESHES, QUICK_COMPILE
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx

ROWS, SIZE, BATCH, LENGTH = 64, 16, 8, 8
RNG = np.random.default_rng(0)
TABLE, BACK = (RNG.normal(size=shape).astype(np.float32) for shape in ((ROWS, SIZE), (BATCH, LENGTH, SIZE)))
HIDDEN = RNG.normal(size=(BATCH, LENGTH, SIZE)).astype(np.float32)
TOKENS = RNG.integers(0, ROWS, (BATCH, LENGTH)).astype(np.int32)


def on(name: str, table: Any, *rows: Any) -> Any:
    mesh = rx.make_mesh(**MESHES[name])
    cut = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
    return (jax.device_put(table, cut), *(jax.device_put(x, rx.batch_sharding(mesh)) for x in rows))


def run(function: Any, *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compile(QUICK_COMPILE)(*arguments)


@pytest.mark.parametrize("name", MESHES)
def test_a_lookup_is_that_of_take(name: str) -> None:
    ids = TOKENS.copy()
    ids[0, :6] = ROWS, -1, -ROWS, -ROWS - 1, 1000, -(2**31)

    def gradient(look_up: Any) -> Any:
        def loss(table: Any, ids: Any) -> Any:
            found = look_up(table, ids)
            return jnp.nansum(found * BACK), found

        return jax.value_and_grad(loss, has_aux=True)

    found = run(gradient(rx.layers.embed), *on(name, TABLE, ids))
    expected = run(gradient(lambda table, ids: jnp.take(table, ids, axis=0)), TABLE, ids)
    assert np.isnan(expected[0][1]).any(-1).sum() == 4
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def by_hand(hidden: Any, table: Any, labels: Any, weights: Any) -> Any:
    """In float64, of the tokens that count alone: the sum, and its gradients by hidden states and table."""
    hidden, table = hidden.astype(np.float64), table.astype(np.float64)
    by_hidden, by_table, total = np.zeros_like(hidden), np.zeros_like(table), 0.0
    for place in zip(*np.nonzero(weights * (labels != -100))):
        logits = table @ hidden[place]
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        total -= weights[place] * np.log(chances[labels[place]])
        chances[labels[place]] -= 1
        by_hidden[place] = weights[place] * (chances @ table)
        by_table += weights[place] * np.outer(chances, hidden[place])
    return total, (by_hidden, by_table)


@pytest.mark.parametrize("name", MESHES)
def test_what_does_not_count_is_zero_whatever_it_is_and_other_labels_outside_are_nan(name: str) -> None:
    """In chunks on half of the meshes; the logits of a finite hidden state overflow too."""
    hidden, labels = HIDDEN.copy(), TOKENS.copy()
    weights = RNG.uniform(0.5, 2, labels.shape).astype(np.float32)
    hidden[0, 0, 3], hidden[1, 1], hidden[2, 2, 0], hidden[3, 3] = np.nan, np.inf, -np.inf, 3e38
    labels[0, 0], labels[4, 4], labels[5, 5] = -100, ROWS, -7
    for place in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)):
        weights[place] = 0
    num_chunks = 2 if "tensor" in name or name == "one" else 1

    def loss(hidden: Any, table: Any, labels: Any, weights: Any) -> Any:
        return rx.layers.cross_entropy(hidden, table, labels, weights=weights, num_chunks=num_chunks).total

    table, *rows = on(name, TABLE, hidden, labels, weights)
    found = run(jax.value_and_grad(loss, argnums=(0, 1, 3)), rows[0], table, *rows[1:])
    total, expected = by_hand(hidden, TABLE, labels, weights)
    np.testing.assert_allclose(found[0], total, rtol=1e-5)
    for one, other in zip(found[1][:2], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    # By its weight the loss still depends on a token of weight 0 that is right.
    alone = by_hand(HIDDEN[6, 6][None], TABLE, labels[6, 6][None], np.ones(1))[0]
    np.testing.assert_allclose(found[1][2][6, 6], alone, rtol=1e-5)
    assert np.isfinite(found[1][2]).all()

    compiled = jax.jit(loss).lower(rows[0], table, *rows[1:]).compile(QUICK_COMPILE)
    for wrong in (ROWS, 1000, -7, -ROWS, -(2**31)):
        worse = labels.copy()
        worse[7, 7] = wrong
        assert np.isnan(compiled(rows[0], table, jax.device_put(worse, rows[1].sharding), rows[2])), wrong


def test_in_64_bits_a_label_is_not_cut() -> None:
    with jax.enable_x64(True):
        labels = TOKENS.astype(np.int64)
        labels[0, 0] = 2**32 + 5
        table, hidden, labels = on("2x2x2", TABLE, HIDDEN, labels)
        assert np.isnan(rx.layers.cross_entropy(hidden, table, labels).total)
        assert np.isnan(rx.layers.embed(table, labels)[0, 0]).all()
