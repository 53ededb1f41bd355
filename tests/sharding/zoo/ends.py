"""Layers at the ends of a residual stream, and square siblings that only look consecutive."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import COL, HEADS, LAYERS, ROW, SEQ, WHOLE, D, Entry, F, attend, each, linear, pairs, squared_loss

PATCH = 12


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    lin_q: eqx.nn.Linear
    lin_k: eqx.nn.Linear
    lin_v: eqx.nn.Linear
    lin_o: eqx.nn.Linear
    norm2: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        *keys, last = jax.random.split(key, 5)
        self.lin_q, self.lin_k, self.lin_v, self.lin_o = (linear(D, D, k) for k in keys)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)
        self.mlp = eqx.nn.MLP(D, D, F, 1, activation=jax.nn.gelu, key=last)

    def __call__(self, x):
        h = each(self.norm1, x)
        q, k, v = (each(layer, h) for layer in (self.lin_q, self.lin_k, self.lin_v))
        x = x + each(self.lin_o, attend(q, k, v, HEADS))
        return x + each(self.mlp, each(self.norm2, x))


class VisionTransformer(eqx.Module):
    """Patches that come flat, and a head; the blocks in a list."""

    patch_embed: eqx.nn.Linear
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key, num_classes):
        k1, k2, *keys = jax.random.split(key, 2 + LAYERS)
        self.patch_embed, self.head = linear(PATCH, D, k1), linear(D, num_classes, k2)
        self.blocks, self.norm = [Block(k) for k in keys], eqx.nn.LayerNorm(D)

    def __call__(self, x):
        x = each(self.patch_embed, x)
        for block in self.blocks:
            x = block(x)
        return each(self.head, each(self.norm, x))


class TwoBlocks(eqx.Module):
    """The same, each block a field: nothing says that they are alike."""

    patch_embed: eqx.nn.Linear
    first: Block
    second: Block
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.patch_embed, self.head = linear(PATCH, D, k1), linear(D, 10, k2)
        self.first, self.second, self.norm = Block(k3), Block(k4), eqx.nn.LayerNorm(D)

    def __call__(self, x):
        x = self.second(self.first(each(self.patch_embed, x)))
        return each(self.head, each(self.norm, x))


class Square(eqx.Module):
    """Square matrices under names of one's own: all but the last, if any, read the same."""

    layers: dict[str, eqx.nn.Linear]
    last: str | None = eqx.field(static=True)

    def __init__(self, key, names: Sequence[str], last: str | None):
        keys = jax.random.split(key, len(names))
        self.layers, self.last = {name: linear(D, D, k) for name, k in zip(names, keys)}, last

    def __call__(self, x):
        first = [each(layer, x) for name, layer in self.layers.items() if name != self.last]
        x = sum(jnp.tanh(y) for y in first)
        return x if self.last is None else each(self.layers[self.last], x)


class BareMLP(eqx.Module):
    """Arrays, and no module that holds them."""

    W_in: jax.Array
    b_in: jax.Array
    W_out: jax.Array
    b_out: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.W_in, self.W_out = (
            0.2 * jax.random.normal(keys[0], (D, F)),
            0.2 * jax.random.normal(keys[1], (F, D)),
        )
        self.b_in, self.b_out = 0.1 * jax.random.normal(keys[2], (F,)), 0.1 * jax.random.normal(keys[3], (D,))

    def __call__(self, x):
        return jax.nn.gelu(x @ self.W_in + self.b_in) @ self.W_out + self.b_out


class Masked(eqx.Module):
    """A weight that is computed of an array and a constant."""

    array: jax.Array
    mask: jax.Array


class MaskedLinear(eqx.Module):
    weight: Masked
    in_features: int = eqx.field(static=True)
    out_features: int = eqx.field(static=True)

    def __init__(self, num_in, num_out, key):
        self.in_features, self.out_features = num_in, num_out
        shape = (num_out, num_in)
        self.weight = Masked(0.2 * jax.random.normal(key, shape), jnp.tri(num_out, num_in) > 0)

    def __call__(self, x):
        return jnp.where(self.weight.mask, self.weight.array, 0) @ x


class MaskedMLP(eqx.Module):
    """As in an autoregressive flow."""

    up: MaskedLinear
    down: MaskedLinear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.up, self.down = MaskedLinear(D, F, k1), MaskedLinear(F, D, k2)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


BLOCK = {
    "*norm*": WHOLE,
    "*.lin_[qkv].*": COL,
    "*.lin_o.weight": ROW,
    "*.lin_o.bias": WHOLE,
    "*.mlp.layers.0.*": COL,
    "*.mlp.layers.1.weight": ROW,
    "*.mlp.layers.1.bias": WHOLE,
}


def _square(name: str, names: Sequence[str], last: str | None) -> Entry:
    closing = {} if last is None else {f"layers.{last}.weight": ROW, f"layers.{last}.bias": WHOLE}
    make = partial(Square, names=names, last=last)
    all_reduces = None if last is None else 1
    return Entry(name, make, pairs(SEQ, D), squared_loss(), {**closing, "layers.*": COL}, all_reduces)


def _vision(name: str, make: Any, num_classes: int, head: Any) -> Entry:
    specs = {"patch_embed.*": WHOLE, "head.*": head, **BLOCK}
    batch = pairs(SEQ, PATCH, out=(SEQ, num_classes))
    return Entry(name, make, batch, squared_loss(), specs, 2 * LAYERS, "the stream stays whole at both ends")


ENTRIES = [
    _vision("vision", partial(VisionTransformer, num_classes=16), 16, COL),
    _vision("vision_10_classes", partial(VisionTransformer, num_classes=10), 10, WHOLE),
    _vision("vision_two_fields", TwoBlocks, 10, WHOLE),
    _square("square_non_local", ("g", "o", "phi", "theta"), "o"),
    _square("square_merge", ("left", "merge", "right"), "merge"),
    _square("square_gate", ("gate_projection", "main_projection"), None),
    Entry(
        "bare_arrays",
        BareMLP,
        pairs(SEQ, D),
        squared_loss(),
        {"W_in": ROW, "b_in": COL, "W_out": COL, "b_out": WHOLE},
        1,
        "(in, out): the columns are dim 1",
    ),
    Entry(
        "wrapped_weights",
        MaskedMLP,
        pairs(D),
        squared_loss(),
        {"up.weight.array": COL, "down.weight.array": ROW, "*.mask": WHOLE},
        1,
        activation_sizes=(D,),
    ),
]
