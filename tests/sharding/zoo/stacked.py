"""Layers stacked by `eqx.filter_vmap` and run by `lax.scan`: the leading dim is never split."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import (
    STACKED_COL,
    STACKED_ROW,
    VOCAB,
    VOCABULARY,
    WHOLE,
    D,
    Entry,
    F,
    each,
    language_loss,
    linear,
    pairs,
    rms_norm,
    squared_loss,
    tokens,
)
from .decoders import GPT2Block, LlamaLayer

NUM_STACKED = 4  # divides over tensor=4, so that splitting it is a mistake one can make


def stack(make: Any, key: Any, num: int = NUM_STACKED) -> Any:
    return eqx.filter_vmap(make)(jax.random.split(key, num))


def scan(layers: Any, x: Any) -> Any:
    arrays, rest = eqx.partition(layers, eqx.is_array)
    return jax.lax.scan(lambda x, one: (eqx.combine(one, rest)(x), None), x, arrays)[0]


class StackedLlama(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    layers: LlamaLayer
    norm: eqx.nn.RMSNorm
    lm_head: eqx.nn.Linear

    def __init__(self, key, *, num_key_value_heads=4):
        k1, k2, k3 = jax.random.split(key, 3)
        self.embed_tokens = eqx.nn.Embedding(VOCAB, D, key=k1)
        self.layers = stack(partial(LlamaLayer, num_key_value_heads=num_key_value_heads), k3)
        self.norm = rms_norm()
        self.lm_head = linear(D, VOCAB, k2, bias=False)

    def __call__(self, ids):
        x = scan(self.layers, each(self.embed_tokens, ids))
        return each(self.lm_head, each(self.norm, x))


class StackedGPT2(eqx.Module):
    wte: eqx.nn.Embedding
    wpe: eqx.nn.Embedding
    h: GPT2Block
    ln_f: eqx.nn.LayerNorm

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.wte, self.wpe = eqx.nn.Embedding(VOCAB, D, key=k1), eqx.nn.Embedding(16, D, key=k2)
        self.h = stack(GPT2Block, k3)
        self.ln_f = eqx.nn.LayerNorm(D)

    def __call__(self, ids):
        x = scan(self.h, each(self.wte, ids) + each(self.wpe, jnp.arange(len(ids))))
        return each(self.ln_f, x) @ self.wte.weight.T


STACKED_LLAMA_SPECS = {
    "embed_tokens.weight": VOCABULARY,
    "layers.self_attn.[qkv]_proj.weight": STACKED_COL,
    "layers.self_attn.o_proj.weight": STACKED_ROW,
    "layers.mlp.gate_proj.weight": STACKED_COL,
    "layers.mlp.up_proj.weight": STACKED_COL,
    "layers.mlp.down_proj.weight": STACKED_ROW,
    "layers.*layernorm.weight": WHOLE,
    "norm.weight": WHOLE,
    "lm_head.weight": VOCABULARY,
}


class Critics(eqx.Module):
    """An ensemble: stacked, but not experts, since nothing routes between them."""

    critics: eqx.nn.MLP

    def __init__(self, key):
        self.critics = stack(lambda k: eqx.nn.MLP(D, D, F, 1, activation=jnp.tanh, key=k), key)

    def __call__(self, x):
        return eqx.filter_vmap(lambda critic, x: critic(x), in_axes=(eqx.if_array(0), None))(self.critics, x)


ENTRIES = [
    Entry(
        "stacked_llama",
        StackedLlama,
        tokens,
        language_loss,
        STACKED_LLAMA_SPECS,
        1 + 2 * NUM_STACKED,
        "4 layers: their dim would divide; stacked norms are (layers, D), and no Linear",
    ),
    Entry(
        "stacked_llama_gqa_refused",
        partial(StackedLlama, num_key_value_heads=2),
        tokens,
        language_loss,
        {"layers.self_attn.[kv]_proj.weight": WHOLE, **STACKED_LLAMA_SPECS},
        1 + 2 * NUM_STACKED,
    ),
    Entry(
        "stacked_gpt2",
        StackedGPT2,
        tokens,
        language_loss,
        {
            "wte.weight": VOCABULARY,
            "wpe.weight": WHOLE,
            "h.attn.c_attn.weight": STACKED_COL,
            "h.attn.c_attn.bias": STACKED_COL,
            "h.mlp.c_fc.weight": STACKED_COL,
            "h.mlp.c_fc.bias": STACKED_COL,
            "h.*.c_proj.weight": STACKED_ROW,
            "h.*.c_proj.bias": WHOLE,
            "h.ln_?.*": WHOLE,
            "ln_f.*": WHOLE,
        },
        None,
        "c_attn crosses the borders of q, k and v; stacked biases are 2-D, and no matrices",
    ),
    Entry(
        "ensemble",
        Critics,
        pairs(D, out=(NUM_STACKED, D)),
        squared_loss(),
        {
            "critics.layers.0.*": STACKED_COL,
            "critics.layers.1.weight": STACKED_ROW,
            "critics.layers.1.bias": WHOLE,
        },
        1,
        "a stack beside no router: the members are not experts, each is split inside",
        activation_sizes=(NUM_STACKED * D,),
    ),
]
