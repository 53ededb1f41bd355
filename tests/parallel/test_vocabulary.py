"""Both ends of a language model over a split vocabulary: the lookup, and the
cross-entropy.

Ids and labels outside of the vocabulary, and tokens that do not count, are the same on
every mesh.
"""

from collections import Counter
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import NamedSharding, PartitionSpec

import redco_eqx as rx
from redco_eqx._compiled.communication import communication

ROWS, SIZE, BATCH, LENGTH = 64, 16, 8, 8
RNG = np.random.default_rng(0)
TABLE, BACK = (
    RNG.normal(size=shape).astype(np.float32)
    for shape in ((ROWS, SIZE), (BATCH, LENGTH, SIZE))
)
HIDDEN = RNG.normal(size=(BATCH, LENGTH, SIZE)).astype(np.float32)
TOKENS = RNG.integers(0, ROWS, (BATCH, LENGTH)).astype(np.int32)


def on(name: str, table: Any, *rows: Any) -> Any:
    mesh = mesh_of(name)
    is_even = len(table) % mesh.shape["tensor"] == 0
    cut = NamedSharding(mesh, PartitionSpec("tensor" if is_even else None, "fsdp"))
    return (
        jax.device_put(table, cut),
        *(jax.device_put(x, rx.batch_sharding(mesh)) for x in rows),
    )


