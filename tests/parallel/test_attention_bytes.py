"""`explain` of a user's model with `attention`: the roles of the weights, and the bytes
that a step sends."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import abstract, filled, mesh_of, stepped

import redco_eqx as rx
from redco_eqx._parallel import attention as blocks

HEADS, SIZE, LENGTH, VOCABULARY = 8, 8, 32, 64
DIM = HEADS * SIZE


def each(layer: Any) -> Any:
    return jax.vmap(jax.vmap(layer))


class Block(eqx.Module):
    """A layer as on the page "Attention for long texts", with grouped heads."""

    norm: eqx.nn.RMSNorm
    projections: tuple[eqx.nn.Linear, eqx.nn.Linear, eqx.nn.Linear]
    output: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, kv_heads: int, key: Any):
        keys = jax.random.split(key, 6)
        self.norm = eqx.nn.RMSNorm(DIM)
        self.projections = (
            eqx.nn.Linear(DIM, DIM, key=keys[0]),
            eqx.nn.Linear(DIM, kv_heads * SIZE, key=keys[1]),
            eqx.nn.Linear(DIM, kv_heads * SIZE, key=keys[2]),
        )
        self.output = eqx.nn.Linear(DIM, DIM, key=keys[3])
        self.up = eqx.nn.Linear(DIM, 4 * DIM, key=keys[4])
        self.down = eqx.nn.Linear(4 * DIM, DIM, key=keys[5])

    def __call__(self, x: Any, options: dict[str, Any]) -> Any:
        h = each(self.norm)(x)
        q, k, v = rx.layers.column(h, *self.projections, unit=SIZE)
        q, k, v = (y.reshape(*x.shape[:2], -1, SIZE) for y in (q, k, v))
        heads = rx.layers.attention(q, k, v, **options)
        x = x + rx.layers.row(heads.reshape(x.shape), self.output, unit=SIZE)
        (h,) = rx.layers.column(each(self.norm)(x), self.up)
        return x + rx.layers.row(jax.nn.gelu(h), self.down)


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    block: Block
    head: eqx.nn.Linear

    def __init__(self, kv_heads: int, key: Any):
        keys = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(VOCABULARY, DIM, key=keys[0])
        self.block = Block(kv_heads, keys[1])
        self.head = eqx.nn.Linear(DIM, VOCABULARY, use_bias=False, key=keys[2])


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 5},
    "texts": {"causal": True},
    "grouped": {"causal": True},
    "blocks": {"causal": True, "window": 5},
}
KV_HEADS = {"grouped": 4}


def batch_of(num_rows: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (num_rows, LENGTH + 1)).astype(np.int32)
    numbers = np.broadcast_to(1 + np.arange(LENGTH) // 10, (num_rows, LENGTH))
    return {"tokens": tokens, "segments": numbers.astype(np.int32)}


@pytest.mark.parametrize("mesh_name", ["data2xtensor4", "2x2x2"])
@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_are_predicted(name: str, mesh_name: str, monkeypatch: Any) -> None:
    """Within a tenth, and never less than the lower bound."""
    if name == "blocks":
        monkeypatch.setattr(blocks, "MOST_PAIRS", 8 * LENGTH)
        monkeypatch.setattr(blocks, "SMALLEST_BLOCK", 8)

    def loss_fn(model: Model, batch: Any, key: Any) -> rx.Mean:
        options = dict(OPTIONS[name])
        if name == "texts":
            options["segments"] = batch["segments"]
        x = each(model.embedding)(batch["tokens"][:, :-1])
        logits = each(model.head)(model.block(x, options))
        labels = batch["tokens"][:, 1:]
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return rx.Mean(jnp.sum(nats), nats.size)

    mesh = mesh_of(mesh_name)
    kv_heads = KV_HEADS.get(name, HEADS)
    model = filled(abstract(lambda key: Model(kv_heads, key)), jnp.float32, 0)
    explanation = rx.explain(model, mesh, loss_fn=loss_fn, batch=batch_of())
    roles = {path: d.role for path, d in explanation.decisions.items()}
    for i in range(3):
        assert roles[f"block.projections.{i}.weight"] == "column"
    assert roles["block.output.weight"] == "row"

    shardings = explanation.shardings
    step = stepped(
        model, batch_of(), mesh, loss_fn, optax.sgd(0.1), shardings=shardings
    )
    sent = rx.communication(step.compiled, mesh).total.sent_bytes
    predicted = explanation.communication
    assert predicted is not None
    assert not predicted.opaque
    assert predicted.num_bytes_unmerged == pytest.approx(sent, rel=0.1)
    assert 0 < predicted.at_least <= sent
