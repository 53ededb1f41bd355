"""Attention with its query, key and value in one matrix, and with raw arrays."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import COL, HEADS, LAYERS, ROW, SEQ, WHOLE, D, Entry, attend, each, linear, pairs, squared_loss


class QKVProj(eqx.Module):
    """[q; k; v], each D."""

    qkv_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.qkv_proj, self.o_proj = linear(D, 3 * D, k1, bias=False), linear(D, D, k2, bias=False)
        self.num_heads = HEADS

    def __call__(self, x):
        q, k, v = jnp.split(each(self.qkv_proj, x), 3, axis=-1)
        return each(self.o_proj, attend(q, k, v, self.num_heads))


class QueryKeyValue(eqx.Module):
    """GPT-NeoX and BLOOM: (heads, 3, head dim), so an even split falls between heads."""

    query_key_value: eqx.nn.Linear
    dense: eqx.nn.Linear
    num_attention_heads: int = eqx.field(static=True)

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.query_key_value, self.dense = linear(D, 3 * D, k1), linear(D, D, k2)
        self.num_attention_heads = HEADS

    def __call__(self, x):
        heads = each(self.query_key_value, x).reshape(len(x), self.num_attention_heads, 3, -1)
        q, k, v = (heads[:, :, i].reshape(len(x), -1) for i in range(3))
        return each(self.dense, attend(q, k, v, self.num_attention_heads))


class InProj(eqx.Module):
    """torch.nn.MultiheadAttention's names; here as Linear layers."""

    in_proj: eqx.nn.Linear
    out_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.in_proj, self.out_proj = linear(D, 3 * D, k1), linear(D, D, k2)
        self.num_heads = HEADS

    def __call__(self, x):
        q, k, v = jnp.split(each(self.in_proj, x), 3, axis=-1)
        return each(self.out_proj, attend(q, k, v, self.num_heads))


class VisionQKV(eqx.Module):
    """ViT in timm: qkv and proj."""

    qkv: eqx.nn.Linear
    proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.qkv, self.proj = linear(D, 3 * D, k1), linear(D, D, k2)
        self.num_heads = HEADS

    def __call__(self, x):
        q, k, v = jnp.split(each(self.qkv, x), 3, axis=-1)
        return each(self.proj, attend(q, k, v, self.num_heads))


class Einsum(eqx.Module):
    """Raw arrays, (dim, heads, head) and (heads, head, dim): no Linear to take a role from."""

    w_q: jax.Array
    w_k: jax.Array
    w_v: jax.Array
    w_o: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        shape = (D, HEADS, D // HEADS)
        self.w_q, self.w_k, self.w_v = (0.2 * jax.random.normal(k, shape) for k in keys[:3])
        self.w_o = 0.2 * jax.random.normal(keys[3], (HEADS, D // HEADS, D))

    def __call__(self, x):
        q, k, v = (jnp.einsum("td,dhk->thk", x, w) for w in (self.w_q, self.w_k, self.w_v))
        out = attend(q, k, v, HEADS).reshape(q.shape)
        return jnp.einsum("thk,hkd->td", out, self.w_o)


class Blocks(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attentions: list[Any]

    def __init__(self, key, make):
        self.norms = [eqx.nn.LayerNorm(D) for _ in range(LAYERS)]
        self.attentions = [make(k) for k in jax.random.split(key, LAYERS)]

    def __call__(self, x):
        for norm, attention in zip(self.norms, self.attentions):
            x = x + attention(each(norm, x))
        return x


def _entry(name, make, column, row, all_reduces, note, *, bias=True):
    specs = {
        "norms.*": WHOLE,
        f"attentions.*.{column}.weight": COL,
        f"attentions.*.{row}.weight": ROW,
    }
    if bias:
        specs |= {f"attentions.*.{column}.bias": COL, f"attentions.*.{row}.bias": WHOLE}
    return Entry(name, partial(Blocks, make=make), pairs(SEQ, D), squared_loss(), specs, all_reduces, note)


CROSSES = "an even split of the outputs crosses the borders of q, k and v: permutes"

ENTRIES = [
    _entry("fused_qkv_proj", QKVProj, "qkv_proj", "o_proj", None, CROSSES, bias=False),
    _entry(
        "fused_query_key_value",
        QueryKeyValue,
        "query_key_value",
        "dense",
        LAYERS,
        "heads lead, so the split is clean",
    ),
    _entry("fused_in_proj", InProj, "in_proj", "out_proj", None, CROSSES),
    _entry("fused_qkv", VisionQKV, "qkv", "proj", None, CROSSES),
    Entry(
        "raw_einsum",
        partial(Blocks, make=Einsum),
        pairs(SEQ, D),
        squared_loss(),
        {"norms.*": WHOLE, "attentions.*.w_[qkv]": (None, "tensor"), "attentions.*.w_o": COL},
        LAYERS,
        "raw 3-D arrays: the dim of heads is split",
    ),
]
