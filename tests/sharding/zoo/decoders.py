"""Decoder-only language models: GPT-J, LLaMA, GPT-2, OPT; shared heads and odd vocabularies."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import (
    COL,
    HEADS,
    LAYERS,
    ROW,
    VOCAB,
    VOCABULARY,
    WHOLE,
    D,
    Entry,
    F,
    attend,
    each,
    language_loss,
    linear,
    rms_norm,
    tokens,
)

# GPT-J: paper, Figure 7


class GPTJAttention(eqx.Module):
    q_proj: Any
    k_proj: Any
    v_proj: Any
    out_proj: Any
    num_attention_heads: int  # a leaf on purpose: not every model marks its integers static

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (linear(D, D, k, bias=False) for k in keys)
        self.num_attention_heads = HEADS

    def __call__(self, x):
        q, k, v = each(self.q_proj, x), each(self.k_proj, x), each(self.v_proj, x)
        return each(self.out_proj, attend(q, k, v, self.num_attention_heads, causal=True, rotary=True))


class GPTJMLP(eqx.Module):
    fc_in: Any
    fc_out: Any

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.fc_in, self.fc_out = linear(D, F, k1), linear(F, D, k2)

    def __call__(self, x):
        return each(self.fc_out, jax.nn.gelu(each(self.fc_in, x)))


class GPTJBlock(eqx.Module):
    ln_1: eqx.nn.LayerNorm
    attn: GPTJAttention
    mlp: GPTJMLP

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.ln_1 = eqx.nn.LayerNorm(D)
        self.attn = GPTJAttention(k1)
        self.mlp = GPTJMLP(k2)

    def __call__(self, x):
        h = each(self.ln_1, x)
        return x + self.attn(h) + self.mlp(h)


class GPTJ(eqx.Module):
    wte: eqx.nn.Embedding
    h: list[GPTJBlock]
    ln_f: eqx.nn.LayerNorm
    lm_head: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, *keys = jax.random.split(key, 2 + LAYERS)
        self.wte = eqx.nn.Embedding(VOCAB, D, key=k1)
        self.h = [GPTJBlock(k) for k in keys]
        self.ln_f = eqx.nn.LayerNorm(D)
        self.lm_head = linear(D, VOCAB, k2)

    def __call__(self, ids):
        x = each(self.wte, ids)
        for block in self.h:
            x = block(x)
        return each(self.lm_head, each(self.ln_f, x))


GPTJ_SPECS = {
    "wte.weight": VOCABULARY,
    "h.*.attn.[qkv]_proj.weight": COL,
    "h.*.attn.out_proj.weight": ROW,
    "h.*.mlp.fc_in.weight": COL,
    "h.*.mlp.fc_in.bias": COL,
    "h.*.mlp.fc_out.weight": ROW,
    "h.*.mlp.fc_out.bias": WHOLE,
    "h.*.ln_1.*": WHOLE,
    "ln_f.*": WHOLE,
    "lm_head.weight": VOCABULARY,
    "lm_head.bias": VOCABULARY,
}

# LLaMA: paper, Figure 8


class LlamaAttention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)
    num_key_value_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)

    def __init__(self, key, num_key_value_heads):
        k1, k2, k3, k4 = jax.random.split(key, 4)
        self.num_heads, self.num_key_value_heads, self.head_dim = HEADS, num_key_value_heads, D // HEADS
        kv_size = num_key_value_heads * self.head_dim
        self.q_proj = linear(D, D, k1, bias=False)
        self.k_proj = linear(D, kv_size, k2, bias=False)
        self.v_proj = linear(D, kv_size, k3, bias=False)
        self.o_proj = linear(D, D, k4, bias=False)

    def __call__(self, x):
        q, k, v = each(self.q_proj, x), each(self.k_proj, x), each(self.v_proj, x)
        out = attend(q, k, v, self.num_heads, self.num_key_value_heads, causal=True, rotary=True)
        return each(self.o_proj, out)


class LlamaMLP(eqx.Module):
    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.gate_proj = linear(D, F, k1, bias=False)
        self.up_proj = linear(D, F, k2, bias=False)
        self.down_proj = linear(F, D, k3, bias=False)

    def __call__(self, x):
        return each(self.down_proj, jax.nn.silu(each(self.gate_proj, x)) * each(self.up_proj, x))


class LlamaLayer(eqx.Module):
    self_attn: LlamaAttention
    mlp: LlamaMLP
    input_layernorm: eqx.nn.RMSNorm
    post_attention_layernorm: eqx.nn.RMSNorm

    def __init__(self, key, num_key_value_heads=HEADS):
        k1, k2 = jax.random.split(key)
        self.self_attn = LlamaAttention(k1, num_key_value_heads)
        self.mlp = LlamaMLP(k2)
        self.input_layernorm, self.post_attention_layernorm = rms_norm(), rms_norm()

    def __call__(self, x):
        x = x + self.self_attn(each(self.input_layernorm, x))
        return x + self.mlp(each(self.post_attention_layernorm, x))


class Llama(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    layers: list[LlamaLayer]
    norm: eqx.nn.RMSNorm
    lm_head: eqx.nn.Linear

    def __init__(self, key, *, num_key_value_heads=HEADS, vocab=VOCAB):
        k1, k2, *keys = jax.random.split(key, 2 + LAYERS)
        self.embed_tokens = eqx.nn.Embedding(vocab, D, key=k1)
        self.layers = [LlamaLayer(k, num_key_value_heads) for k in keys]
        self.norm = rms_norm()
        self.lm_head = linear(D, vocab, k2, bias=False)

    def __call__(self, ids):
        x = each(self.embed_tokens, ids)
        for layer in self.layers:
            x = layer(x)
        return each(self.lm_head, each(self.norm, x))


LLAMA_LAYER_SPECS = {
    "layers.*.self_attn.[qkv]_proj.weight": COL,
    "layers.*.self_attn.o_proj.weight": ROW,
    "layers.*.mlp.gate_proj.weight": COL,
    "layers.*.mlp.up_proj.weight": COL,
    "layers.*.mlp.down_proj.weight": ROW,
    "layers.*.*layernorm.weight": WHOLE,
    "norm.weight": WHOLE,
}
LLAMA_SPECS = {
    "embed_tokens.weight": VOCABULARY,
    **LLAMA_LAYER_SPECS,
    "lm_head.weight": VOCABULARY,
}
REFUSED_SPECS = {"layers.*.self_attn.[kv]_proj.weight": WHOLE, **LLAMA_SPECS}


class SharedLlama(eqx.Module):
    """The head is the embedding, by `eqx.nn.Shared`, and has a bias of its own."""

    shared: eqx.nn.Shared
    layers: list[LlamaLayer]
    norm: eqx.nn.RMSNorm

    def __init__(self, key, *, vocab=VOCAB):
        k1, k2, *keys = jax.random.split(key, 2 + LAYERS)
        both = (eqx.nn.Embedding(vocab, D, key=k1), linear(D, vocab, k2))
        self.shared = eqx.nn.Shared(both, lambda pair: pair[1].weight, lambda pair: pair[0].weight)
        self.layers = [LlamaLayer(k) for k in keys]
        self.norm = rms_norm()

    def __call__(self, ids):
        embedding, head = self.shared()
        x = each(embedding, ids)
        for layer in self.layers:
            x = layer(x)
        return each(head, each(self.norm, x))


# GPT-2


class GPT2Attention(eqx.Module):
    c_attn: eqx.nn.Linear
    c_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.c_attn, self.c_proj = linear(D, 3 * D, k1), linear(D, D, k2)
        self.num_heads = HEADS

    def __call__(self, x):
        q, k, v = jnp.split(each(self.c_attn, x), 3, axis=-1)
        return each(self.c_proj, attend(q, k, v, self.num_heads, causal=True))


class GPT2MLP(eqx.Module):
    c_fc: eqx.nn.Linear
    c_proj: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.c_fc, self.c_proj = linear(D, 4 * D, k1), linear(4 * D, D, k2)

    def __call__(self, x):
        return each(self.c_proj, jax.nn.gelu(each(self.c_fc, x)))


class GPT2Block(eqx.Module):
    ln_1: eqx.nn.LayerNorm
    attn: GPT2Attention
    ln_2: eqx.nn.LayerNorm
    mlp: GPT2MLP

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.ln_1, self.ln_2 = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)
        self.attn, self.mlp = GPT2Attention(k1), GPT2MLP(k2)

    def __call__(self, x):
        x = x + self.attn(each(self.ln_1, x))
        return x + self.mlp(each(self.ln_2, x))


class GPT2(eqx.Module):
    wte: eqx.nn.Embedding
    wpe: eqx.nn.Embedding
    h: list[GPT2Block]
    ln_f: eqx.nn.LayerNorm

    def __init__(self, key):
        k1, k2, *keys = jax.random.split(key, 2 + LAYERS)
        self.wte = eqx.nn.Embedding(VOCAB, D, key=k1)
        self.wpe = eqx.nn.Embedding(16, D, key=k2)
        self.h = [GPT2Block(k) for k in keys]
        self.ln_f = eqx.nn.LayerNorm(D)

    @property
    def lm_head(self):
        return self.wte.weight

    def __call__(self, ids):
        x = each(self.wte, ids) + each(self.wpe, jnp.arange(len(ids)))
        for block in self.h:
            x = block(x)
        return each(self.ln_f, x) @ self.lm_head.T


GPT2_SPECS = {
    "wte.weight": VOCABULARY,
    "wpe.weight": WHOLE,
    "h.*.attn.c_attn.weight": COL,
    "h.*.attn.c_attn.bias": COL,
    "h.*.mlp.c_fc.weight": COL,
    "h.*.mlp.c_fc.bias": COL,
    "h.*.c_proj.weight": ROW,
    "h.*.c_proj.bias": WHOLE,
    "h.*.ln_?.*": WHOLE,
    "ln_f.*": WHOLE,
}

# OPT


class SelfAttention(eqx.Module):
    """OPT's and BART's."""

    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    q_proj: eqx.nn.Linear
    out_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (linear(D, D, k) for k in keys)
        self.num_heads = HEADS

    def __call__(self, x, source=None, *, causal=False):
        source = x if source is None else source
        q, k, v = each(self.q_proj, x), each(self.k_proj, source), each(self.v_proj, source)
        return each(self.out_proj, attend(q, k, v, self.num_heads, causal=causal))


class OPTLayer(eqx.Module):
    self_attn: SelfAttention
    self_attn_layer_norm: eqx.nn.LayerNorm
    fc1: eqx.nn.Linear
    fc2: eqx.nn.Linear
    final_layer_norm: eqx.nn.LayerNorm

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.self_attn = SelfAttention(k1)
        self.fc1, self.fc2 = linear(D, F, k2), linear(F, D, k3)
        self.self_attn_layer_norm, self.final_layer_norm = eqx.nn.LayerNorm(D), eqx.nn.LayerNorm(D)

    def __call__(self, x):
        x = x + self.self_attn(each(self.self_attn_layer_norm, x), causal=True)
        h = jax.nn.relu(each(self.fc1, each(self.final_layer_norm, x)))
        return x + each(self.fc2, h)


class OPTDecoder(eqx.Module):
    embed_tokens: eqx.nn.Embedding
    embed_positions: eqx.nn.Embedding
    project_in: eqx.nn.Linear | None
    project_out: eqx.nn.Linear | None
    final_layer_norm: eqx.nn.LayerNorm
    layers: list[OPTLayer]
    offset: int = 2

    def __init__(self, key, word_size):
        k1, k2, k3, k4, *keys = jax.random.split(key, 4 + LAYERS)
        self.embed_tokens = eqx.nn.Embedding(VOCAB, word_size, key=k1)
        self.embed_positions = eqx.nn.Embedding(16 + self.offset, D, key=k2)
        projects = word_size != D
        self.project_in = linear(word_size, D, k3, bias=False) if projects else None
        self.project_out = linear(D, word_size, k4, bias=False) if projects else None
        self.final_layer_norm = eqx.nn.LayerNorm(D)
        self.layers = [OPTLayer(k) for k in keys]

    def __call__(self, ids):
        x = each(self.embed_tokens, ids)
        if self.project_in is not None:
            x = each(self.project_in, x)
        x = x + each(self.embed_positions, jnp.arange(len(ids)) + self.offset)
        for layer in self.layers:
            x = layer(x)
        x = each(self.final_layer_norm, x)
        return x if self.project_out is None else each(self.project_out, x)


class OPT(eqx.Module):
    decoder: OPTDecoder

    def __init__(self, key, *, word_size=D):
        self.decoder = OPTDecoder(key, word_size)

    @property
    def lm_head(self):
        return self.decoder.embed_tokens.weight

    def __call__(self, ids):
        return self.decoder(ids) @ self.lm_head.T


OPT_LAYER_SPECS = {
    "*.layers.*.[qkv]_proj.*": COL,
    "*.layers.*.out_proj.weight": ROW,
    "*.layers.*.out_proj.bias": WHOLE,
    "*.layers.*.fc1.*": COL,
    "*.layers.*.fc2.weight": ROW,
    "*.layers.*.fc2.bias": WHOLE,
    "*layer_norm.*": WHOLE,
}
OPT_SPECS = {
    "decoder.embed_tokens.weight": VOCABULARY,
    "decoder.embed_positions.weight": WHOLE,
    **OPT_LAYER_SPECS,
}

LOOKUP_AND_LAYERS = 1 + 2 * LAYERS


def _language(name, make, specs, all_reduces, note="", *, vocab=VOCAB):
    return Entry(name, make, partial(tokens, vocab=vocab), language_loss, specs, all_reduces, note)


ENTRIES = [
    _language(
        "gptj",
        GPTJ,
        GPTJ_SPECS,
        LOOKUP_AND_LAYERS,
        "attention and MLP are parallel branches: their two all-reduces may be one, if the compiler adds "
        "before it reduces",
    ),
    _language("llama", Llama, LLAMA_SPECS, LOOKUP_AND_LAYERS),
    _language(
        "llama_gqa",
        partial(Llama, num_key_value_heads=4),
        LLAMA_SPECS,
        LOOKUP_AND_LAYERS,
        "4 key/value heads over 4 devices: k and v split like q",
    ),
    _language(
        "llama_gqa_refused",
        partial(Llama, num_key_value_heads=2),
        REFUSED_SPECS,
        LOOKUP_AND_LAYERS,
        "2 key/value heads over 4 devices: their 8 output features divide, but not their heads",
    ),
    _language(
        "llama_mqa",
        partial(Llama, num_key_value_heads=1),
        REFUSED_SPECS,
        LOOKUP_AND_LAYERS,
        "one key/value head, of 4 features: k and v replicated",
    ),
    _language(
        "gpt2",
        GPT2,
        GPT2_SPECS,
        None,
        "an even split of c_attn's 3 * D outputs crosses the borders of q, k and v: it costs permutes; "
        "the head is tied by a property, so it is no leaf",
    ),
    _language("opt", OPT, OPT_SPECS, LOOKUP_AND_LAYERS, "fields in the order k, v, q, out, as in HF"),
    _language(
        "opt350",
        partial(OPT, word_size=D // 2),
        {"decoder.project_*.weight": ..., **OPT_SPECS},
        None,
        "project_in and project_out stand before and after the layers: not a pair, though the second's in is "
        "the first's out. The stream stays whole: so is project_in, and project_out is whole, or by columns",
    ),
    _language(
        "shared_head",
        SharedLlama,
        {
            "shared.pytree.0.weight": VOCABULARY,
            "shared.pytree.1.bias": VOCABULARY,
            **LLAMA_LAYER_SPECS,
        },
        LOOKUP_AND_LAYERS,
        "one leaf for both; the head's bias follows the vocabulary",
    ),
    _language(
        "vocab_indivisible",
        partial(Llama, vocab=50),
        {"embed_tokens.weight": WHOLE, "lm_head.weight": WHOLE, **LLAMA_LAYER_SPECS},
        2 * LAYERS,
        "50 words over 4 devices: table and head whole, layers as usual",
        vocab=50,
    ),
    _language(
        "shared_head_indivisible",
        partial(SharedLlama, vocab=50),
        {"shared.*": WHOLE, **LLAMA_LAYER_SPECS},
        2 * LAYERS,
        "the head's bias follows its weight: whole",
        vocab=50,
    ),
]
