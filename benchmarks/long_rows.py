"""One long row over many devices: a LLaMA in plain Equinox, with and without
`split_activations`.

    python benchmarks/long_rows.py [--target v5p:2x2x2] [--layers 32] [--tokens \\
        32768] [--small]

It needs the compiler of the target, `python -m pip install "jax[tpu]"`, and no device.
The model has the sizes of LLaMA-3 8B: layers in a `lax.scan`, each under
`jax.checkpoint`, float32, AdamW. `plan` compiles its step for the only mesh that one
row allows, all devices along `tensor`.

Predicted: fewer bytes, because gathering the weights of a layer sends less than summing
its activations, and less memory, because each device keeps only its tokens between the
layers. Outcome (v5p:2x2x2, JAX 0.10.2): 92.9 GiB sent instead of 141.8, 51.4 GiB of a
chip instead of 66.8. On a chip of 60 GiB, only the second fits.
"""

import argparse
import functools
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax

import redco_eqx as rx


class Block(eqx.Module):
    """Grouped-query attention and a gated MLP, without any word about devices."""

    norms: list[eqx.nn.RMSNorm]
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    rotate: eqx.nn.RotaryPositionalEmbedding
    num_heads: int = eqx.field(static=True)
    num_kv_heads: int = eqx.field(static=True)

    def __init__(
        self, dim: int, hidden: int, num_heads: int, num_kv_heads: int, *, key: Any
    ):
        keys, linear = (
            jax.random.split(key, 7),
            functools.partial(eqx.nn.Linear, use_bias=False),
        )
        size = dim // num_heads
        self.norms = [eqx.nn.RMSNorm(dim, use_bias=False) for _ in range(2)]
        self.query, self.output = (linear(dim, dim, key=k) for k in keys[:2])
        self.key, self.value = (
            linear(dim, num_kv_heads * size, key=k) for k in keys[2:4]
        )
        self.gate, self.up = (linear(dim, hidden, key=k) for k in keys[4:6])
        self.down = linear(hidden, dim, key=keys[6])
        self.rotate = eqx.nn.RotaryPositionalEmbedding(size)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def __call__(self, x: jax.Array) -> jax.Array:
        length, dim = x.shape
        y = jax.vmap(self.norms[0])(x)
        query = jax.vmap(self.query)(y).reshape(length, self.num_heads, -1)
        key, value = (
            jax.vmap(f)(y).reshape(length, self.num_kv_heads, -1)
            for f in (self.key, self.value)
        )
        rotate = jax.vmap(self.rotate, in_axes=1, out_axes=1)
        heads = jax.nn.dot_product_attention(
            rotate(query), rotate(key), value, is_causal=True
        )
        x = x + jax.vmap(self.output)(heads.reshape(length, dim))
        y = jax.vmap(self.norms[1])(x)
        return x + jax.vmap(self.down)(
            jax.nn.silu(jax.vmap(self.gate)(y)) * jax.vmap(self.up)(y)
        )


class Llama(eqx.Module):
    """A LLaMA: a table, a stack of blocks, and a head."""

    table: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(
        self, num_layers: int, vocabulary: int, dim: int, *sizes: int, key: Any
    ):
        keys = jax.random.split(key, num_layers + 2)
        self.table = eqx.nn.Embedding(vocabulary, dim, key=keys[0])
        self.blocks = eqx.filter_vmap(lambda key: Block(dim, *sizes, key=key))(keys[2:])
        self.norm = eqx.nn.RMSNorm(dim, use_bias=False)
        self.head = eqx.nn.Linear(dim, vocabulary, use_bias=False, key=keys[1])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        body = jax.checkpoint(lambda x, own: (eqx.combine(own, static)(x), None))
        x, _ = jax.lax.scan(body, self.table.weight[tokens], arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss_fn(model: Llama, batch: jax.Array, key: Any) -> jax.Array:
    """Return the mean cross-entropy of the next tokens."""
    logits = jax.vmap(model)(batch[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="v5p:2x2x2")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--small", action="store_true", help="widths of a sixteenth")
    args = parser.parse_args()
    sizes = (8192, 256, 896, 32, 8) if args.small else (128256, 4096, 14336, 32, 8)
    for loss in (loss_fn, rx.split_activations(loss_fn)):
        found = rx.plan(
            lambda key: Llama(args.layers, *sizes, key=key),
            loss_fn=loss,
            optimizer=optax.adamw(1e-4),
            batch=jax.ShapeDtypeStruct((1, args.tokens + 1), np.int32),
            target=args.target,
            mesh={"data": 1, "tensor": 8},
            max_compilations=1,
        )
        print(found, "\n")