@pytest.mark.parametrize(
    ("name", "parallel"), [("fsdp8", False), ("2x2x2", False), ("data2xtensor4", True)]
)
def test_a_lookup_is_that_of_take(name: str, parallel: bool) -> None:
    ids = TOKENS.copy()
    ids[0, :6] = ROWS, -1, -ROWS, -ROWS - 1, 1000, -(2**31)

    def loss(table: Any, ids: Any) -> Any:
        found = rx.layers.embed(table, ids, sequence_parallel=parallel)
        return jnp.nansum(found * BACK), found

    (total, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        *on(name, TABLE, ids)
    )
    is_inside = (ids >= -ROWS) & (ids < ROWS)
    expected = np.where(
        is_inside[..., None], TABLE[np.where(is_inside, ids, 0)], np.nan
    )
    by_hand = np.zeros_like(TABLE)
    np.add.at(by_hand, ids[is_inside], BACK[is_inside])
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(gradient, by_hand, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(total, np.nansum(expected * BACK), rtol=1e-4)


def by_hand(hidden: Any, table: Any, labels: Any, weights: Any) -> Any:
    """In float64, of the tokens that count alone: the sum, and its gradients by hidden
    states and table."""
    hidden, table = hidden.astype(np.float64), table.astype(np.float64)
    by_hidden = np.zeros_like(hidden)
    by_table = np.zeros_like(table)
    total = 0.0
    for place in zip(*np.nonzero(weights * (labels != -100))):
        logits = table @ hidden[place]
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        total -= weights[place] * np.log(chances[labels[place]])
        chances[labels[place]] -= 1
        by_hidden[place] = weights[place] * (chances @ table)
        by_table += weights[place] * np.outer(chances, hidden[place])
    return total, (by_hidden, by_table)


@pytest.mark.parametrize(
    ("name", "num_chunks", "parallel", "num_rows"),
    [
        ("one", 2, False, ROWS),
        ("fsdp8", 1, False, ROWS),
        ("2x2x2", 2, False, ROWS),
        ("2x2x2", 1, True, ROWS),
        # A table that does not divide over `tensor` is whole.
        ("data2xtensor4", 2, True, ROWS - 2),
    ],
)
def test_what_does_not_count_is_zero_whatever_it_is_and_other_labels_outside_are_nan(
    name: str, num_chunks: int, parallel: bool, num_rows: int
) -> None:
    """The logits of a finite hidden state overflow too."""
    hidden = HIDDEN.copy()
    labels = TOKENS % num_rows
    whole = TABLE[:num_rows]
    weights = np.random.default_rng(1).uniform(0.5, 2, labels.shape).astype(np.float32)
    hidden[0, 0, 3] = np.nan
    hidden[1, 1] = np.inf
    hidden[2, 2, 0] = -np.inf
    hidden[3, 3] = 3e38
    labels[0, 0], labels[4, 4], labels[5, 5] = -100, ROWS, -7
    for place in ((1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)):
        weights[place] = 0

    def loss(hidden: Any, table: Any, labels: Any, weights: Any) -> Any:
        options = {"num_chunks": num_chunks, "sequence_parallel": parallel}
        mean = rx.layers.cross_entropy(
            hidden, table, labels, weights=weights, **options
        )
        return mean.total, mean.weight

    table, *rows = on(name, whole, hidden, labels, weights)
    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 3), has_aux=True))
    (total, weight), found = gradient(rows[0], table, *rows[1:])
    expected_total, expected = by_hand(hidden, whole, labels, weights)
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    np.testing.assert_allclose(weight, np.sum(weights * (labels != -100)), rtol=1e-5)
    for one, other in zip(found[:2], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    # By its weight the loss still depends on a token of weight 0 that is right.
    alone = by_hand(HIDDEN[6, 6][None], whole, labels[6, 6][None], np.ones(1))[0]
    np.testing.assert_allclose(found[2][6, 6], alone, rtol=1e-5)
    assert np.isfinite(found[2]).all()

    for wrong in (ROWS, 1000, -7, -ROWS, -(2**31)):
        worse = labels.copy()
        worse[7, 7] = wrong
        (total, _), _ = gradient(
            rows[0], table, jax.device_put(worse, rows[1].sharding), rows[2]
        )
        assert np.isnan(total), wrong


def test_in_64_bits_a_label_is_not_cut() -> None:
    with jax.enable_x64(True):
        labels = TOKENS.astype(np.int64)
        labels[0, 0] = 2**32 + 5
        for name in ("one", "2x2x2"):
            given = on(name, TABLE, HIDDEN, labels)
            loss = jax.jit(
                lambda table, *rest: (
                    rx.layers.cross_entropy(rest[0], table, rest[1]).total
                )
            )
            assert np.isnan(loss(*given))
        found = jax.jit(rx.layers.embed)(given[0], given[2])[0, 0]
        assert np.isnan(found).all()


@pytest.mark.parametrize(
    ("name", "tied", "num_chunks", "parallel"),
    [("fsdp8", True, 4, False), ("2x2x2", False, 4, False), ("2x2x2", False, 1, True)],
)
def test_neither_the_batch_nor_the_logits_are_gathered(
    name, tied, num_chunks, parallel
):
    """Over fsdp each table is gathered once, and over tensor the stream if it is
    split."""
    mesh = mesh_of(name)
    rows = rx.batch_sharding(mesh_of(name))

    def loss(model: dict[str, Any], ids: Any, labels: Any) -> Any:
        table = model["embedding"].weight
        hidden = jnp.tanh(rx.layers.embed(table, ids, sequence_parallel=parallel))
        head = table if tied else model["head"]
        options = {"num_chunks": num_chunks, "sequence_parallel": parallel}
        return rx.layers.cross_entropy(hidden, head, labels, **options).value

    rng = np.random.default_rng(0)
    model: dict[str, Any] = {
        "embedding": eqx.nn.Embedding(128, 64, key=jax.random.key(0))
    }
    if not tied:
        model["head"] = eqx.nn.Linear(64, 128, key=jax.random.key(0))
    shardings = rx.shard_rules(model, mesh)
    ids, labels = rng.integers(0, 128, (2, 8, 16)).astype(np.int32)
    placed = eqx.filter_shard(model, shardings), *jax.device_put((ids, labels), rows)
    found = communication(
        jax.jit(jax.grad(loss), out_shardings=shardings).lower(*placed).compile(), mesh
    )
    assert {c.kind for c in found} <= {"all-gather", "all-reduce", "reduce-scatter"}
    gathered = Counter()
    for c in found:
        gathered[c.axes] += c.total_bytes if c.kind == "all-gather" else 0
    tables = 4 * 128 * 64 // mesh.shape["tensor"] * (1 if tied else 2)
    stream = 4 * 8 * 16 * 64 // (mesh.shape["data"] * mesh.shape["fsdp"])
    # Of the stream: the lookup's gradient and the head's input.
    expected = Counter({("fsdp",): tables, ("tensor",): 2 * stream if parallel else 0})
    assert +gathered == +expected, found
    over_tensor = [c for c in found if (c.kind, c.axes) == ("all-reduce", ("tensor",))]
    reduced = sum(c.count for c in over_tensor if c.result_bytes >= stream)
    assert reduced == (2 if mesh.shape["tensor"] > 1 and not parallel else 0)
