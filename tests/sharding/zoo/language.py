"""Language models: lists and stacks of layers, groups of heads, tied heads, odd vocabularies, T5, LoRA."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ._entry import (
    COL,
    HEADS,
    LAYERS,
    NUM_STACKED,
    ROW,
    SEQ,
    STACKED_COL,
    STACKED_ROW,
    VOCAB,
    VOCABULARY,
    WHOLE,
    D,
    Entry,
    F,
    attend,
    cross_entropy,
    each,
    language_loss,
    linear,
    linears,
    norm,
    pairs,
    rms_norm,
    squared_loss,
    stack,
    through,
    tokens,
)

# LLaMA: paper, Figure 8


class LlamaAttention(eqx.Module):
    q_proj: eqx.nn.Linear
    k_proj: eqx.nn.Linear
    v_proj: eqx.nn.Linear
    o_proj: eqx.nn.Linear
    num_heads: int = eqx.field(static=True)
    num_key_value_heads: int = eqx.field(static=True)

    def __init__(self, key, num_key_value_heads):
        self.num_heads, self.num_key_value_heads = HEADS, num_key_value_heads
        width = num_key_value_heads * D // HEADS
        layers = linears(key, (D, D), (D, width), (D, width), (D, D), bias=False)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = layers

    def __call__(self, x):
        q, k, v = each(self.q_proj, x), each(self.k_proj, x), each(self.v_proj, x)
        out = attend(q, k, v, self.num_heads, self.num_key_value_heads, causal=True, rotary=True)
        return each(self.o_proj, out)


def llama_layer(key: Any, num_key_value_heads: int) -> Any:
    k1, k2 = jax.random.split(key)
    gate, up, down = linears(k2, (D, F), (D, F), (F, D), bias=False)
    return {
        "self_attn": LlamaAttention(k1, num_key_value_heads),
        "mlp": {"gate_proj": gate, "up_proj": up, "down_proj": down},
        "input_layernorm": rms_norm(),
        "post_attention_layernorm": rms_norm(),
    }


def apply_llama_layer(layer: Any, x: Any) -> Any:
    mlp = layer["mlp"]
    x = x + layer["self_attn"](each(layer["input_layernorm"], x))
    h = each(layer["post_attention_layernorm"], x)
    return x + each(mlp["down_proj"], jax.nn.silu(each(mlp["gate_proj"], h)) * each(mlp["up_proj"], h))


def llama(
    key: Any, *, num_key_value_heads: int = HEADS, vocab: int = VOCAB, is_stacked: bool = False
) -> dict[str, Any]:
    k1, k2, k3 = jax.random.split(key, 3)
    make = partial(llama_layer, num_key_value_heads=num_key_value_heads)
    return {
        "embed_tokens": eqx.nn.Embedding(vocab, D, key=k1),
        "layers": stack(make, k3) if is_stacked else [make(k) for k in jax.random.split(k3, LAYERS)],
        "norm": rms_norm(),
        "lm_head": linear(D, vocab, k2, bias=False),
    }


def apply_llama(model: Any, ids: Any) -> Any:
    x = through(model["layers"], apply_llama_layer, each(model["embed_tokens"], ids))
    return each(model["lm_head"], each(model["norm"], x))


def shared_llama(key: Any) -> Any:
    """The head is the embedding, by `eqx.nn.Shared`, and has a bias of its own."""
    model = llama(key)
    both = (model.pop("embed_tokens"), linear(D, VOCAB, key))
    del model["lm_head"]
    return {"shared": eqx.nn.Shared(both, lambda pair: pair[1].weight, lambda pair: pair[0].weight), **model}


def apply_shared_llama(model: Any, ids: Any) -> Any:
    embedding, head = model["shared"]()
    return apply_llama({**model, "embed_tokens": embedding, "lm_head": head}, ids)


def llama_specs(column: Any = COL, row: Any = ROW, key_value: Any = None) -> dict[str, Any]:
    return {
        "layers.*self_attn.[kv]_proj.weight": column if key_value is None else key_value,
        "layers.*self_attn.q_proj.weight": column,
        "layers.*self_attn.o_proj.weight": row,
        "layers.*mlp.gate_proj.weight": column,
        "layers.*mlp.up_proj.weight": column,
        "layers.*mlp.down_proj.weight": row,
        "*norm.weight": WHOLE,
        "embed_tokens.weight": VOCABULARY,
        "lm_head.weight": VOCABULARY,
        "shared.pytree.0.weight": VOCABULARY,
        "shared.pytree.1.bias": VOCABULARY,
    }


# GPT-2


def gpt2(key: Any) -> Any:
    k1, k2, *keys = jax.random.split(key, 2 + LAYERS)

    def block(key):
        c_attn, out, up, down = linears(key, (D, 3 * D), (D, D), (D, 4 * D), (4 * D, D))
        attn, mlp = {"c_attn": c_attn, "c_proj": out}, {"c_fc": up, "c_proj": down}
        return {"ln_1": norm(), "attn": attn, "ln_2": norm(), "mlp": mlp}

    tables = {"wte": eqx.nn.Embedding(VOCAB, D, key=k1), "wpe": eqx.nn.Embedding(16, D, key=k2)}
    return {**tables, "h": [block(k) for k in keys], "ln_f": norm()}


def apply_gpt2(model: Any, ids: Any) -> Any:
    def block(layer, x):
        attn, mlp = layer["attn"], layer["mlp"]
        q, k, v = jnp.split(each(attn["c_attn"], each(layer["ln_1"], x)), 3, axis=-1)
        x = x + each(attn["c_proj"], attend(q, k, v, HEADS, causal=True))
        return x + each(mlp["c_proj"], jax.nn.gelu(each(mlp["c_fc"], each(layer["ln_2"], x))))

    x = each(model["wte"], ids) + each(model["wpe"], jnp.arange(len(ids)))
    return each(model["ln_f"], through(model["h"], block, x)) @ model["wte"].weight.T


GPT2_SPECS = {
    "wte.weight": VOCABULARY,
    "wpe.weight": WHOLE,
    "h.*.attn.c_attn.*": COL,
    "h.*.mlp.c_fc.*": COL,
    "h.*.c_proj.weight": ROW,
    "h.*.c_proj.bias": WHOLE,
    "*ln_?.*": WHOLE,
}

# T5

BUCKETS = 8


def t5_attention(key: Any) -> dict[str, Any]:
    return dict(zip("qkvo", linears(key, *[(D, D)] * 4, bias=False)))


def t5_attend(layer: Any, x: Any, source: Any, **options: Any) -> Any:
    q, k, v = each(layer["q"], x), each(layer["k"], source), each(layer["v"], source)
    return each(layer["o"], attend(q, k, v, HEADS, scale=False, **options))


def t5_stack(key: Any, *, is_decoder: bool) -> Any:
    def block(key):
        k1, k2, k3 = jax.random.split(key, 3)
        wi, wo = linears(k3, (D, F), (F, D), bias=False)
        cross = [{"EncDecAttention": t5_attention(k2), "layer_norm": rms_norm()}] if is_decoder else []
        dense = {"DenseReluDense": {"wi": wi, "wo": wo}, "layer_norm": rms_norm()}
        return {"layer": [{"SelfAttention": t5_attention(k1), "layer_norm": rms_norm()}, *cross, dense]}

    *keys, last = jax.random.split(key, LAYERS + 1)
    blocks = [block(k) for k in keys]
    table = eqx.nn.Embedding(BUCKETS, HEADS, key=last)
    blocks[0]["layer"][0]["SelfAttention"]["relative_attention_bias"] = table
    return {"block": blocks, "final_layer_norm": rms_norm()}


def apply_t5_stack(model: Any, x: Any, source: Any = None) -> Any:
    table = model["block"][0]["layer"][0]["SelfAttention"]["relative_attention_bias"].weight
    distance = jnp.abs(jnp.arange(len(x))[:, None] - jnp.arange(len(x)))
    bias = jnp.transpose(table[jnp.minimum(distance, BUCKETS - 1)], (2, 0, 1))

    def block(one, x):
        own, *crossed, dense = one["layer"]
        h = each(own["layer_norm"], x)
        x = x + t5_attend(own["SelfAttention"], h, h, causal=source is not None, bias=bias)
        for cross in crossed:
            x = x + t5_attend(cross["EncDecAttention"], each(cross["layer_norm"], x), source)
        h = each(dense["DenseReluDense"]["wi"], each(dense["layer_norm"], x))
        return x + each(dense["DenseReluDense"]["wo"], jax.nn.relu(h))

    return each(model["final_layer_norm"], through(model["block"], block, x))


def t5(key: Any) -> Any:
    k1, k2, k3 = jax.random.split(key, 3)
    return {
        "shared": eqx.nn.Embedding(VOCAB, D, key=k1),
        "encoder": t5_stack(k2, is_decoder=False),
        "decoder": t5_stack(k3, is_decoder=True),
    }


def t5_inputs(batch_size: int) -> dict[str, Any]:
    return {"source": tokens(batch_size, seq=SEQ - 1, seed=1)["tokens"], **tokens(batch_size)}


def t5_loss(model: Any, batch: Any) -> Any:
    def logits(source, ids):
        source = apply_t5_stack(model["encoder"], each(model["shared"], source))
        x = apply_t5_stack(model["decoder"], each(model["shared"], ids), source)
        return x * D**-0.5 @ model["shared"].weight.T

    return cross_entropy(jax.vmap(logits)(batch["source"], batch["tokens"][:, :-1]), batch["tokens"][:, 1:])


T5_SPECS = {
    "shared.weight": VOCABULARY,
    "*.relative_attention_bias.weight": WHOLE,
    "*Attention.[qkv].weight": COL,
    "*Attention.o.weight": ROW,
    "*.wi.weight": COL,
    "*.wo.weight": ROW,
    "*layer_norm.weight": WHOLE,
}

# GPT-J (paper, Figure 7) with low-rank adapters on column- and row-parallel layers

RANK = 4  # divides over tensor=4, so that splitting it is a mistake one can make


class LoRALinear(eqx.Module):
    linear: eqx.nn.Linear
    lora_a: eqx.nn.Linear
    lora_b: eqx.nn.Linear

    def __init__(self, base, key):
        sizes = (base.in_features, RANK), (RANK, base.out_features)
        self.linear, (self.lora_a, self.lora_b) = base, linears(key, *sizes, bias=False)

    def __call__(self, x):
        return self.linear(x) + self.lora_b(self.lora_a(x))


def lora(key: Any) -> Any:
    k1, k2, *keys = jax.random.split(key, 2 + LAYERS)

    def block(key):
        k1, k2, *keys = jax.random.split(key, 6)
        q, k, v, out = linears(k1, *[(D, D)] * 4, bias=False)
        up, down = linears(k2, (D, F), (F, D))
        q, v, out, down = (LoRALinear(base, k) for base, k in zip((q, v, out, down), keys))
        attn = {"q_proj": q, "k_proj": k, "v_proj": v, "out_proj": out}
        return {"ln_1": norm(), "attn": attn, "mlp": {"fc_in": up, "fc_out": down}}

    ends = {"wte": eqx.nn.Embedding(VOCAB, D, key=k1), "lm_head": linear(D, VOCAB, k2)}
    return {**ends, "h": [block(k) for k in keys], "ln_f": norm()}


def apply_gptj(model: Any, ids: Any) -> Any:
    def block(layer, x):
        attn, h = layer["attn"], each(layer["ln_1"], x)
        q, k, v = (each(attn[name], h) for name in ("q_proj", "k_proj", "v_proj"))
        out = each(attn["out_proj"], attend(q, k, v, HEADS, causal=True, rotary=True))
        return x + out + each(layer["mlp"]["fc_out"], jax.nn.gelu(each(layer["mlp"]["fc_in"], h)))

    x = through(model["h"], block, each(model["wte"], ids))
    return each(model["lm_head"], each(model["ln_f"], x))


LORA_SPECS = {
    "h.*.attn.[qv]_proj.lora_a.weight": WHOLE,
    "h.*.attn.[qv]_proj.lora_b.weight": COL,
    "h.*.attn.[qv]_proj.linear.weight": COL,
    "h.*.attn.k_proj.weight": COL,
    "h.*.lora_a.weight": ROW,
    "h.*.lora_b.weight": WHOLE,
    "h.*.attn.out_proj.linear.weight": ROW,
    "h.*.mlp.fc_in.*": COL,
    "h.*.mlp.fc_out.linear.weight": ROW,
    "h.*.mlp.fc_out.linear.bias": WHOLE,
    "wte.weight": VOCABULARY,
    "lm_head.*": VOCABULARY,
    "*ln_?.*": WHOLE,
}

# Attention alone: query, key and value in one matrix, and in raw arrays


def fused(key: Any) -> Any:
    qkv, proj = linears(key, (D, 3 * D), (D, D))
    return {"norm": norm(), "qkv": qkv, "proj": proj}


def apply_fused(model: Any, x: Any) -> Any:
    q, k, v = jnp.split(each(model["qkv"], each(model["norm"], x)), 3, axis=-1)
    return x + each(model["proj"], attend(q, k, v, HEADS))


def einsum(key: Any) -> Any:
    """(dim, heads, head) and (heads, head, dim): no Linear to take a role from."""
    shapes = dict.fromkeys(("w_q", "w_k", "w_v"), (D, HEADS, D // HEADS)) | {"w_o": (HEADS, D // HEADS, D)}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.2 * jax.random.normal(k, shape) for (name, shape), k in zip(shapes.items(), keys)}


def apply_einsum(model: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("td,dhk->thk", x, model[name]) for name in ("w_q", "w_k", "w_v"))
    return x + jnp.einsum("thk,hkd->td", attend(q, k, v, HEADS).reshape(q.shape), model["w_o"])


LOOKUP_AND_LAYERS = 1 + 2 * LAYERS


def _entry(name, make, apply, specs, all_reduces, note="", *, vocab=VOCAB):
    return Entry(name, make, partial(tokens, vocab=vocab), language_loss(apply), specs, all_reduces, note)


ENTRIES = [
    _entry("llama", llama, apply_llama, llama_specs(), LOOKUP_AND_LAYERS),
    _entry(
        "llama_gqa_refused",
        partial(llama, num_key_value_heads=2),
        apply_llama,
        llama_specs(key_value=WHOLE),
        LOOKUP_AND_LAYERS,
        "2 key/value heads over 4 devices: their 8 output features divide, but not their heads",
    ),
    _entry(
        "stacked_llama",
        partial(llama, num_key_value_heads=4, is_stacked=True),
        apply_llama,
        llama_specs(STACKED_COL, STACKED_ROW),
        1 + 2 * NUM_STACKED,
        "4 layers: their dim would divide; stacked norms are (layers, D), and no Linear. "
        "4 key/value heads over 4 devices: k and v split like q",
    ),
    _entry(
        "stacked_llama_gqa_refused",
        partial(llama, num_key_value_heads=2, is_stacked=True),
        apply_llama,
        llama_specs(STACKED_COL, STACKED_ROW, key_value=WHOLE),
        1 + 2 * NUM_STACKED,
    ),
    _entry(
        "vocab_indivisible",
        partial(llama, vocab=50),
        apply_llama,
        {**llama_specs(), "embed_tokens.weight": WHOLE, "lm_head.weight": WHOLE},
        2 * LAYERS,
        "50 words over 4 devices: table and head whole, layers as usual",
        vocab=50,
    ),
    _entry(
        "shared_head",
        shared_llama,
        apply_shared_llama,
        llama_specs(),
        LOOKUP_AND_LAYERS,
        "one leaf for both; the head's bias follows the vocabulary",
    ),
    _entry(
        "gpt2",
        gpt2,
        apply_gpt2,
        GPT2_SPECS,
        None,
        "an even split of c_attn's 3 * D outputs crosses the borders of q, k and v: it costs permutes; "
        "the head is tied by use, so it is no leaf",
    ),
    _entry(
        "lora",
        lora,
        apply_gptj,
        LORA_SPECS,
        LOOKUP_AND_LAYERS,
        "a row-parallel adapter adds an all-reduce of `rank` numbers per token",
    ),
    Entry(
        "fused_qkv",
        lambda key: [fused(k) for k in jax.random.split(key, LAYERS)],
        pairs(SEQ, D),
        squared_loss(lambda model, x: through(model, apply_fused, x)),
        {"*norm.*": WHOLE, "*.qkv.*": COL, "*.proj.weight": ROW, "*.proj.bias": WHOLE},
        None,
        "an even split of the outputs crosses the borders of q, k and v: permutes",
    ),
    Entry(
        "raw_einsum",
        einsum,
        pairs(SEQ, D),
        squared_loss(apply_einsum),
        {"w_[qkv]": (None, "tensor"), "w_o": COL},
        1,
        "raw 3-D arrays: the dim of heads is split",
    ),
    Entry(
        "t5",
        t5,
        t5_inputs,
        t5_loss,
        T5_SPECS,
        2 + 5 * LAYERS,
        "two lookups, two all-reduces per encoder layer, three per decoder layer; the table of relative "
        "positions is (buckets, heads) and an eqx.nn.Embedding, yet no vocabulary",
    ),
]
