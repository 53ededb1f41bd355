"""Mixtures of experts, computed densely: every token by every expert, weighted by the router."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import (
    COL,
    EXPERTS,
    LAYERS,
    ROW,
    SEQ,
    STACKED_COL,
    STACKED_ROW,
    WHOLE,
    D,
    Entry,
    F,
    each,
    linear,
    pairs,
    squared_loss,
)
from .stacked import NUM_STACKED, scan, stack


class Expert(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.up, self.down = linear(D, F, k1), linear(F, D, k2)

    def __call__(self, x):
        return each(self.down, jax.nn.gelu(each(self.up, x)))


class MoE(eqx.Module):
    """Experts as one module with a leading dim."""

    router: eqx.nn.Linear
    experts: Expert
    num_experts: int = eqx.field(static=True)

    def __init__(self, key, num_experts):
        k1, k2 = jax.random.split(key)
        self.router = linear(D, num_experts, k1)
        self.experts = stack(Expert, k2, num_experts)
        self.num_experts = num_experts

    def __call__(self, x):
        weights = jax.nn.softmax(each(self.router, x))
        every = eqx.filter_vmap(lambda e, x: e(x), in_axes=(eqx.if_array(0), None))(self.experts, x)
        return jnp.einsum("te,etd->td", weights, every)


class RawMoE(eqx.Module):
    """Experts as raw arrays."""

    router: eqx.nn.Linear
    w_in: jax.Array
    w_out: jax.Array
    num_experts: int = eqx.field(static=True)

    def __init__(self, key, num_experts):
        k1, k2, k3 = jax.random.split(key, 3)
        self.router = linear(D, num_experts, k1)
        self.w_in = 0.2 * jax.random.normal(k2, (num_experts, D, F))
        self.w_out = 0.2 * jax.random.normal(k3, (num_experts, F, D))
        self.num_experts = num_experts

    def __call__(self, x):
        weights = jax.nn.softmax(each(self.router, x))
        hidden = jax.nn.gelu(jnp.einsum("td,edf->etf", x, self.w_in))
        return jnp.einsum("te,etd->td", weights, jnp.einsum("etf,efd->etd", hidden, self.w_out))


class MixtralExpert(eqx.Module):
    w1: eqx.nn.Linear
    w2: eqx.nn.Linear
    w3: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.w1, self.w3 = linear(D, F, k1, bias=False), linear(D, F, k3, bias=False)
        self.w2 = linear(F, D, k2, bias=False)

    def __call__(self, x):
        return each(self.w2, jax.nn.silu(each(self.w1, x)) * each(self.w3, x))


class MoEList(eqx.Module):
    """Experts as a list of modules: each is a block of its own."""

    router: eqx.nn.Linear
    experts: list[Any]

    def __init__(self, key, num_experts, make):
        k1, *keys = jax.random.split(key, 1 + num_experts)
        self.router = linear(D, num_experts, k1, bias=False)
        self.experts = [make(k) for k in keys]

    def __call__(self, x):
        weights = jax.nn.softmax(each(self.router, x))
        return sum(weights[:, [i]] * expert(x) for i, expert in enumerate(self.experts))


class MixtralMoE(eqx.Module):
    """As on disk: the router is named `gate`."""

    gate: eqx.nn.Linear
    experts: list[MixtralExpert]

    def __init__(self, key, num_experts):
        k1, *keys = jax.random.split(key, 1 + num_experts)
        self.gate = linear(D, num_experts, k1, bias=False)
        self.experts = [MixtralExpert(k) for k in keys]

    def __call__(self, x):
        weights = jax.nn.softmax(each(self.gate, x))
        return sum(weights[:, [i]] * expert(x) for i, expert in enumerate(self.experts))


class Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    moe: Any

    def __init__(self, key, make):
        self.norm, self.moe = eqx.nn.LayerNorm(D), make(key)

    def __call__(self, x):
        return x + self.moe(each(self.norm, x))


class Blocks(eqx.Module):
    blocks: list[Block]

    def __init__(self, key, make):
        self.blocks = [Block(k, make) for k in jax.random.split(key, LAYERS)]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class StackedBlocks(eqx.Module):
    """Two leading dims: layers, then experts."""

    blocks: Block

    def __init__(self, key, make):
        self.blocks = stack(partial(Block, make=make), key)

    def __call__(self, x):
        return scan(self.blocks, x)


def _entry(name, make, specs, all_reduces, note="", *, blocks: Any = Blocks):
    return Entry(
        name,
        partial(blocks, make=make),
        pairs(SEQ, D),
        squared_loss(),
        {"blocks.*norm.*": WHOLE, **specs},
        all_reduces,
        note,
    )


NUM_LISTED = 4

ENTRIES = [
    _entry(
        "moe",
        partial(MoE, num_experts=8),
        {"blocks.*.moe.experts.*": EXPERTS, "blocks.*.moe.router.*": WHOLE},
        LAYERS,
        "2 experts on each device; the weighted sum over experts is the all-reduce",
    ),
    _entry(
        "moe_indivisible",
        partial(MoE, num_experts=6),
        {
            "blocks.*.moe.experts.up.*": STACKED_COL,
            "blocks.*.moe.experts.down.weight": STACKED_ROW,
            "blocks.*.moe.experts.down.bias": WHOLE,
            "blocks.*.moe.router.*": WHOLE,
        },
        None,
        "6 experts over 4 devices: each is split inside; its all-reduce comes before the sum over experts "
        "and is 6 activations wide",
    ),
    _entry(
        "moe_raw",
        partial(RawMoE, num_experts=8),
        {"blocks.*.moe.w_*": EXPERTS, "blocks.*.moe.router.*": WHOLE},
        LAYERS,
        "raw 3-D arrays beside a router and an expert count",
    ),
    _entry(
        "moe_raw_indivisible",
        partial(RawMoE, num_experts=6),
        {"blocks.*.moe.w_*": WHOLE, "blocks.*.moe.router.*": WHOLE},
        0,
        "nothing says which dim of a raw array is which: replicated, with a warning where it is large",
    ),
    _entry(
        "moe_list",
        partial(MoEList, num_experts=NUM_LISTED, make=Expert),
        {
            "blocks.*.moe.experts.*.up.*": COL,
            "blocks.*.moe.experts.*.down.weight": ROW,
            "blocks.*.moe.experts.*.down.bias": WHOLE,
            "blocks.*.moe.router.*": WHOLE,
        },
        None,
        "one all-reduce for each expert, unless the compiler adds first",
    ),
    _entry(
        "moe_mixtral",
        partial(MixtralMoE, num_experts=NUM_LISTED),
        {
            "blocks.*.moe.experts.*.w[13].weight": COL,
            "blocks.*.moe.experts.*.w2.weight": ROW,
            "blocks.*.moe.gate.weight": WHOLE,
        },
        None,
        "the router is named `gate`, and is none of a gated MLP; one all-reduce for each expert",
    ),
    _entry(
        "moe_stacked",
        partial(MoE, num_experts=8),
        {"blocks.moe.experts.*": (None, "tensor"), "blocks.moe.router.*": WHOLE},
        NUM_STACKED,
        "(layers, experts, ...): the dim of layers is never split, the one of experts is",
        blocks=StackedBlocks,
    ),
]
